//! Memory whose pages do not come until the test says so: a mapped file of a FUSE that the test
//! serves.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PAGE: usize = 4096;
/// Pages of the file. The first and the last one come at once, so that all of it can be registered.
const PAGES: usize = 512;

/// Bytes that the allocator has before the first test.
const TAKEN: i32 = 64 << 20;

/// Who waits for a page has the page table of all of the test's process, so that whoever asks the
/// kernel for memory then waits, too: for ever, if it is the thread that is to give the page, or a
/// test that is to let it go. So the allocator takes what tests need from the kernel beforehand, in
/// one piece that all threads share, and never asks again or gives back. For before `main`.
pub(crate) extern "C" fn take_memory() {
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        (libc::M_MMAP_MAX, 0),
        (libc::M_TRIM_THRESHOLD, i32::MAX),
        (libc::M_TOP_PAD, TAKEN),
    ] {
        // SAFETY: mallopt takes numbers; no other thread runs yet.
        unsafe { libc::mallopt(parameter, value) };
    }
    // The padding comes with the first bytes that there are none for.
    drop(std::hint::black_box(vec![0_u8; 1 << 20]));
}

/// A private mapping of the file.
pub(crate) struct Pages {
    at: *mut u8,
    server: Arc<Server>,
}

struct Server {
    device: File,
    /// Answers that are held back.
    held: Mutex<Vec<u64>>,
    /// After which they are given, if they are not held back until the test says so.
    late: Option<Duration>,
}

impl Pages {
    pub(crate) fn new(dir: &Path) -> Self {
        Self::mapped(dir, None)
    }

    /// Pages that come by themselves, but each of them so late.
    pub(crate) fn late(dir: &Path, after: Duration) -> Self {
        Self::mapped(dir, Some(after))
    }

    fn mapped(dir: &Path, late: Option<Duration>) -> Self {
        let dir = dir.to_owned();
        // The mount is of a namespace of this thread, and ends with the mapping.
        let made = std::thread::spawn(move || mount(&dir, late)).join().unwrap();
        let (file, server) = made;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        let (none, fd) = (core::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: the kernel picks addresses that nothing uses.
        let at = unsafe { libc::mmap(none, PAGE * PAGES, protection, flags, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { at: at.cast(), server }
    }

    /// All of it: where it is, and how many bytes.
    pub(crate) fn all(&self) -> (u64, u64) {
        (self.at as u64, (PAGE * PAGES) as u64)
    }

    /// Where one of its pages is that does not come, 0 to 509.
    pub(crate) fn page(&self, number: u64) -> u64 {
        self.at as u64 + (number + 1) * PAGE as u64
    }

    /// Whether somebody waits for a page.
    pub(crate) fn is_waited_for(&self) -> bool {
        !self.server.held.lock().unwrap().is_empty()
    }

    /// Has those come that are waited for.
    pub(crate) fn let_go(&self) {
        for unique in self.server.held.lock().unwrap().drain(..) {
            self.server.answer(unique, 0, &[1; PAGE]);
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.let_go();
        // SAFETY: the mapping is this object's own.
        unsafe { libc::munmap(self.at.cast(), PAGE * PAGES) };
    }
}

fn mount(dir: &Path, late: Option<Duration>) -> (OwnedFd, Arc<Server>) {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0\0", device.as_raw_fd());
    let path = format!("{}\0", dir.display());
    let check = |result: i32| assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: unshare takes a number; this thread has no other one to share with afterwards.
    check(unsafe { libc::unshare(libc::CLONE_NEWNS) });
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let none = core::ptr::null();
    // SAFETY: the kernel reads a path, and nothing else with these flags.
    check(unsafe { libc::mount(none, c"/".as_ptr(), none, private, none.cast()) });
    let (name, target) = (c"fuse".as_ptr(), path.as_ptr().cast());
    // SAFETY: the kernel reads four strings, all of which end.
    check(unsafe { libc::mount(name, target, name, 0, options.as_ptr().cast()) });
    let server = Arc::new(Server { device, held: Mutex::default(), late });
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve());
    let file = File::open(dir.join("pages")).unwrap();
    (file.into(), server)
}

fn attributes(node: u64) -> Vec<u8> {
    let size = if node == 1 { 0 } else { PAGE * PAGES } as u64;
    let mode: u32 = if node == 1 { 0o40_755 } else { 0o100_644 };
    let mut bytes = Vec::new();
    for number in [node, size, size / 512, 0, 0, 0] {
        bytes.extend_from_slice(&number.to_ne_bytes());
    }
    for number in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        bytes.extend_from_slice(&number.to_ne_bytes());
    }
    bytes
}

impl Server {
    fn answer(&self, unique: u64, error: i32, body: &[u8]) {
        let length = u32::try_from(16 + body.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&error.to_ne_bytes());
        bytes.extend_from_slice(&unique.to_ne_bytes());
        bytes.extend_from_slice(body);
        // Who asked may have ended.
        let _ = (&self.device).write(&bytes);
    }

    /// Serves until the mount ends: include/uapi/linux/fuse.h.
    fn serve(&self) {
        let mut bytes = vec![0; 1 << 17];
        while let Ok(got) = (&self.device).read(&mut bytes) {
            let word = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
            let long = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
            let (opcode, unique, node) = (word(4), long(8), long(16));
            let valid = 3600_u64.to_ne_bytes();
            match opcode {
                // LOOKUP
                1 if bytes[40..got].starts_with(b"pages\0") => {
                    let head = [&2_u64.to_ne_bytes()[..], &[0; 8], &valid, &valid, &[0; 8]];
                    self.answer(unique, 0, &[&head.concat()[..], &attributes(2)].concat());
                }
                // FORGET, INTERRUPT
                2 | 36 => {}
                // GETATTR
                3 => self.answer(unique, 0, &[&valid[..], &[0; 8], &attributes(node)].concat()),
                // OPEN
                14 => self.answer(unique, 0, &[0; 16]),
                // READ
                15 => {
                    let page = usize::try_from(long(48)).unwrap() / PAGE;
                    if page == 0 || page == PAGES - 1 {
                        self.answer(unique, 0, &[1; PAGE]);
                    } else if let Some(after) = self.late {
                        std::thread::sleep(after);
                        self.answer(unique, 0, &[1; PAGE]);
                    } else {
                        self.held.lock().unwrap().push(unique);
                    }
                }
                // FLUSH, RELEASE
                18 | 25 => self.answer(unique, 0, &[]),
                // INIT: no readahead
                26 => {
                    let mut body = [0; 64];
                    body[0..4].copy_from_slice(&7_u32.to_ne_bytes());
                    body[4..8].copy_from_slice(&31_u32.to_ne_bytes());
                    body[20..24].copy_from_slice(&4096_u32.to_ne_bytes());
                    body[24..28].copy_from_slice(&1_u32.to_ne_bytes());
                    self.answer(unique, 0, &body);
                }
                1 => self.answer(unique, -libc::ENOENT, &[]),
                _ => self.answer(unique, -libc::ENOSYS, &[]),
            }
        }
    }
}

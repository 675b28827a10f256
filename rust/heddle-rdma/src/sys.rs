//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::sync::atomic::AtomicU32;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use unix_io::epoll::wait_readable;
use unix_io::packets;

pub(crate) use unix_io::epoll::{EDGE, READABLE, WRITABLE};
pub(crate) use unix_io::packets::{accept, listen_packets, packet_pair, receive, send};
pub(crate) use unix_io::{
    Epoll, eventfd, monotonic, raise_descriptors, random, ring, set_nonblocking, would_block,
};

/// Whether there are no more descriptors, of this process or of the machine.
pub(crate) fn no_descriptors(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The number of this thread.
pub(crate) fn thread() -> i32 {
    // SAFETY: gettid takes nothing.
    unsafe { libc::gettid() }
}

/// Wakes all threads, of any process, that wait for a word of shared memory to change.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel takes the address as a name, and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// What the kernel says of a thread.
pub(crate) fn open_stat(process: u32, thread: i32) -> io::Result<OwnedFd> {
    Ok(File::open(format!("/proc/{process}/task/{thread}/stat"))?.into())
}

/// Whether a thread waits for something, and not just for a processor.
pub(crate) fn waits(stat: &File) -> bool {
    let Ok(text) = reread(stat) else { return false };
    // The state follows the name, which ends with the last bracket.
    let state = text.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'R')
}

/// All of a file of /proc, as it is now.
fn reread(file: &File) -> io::Result<String> {
    let (mut text, mut length) = (vec![0; 1024], 0);
    loop {
        match file.read_at(&mut text[length..], length as u64)? {
            0 => break,
            got => length += got,
        }
        if length == text.len() {
            text.resize(2 * length, 0);
        }
    }
    text.truncate(length);
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Bytes of memory that the machine has.
pub(crate) fn machine_memory() -> u64 {
    // SAFETY: sysconf takes numbers.
    let [pages, size] =
        [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|n| unsafe { libc::sysconf(n) });
    u64::try_from(pages).unwrap_or(0) * u64::try_from(size).unwrap_or(0)
}

/// A connected pair of STREAM sockets.
pub(crate) fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = std::os::unix::net::UnixStream::pair()?;
    Ok((a.into(), b.into()))
}

/// The process that made a connection: its number, and its memory as it is now.
pub(crate) fn peer(socket: &OwnedFd) -> io::Result<(libc::pid_t, OwnedFd)> {
    let (pid, pidfd) = packets::peer(socket.as_fd())?;
    let memory = open_memory(pid)?;
    // Looked for last: the number was this process's all the time until now. Where the kernel does
    // not tell, the memory is not used before the program has shown that it is its.
    if pidfd.is_some_and(|pidfd| wait_readable(pidfd.as_fd(), Duration::ZERO)) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok((pid, memory))
}

/// Whether [`peer`] failed as the process has ended.
pub(crate) fn is_gone(err: &io::Error) -> bool {
    // Its number, its folder in /proc, its descriptor when nobody has waited for it yet and when
    // somebody has.
    matches!(err.raw_os_error(), Some(libc::ESRCH | libc::ENOENT | libc::EINVAL))
}

/// The memory that a process has now. It stays that one, whatever the process executes.
pub(crate) fn open_memory(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    Ok(memory.into())
}

/// Sends bytes that are in several places, as many as there is room for.
///
/// # Safety
///
/// The parts are mapped. Others may write to them meanwhile.
pub(crate) unsafe fn send_parts(
    stream: &TcpStream,
    parts: &[(*const u8, usize)],
) -> io::Result<usize> {
    const MOST: usize = 40;
    let mut vectors = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; MOST];
    for (vector, (at, length)) in vectors.iter_mut().zip(parts) {
        *vector = libc::iovec { iov_base: at.cast_mut().cast(), iov_len: *length };
    }
    // SAFETY: a msghdr of zeros is a message of nothing.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = parts.len().min(MOST);
    // SAFETY: the kernel reads the parts, which the caller vouches for.
    unix_io::length(unsafe {
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    })
}

/// The device by which whoever has it makes a userfaultfd of its own memory that the kernel's
/// accesses wait for, too.
pub(crate) fn open_userfaultfd() -> io::Result<OwnedFd> {
    Ok(OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?.into())
}

/// Something that tells of the end of files. It counts for the router's user, which is nobody
/// else's: root of a container would use up what the kernel allows root.
pub(crate) struct Watches {
    watches: OwnedFd,
    /// What it has, for when something was lost: opened now, as the router opens nothing later.
    info: File,
}

impl Watches {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: inotify_init1 takes a number.
        let made = unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) };
        let made = unix_io::check(made)?;
        // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
        Self::of(unsafe { OwnedFd::from_raw_fd(made) })
    }

    pub(crate) fn of(watches: OwnedFd) -> io::Result<Self> {
        let info = File::open(format!("/proc/self/fdinfo/{}", watches.as_raw_fd()))?;
        Ok(Self { watches, info })
    }
}

impl AsFd for Watches {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watches.as_fd()
    }
}

/// Has the end of a file told that has no name: when nobody has it open, mapped, or under way in a
/// message any more. The number by which it is told.
pub(crate) fn watch_end(watches: &Watches, file: BorrowedFd<'_>) -> io::Result<i32> {
    let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    // SAFETY: the path ends with a 0.
    unix_io::check(unsafe {
        libc::inotify_add_watch(
            watches.watches.as_raw_fd(),
            path.as_ptr().cast(),
            libc::IN_DELETE_SELF,
        )
    })
}

/// What has been told: the numbers of files that have ended; -1 if something was lost.
pub(crate) fn ended(watches: &Watches) -> io::Result<Vec<i32>> {
    const EVENT: usize = size_of::<libc::inotify_event>();
    let mut bytes = [0_u8; 64 * EVENT];
    // SAFETY: the kernel writes at most as many bytes as there are.
    let got = unix_io::length(unsafe {
        libc::read(watches.watches.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len())
    })?;
    // Events of a file itself have no name behind them.
    let events = bytes[..got].chunks_exact(EVENT);
    Ok(events.filter_map(|e| e.first_chunk().copied().map(i32::from_ne_bytes)).collect())
}

/// The numbers of all files whose end is still to be told.
pub(crate) fn watched(watches: &Watches) -> io::Result<Vec<i32>> {
    let info = reread(&watches.info)?;
    let words = info.lines().filter_map(|line| line.strip_prefix("inotify wd:"));
    Ok(words.filter_map(|rest| rest.split(' ').next()?.parse().ok()).collect())
}

/// Reads bytes of another process into one's own, or writes them: as many as `local` has, from
/// `there` on or to it. Says whether all of it was done.
///
/// # Safety
///
/// `local` is memory of this process, valid for writes. Others may write to it meanwhile, if nobody
/// reads it as anything but bytes that may be anything.
pub(crate) unsafe fn memory_copy(
    memory: &OwnedFd,
    local: (*mut u8, usize),
    there: u64,
    write: bool,
) -> bool {
    let Ok(at) = libc::off_t::try_from(there) else { return false };
    let done = if write {
        // SAFETY: the kernel reads `local`, which the caller vouches for.
        unsafe { libc::pwrite(memory.as_raw_fd(), local.0.cast(), local.1, at) }
    } else {
        // SAFETY: as above, and writes it.
        unsafe { libc::pread(memory.as_raw_fd(), local.0.cast(), local.1, at) }
    };
    usize::try_from(done) == Ok(local.1)
}

/// Whether this process is root's.
pub(crate) fn is_root() -> bool {
    // SAFETY: geteuid takes nothing.
    unsafe { libc::geteuid() == 0 }
}

/// Has this process, which has one thread, be another user's, with its group and no other. Rights
/// go with root. As of any process that has changed so, others of that user may not look at it.
pub(crate) fn become_user(user: u32) -> io::Result<()> {
    // SAFETY: of no groups the kernel reads none.
    unix_io::check(unsafe { libc::setgroups(0, core::ptr::null()) })?;
    // SAFETY: setresgid takes numbers.
    unix_io::check(unsafe { libc::setresgid(user, user, user) })?;
    // SAFETY: setresuid takes numbers.
    unix_io::check(unsafe { libc::setresuid(user, user, user) }).map(drop)
}

/// Has this thread have these rights and no others.
pub(crate) fn keep_capabilities(kept: &[u32]) -> io::Result<()> {
    /// `linux/capability.h`: the version that has two sets of 32 each, for this thread.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    let bits = kept.iter().fold(0, |bits, right| bits | 1_u32 << right);
    // Effective, permitted, inheritable; of rights 0 to 31, then of the rest.
    let sets: [u32; 6] = [bits, bits, 0, 0, 0, 0];
    // SAFETY: the kernel reads both, as large as this version has them.
    let done = unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), sets.as_ptr()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets this process have as much memory pinned as it may ask for.
pub(crate) fn raise_locked_memory() {
    let most = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads one rlimit. Without the right it stays as it is.
    unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const most) };
}

/// Names this thread, for people to read.
pub(crate) fn rename_thread(name: &std::ffi::CStr) {
    // SAFETY: the kernel reads a string that ends with a 0.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

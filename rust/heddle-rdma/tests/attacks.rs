//! Attacks, each on a router as it is, and on one that does without the protection that is said to
//! stop it: there it has to succeed, or it proves nothing. `cargo test --features attack`; without
//! the feature the router has no such switch, and the attacks say so.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use shared_ring::SharedMemory;
use support::{
    Device, End, Router, ask, attacked, connect, hello, receive, request, send, sending,
};
use verbs_protocol::agent::Limits;
use verbs_protocol::{abi, ibv, plain};

/// Where programs of these tests have something mapped.
const ADDRESS: usize = 0x5_0000_0000;
const SECRET: u8 = 0x5e;

/// Maps a page at [`ADDRESS`], full of a byte.
fn map(byte: u8) {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let wish = core::ptr::without_provenance_mut(ADDRESS);
    // SAFETY: MAP_FIXED_NOREPLACE takes no address that something uses.
    let at = unsafe { libc::mmap(wish, 4096, protection, flags, -1, 0) };
    assert_eq!(at as usize, ADDRESS);
    // SAFETY: the page is this function's own.
    unsafe { at.cast::<u8>().write_bytes(byte, 4096) };
}

/// Another program, which a test executes: it has a secret where the one before had something of
/// its own.
#[test]
#[ignore = "is executed by others"]
fn victim() {
    map(SECRET);
    println!("\nready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read(&mut [0]);
    // SAFETY: the page was mapped above.
    let now = unsafe { core::slice::from_raw_parts(ADDRESS as *const u8, 4096) };
    println!("\n{}", if now.iter().all(|b| *b == SECRET) { "whole" } else { "changed" });
}

/// A process that does `first`, and becomes the victim when it is told to.
struct Becoming {
    to: UnixDatagram,
    spawning: Option<std::thread::JoinHandle<Child>>,
    running: Option<(Child, ChildStdin, BufReader<ChildStdout>)>,
}

impl Becoming {
    fn start(first: impl Fn(&UnixDatagram) + Send + Sync + 'static) -> Self {
        let (to, from) = UnixDatagram::pair().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "victim", "--nocapture"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let before = move || {
            first(&from);
            from.recv(&mut [0])?;
            Ok(())
        };
        // SAFETY: glibc's fork() leaves a child its allocator, which is all that this needs.
        unsafe { command.pre_exec(before) };
        // It comes back when the other program runs.
        let spawning = std::thread::spawn(move || command.spawn().unwrap());
        Self { to, spawning: Some(spawning), running: None }
    }

    /// It executes the other program, which has its secret then.
    fn become_victim(&mut self) {
        self.to.send(b"x").unwrap();
        let mut child = self.spawning.take().unwrap().join().unwrap();
        let input = child.stdin.take().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        assert!(says(&mut output, "ready"));
        self.running = Some((child, input, output));
    }

    /// Whether the secret has been changed. It has ended then.
    fn ends_changed(mut self) -> bool {
        let (mut child, input, mut output) = self.running.take().unwrap();
        drop(input);
        let changed = says(&mut output, "changed");
        child.wait().unwrap();
        changed
    }
}

impl Drop for Becoming {
    fn drop(&mut self) {
        let _ = self.to.send(b"x");
        if let Some(child) = self.spawning.take().and_then(|s| s.join().ok()) {
            let (mut child, output) = (child, ());
            let () = output;
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some((mut child, ..)) = self.running.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Whether a program says a word before it ends.
fn says(output: &mut impl BufRead, word: &str) -> bool {
    let mut lines = output.lines().map_while(Result::ok);
    lines.any(|line| line == word)
}

/// Reads [`ADDRESS`] by a device whose process has it registered, and writes there: what was read.
fn reach(router: &Router, mut device: Device, pd: u32, key: u32) -> Option<u8> {
    let sends = device.cq(64, 0);
    let receives = device.cq(64, 0);
    let mut qp = device.qp(ibv::QPT_RC, pd, &sends, &receives, 0);
    let mut b = End::new(router, 2, ibv::QPT_RC, 2, 64);
    device.connect(qp.number, ibv::QPT_RC, b.address(), |_| ());
    b.device.connect(b.qp.number, ibv::QPT_RC, (1, qp.number), |_| ());
    // Written first: what cannot be read ends the queue pair.
    let head = abi::verbs_send {
        remote_address: ADDRESS as u64,
        rkey: key,
        ..request(ibv::WR_RDMA_WRITE, 1)
    };
    b.send(&sending(head, &[b.part(0, 8)]));
    let written = b.sends.result().1;
    if written != ibv::WC_SUCCESS {
        return None;
    }
    b.post_receive(7, &[b.whole()]);
    let sge = (ADDRESS as u64 + 64, 64, key);
    device.post(&mut qp.send, &sending(request(ibv::WR_SEND, 1), &[sge]));
    (b.receives.result() == (7, ibv::WC_SUCCESS)).then(|| b.buffer[0])
}

/// A process opens a device and registers memory, and somebody else has the connection, too; then
/// it executes another program, as a set-user-ID one would be.
#[test]
fn the_memory_of_a_program_that_takes_the_place_is_not_registered() {
    attacked("address_space", |router| {
        for n in [1, 2] {
            router.add(n, Limits::default());
        }
        let (path, (mine, its)) = (router.path(1), UnixDatagram::pair().unwrap());
        let its = OwnedFd::from(its);
        let mut becoming = Becoming::start(move |_| {
            map(0);
            let socket = connect(&path).unwrap();
            let (bytes, fds) = ask(&socket, plain::bytes(&hello(1, 0))).unwrap();
            let memory = SharedMemory::open(fds[0].try_clone().unwrap(), 4096).unwrap();
            let head = abi::verbs_request { command: abi::VERBS_SHOW_MEMORY, tag: 2 };
            let address = memory.as_ptr().as_ptr() as u64;
            let show = abi::verbs_show_memory_request { head, address };
            ask(&socket, plain::bytes(&show)).unwrap();
            let all = [&socket, &fds[0], &fds[1], &fds[2]].map(AsRawFd::as_raw_fd);
            send(&its, &bytes, &all).unwrap();
        });
        let (bytes, mut fds) = receive(&mine.into()).unwrap();
        let mut device = Device::of(fds.remove(0), 1, (bytes, fds));
        let pd = device.pd();
        let key = device.register_at(pd, ADDRESS as u64, 4096, 15).unwrap();
        becoming.become_victim();
        let read = reach(router, device, pd, key);
        let changed = becoming.ends_changed();
        assert_eq!(read == Some(SECRET), changed);
        changed
    });
}

/// A process connects and executes another program before the router has looked who that was.
#[test]
fn a_program_that_takes_the_place_early_is_not_the_one_that_connected() {
    attacked("address_space", |router| {
        router.add(2, Limits::default());
        let listener = router.listen(1);
        let (path, (mine, its)) = (router.path(1), UnixDatagram::pair().unwrap());
        let its = OwnedFd::from(its);
        let mut becoming = Becoming::start(move |_| {
            let socket = connect(&path).unwrap();
            send(&its, b"x", &[socket.as_raw_fd()]).unwrap();
        });
        let socket = receive(&mine.into()).unwrap().1.remove(0);
        becoming.become_victim();
        router.add_listening(1, Limits::default(), &listener);
        let answer = ask(&socket, plain::bytes(&hello(1, 0))).unwrap();
        // It has the memory mapped, but it did not connect.
        let mut device = Device::of(socket, 1, answer);
        let address = device.memory.as_ptr().as_ptr() as u64;
        assert_eq!(device.show(address), Err(libc::EACCES));
        let pd = device.pd();
        let Ok(key) = device.register_at(pd, ADDRESS as u64, 4096, 15) else {
            return false;
        };
        reach(router, device, pd, key) == Some(SECRET) && becoming.ends_changed()
    });
}

//! Attacks, each on a router as it is, and on one that does without the protection that is said to
//! stop it: there it has to succeed, or it proves nothing. `cargo test --features attack`; without
//! the feature the router has no such switch, and the attacks say so.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use shared_ring::SharedMemory;
use support::{
    Device, End, Router, ask, at, attacked, attacked_without, connect, eventually, gid, hello,
    inline, pair_of, receive, request, send, sending, tcp_pair,
};
use verbs_protocol::agent::{Limits, Message};
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
    // A router without rights could not open it.
    attacked_without("sandbox", "address_space", |router| {
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
    // A router without rights could not open it.
    attacked_without("sandbox", "address_space", |router| {
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

/// Endpoints 1 to 3.
fn endpoints(router: &Router) {
    for n in [1, 2, 3] {
        router.add(n, Limits::default());
    }
}

/// A pair, and a third container that has registered memory: its key is known to the first one.
#[test]
fn a_key_of_another_container_is_of_no_use() {
    attacked("keys", |router| {
        endpoints(router);
        let (mut a, _b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
        let c = End::new(router, 3, ibv::QPT_RC, 3, 64);
        a.send(&sending(at(ibv::WR_RDMA_WRITE, 1, &c.buffer, c.key), &[a.whole()]));
        let written = a.sends.result().1 == ibv::WC_SUCCESS;
        assert_eq!(written, c.buffer == [1; 64]);
        written
    });
}

/// A peer that was given the key of a part writes beside it.
#[test]
fn what_was_not_registered_is_not_reached() {
    attacked("ranges", |router| {
        endpoints(router);
        let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
        let key = b.device.register(b.pd, &mut b.buffer[..8], 15).unwrap();
        a.send(&sending(at(ibv::WR_RDMA_WRITE, 1, &b.buffer[4..], key), &[a.part(0, 8)]));
        let written = a.sends.result().1 == ibv::WC_SUCCESS;
        assert_eq!(b.buffer[..4], [2; 4]);
        assert_eq!(written, b.buffer[8..12] == [1; 4]);
        written
    });
}

/// A queue pair waits for its peer. Somebody else knows its number and a key, and is faster.
#[test]
fn a_queue_pair_is_not_for_others_than_it_names() {
    attacked("pairs", |router| {
        endpoints(router);
        // The one with the smaller GID opens the connection.
        let mut victim = End::new(router, 3, ibv::QPT_RC, 2, 64);
        victim.device.connect(victim.qp.number, ibv::QPT_RC, (2, 77), |_| ());
        let mut a = End::new(router, 1, ibv::QPT_RC, 1, 64);
        let soon = |attr: &mut abi::verbs_qp_attr| (attr.timeout, attr.retry_cnt) = (14, 7);
        a.device.connect(a.qp.number, ibv::QPT_RC, victim.address(), soon);
        a.send(&sending(at(ibv::WR_RDMA_WRITE, 1, &victim.buffer, victim.key), &[a.whole()]));
        let written = a.sends.result().1 == ibv::WC_SUCCESS;
        assert_eq!(written, victim.buffer == [1; 64]);
        written
    });
}

/// Handles are numbers: those of another container are tried.
#[test]
fn objects_of_another_container_are_not_destroyed() {
    attacked("owners", |router| {
        endpoints(router);
        let victim = End::new(router, 2, ibv::QPT_RC, 2, 64);
        // With some of its own, of which there are fewer then.
        let mut attacker = End::new(router, 1, ibv::QPT_RC, 1, 64).device;
        let destroyed = attacker.object(abi::VERBS_DEREG_MR, victim.key) == Ok(());
        let looked = attacker.object(abi::VERBS_DESTROY_QP, victim.qp.number) == Ok(());
        assert_eq!(destroyed, looked);
        destroyed
    });
}

/// A program changes the length of a request when the router has found it good.
#[test]
fn a_request_that_is_changed_while_it_is_read_is_one_or_the_other() {
    changed_while_it_is_read(false);
}

/// The same to memory that the router has mapped, where requests are copied together.
#[test]
fn so_is_one_that_is_copied_with_others() {
    changed_while_it_is_read(true);
}

fn changed_while_it_is_read(mapped: bool) {
    attacked("copies", |router| {
        endpoints(router);
        (0..40).any(|_| {
            if router.has_died() {
                return true;
            }
            let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 4096, |_| ());
            let memory = Arc::clone(&a.qp.memory);
            let (_, rkey, _shared) = b.device.shared(b.pd, 4096);
            // The length of inline data, in the first slot of the ring.
            // SAFETY: it lies in the mapping.
            let word = unsafe { memory.as_ptr().byte_add(384 + 28) }.as_ptr() as usize;
            let stop = Arc::new(AtomicBool::new(false));
            let until = Arc::clone(&stop);
            let changing = std::thread::spawn(move || {
                while !until.load(Ordering::Relaxed) {
                    for length in [8_u32, 1 << 20] {
                        let word = core::ptr::with_exposed_provenance_mut::<u32>(word);
                        // SAFETY: `memory` is mapped until this thread has ended. The router reads
                        // it meanwhile, which is what is tested.
                        unsafe { word.write_volatile(length) };
                        std::thread::yield_now();
                    }
                }
            });
            let mut head = at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key);
            if mapped {
                (head.remote_address, head.rkey) = (0, rkey);
            }
            assert!(a.qp.send.push(&inline(head, &[9; 8])).is_ok());
            a.device.ringer.ring().unwrap();
            let done = eventually("an end of the request", || {
                if router.has_died() { Some(true) } else { a.sends.poll().map(|_| false) }
            });
            stop.store(true, Ordering::Relaxed);
            changing.join().unwrap();
            drop(memory);
            done
        })
    });
}

/// A program shows the router more requests than it has written: those that lie there from before
/// would be done again.
#[test]
fn a_wild_index_does_not_have_requests_done_again() {
    attacked("indices", |router| {
        endpoints(router);
        let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
        b.buffer.fill(0);
        let mut head = at(ibv::WR_ATOMIC_FETCH_AND_ADD, 1, &b.buffer, b.key);
        (head.compare_add, head.flags) = (1, 0);
        let capacity = u64::from(a.qp.send.room().unwrap());
        let slots = sending(head, &[a.part(0, 8)]);
        assert_eq!(slots.len(), 1);
        let count = |b: &End| u64::from_ne_bytes(*b.buffer.first_chunk().unwrap());
        for _ in 0..capacity {
            a.send(&slots);
        }
        eventually("all of them", || (count(&b) == capacity).then_some(()));
        // SAFETY: the producer's index of the send ring lies there.
        let index = unsafe { a.qp.memory.as_ptr().byte_add(128) }.cast::<u32>();
        // SAFETY: as above.
        unsafe { index.write_volatile(1 << 30) };
        a.device.ringer.ring().unwrap();
        let more = eventually("more, or an end", || {
            let more = count(&b) > 2 * capacity;
            let failed = support::readable(&a.device.events, std::time::Duration::ZERO);
            (more || failed).then_some(more)
        });
        if more {
            // The router goes on writing to their buffers until it is ended: nobody else may have
            // the memory.
            std::mem::forget((a, b));
        }
        more
    });
}

/// A program takes the memory away in which the router is to write.
#[test]
fn memory_that_is_shared_cannot_be_taken_away() {
    attacked("seals", |router| {
        endpoints(router);
        let socket = router.connect(1);
        let (_, mut fds) = ask(&socket, plain::bytes(&hello(1, 0))).unwrap();
        // SAFETY: ftruncate takes numbers.
        let shrunk = unsafe { libc::ftruncate(fds[0].as_raw_fd(), 0) } == 0;
        if shrunk {
            // It wakes up, and arms the doorbell that was there when it has nothing to do.
            let mut ring = std::fs::File::from(fds.remove(1));
            ring.write_all(&1_u64.to_ne_bytes()).unwrap();
            eventually("the end of the router", || router.has_died().then_some(()));
        } else {
            router.open(2);
        }
        shrunk
    });
}

/// A connection has asked for a great many things when another one asks for one. The handles tell
/// in which order they were made.
#[test]
fn a_flood_of_requests_lets_others_have_their_turn() {
    const FLOOD: u32 = 200;
    attacked("turns", |router| {
        router.add(1, Limits { pds: 100 * FLOOD, ..Limits::default() });
        router.add(2, Limits::default());
        let (mut flood, mut other) = (router.open(1), router.open(2));
        let ask = |device: &mut Device| {
            let request = abi::verbs_plain_request { head: device.head(abi::VERBS_ALLOC_PD) };
            send(&device.socket, plain::bytes(&request), &[]).unwrap();
        };
        let made = |device: &Device| {
            let bytes = receive(&device.socket).unwrap().0;
            plain::read::<abi::verbs_object_reply>(&bytes).unwrap().object
        };
        let mut before = || {
            router.while_stopped(|| {
                for _ in 0..FLOOD {
                    ask(&mut flood);
                }
                ask(&mut other);
            });
            let late = made(&other);
            (0..FLOOD).filter(|_| made(&flood) < late).count()
        };
        // Which one the kernel names first is the kernel's business.
        let before = (0..50).map(|_| before()).find(|before| *before > 0);
        before.expect("the flood never came first") > 100
    });
}

/// Somebody connects to the port of others' queue pairs, and says nothing.
#[test]
fn who_connects_and_does_not_greet_is_hung_up_on() {
    attacked("deadlines", |router| {
        endpoints(router);
        let (mut mine, its) = tcp_pair();
        let accepted = Message::Accepted { endpoint: 1, source: gid(9), destination: gid(1) };
        router.tell(&accepted, &[its.as_raw_fd()]);
        drop(its);
        mine.set_read_timeout(Some(std::time::Duration::from_secs(12))).unwrap();
        mine.read(&mut [0]).is_err()
    });
}

#[test]
fn an_endpoint_has_no_more_than_its_quotas() {
    attacked("quotas", |router| {
        router.add(1, Limits { cqs: 3, ..Limits::default() });
        let mut device = router.open(1);
        let made: Vec<_> = (0..4).map_while(|_| device.try_cq(1, 0).ok()).collect();
        assert!(made.len() >= 3);
        made.len() > 3
    });
}

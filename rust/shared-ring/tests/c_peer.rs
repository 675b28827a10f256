//! The crate against its twin in C, `clib/ring/ring.h`: what one side pushes the other pops, both
//! sides sleep and ring, and each refuses what a broken peer writes.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use shared_ring::{
    Consumer, DOORBELL_SIZE, Producer, Ringer, SharedMemory, Sleeper, Slot, Wake, doorbell, ring,
    ring_size,
};

const CAPACITY: u32 = 8;
const SLOTS: u64 = 20_000;
const THERE: usize = 0;
const BACK: usize = ring_size(CAPACITY).next_multiple_of(128);
const WE_SLEEP: usize = 2 * BACK;
const IT_SLEEPS: usize = WE_SLEEP + DOORBELL_SIZE;
const LENGTH: usize = IT_SLEEPS + DOORBELL_SIZE;
const PRODUCED: usize = 128;

/// Compiles the C program under a name of its own: tests run side by side.
fn compile(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = Command::new("cc")
        .args(["-std=gnu11", "-O2", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(here.join("../../clib"))
        .arg("-o")
        .args([program.as_path(), &here.join("tests/c_peer.c")])
        .status();
    assert!(done.expect("cc is there").success());
    program
}

/// Two processes, and this one's part.
struct Parties {
    producer: Producer,
    consumer: Consumer,
    ringer: Ringer,
    sleeper: Sleeper,
    memory: std::sync::Arc<SharedMemory>,
    child: Child,
}

fn start(program: &Path) -> Parties {
    let memory = SharedMemory::create(c"c peer", LENGTH).unwrap();
    for offset in [THERE, BACK] {
        ring::create(&memory, offset, CAPACITY).unwrap();
    }
    let (ours, theirs) = (doorbell::descriptors().unwrap(), doorbell::descriptors().unwrap());
    let passed =
        [memory.as_fd().as_raw_fd(), ours.ring.as_raw_fd(), theirs.wait.as_fd().as_raw_fd()];
    let mut command = Command::new(program);
    command.args(passed.map(|fd| fd.to_string()));
    let numbers = [LENGTH, CAPACITY as usize, THERE, BACK, WE_SLEEP, IT_SLEEPS];
    command.args(numbers.map(|n| n.to_string())).arg(SLOTS.to_string());
    let keep_open = move || {
        for fd in passed {
            // SAFETY: F_SETFD takes a number and touches no memory of ours.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: fcntl is async-signal-safe, and nothing else is done between fork and exec.
    unsafe { command.pre_exec(keep_open) };
    let child = command.spawn().unwrap();
    drop((ours.ring, theirs.wait));
    Parties {
        producer: Producer::attach(&memory, THERE, CAPACITY).unwrap(),
        consumer: Consumer::attach(&memory, BACK, CAPACITY).unwrap(),
        ringer: Ringer::attach(&memory, IT_SLEEPS, theirs.ring).unwrap(),
        sleeper: Sleeper::attach(&memory, WE_SLEEP, ours.wait, Duration::ZERO).unwrap(),
        memory,
        child,
    }
}

fn numbered(n: u64) -> Slot {
    Slot([n, !n, n, n, n, n, n, n.rotate_left(32)])
}

#[test]
fn slots_go_to_c_and_back() {
    let Parties { mut producer, mut consumer, mut ringer, mut sleeper, mut child, .. } =
        start(&compile("c_peer_echo"));
    let (mut sent, mut received) = (0, 0);
    while received < SLOTS {
        let batch = [numbered(sent), numbered(sent + 1), numbered(sent + 2)];
        let left = usize::try_from(SLOTS - sent).unwrap();
        let pushed = producer.push(&batch[..left.min(3)]).unwrap();
        sent += pushed as u64;
        let mut copies = [Slot::default(); 5];
        let popped = consumer.pop(&mut copies).unwrap();
        for slot in &copies[..popped] {
            assert_eq!(*slot, numbered(received));
            received += 1;
        }
        if pushed + popped > 0 {
            ringer.ring().unwrap();
            continue;
        }
        let ready = || consumer.is_ready() || sent < SLOTS && producer.is_ready();
        let wake = sleeper.wait(Some(Duration::from_mins(1)), ready).unwrap();
        assert_ne!(wake, Wake::TimedOut, "the C process is not there, or a wake-up is lost");
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn c_refuses_an_index_that_cannot_be() {
    let Parties { mut ringer, memory, mut child, .. } = start(&compile("c_peer_refuses"));
    // SAFETY: the address lies in the mapping.
    let produced = unsafe { memory.as_ptr().byte_add(THERE + PRODUCED) };
    // SAFETY: it is aligned as an index of a ring is, and is used by atomics only.
    let produced = unsafe { produced.cast::<std::sync::atomic::AtomicU32>().as_ref() };
    produced.store(CAPACITY + 1, std::sync::atomic::Ordering::Release);
    ringer.ring().unwrap();
    let code = child.wait().unwrap().code().expect("it ended by itself");
    assert_ne!(code, 0, "C took slots that cannot be there");
}

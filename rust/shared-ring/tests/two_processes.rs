//! Two processes, as in use: one makes memory, rings and doorbells and passes descriptors on, the
//! other opens them. Slots go there and come back, through small rings, so that both sides sleep
//! for slots and for room.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::env;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use shared_ring::{
    Consumer, DOORBELL_SIZE, Producer, Ringer, SharedMemory, Sleeper, Slot, Wake, doorbell, ring,
    ring_size,
};

const CAPACITY: u32 = 8;
const SLOTS: u64 = 20_000;
const THERE: usize = 0;
const BACK: usize = ring_size(CAPACITY).next_multiple_of(128);
const MAKER_SLEEPS: usize = 2 * BACK;
const CHILD_SLEEPS: usize = MAKER_SLEEPS + DOORBELL_SIZE;
const LENGTH: usize = CHILD_SLEEPS + DOORBELL_SIZE;
/// The descriptors that the child inherits: memory, its ringing end, its waiting end.
const INHERITED: &str = "SHARED_RING_TEST_DESCRIPTORS";

/// One process's part: what it pushes to and pops from, and one doorbell for both in each
/// direction.
struct Party {
    producer: Producer,
    consumer: Consumer,
    ringer: Ringer,
    sleeper: Sleeper,
}

impl Party {
    /// Waits for slots or, if `full`, for room as well.
    fn wait(&mut self, full: bool) {
        let (producer, consumer) = (&mut self.producer, &mut self.consumer);
        let ready = || consumer.is_ready() || full && producer.is_ready();
        let wake = self.sleeper.wait(Some(Duration::from_mins(1)), ready).unwrap();
        assert_ne!(wake, Wake::TimedOut, "the other process is not there, or a wake-up is lost");
    }
}

fn numbered(n: u64) -> Slot {
    Slot([n, !n, n, n, n, n, n, n.rotate_left(32)])
}

/// Sends all slots and sees them come back in order.
fn send_and_receive(party: &mut Party) {
    let (mut sent, mut received) = (0, 0);
    while received < SLOTS {
        let batch = [numbered(sent), numbered(sent + 1), numbered(sent + 2)];
        let left = usize::try_from(SLOTS - sent).unwrap();
        let pushed = party.producer.push(&batch[..left.min(3)]).unwrap();
        sent += pushed as u64;
        let mut copies = [Slot::default(); 5];
        let popped = party.consumer.pop(&mut copies).unwrap();
        for slot in &copies[..popped] {
            assert_eq!(*slot, numbered(received));
            received += 1;
        }
        if pushed + popped > 0 {
            party.ringer.ring().unwrap();
        } else {
            party.wait(sent < SLOTS);
        }
    }
}

/// Sends back what comes.
fn echo(party: &mut Party) {
    let mut copies = [Slot::default(); 4];
    let mut done = 0;
    while done < SLOTS {
        let popped = party.consumer.pop(&mut copies).unwrap();
        let mut rest = &copies[..popped];
        while !rest.is_empty() {
            let pushed = party.producer.push(rest).unwrap();
            rest = &rest[pushed..];
            party.ringer.ring().unwrap();
            if !rest.is_empty() {
                wait_for_room(party);
            }
        }
        done += popped as u64;
        if popped == 0 {
            party.wait(false);
        }
    }
}

fn wait_for_room(party: &mut Party) {
    let wake = party.sleeper.wait(Some(Duration::from_mins(1)), || party.producer.is_ready());
    assert_ne!(wake.unwrap(), Wake::TimedOut, "no room came, or a wake-up is lost");
}

#[test]
fn slots_go_to_another_process_and_back() {
    let memory = SharedMemory::create(c"two processes", LENGTH).unwrap();
    for offset in [THERE, BACK] {
        ring::create(&memory, offset, CAPACITY).unwrap();
    }
    let (ours, theirs) = (doorbell::descriptors().unwrap(), doorbell::descriptors().unwrap());
    let passed =
        [memory.as_fd().as_raw_fd(), ours.ring.as_raw_fd(), theirs.wait.as_fd().as_raw_fd()];
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "the_other_process", "--ignored", "--nocapture"]);
    child.env(INHERITED, passed.map(|fd| fd.to_string()).join(" "));
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
    unsafe { child.pre_exec(keep_open) };
    let mut child = child.spawn().unwrap();
    drop((ours.ring, theirs.wait));
    let mut party = Party {
        producer: Producer::attach(&memory, THERE, CAPACITY).unwrap(),
        consumer: Consumer::attach(&memory, BACK, CAPACITY).unwrap(),
        ringer: Ringer::attach(&memory, CHILD_SLEEPS, theirs.ring).unwrap(),
        sleeper: Sleeper::attach(&memory, MAKER_SLEEPS, ours.wait, Duration::ZERO).unwrap(),
    };
    send_and_receive(&mut party);
    assert!(child.wait().unwrap().success());
    assert!(party.ringer.rings() <= SLOTS, "it rang more often than it pushed");
}

#[test]
#[ignore = "the child of slots_go_to_another_process_and_back"]
fn the_other_process() {
    let list = env::var(INHERITED).expect("started by the other test");
    let mut descriptors = list.split(' ').map(|number| {
        let fd: RawFd = number.parse().unwrap();
        // SAFETY: the parent has passed this descriptor on for this process to own.
        unsafe { OwnedFd::from_raw_fd(fd) }
    });
    let memory = SharedMemory::open(descriptors.next().unwrap(), LENGTH).unwrap();
    let (ring, wait) = (descriptors.next().unwrap(), descriptors.next().unwrap());
    let mut party = Party {
        producer: Producer::attach(&memory, BACK, CAPACITY).unwrap(),
        consumer: Consumer::attach(&Arc::clone(&memory), THERE, CAPACITY).unwrap(),
        ringer: Ringer::attach(&memory, MAKER_SLEEPS, ring).unwrap(),
        sleeper: Sleeper::attach(&memory, CHILD_SLEEPS, wait, Duration::ZERO).unwrap(),
    };
    echo(&mut party);
}

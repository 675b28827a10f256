//! Peers that do what they like: a thread that writes into all of the shared part meanwhile, and
//! peers that use the descriptors they were given in the worst way.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use shared_ring::{
    Consumer, DOORBELL_SIZE, Producer, Ringer, SharedMemory, Sleeper, Slot, Wake, doorbell, ring,
    ring_size,
};

const CAPACITY: u32 = 16;

/// Writes numbers into random words of the shared part until it is told to stop.
fn scribble(memory: &SharedMemory, stop: &AtomicBool) {
    let mut state = 1_u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let words = memory.len() / 4;
    // The words that are indices, a version, a doorbell: most writes go there.
    let known = [0, 1, 2, 3, 4, 32, 64, words - DOORBELL_SIZE / 4];
    while !stop.load(Ordering::Relaxed) {
        let (choice, number) = (random() as usize, random());
        let at = if choice.is_multiple_of(4) { choice / 4 % words } else { known[choice / 4 % 8] };
        let value = if number.is_multiple_of(3) { number << 8 } else { number / 3 % 40 };
        let word = memory.as_ptr().cast::<AtomicU32>().as_ptr().wrapping_add(at);
        // SAFETY: `at` is a word of the memory, which outlives this call, and any bytes are a value
        // of an atomic.
        unsafe { &*word }.store(value, Ordering::Relaxed);
    }
}

#[test]
fn a_peer_that_writes_anywhere_gets_typed_errors() {
    let bell = ring_size(CAPACITY);
    let memory = SharedMemory::create(c"hostile", bell + DOORBELL_SIZE).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let theirs = SharedMemory::open(memory.as_fd().try_clone_to_owned().unwrap(), memory.len());
    let (theirs, told) = (theirs.unwrap(), Arc::clone(&stop));
    let peer = thread::spawn(move || scribble(&theirs, &told));
    let ends = doorbell::descriptors().unwrap();
    let mut ringer = Ringer::attach(&memory, bell, ends.ring).unwrap();
    let mut sleeper = Sleeper::attach(&memory, bell, ends.wait, Duration::ZERO).unwrap();
    let (mut refused, mut broken, mut moved) = (0, 0, 0);
    for round in 0..20_000 {
        ring::create(&memory, 0, CAPACITY).unwrap();
        let producer = Producer::attach(&memory, 0, CAPACITY);
        let (Ok(mut producer), Ok(mut consumer)) =
            (producer, Consumer::attach(&memory, 0, CAPACITY))
        else {
            refused += 1;
            continue;
        };
        for n in 1..=24 {
            let mut copies = [Slot::default(); 24];
            let pushed = producer.push(&copies[..n]);
            let popped = consumer.pop(&mut copies[..n]);
            for count in [pushed, popped] {
                match count {
                    Ok(count) => {
                        assert!(count <= n && count <= CAPACITY as usize);
                        moved += count;
                    }
                    Err(_) => broken += 1,
                }
            }
        }
        if round % 16 == 0 {
            ringer.ring().unwrap();
            sleeper.wait(Some(Duration::ZERO), || consumer.is_ready()).unwrap();
        }
    }
    stop.store(true, Ordering::Relaxed);
    peer.join().unwrap();
    assert!(moved > 0 && broken + refused > 0, "{moved} moved, {broken} broken, {refused} refused");
}

#[test]
fn a_peer_cannot_take_the_memory_away() {
    let memory = SharedMemory::create(c"holes", 1 << 20).unwrap();
    let capacity = 8192;
    ring::create(&memory, 0, capacity).unwrap();
    let mut producer = Producer::attach(&memory, 0, capacity).unwrap();
    let mut consumer = Consumer::attach(&memory, 0, capacity).unwrap();
    assert_eq!(producer.push(&[Slot([1; 8]); 100]), Ok(100));
    let theirs = File::from(memory.as_fd().try_clone_to_owned().unwrap());
    assert!(theirs.set_len(0).is_err(), "memory could be made smaller");
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: fallocate takes numbers and touches no memory of ours.
    let punched = unsafe { libc::fallocate(theirs.as_raw_fd(), mode, 0, 1 << 20) };
    assert_eq!(punched, 0);
    // All of it is zero now, indices, too: the producer went back, the consumer is where it was.
    assert!(consumer.available().is_ok());
    assert_eq!(consumer.pop(&mut [Slot::default(); 4]), Ok(0));
    assert_eq!(producer.push(&vec![Slot([2; 8]); 8192]), Ok(8092));
    assert!(consumer.pop(&mut [Slot::default(); 200]).is_ok());
}

fn doorbell_in_memory() -> (Arc<SharedMemory>, doorbell::Descriptors) {
    (SharedMemory::create(c"bell", DOORBELL_SIZE).unwrap(), doorbell::descriptors().unwrap())
}

fn make_blocking(fd: BorrowedFd<'_>) {
    // SAFETY: F_SETFL takes a number and touches no memory of ours.
    assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, 0) }, 0);
}

fn can_write(fd: BorrowedFd<'_>) -> bool {
    let mut asked = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: the kernel reads and writes one pollfd, and `asked` is one.
    unsafe { libc::poll(&raw mut asked, 1, 0) == 1 }
}

/// What the two descriptors of a doorbell protect from: a ringer whose eventfd a peer has, too.
#[test]
fn an_eventfd_that_both_have_would_block_its_ringer() {
    let ours = doorbell::descriptors().unwrap().ring;
    let mut theirs = File::from(ours.try_clone().unwrap());
    make_blocking(theirs.as_fd());
    theirs.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
    // SAFETY: F_GETFL takes no argument and touches no memory of ours.
    let flags = unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_GETFL) };
    assert_eq!(flags & libc::O_NONBLOCK, 0, "the flag is not shared");
    assert!(!can_write(ours.as_fd()), "a write would not block");
}

#[test]
fn a_sleeper_that_never_wakes_cannot_block_the_ringer() {
    let (memory, ends) = doorbell_in_memory();
    let theirs = ends.wait;
    make_blocking(theirs.as_fd());
    let mut ringer = Ringer::attach(&memory, 0, ends.ring).unwrap();
    // SAFETY: a doorbell's word is the first of its line.
    let word = unsafe { memory.as_ptr().cast::<AtomicU32>().as_ref() };
    for _ in 0..10_000 {
        word.store(1, Ordering::Relaxed);
        assert!(ringer.ring().unwrap());
    }
    drop(theirs);
    word.store(1, Ordering::Relaxed);
    assert!(ringer.ring().unwrap());
    assert_eq!(ringer.rings(), 10_001);
}

#[test]
fn a_ringer_that_rings_for_ever_or_never_cannot_hold_the_sleeper() {
    let (memory, ends) = doorbell_in_memory();
    let mut sleeper = Sleeper::attach(&memory, 0, ends.wait, Duration::ZERO).unwrap();
    let mut theirs = File::from(ends.ring);
    let moment = Some(Duration::from_millis(1));
    assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::TimedOut);
    for _ in 0..1000 {
        theirs.write_all(&1_u64.to_ne_bytes()).unwrap();
        theirs.write_all(&1_u64.to_ne_bytes()).unwrap();
        // However often it rang: one event, and then none.
        assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::Rung);
        assert!(!sleeper.take_ring().unwrap());
    }
    make_blocking(theirs.as_fd());
    theirs.write_all(&(u64::MAX - 1 - 2000).to_ne_bytes()).unwrap();
    assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::Rung);
    assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::TimedOut);
}

#[test]
fn a_ring_arrives_although_its_ringer_has_ended() {
    let (memory, ends) = doorbell_in_memory();
    let mut sleeper = Sleeper::attach(&memory, 0, ends.wait, Duration::ZERO).unwrap();
    let mut ringer = Ringer::attach(&memory, 0, ends.ring).unwrap();
    sleeper.arm();
    assert!(ringer.ring().unwrap());
    drop(ringer);
    let moment = Some(Duration::from_millis(1));
    assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::Rung);
    assert_eq!(sleeper.wait(moment, || false).unwrap(), Wake::TimedOut);
}

#[test]
fn a_sleeper_spins_first() {
    let (memory, ends) = doorbell_in_memory();
    let mut sleeper = Sleeper::attach(&memory, 0, ends.wait, Duration::from_micros(50)).unwrap();
    // SAFETY: a doorbell's word is the first of its line.
    let word = unsafe { memory.as_ptr().cast::<AtomicU32>().as_ref() };
    let mut asked = 0;
    let ready = || {
        asked += 1;
        assert_eq!(word.load(Ordering::Relaxed), 0, "it asked to be rung while it spins");
        asked == 5
    };
    assert_eq!(sleeper.wait(None, ready).unwrap(), Wake::Ready);
}

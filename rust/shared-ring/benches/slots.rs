//! What a slot costs: nanoseconds for a slot of 64 bytes that is pushed and popped, by one thread
//! and by two, at batches of 1, 4 and 32. The goal is 10 ns at batches of 4 in one thread.
//!
//! `make bench-rust` runs it. Rounds of all cases are interleaved, so that what else the machine
//! does meets all of them alike; medians, and the spread from the fastest to the slowest round, are
//! printed. Figures of two threads need two processors that nobody else uses.

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use shared_ring::{Consumer, Producer, SharedMemory, Slot, ring, ring_size};

const CAPACITY: u32 = 1024;
const ROUNDS: usize = 9;
/// Slots of a round: 20 ms at 10 ns each.
const SLOTS: usize = 1 << 21;

struct Case {
    threads: usize,
    batch: usize,
    rounds: Vec<f64>,
}

fn pair() -> (Producer, Consumer) {
    let memory = SharedMemory::create(c"bench", ring_size(CAPACITY)).expect("make memory");
    ring::create(&memory, 0, CAPACITY).expect("make ring");
    let other = Arc::clone(&memory);
    (
        Producer::attach(&memory, 0, CAPACITY).expect("attach producer"),
        Consumer::attach(&other, 0, CAPACITY).expect("attach consumer"),
    )
}

fn one_thread(batch: usize) {
    let (mut producer, mut consumer) = pair();
    let mut slots = vec![Slot([1; 8]); batch];
    for n in 0..SLOTS / batch {
        slots[0].0[0] = n as u64;
        let pushed = producer.push(black_box(&slots)).expect("push");
        let popped = consumer.pop(black_box(&mut slots)).expect("pop");
        assert_eq!((pushed, popped), (batch, batch));
    }
}

/// Lets the other side run: on a machine with one free processor nothing else would.
fn pause(idle: &mut u32) {
    *idle += 1;
    if idle.is_multiple_of(256) { thread::yield_now() } else { spin_loop() }
}

fn two_threads(batch: usize) {
    let (mut producer, mut consumer) = pair();
    let pushing = thread::spawn(move || {
        let slots = vec![Slot([1; 8]); batch];
        let (mut left, mut idle) = (SLOTS, 0);
        while left > 0 {
            match producer.push(black_box(&slots[..batch.min(left)])).expect("push") {
                0 => pause(&mut idle),
                pushed => left -= pushed,
            }
        }
    });
    let mut copies = vec![Slot::default(); batch];
    let (mut left, mut idle) = (SLOTS, 0);
    while left > 0 {
        match consumer.pop(black_box(&mut copies)).expect("pop") {
            0 => pause(&mut idle),
            popped => left -= popped,
        }
    }
    pushing.join().expect("producer");
}

#[expect(clippy::cast_precision_loss, reason = "2^21 slots are exact in a float")]
fn main() {
    let mut cases: Vec<Case> = [1, 2]
        .into_iter()
        .flat_map(|threads| [1, 4, 32].map(|batch| Case { threads, batch, rounds: Vec::new() }))
        .collect();
    for _ in 0..ROUNDS {
        for case in &mut cases {
            let start = Instant::now();
            let run = if case.threads == 1 { one_thread } else { two_threads };
            run(case.batch);
            case.rounds.push(start.elapsed().as_nanos() as f64 / SLOTS as f64);
        }
    }
    println!("threads batch  median ns/slot  fastest  slowest  of {ROUNDS} rounds");
    for case in &mut cases {
        case.rounds.sort_by(f64::total_cmp);
        let (fastest, median, slowest) =
            (case.rounds[0], case.rounds[ROUNDS / 2], case.rounds[ROUNDS - 1]);
        let goal = match (case.threads, case.batch, median <= 10.0) {
            (1, 4, true) => "  goal of 10 ns: met",
            (1, 4, false) => "  goal of 10 ns: missed",
            _ => "",
        };
        let Case { threads, batch, .. } = case;
        println!("{threads:7} {batch:5} {median:15.2} {fastest:8.2} {slowest:8.2}{goal}");
    }
}

//! Guests that push any nqes and write anything into their streams.

mod queues_support;
#[path = "../../testing/seeded.rs"]
mod seeded;

use std::sync::atomic::Ordering;
use std::time::Duration;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::guest::Guest;
use queues_support::*;

/// What is random, but near what there is: numbers of sockets and streams that may exist.
fn any(random: &mut impl FnMut() -> u64) -> queues_nqe {
    let mut n = job(u32::try_from(random() % 40).unwrap(), u32::try_from(random() % 6).unwrap());
    n.flags = random().to_le_bytes()[0] & 7;
    n.length = u32::try_from(random() % 8).unwrap();
    n.generation = u32::try_from(random() % 3).unwrap();
    n.option = u16::try_from(random() % 16).unwrap();
    n.credit = u32::try_from(random() % 5).unwrap();
    n.offset = if random().is_multiple_of(4) { random() } else { random() % 100 };
    n.address[10..12].fill(255);
    n.address[12..].copy_from_slice(&[127, 0, 0, 1]);
    n.port = if random().is_multiple_of(2) { 0 } else { 9 };
    n
}

/// Pushes a job once there is room for it.
fn insist(guest: &mut Guest, nqe: queues_nqe) -> u32 {
    loop {
        if let Ok(sequence) = guest.push(nqe) {
            return sequence;
        }
        guest.drop_completions().unwrap();
        std::thread::yield_now();
    }
}

fn round(agent: &mut Agent, region: u64, random: &mut impl FnMut() -> u64) {
    let flags = if random().is_multiple_of(4) { 0 } else { QUEUES_CONTROL };
    let life = agent.region(region, flags);
    let mut guest = Guest::open(&life).unwrap();
    for _ in 0..400 {
        if random().is_multiple_of(8) {
            let stream = u16::try_from(random() % u64::from(STREAMS)).unwrap();
            let value = if random().is_multiple_of(2) { random() } else { random() % 70000 };
            guest.view.out_produced(stream).store(value, Ordering::Relaxed);
            guest.view.in_consumed(stream).store(random() % 4, Ordering::Relaxed);
            guest.view.out_waiting(stream).store(1, Ordering::Relaxed);
        }
        insist(&mut guest, any(random));
        agent.hear(Duration::ZERO);
    }
    // All were looked at.
    let last = insist(&mut guest, job(QUEUES_NOTHING, 0));
    guest.wait(|n| n.sequence == last).unwrap();
    drop((guest, life));
    agent.await_gone(region);
}

#[test]
fn a_service_survives_what_guests_push() {
    let mut random = seeded::numbers(0x51ed_270b_a5f8_3c11);
    let mut agent = Agent::new();
    let beside = agent.region(1, 0);
    let mut other = Guest::open(&beside).unwrap();
    for region in 2..42 {
        round(&mut agent, region, &mut random);
        other.call(job(QUEUES_NOTHING, 0)).unwrap();
    }
    let stats = agent.stats(0);
    assert!(stats.jobs > 16000 && stats.refused > 1000, "{stats:?}");
}

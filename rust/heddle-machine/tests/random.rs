//! What a fuzz target would do, with bytes from seeds.

mod driver;
#[path = "../../testing/seeded.rs"]
mod seeded;

use driver::Outcomes;

#[test]
fn a_service_survives_what_a_guest_writes() {
    let mut random = seeded::numbers(0x9e37_79b9_7f4a_7c15);
    let rounds: u64 =
        std::env::var("HEDDLE_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let mut all = Outcomes::default();
    for _ in 0..rounds {
        let bytes: Vec<u8> = (0..2000).map(|_| random().to_le_bytes()[3]).collect();
        driver::drive(&bytes, &mut all);
    }
    let reached = [
        all.jobs,
        all.accepted,
        all.sent,
        all.received,
        all.refused,
        all.broken_streams,
        all.broken_regions,
    ];
    assert!(reached.iter().all(|n| *n > 0), "{all:?}");
}

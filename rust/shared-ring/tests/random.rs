//! The driver of the fuzz target with moves of a seeded generator: the same on every run.

mod driver;
#[path = "../../testing/seeded.rs"]
mod seeded;

use driver::{Outcomes, drive};

/// Moves of one seed.
fn moves(seed: u64) -> Vec<u8> {
    let mut random = seeded::numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut next = || random().to_ne_bytes();
    let words = 1 + usize::from(next()[0]);
    (0..words).flat_map(|_| next()).collect()
}

#[test]
fn every_move_of_a_peer_has_a_typed_outcome() {
    let mut sum = Outcomes::default();
    for seed in 1..=1000 {
        let moves = moves(seed);
        let play = std::panic::AssertUnwindSafe(|| drive(&moves, &mut sum));
        std::panic::catch_unwind(play).unwrap_or_else(|_| panic!("seed {seed}"));
    }
    // A generator that reaches only one kind of outcome would prove little.
    assert!(
        sum.moved > 1000 && sum.broken > 1000 && sum.refused > 1000 && sum.rung > 1000,
        "{sum:?}"
    );
}

//! The driver of the fuzz target with moves of a seeded generator: the same on every run.

mod driver;

use driver::{Outcomes, drive};

/// Moves of one seed: xorshift64*, which needs no crate.
fn moves(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_ne_bytes()
    };
    let words = 1 + usize::from(next()[0]);
    (0..words).flat_map(|_| next()).collect()
}

#[test]
fn every_move_of_a_peer_has_a_typed_outcome() {
    let mut sum = Outcomes::default();
    for seed in 1..=1000 {
        let outcomes = std::panic::catch_unwind(|| drive(&moves(seed)))
            .unwrap_or_else(|_| panic!("seed {seed}"));
        sum.moved += outcomes.moved;
        sum.broken += outcomes.broken;
        sum.refused += outcomes.refused;
        sum.rung += outcomes.rung;
    }
    // A generator that reaches only one kind of outcome would prove little.
    assert!(
        sum.moved > 1000 && sum.broken > 1000 && sum.refused > 1000 && sum.rung > 1000,
        "{sum:?}"
    );
}

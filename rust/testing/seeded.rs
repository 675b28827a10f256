//! Numbers of a seeded generator, the same on every run: xorshift64, which needs no crate.

/// The numbers that follow a seed, which is not 0.
pub(crate) fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

//! What the fuzz target does, with bytes from seeds.

mod driver;

use driver::Outcomes;

#[test]
fn a_host_survives_what_anybody_sends() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let rounds: u64 =
        std::env::var("HEDDLE_FUZZ_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let mut all = Outcomes::default();
    for _ in 0..rounds {
        let bytes: Vec<u8> = (0..2000).map(|_| random().to_le_bytes()[3]).collect();
        let got = driver::drive(&bytes);
        all.connected += got.connected;
        all.accepted += got.accepted;
        all.failed += got.failed;
        all.reset += got.reset;
        all.bytes += got.bytes;
        all.retransmits += got.retransmits;
        all.dropped += got.dropped;
        all.agents += got.agents;
    }
    let reached = [
        all.connected,
        all.accepted,
        all.failed,
        all.reset,
        all.bytes,
        all.retransmits,
        all.dropped,
        all.agents,
    ];
    assert!(reached.iter().all(|n| *n > 0), "{all:?}");
}

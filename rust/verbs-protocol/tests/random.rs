//! What the fuzz target does, with bytes from seeds: likely ones, so that all of it is reached.

mod driver;
#[path = "../../testing/seeded.rs"]
mod seeded;

use driver::Outcomes;

#[test]
fn bytes_of_any_kind_are_read_or_refused() {
    let mut random = seeded::numbers(0x9e37_79b9_7f4a_7c15);
    let mut all = Outcomes::default();
    for _ in 0..50_000 {
        let kind = random() % 7;
        let length = match kind {
            0 => [8, 16, 24, 32, 48, 56, 64, 140][usize::try_from(random() % 8).unwrap()],
            5 => [16, 32, 48, 72, 280, 296, 304][usize::try_from(random() % 7).unwrap()],
            6 => 48 + [32, 36, 88][usize::try_from(random() % 3).unwrap()],
            4 => [16, 24, 48, 176][usize::try_from(random() % 4).unwrap()],
            _ => 64 * (1 + usize::try_from(random() % 9).unwrap()),
        };
        // Most bytes are 0, and the others small: as fields are.
        let mut bytes: Vec<u8> = (0..length)
            .map(|_| if random().is_multiple_of(8) { random().to_ne_bytes()[0] & 15 } else { 0 })
            .collect();
        bytes[0] = random().to_ne_bytes()[0] % 28;
        if kind == 2 && !random().is_multiple_of(4) {
            bytes[..8].copy_from_slice(b"HDLVERBS");
            bytes[8..12].copy_from_slice(&[0, 1, 0, 1]);
        }
        if kind == 5 {
            // The command says how long it is.
            let rest = u16::try_from(length - 8).unwrap();
            bytes[1..4].fill(0);
            bytes[4..6].copy_from_slice(&rest.to_ne_bytes());
        }
        if kind == 6 {
            let rest = u32::try_from(length - 48).unwrap();
            bytes[..48].fill(0);
            bytes[..2].copy_from_slice(&[8, random().to_ne_bytes()[0] % 10]);
            bytes[4..8].copy_from_slice(&rest.to_be_bytes());
            bytes[48..80].fill(0);
            if !random().is_multiple_of(4) {
                bytes[48..50].copy_from_slice(&[1, 6]);
            }
        }
        bytes.insert(0, u8::try_from(kind).unwrap());
        driver::drive(&bytes, &mut all);
    }
    let reached = [
        all.requests,
        all.refused,
        all.sends,
        all.receives,
        all.greetings,
        all.frames,
        all.messages,
        all.cm_commands,
        all.cm_messages,
    ];
    assert!(reached.iter().all(|n| *n > 0), "{all:?}");
}

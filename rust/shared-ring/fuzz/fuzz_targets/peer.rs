//! Everything that is read from shared memory, written by a peer whose moves libFuzzer chooses.

#![no_main]

#[path = "../../tests/driver/mod.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|moves: &[u8]| {
    driver::drive(moves, &mut driver::Outcomes::default());
});

//! Everything that the router reads of containers, of other nodes and of its agent, in bytes that
//! libFuzzer chooses.

#![no_main]

#[path = "../../tests/driver/mod.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    driver::drive(bytes, &mut driver::Outcomes::default());
});

//! Packets, messages and programs' bytes that libFuzzer chooses, for a whole host.

#![no_main]

#[path = "../../tests/driver/mod.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    driver::drive(bytes, &mut driver::Outcomes::default());
});

//! Queues between guests and a service: `docs/protocols/stack-queues.md`.

/// The layouts of `clib/stack/queues.h`, which has their comments.
#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    unused_qualifications,
    clippy::pedantic,
    reason = "made by bindgen"
)]
pub mod abi;

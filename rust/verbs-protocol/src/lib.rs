//! What libraries, routers and agents of the verbs plane say to each other. The pages
//! `docs/protocols/verbs-control.md`, `verbs-rings.md`, `verbs-wire.md` and `verbs-agent.md` are
//! normative.
//!
//! | module | what it owns |
//! |---|---|
//! | [`abi`] | the layouts that C shares, made of `clib/verbs/protocol.h` by `clib/generate.sh` |
//! | [`control`] | requests on the control socket, out of bytes |
//! | [`cm`], [`cm_message`] | RDMA-CM: commands of programs, and messages |
//! | [`slots`] | work requests, out of slots |
//! | [`wire`] | greeting and frames between routers |
//! | [`agent`], [`statistics`] | messages between the router and its agent |
//! | [`agent_abi`] | their layouts, made of `clib/verbs/agent.h` |
//! | [`ibv`] | numbers of libibverbs |
//!
//! Everything here is pure: bytes in, values or a typed refusal out. Nothing panics, whatever the
//! bytes.

pub mod agent;
pub mod cm;
pub mod cm_message;
pub mod control;
pub mod ibv;
pub mod plain;
pub mod slots;
pub mod statistics;
pub mod wire;

/// The layouts of `clib/verbs/protocol.h`, which has their comments.
#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    unused_qualifications,
    clippy::pedantic,
    reason = "made by bindgen"
)]
pub mod abi;

/// The layouts of `clib/verbs/agent.h`, which has their comments.
#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    unused_qualifications,
    clippy::pedantic,
    reason = "made by bindgen"
)]
pub mod agent_abi;

/// Bytes of a GID.
pub type Gid = [u8; 16];

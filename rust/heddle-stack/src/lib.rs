//! The module host: runs TCP in user space for the endpoints that the agent of a node names, their
//! programs behind pairs of sockets. `docs/architecture/stack-modules.md`; the protocol is
//! `docs/protocols/stack-module.md`.
//!
//! | module | what it owns |
//! |---|---|
//! | `host` | the loop, the agent's connection, whose turn it is |
//! | `outbox` | messages that the agent has not taken yet |
//! | `tenant` | an endpoint: sockets, which connection a packet is of, limits, counters |
//! | `connection` | smoltcp's socket on one side, the program's pair on the other |
//! | `device` | packets in and out |
//! | `ports` | who has which port |
//! | `packet` | segments, out of bytes of anybody's |
//! | `proto` | messages, out of bytes of the agent's |
//! | `queues` | the service of guests that have queues instead of pairs |
//! | `settings`, `bucket` | options, rates |
//! | `client` | the agent's side, for tests (feature `client`) |
//! | `sys` | system calls beside those of `unix-io` |

#![allow(clippy::wildcard_imports, reason = "the layouts are many, and their names begin alike")]

mod bucket;
#[cfg(feature = "client")]
pub mod client;
mod connection;
mod device;
mod host;
mod outbox;
pub mod packet;
mod ports;
pub mod proto;
pub mod queues;
mod settings;
mod sys;
mod tenant;

/// The layouts of `clib/stack/protocol.h`, which has their comments.
#[allow(
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    unused_qualifications,
    clippy::pedantic,
    reason = "made by bindgen"
)]
pub mod abi;

use std::io;
use std::path::Path;

pub use host::Host;

/// Serves the agents that connect at a path, for ever.
///
/// # Errors
///
/// The kernel's: the path is in use, say.
pub fn run(path: &Path) -> io::Result<()> {
    sys::map_large_buffers();
    sys::raise_descriptors();
    let mut host = Host::new()?;
    host.listen(path)?;
    loop {
        host.step(None)?;
    }
}

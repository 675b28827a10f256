//! The service of queues: what the kernel's TCP is to guests that have rings in shared memory in
//! place of system calls. `docs/architecture/guest-library.md`; the protocol is
//! `docs/protocols/stack-queues.md`.
//!
//! | module | what it owns |
//! |---|---|
//! | `service` | the loop, the agent's connection, whose turn it is |
//! | `region` | a guest: its queues, its sockets |
//! | `stream` | a connection: byte rings on one side, a socket on the other |
//! | `memory` | which byte of a region is what, and every access to it |
//! | `proto` | messages and nqes, out of bytes |
//! | `sockets` | system calls on TCP sockets |
//! | `measure` | what an nqe costs, and what small writes gain |
//! | `guest` | the guest's side, for tests and measurements |

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
pub mod guest;
pub mod measure;
pub mod memory;
pub mod proto;
mod region;
mod service;
mod sockets;
mod stream;

use std::io;
use std::path::Path;

pub use service::{ROUND, Service};

/// Serves the agents that connect at a path, for ever.
///
/// # Errors
///
/// The kernel's: the path is in use, say.
pub fn run(path: &Path) -> io::Result<()> {
    unix_io::raise_descriptors();
    let mut service = Service::new()?;
    service.listen(path)?;
    loop {
        service.step(None)?;
    }
}

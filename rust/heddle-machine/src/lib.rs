//! TCP of a virtual machine without a network device: what its programs ask for goes by queues in
//! memory that the machine sees as a PCI device (ivshmem) to a process of its container outside,
//! whose sockets are its connections. `docs/architecture/machines.md`; the protocol is
//! `docs/protocols/stack-queues.md`.
//!
//! | module | what it owns |
//! |---|---|
//! | `region` | the memory of both sides, and where what is in it |
//! | `stream` | the byte rings of a connection |
//! | `nqe` | nqes out of slots, and into them |
//! | `service` | outside: jobs become calls on sockets |
//! | `guest` | inside: programs' sockets become jobs |
//! | `run` | outside: starts the machine's monitor, and a service that may die |
//! | `device` | inside: finds the memory |
//! | `sys` | system calls |

#![allow(clippy::wildcard_imports, reason = "the layouts are many, and their names begin alike")]

pub mod device;
pub mod guest;
pub mod nqe;
pub mod region;
pub mod run;
pub mod service;
pub mod stream;
mod sys;

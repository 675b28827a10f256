//! Sealed shared memory, rings in it that have one producer and one consumer, and doorbells that
//! sleep: how the programs of a container and a service of the node exchange fixed-size messages.
//!
//! Either side may be hostile to the other. A peer can write anything into the shared part at any
//! time, and the worst that it gets is a typed error on this side. The byte layout and the rules
//! for both sides are in `docs/protocols/shared-rings.md`; this crate is the reference.
//!
//! | module | what it owns |
//! |---|---|
//! | [`memory`] | a sealed memfd and its mapping: the size can never change under a reader |
//! | [`ring`] | [`Producer`] and [`Consumer`] of 64-byte slots, with private cursors |
//! | [`doorbell`] | [`Ringer`] and [`Sleeper`]: no system call unless the other side sleeps |
//! | [`protection`] | protections by name, for attacks |
//! | `layout` | which byte is what; the only module that knows offsets |
//! | `storage` | every access to shared memory, each with its memory order and the reason for it |
//! | `sys` | the system calls that the standard library does not have |
//!
//! ```
//! use shared_ring::{Consumer, Producer, SharedMemory, Slot, ring, ring_size};
//!
//! // The maker; the memory's descriptor goes to the peer by SCM_RIGHTS.
//! let ours = SharedMemory::create(c"example", ring_size(256))?;
//! ring::create(&ours, 0, 256)?;
//! let mut producer = Producer::attach(&ours, 0, 256)?;
//!
//! // The peer, which was told size, offset and capacity.
//! # use std::os::fd::AsFd;
//! # let descriptor = ours.as_fd().try_clone_to_owned()?;
//! let theirs = SharedMemory::open(descriptor, ring_size(256))?;
//! let mut consumer = Consumer::attach(&theirs, 0, 256)?;
//!
//! assert_eq!(producer.push(&[Slot([1; 8]), Slot([2; 8])])?, 2);
//! let mut copies = [Slot::default(); 32];
//! assert_eq!(consumer.pop(&mut copies)?, 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With `--cfg loom` the storage is loom's, `memory` and `sys` are left out, and `models` is built.

#![cfg_attr(loom, allow(dead_code, unused_imports))]

pub mod doorbell;
mod layout;
#[cfg(not(loom))]
pub mod memory;
pub mod protection;
pub mod ring;
mod storage;
#[cfg(not(loom))]
mod sys;

#[cfg(all(test, loom))]
mod models;

pub use doorbell::{Ringer, Sleeper, Wake};
pub use layout::{
    ALIGNMENT, CAPACITY_MAX, DOORBELL_SIZE, MAGIC, SLOT_SIZE, Slot, VERSION, ring_size,
};
#[cfg(not(loom))]
pub use memory::SharedMemory;
pub use ring::{Consumer, PeerBroken, Producer};

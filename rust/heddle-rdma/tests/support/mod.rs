//! Plays the agent of a router and the library of programs, by the pages and not by the router's
//! code.

#![allow(dead_code, unused_imports, reason = "each test takes what it needs")]

mod agent;
pub(crate) mod by_card;
pub(crate) mod channel;
mod device;
mod ends;
pub(crate) mod liar;
pub(crate) mod pages;
mod requests;
mod router;
pub(crate) mod taken_over;
mod wire;

use std::time::{Duration, Instant};

use verbs_protocol::Gid;

pub(crate) use agent::Net;
pub(crate) use device::{Cq, Device, Qp, ask, hello};
pub(crate) use ends::{End, attacked, attacked_without, node, nodes, pair, pair_of};
pub(crate) use requests::{Sge, at, inline, receiving, request, sending, sge};
pub(crate) use router::Router;
pub(crate) use wire::{connect, punch, readable, receive, send, tcp_pair};

/// How long a test waits before it says that nothing comes any more.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for a condition.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "{what} did not come");
        std::thread::yield_now();
    }
}

/// The GID of an endpoint of the tests.
pub(crate) fn gid(n: u8) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 9, 0, n]);
    gid
}

/// Its IPv6 one.
pub(crate) fn gid6(n: u8) -> Gid {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&[0xfd, 9]);
    gid[15] = n;
    gid
}

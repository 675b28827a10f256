//! Connections and nodes as tests want them.

use std::sync::Arc;

use shared_ring::Slot;
use verbs_protocol::abi;
use verbs_protocol::agent::Limits;

use super::device::{Cq, Device, Qp};
use super::requests::{Sge, receiving, sge};
use super::router::Router;

/// One end of a connection: a device with a queue pair and a registered buffer.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: u32,
    pub(crate) sends: Cq,
    pub(crate) receives: Cq,
    pub(crate) qp: Qp,
    pub(crate) buffer: Vec<u8>,
    pub(crate) key: u32,
}

impl End {
    pub(crate) fn new(router: &Router, n: u8, kind: u32, fill: u8, length: usize) -> Self {
        let mut device = router.open(n);
        let pd = device.pd();
        let sends = device.cq(64, 0);
        let receives = device.cq(64, 0);
        let qp = device.qp(kind, pd, &sends, &receives, 0);
        let mut buffer = vec![fill; length];
        let key = device.register(pd, &mut buffer, 15).unwrap();
        Self { device, pd, sends, receives, qp, buffer, key }
    }

    pub(crate) fn address(&self) -> (u8, u32) {
        (self.device.number, self.qp.number)
    }

    pub(crate) fn whole(&self) -> Sge {
        sge(&self.buffer, self.key)
    }

    /// A part of the buffer.
    pub(crate) fn part(&self, from: usize, length: usize) -> Sge {
        sge(&self.buffer[from..from + length], self.key)
    }

    pub(crate) fn send(&mut self, slots: &[Slot]) {
        self.device.post(&mut self.qp.send, slots);
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, sges: &[Sge]) {
        let slots = receiving(wr_id, sges);
        self.device.post(self.qp.receive.as_mut().unwrap(), &slots);
    }
}

/// Two connected ends.
pub(crate) fn pair(
    routers: [&Router; 2],
    kind: u32,
    length: usize,
    edit: impl Fn(&mut abi::verbs_qp_attr) + Copy,
) -> (End, End) {
    pair_of(routers, [1, 2], kind, length, edit)
}

/// The same, of these endpoints.
pub(crate) fn pair_of(
    routers: [&Router; 2],
    [one, two]: [u8; 2],
    kind: u32,
    length: usize,
    edit: impl Fn(&mut abi::verbs_qp_attr) + Copy,
) -> (End, End) {
    let mut a = End::new(routers[0], one, kind, 1, length);
    let mut b = End::new(routers[1], two, kind, 2, length);
    a.device.connect(a.qp.number, kind, b.address(), edit);
    b.device.connect(b.qp.number, kind, a.address(), edit);
    (a, b)
}

/// A router with two endpoints.
pub(crate) fn node() -> Router {
    let router = Router::start();
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    router
}

/// Two nodes with an endpoint each.
pub(crate) fn nodes() -> (Router, Router) {
    let net = Arc::default();
    let (one, two) = (Router::start_in(&net), Router::start_in(&net));
    one.add(1, Limits::default());
    two.add(2, Limits::default());
    (one, two)
}

/// Runs an attack with all protections, then without one.
pub(crate) fn attacked(protection: &str, attack: impl Fn(&Router) -> bool) {
    attacked_without("", protection, attack);
}

/// The same, always without another one, which keeps such attacks from being made at all.
pub(crate) fn attacked_without(other: &str, protection: &str, attack: impl Fn(&Router) -> bool) {
    let with = Router::start_without(other, &Arc::default());
    assert!(!attack(&with), "the attack succeeds although {protection} is in force");
    let without = Router::start_without(&format!("{other},{protection}"), &Arc::default());
    let gained = attack(&without);
    assert_eq!(gained, cfg!(feature = "attack"), "without {protection}");
}

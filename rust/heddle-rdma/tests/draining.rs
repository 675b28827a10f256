//! A router whose place another one takes: it keeps endpoints that have something open, gives the
//! others back, and ends.

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use support::{Device, End, Net, Router, eventually, pair, request, sending};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::ibv;

/// A SEND from one to the other.
fn talk(a: &mut End, b: &mut End, wr_id: u64) {
    b.post_receive(wr_id, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, wr_id), &[a.whole()]));
    assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (wr_id, ibv::WC_SUCCESS));
}

#[test]
fn endpoints_go_to_the_next_router_one_by_one_and_nothing_is_lost() {
    let net: Arc<Net> = Arc::default();
    let mut old = Router::start_in(&net);
    for n in [1, 2, 3] {
        old.add(n, Limits::default());
    }
    let (mut a, mut b) = pair([&old, &old], ibv::QPT_RC, 4096, |_| ());
    talk(&mut a, &mut b, 1);

    old.tell(&Message::Drain, &[]);
    eventually("the answer", || (net.drained.load(Ordering::SeqCst) == 1).then_some(()));
    let (number, counts, listener) = old.released();
    assert_eq!((number, counts.traffic[0].requests), (3, 0));
    assert!(net.released.lock().unwrap().is_empty(), "two that have devices open");

    // A program that comes while no router has the socket waits for the next one.
    let waiting = old.connect(3);
    let new = Router::start_in(&net);
    new.add_listening(3, Limits::default(), &listener);
    let _device = Device::open(waiting, 3);

    // What is kept is kept as a whole: the pair goes on, and there may be more.
    talk(&mut b, &mut a, 2);
    let mut more = End::new(&old, 2, ibv::QPT_RC, 5, 64);
    drop(b);

    // An endpoint of each router, on one node.
    let mut c = End::new(&old, 3, ibv::QPT_RC, 4, 64);
    more.device.connect(more.qp.number, ibv::QPT_RC, c.address(), |_| ());
    c.device.connect(c.qp.number, ibv::QPT_RC, more.address(), |_| ());
    talk(&mut more, &mut c, 3);
    talk(&mut c, &mut more, 4);

    drop(a);
    let (number, counts, _listener) = old.released();
    assert_eq!((number, counts.traffic[0].requests, counts.traffic[0].served), (1, 1, 1));
    assert!(old.runs());
    drop(more);
    let (number, counts, _listener) = old.released();
    assert_eq!((number, counts.traffic[1].requests), (2, 1));
    assert!(old.ends_without_agent());
}

#[test]
fn an_agent_that_ends_meanwhile_changes_nothing() {
    let mut router = Router::start();
    router.add(1, Limits::default());
    let mut device = router.open(1);
    router.tell(&Message::Drain, &[]);
    let drained = || (router.net.drained.load(Ordering::SeqCst) == 1).then_some(());
    eventually("the answer", drained);
    router.reconnect();
    device.pd();
    drop(device);
    // It drains for who has asked for it, and for nobody else.
    let _again = router.open(1);
    assert!(router.runs());
    assert!(router.net.released.lock().unwrap().is_empty());
}

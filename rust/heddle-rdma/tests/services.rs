//! What services do that is not seen in one message: drops of the unreliable ones, the other family
//! of addresses, the order of events.

mod support;

use support::{End, Router, eventually, gid6, node, nodes, pair, readable, request, sending};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{abi, ibv};

#[test]
fn a_message_that_does_not_fit_is_dropped_by_an_unreliable_connection() {
    let one = node();
    let (left, right) = nodes();
    for routers in [[&one, &one], [&left, &right]] {
        let (mut a, mut b) = pair(routers, ibv::QPT_UC, 64, |_| ());
        b.post_receive(7, &[b.part(0, 32)]);
        for length in [64, 32] {
            a.send(&sending(request(ibv::WR_SEND, 1), &[a.part(0, length)]));
            assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        }
        let completion = b.receives.next();
        assert_eq!((completion.wr_id, completion.status), (7, ibv::WC_SUCCESS));
        assert_eq!(completion.byte_len, 32);
        assert_eq!((a.device.state(a.qp.number), b.device.state(b.qp.number)), (3, 3));
        assert_eq!(routers[1].times(2, Reason::MessageDropped), 1);
    }
}

#[test]
fn a_write_without_the_right_is_dropped_by_an_unreliable_connection() {
    let one = node();
    let (left, right) = nodes();
    for routers in [[&one, &one], [&left, &right]] {
        let (mut a, mut b) = pair(routers, ibv::QPT_UC, 64, |_| ());
        let wrong = support::at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key ^ 1 << 20);
        a.send(&sending(wrong, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, 2), &[a.whole()]));
        assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
        assert_eq!(b.device.state(b.qp.number), 3);
    }
}

fn datagrams(routers: [&Router; 2]) -> (End, End) {
    let mut a = End::new(routers[0], 1, ibv::QPT_UD, 1, 256);
    let mut b = End::new(routers[1], 2, ibv::QPT_UD, 2, 256);
    a.device.connect_datagrams(a.qp.number, 5);
    b.device.connect_datagrams(b.qp.number, 5);
    (a, b)
}

#[test]
fn a_datagram_that_does_not_fit_is_dropped() {
    let one = node();
    let (left, right) = nodes();
    for routers in [[&one, &one], [&left, &right]] {
        let (mut a, mut b) = datagrams(routers);
        let ah = a.device.ah(a.pd, 2);
        b.post_receive(7, &[b.part(0, 72)]);
        let head = abi::verbs_send {
            rkey: b.qp.number,
            compare_add: ah.into(),
            swap: 5,
            ..request(ibv::WR_SEND, 1)
        };
        for length in [33, 32] {
            a.send(&sending(head, &[a.part(0, length)]));
            assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        }
        let completion = b.receives.next();
        assert_eq!((completion.status, completion.byte_len), (ibv::WC_SUCCESS, 72));
        assert_eq!(b.device.state(b.qp.number), 3);
        assert_eq!(routers[1].times(2, Reason::DatagramNoReceive), 1);
    }
}

#[test]
fn addresses_of_ipv6_are_gids_too() {
    let one = Router::start();
    let net = std::sync::Arc::default();
    let (left, right) = (Router::start_in(&net), Router::start_in(&net));
    for (router, n) in [(&one, 1), (&one, 2), (&left, 1), (&right, 2)] {
        router.add6(n);
    }
    for routers in [[&one, &one], [&left, &right]] {
        let mut a = End::new(routers[0], 1, ibv::QPT_RC, 1, 64);
        let mut b = End::new(routers[1], 2, ibv::QPT_RC, 2, 64);
        assert_eq!((a.device.limits.gid_count, a.device.limits.gid[1]), (2, gid6(1)));
        let to = |n| {
            move |attr: &mut abi::verbs_qp_attr| {
                attr.address.gid = gid6(n);
                attr.address.sgid_index = 1;
            }
        };
        a.device.connect(a.qp.number, ibv::QPT_RC, b.address(), to(2));
        b.device.connect(b.qp.number, ibv::QPT_RC, a.address(), to(1));
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
        assert_eq!(routers[0].qp_account(a.address()).peer_gid, gid6(2));
        let (mut a, mut b) = datagrams(routers);
        let ah = a.device.ah_to(a.pd, gid6(2), 1);
        b.post_receive(7, &[b.whole()]);
        let head = abi::verbs_send {
            rkey: b.qp.number,
            compare_add: ah.into(),
            swap: 5,
            ..request(ibv::WR_SEND, 1)
        };
        a.send(&sending(head, &[a.part(0, 16)]));
        assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
        assert_eq!(b.buffer[8..40], [gid6(1), gid6(2)].concat());
    }
}

#[test]
fn the_last_request_is_told_of_when_all_of_them_are_flushed() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, 64);
    let mut b = End::new(&router, 2, ibv::QPT_RC, 2, 64);
    let (srq, _ring) = b.device.srq(b.pd, 8, 0);
    b.qp = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &b.receives, srq);
    a.device.connect(a.qp.number, ibv::QPT_RC, b.address(), |_| ());
    b.device.connect(b.qp.number, ibv::QPT_RC, a.address(), |_| ());
    // More than a turn flushes, none of which has a receive request.
    let slots = sending(request(ibv::WR_SEND, 1), &[b.whole()]).repeat(32);
    b.send(&slots);
    eventually("a message that waits", || (router.times(1, Reason::NotReady) == 1).then_some(()));
    assert!(!readable(&b.device.events, std::time::Duration::ZERO));
    let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
    assert_eq!(b.device.modify(b.qp.number, ibv::QP_STATE, attr), Ok(6));
    let event = b.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_LAST_WQE_REACHED, b.qp.number));
    let flushed = std::iter::from_fn(|| b.sends.poll()).count();
    assert_eq!(flushed, 32);
}

fn change(state: u32) -> abi::verbs_qp_attr {
    abi::verbs_qp_attr { qp_state: state, en_sqd_async_notify: 1, ..Default::default() }
}

#[test]
fn a_send_queue_that_drains_ends_what_it_began() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    eventually("a message that waits", || (router.times(2, Reason::NotReady) == 1).then_some(()));
    let notify = ibv::QP_STATE | ibv::QP_EN_SQD_ASYNC_NOTIFY;
    assert_eq!(a.device.modify(a.qp.number, notify, change(4)), Ok(4));
    a.send(&sending(request(ibv::WR_SEND, 2), &[a.whole()]));
    assert_eq!(a.device.state(a.qp.number), 4);
    assert!(!readable(&a.device.events, std::time::Duration::ZERO));
    for wr_id in [7, 8] {
        b.post_receive(wr_id, &[b.whole()]);
    }
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    let event = a.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_SQ_DRAINED, a.qp.number));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
    // It still takes what comes, and has begun nothing.
    a.post_receive(3, &[a.whole()]);
    b.send(&sending(request(ibv::WR_SEND, 4), &[b.whole()]));
    assert_eq!(b.sends.result(), (4, ibv::WC_SUCCESS));
    assert_eq!(a.receives.result(), (3, ibv::WC_SUCCESS));
    assert!(a.sends.poll().is_none());
    assert_eq!(a.device.modify(a.qp.number, ibv::QP_STATE, change(3)), Ok(3));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
}

#[test]
fn an_error_of_a_send_queue_of_datagrams_leaves_what_comes_alone() {
    let router = node();
    let (mut a, mut b) = datagrams([&router, &router]);
    let [to_a, to_b] = [b.device.ah(b.pd, 1), a.device.ah(a.pd, 2)];
    let say = |qp: u32, ah: u32, wr_id| {
        let head = request(ibv::WR_SEND, wr_id);
        abi::verbs_send { rkey: qp, compare_add: ah.into(), swap: 5, ..head }
    };
    let wrong = (a.whole().0, 16, a.key ^ 1 << 20);
    a.send(&sending(say(b.qp.number, to_b, 1), &[wrong]));
    assert_eq!(a.sends.result(), (1, ibv::WC_LOC_PROT_ERR));
    assert_eq!(a.device.state(a.qp.number), 5);
    a.send(&sending(say(b.qp.number, to_b, 2), &[a.part(0, 16)]));
    assert_eq!(a.sends.result(), (2, ibv::WC_WR_FLUSH_ERR));
    a.post_receive(3, &[a.whole()]);
    b.send(&sending(say(a.qp.number, to_a, 4), &[b.part(0, 16)]));
    assert_eq!(a.receives.result(), (3, ibv::WC_SUCCESS));
    // The program repairs it.
    assert_eq!(a.device.modify(a.qp.number, ibv::QP_STATE, change(3)), Ok(3));
    b.post_receive(5, &[b.whole()]);
    a.send(&sending(say(b.qp.number, to_b, 6), &[a.part(0, 16)]));
    assert_eq!(a.sends.result(), (6, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (5, ibv::WC_SUCCESS));
}

//! Completion queues that grow, and groups of queue pairs.

mod support;

use std::time::Duration;

use support::{End, WAIT_TIMEOUT, eventually, gid, node, pair, readable, request, sending};
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::Reason;
use verbs_protocol::{Gid, abi, ibv};

const GROUP: Gid = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
const ALL: u32 = 0xff_ffff;

#[test]
fn a_queue_that_grows_keeps_what_it_has_and_the_wish_for_an_event() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let (channel, events) = b.device.channel();
    let mut cq = b.device.cq(2, channel);
    let qp = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &cq, 0);
    let of_a = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0);
    a.device.connect(of_a.number, ibv::QPT_RC, (2, qp.number), |_| ());
    b.device.connect(qp.number, ibv::QPT_RC, (1, of_a.number), |_| ());
    (a.qp, b.qp) = (of_a, qp);
    for wr_id in 0..8 {
        b.post_receive(wr_id, &[b.whole()]);
    }
    for wr_id in 0..2 {
        a.send(&sending(request(ibv::WR_SEND, wr_id), &[a.whole()]));
    }
    let done: Vec<u64> = (0..2).map(|_| a.sends.next().wr_id).collect();
    assert_eq!(done, [0, 1]);
    let charged = router.account(2).used;
    cq.arm(abi::VERBS_ARM_NEXT);
    assert!(!readable(&events, Duration::ZERO));
    let mut former = b.device.resize(&mut cq, 8).unwrap();
    assert!(router.account(2).used > charged, "the larger ring counts");
    // As many as the smaller one had no room for.
    for wr_id in 2..8 {
        a.send(&sending(request(ibv::WR_SEND, wr_id), &[a.whole()]));
        assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
    }
    assert!(readable(&events, WAIT_TIMEOUT));
    assert_eq!([former.next().wr_id, former.next().wr_id], [0, 1]);
    assert!(former.poll().is_none());
    assert_eq!((2..8).map(|_| cq.next().wr_id).collect::<Vec<_>>(), [2, 3, 4, 5, 6, 7]);
    // Not smaller, not too large, not another context's.
    for cqe in [8, (1 << 17) + 1] {
        assert_eq!(b.device.resize(&mut cq, cqe).err(), Some(libc::EINVAL));
    }
    assert_eq!(a.device.resize(&mut cq, 16).err(), Some(libc::EINVAL));
}

#[test]
fn rings_that_grow_are_of_the_quota() {
    let router = node();
    let limits = Limits { memory_mib: 1, ..Limits::default() };
    router.add(3, limits);
    let mut device = router.open(3);
    let mut cq = device.cq(1, 0);
    let used = router.account(3).used;
    assert_eq!(device.resize(&mut cq, 1 << 15).err(), Some(libc::ENOMEM));
    assert_eq!(router.account(3).used, used);
    assert_eq!(router.times(3, Reason::QuotaMemory), 1);
    device.resize(&mut cq, 1 << 13).unwrap();
    device.object(abi::VERBS_DESTROY_CQ, cq.handle).unwrap();
    // As long as the program has its memory, it counts.
    assert_eq!(device.try_cq(1 << 13, 0).err(), Some(libc::ENOMEM));
    drop(cq);
    let mut whole = device.cq(1 << 13, 0);
    device.object(abi::VERBS_DESTROY_CQ, whole.handle).unwrap();
    assert!(whole.poll().is_none());
}

/// A member of the group, with a receive request.
fn member(router: &support::Router, n: u8, qkey: u32) -> End {
    let mut end = End::new(router, n, ibv::QPT_UD, n, 256);
    end.device.connect_datagrams(end.qp.number, qkey);
    end.device.group(abi::VERBS_ATTACH_MCAST, end.qp.number, GROUP).unwrap();
    end.post_receive(n.into(), &[end.whole()]);
    end
}

#[test]
fn a_group_has_its_members_and_nobody_else() {
    let router = node();
    for n in 3..=4 {
        router.add(n, Limits::default());
    }
    let mut a = member(&router, 1, 5);
    let mut b = member(&router, 2, 5);
    let mut other_key = member(&router, 3, 6);
    let mut none = member(&router, 4, 5);
    none.device.group(abi::VERBS_DETACH_MCAST, none.qp.number, GROUP).unwrap();
    let ah = a.device.ah_to(a.pd, GROUP, 0);
    let to_group = |wr_id, rkey| abi::verbs_send {
        rkey,
        compare_add: ah.into(),
        swap: 5,
        ..request(ibv::WR_SEND, wr_id)
    };
    // A number of one is nobody's in a group.
    a.send(&sending(to_group(1, b.qp.number), &[a.part(0, 80)]));
    a.send(&sending(to_group(2, ALL), &[a.part(0, 80)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    for (end, wr_id) in [(&mut a, 1), (&mut b, 2)] {
        let got = end.receives.next();
        assert_eq!((got.wr_id, got.byte_len, got.flags), (wr_id, 120, ibv::WC_GRH));
        assert_eq!(end.buffer[8..40], [gid(1), GROUP].concat());
        assert!(end.receives.poll().is_none());
    }
    for end in [&mut other_key, &mut none] {
        assert!(end.receives.poll().is_none());
    }
    // Who is destroyed is no member.
    b.device.object(abi::VERBS_DESTROY_QP, b.qp.number).unwrap();
    let unwanted = router.times(1, Reason::DatagramUnwanted);
    a.post_receive(9, &[a.whole()]);
    a.send(&sending(to_group(3, ALL), &[a.part(0, 80)]));
    assert_eq!(a.receives.next().wr_id, 9);
    eventually("that of the other key", || {
        (router.times(1, Reason::DatagramUnwanted) == unwanted + 1).then_some(())
    });
}

/// Whether a datagram to a group reaches a member to whom policy lets nothing pass.
fn passes_policy(without: &str) -> bool {
    let net = std::sync::Arc::default();
    let router = support::Router::start_without(without, &net);
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    net.refuse(libc::EACCES);
    let mut a = member(&router, 1, 5);
    let mut b = member(&router, 2, 5);
    let ah = a.device.ah_to(a.pd, GROUP, 0);
    let head =
        abi::verbs_send { rkey: ALL, compare_add: ah.into(), swap: 5, ..request(ibv::WR_SEND, 1) };
    a.send(&sending(head, &[a.part(0, 80)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(a.receives.next().wr_id, 1);
    b.receives.poll().is_some()
}

#[test]
fn a_group_gives_nothing_to_whom_policy_forbids() {
    assert!(!passes_policy(""));
    assert_eq!(passes_policy("groups"), cfg!(feature = "attack"));
}

#[test]
fn memberships_have_a_limit_and_end_with_their_queue_pair() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_UD, 1, 64);
    let group = |n: u8| {
        let mut gid = GROUP;
        gid[14] = n;
        gid
    };
    let most = a.device.limits.max_mcast_grp;
    for n in 0..most {
        let gid = group(u8::try_from(n).unwrap());
        a.device.group(abi::VERBS_ATTACH_MCAST, a.qp.number, gid).unwrap();
    }
    let mut one_more = GROUP;
    one_more[13] = 1;
    let joins = abi::VERBS_ATTACH_MCAST;
    assert_eq!(a.device.group(joins, a.qp.number, one_more), Err(libc::ENOMEM));
    assert_eq!(router.times(1, Reason::QuotaObjects), 1);
    a.device.object(abi::VERBS_DESTROY_QP, a.qp.number).unwrap();
    let mut b = End::new(&router, 1, ibv::QPT_UD, 1, 64);
    b.device.group(joins, b.qp.number, one_more).unwrap();
    // Nobody's but their own.
    let mut other = router.open(2);
    assert_eq!(other.group(joins, b.qp.number, GROUP), Err(libc::EINVAL));
    assert_eq!(b.device.group(joins, b.qp.number, gid(2)), Err(libc::EINVAL));
}

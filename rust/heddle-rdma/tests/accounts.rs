//! What the router tells its agent of endpoints and queue pairs: nothing is counted twice or not at
//! all.

mod support;

use std::os::unix::process::CommandExt;

use support::{End, Router, at, eventually, node, nodes, pair, request, sending};
use unix_io::packets::connect_packets;
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::{KIND_ENDPOINTS, KIND_QPS, Path, Reason, Traffic};
use verbs_protocol::{abi, ibv};

/// A program has asked for a device and ended before the router came to hear it: nothing was
/// refused.
#[test]
fn a_program_that_has_ended_is_not_refused_anything() {
    let router = node();
    router.while_stopped(|| {
        let path = router.path(1);
        let mut command = std::process::Command::new("true");
        let before = move || connect_packets(&path).map(drop);
        #[expect(unsafe_code, reason = "a program of its own that connects")]
        // SAFETY: glibc's fork() leaves a child its allocator, which is all that this needs.
        unsafe {
            command.pre_exec(before)
        };
        assert!(command.status().unwrap().success());
    });
    // It is served after the one that has ended.
    let _device = router.open(1);
    assert_eq!(router.times(1, Reason::RouterFull), 0);
}

/// One of each kind of request, 64 bytes or 8.
fn one_of_each(a: &mut End, b: &mut End) {
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    for opcode in [ibv::WR_RDMA_WRITE, ibv::WR_RDMA_READ] {
        a.send(&sending(at(opcode, 1, &b.buffer, b.key), &[a.whole()]));
    }
    let add = at(ibv::WR_ATOMIC_FETCH_AND_ADD, 1, &b.buffer, b.key);
    a.send(&sending(add, &[a.part(0, 8)]));
    for _ in 0..4 {
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    }
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
}

const REQUESTER: Traffic = Traffic { requests: 4, served: 0, sent: 128, received: 72 };
const RESPONDER: Traffic = Traffic { requests: 0, served: 4, sent: 72, received: 128 };

#[test]
fn traffic_is_counted_at_both_ends_and_by_path() {
    let one = node();
    let (left, right) = nodes();
    for (routers, path) in [([&one, &one], Path::Memory), ([&left, &right], Path::Tcp)] {
        let (mut a, mut b) = pair(routers, ibv::QPT_RC, 64, |_| ());
        one_of_each(&mut a, &mut b);
        for (end, router, want) in [(&a, routers[0], REQUESTER), (&b, routers[1], RESPONDER)] {
            let qp = router.qp_account(end.address());
            assert_eq!((qp.traffic, qp.path), (want, path as u8));
            assert_eq!((qp.state, qp.service, qp.errors, qp.last_error), (3, 2, 0, 0));
            assert_eq!(qp.pid, std::process::id());
            assert_eq!(qp.gid, support::gid(end.device.number));
            let peer = if end.device.number == 1 { &b } else { &a };
            assert_eq!((qp.peer, qp.peer_gid), (peer.qp.number, support::gid(peer.device.number)));
            let endpoint = router.account(end.device.number);
            assert_eq!(endpoint.traffic[path as usize - 1], want);
            assert_eq!(endpoint.traffic[2 - path as usize], Traffic::default());
            assert_eq!(endpoint.used[..3], [1, 1, 2]);
            assert_eq!(endpoint.limits[..3], [64, 1024, 2048]);
        }
    }
}

#[test]
fn errors_are_counted_and_flushes_are_not() {
    let router = node();
    let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    a.post_receive(3, &[a.whole()]);
    let wrong = at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key ^ 1 << 20);
    a.send(&sending(wrong, &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_REM_ACCESS_ERR));
    assert_eq!(a.receives.result(), (3, ibv::WC_WR_FLUSH_ERR));
    let qp = router.qp_account(a.address());
    assert_eq!((qp.errors, u32::from(qp.last_error)), (1, ibv::WC_REM_ACCESS_ERR));
    assert_eq!((qp.traffic, qp.state), (Traffic::default(), 6));
    assert_eq!(router.account(1).errors, 1);
}

#[test]
fn refusals_have_their_reasons() {
    let router = Router::start();
    router.add(1, Limits { cqs: 2, sends_per_second: 10, ..Limits::default() });
    router.add(2, Limits { memory_mib: 1, ..Limits::default() });
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    assert!(a.device.try_cq(1, 0).is_err());
    assert!(b.device.try_cq(1 << 15, 0).is_err());
    let head = at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key);
    for _ in 0..4 {
        a.send(&sending(head, &[a.whole()]));
    }
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    eventually("a message that waits", || (router.times(2, Reason::NotReady) == 1).then_some(()));
    router.net.cut();
    eventually("both ends", || {
        ([1, 2].map(|n| router.times(n, Reason::LinkCut)) == [1, 1]).then_some(())
    });
    assert_eq!(router.times(1, Reason::QuotaObjects), 1);
    assert_eq!(router.times(2, Reason::QuotaMemory), 1);
    assert!((1..=5).contains(&router.times(1, Reason::RateRequests)));
    assert_eq!(router.times(2, Reason::RateRequests), 0);
    support::send(&router.connect(2), &[255; 3], &[]).unwrap();
    eventually("a malformed message", || {
        (router.times(2, Reason::ControlMalformed) == 1).then_some(())
    });
}

#[test]
fn datagrams_that_are_dropped_have_their_reasons() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_UD, 1, 64);
    let mut b = End::new(&router, 2, ibv::QPT_UD, 2, 256);
    a.device.connect_datagrams(a.qp.number, 5);
    b.device.connect_datagrams(b.qp.number, 6);
    let ah = a.device.ah(a.pd, 2);
    let to = b.qp.number;
    let mut say = |qkey: u64| {
        let mut head = abi::verbs_send { rkey: to, ..request(ibv::WR_SEND, 1) };
        (head.compare_add, head.swap) = (ah.into(), qkey);
        a.send(&sending(head, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    };
    say(7);
    say(6);
    b.post_receive(1, &[b.whole()]);
    say(6);
    assert_eq!(b.receives.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(router.times(2, Reason::DatagramUnwanted), 1);
    assert_eq!(router.times(2, Reason::DatagramNoReceive), 1);
    let (sent, got) = (router.account(1).traffic[0], router.account(2).traffic[0]);
    assert_eq!((sent.requests, sent.sent), (3, 192));
    assert_eq!((got.served, got.received), (1, 64));
}

#[test]
fn more_than_one_message_holds_comes_in_several() {
    let router = Router::start();
    let listener = router.listen(1);
    for n in 1..=100 {
        router.add_listening(n, Limits::default(), &listener);
    }
    let (all, messages) = router.records(KIND_ENDPOINTS, 0);
    assert_eq!((all.len(), messages), (100, 5));
    assert_eq!(router.records(KIND_ENDPOINTS, 77).0.len(), 1);
    assert_eq!(router.records(KIND_ENDPOINTS, 777).0.len(), 0);
    assert_eq!(router.records(KIND_QPS, 0), (Vec::new(), 1));
    // A kind that this router does not have.
    assert_eq!(router.records(3, 0), (Vec::new(), 1));
}

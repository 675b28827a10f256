//! Multicast groups whose members are at two routers.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use support::{
    End, Router, WAIT_TIMEOUT, attacked, eventually, gid, nodes, request, sending, tcp_pair,
};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::statistics::{self, Reason};
use verbs_protocol::wire::{self, FIRST, Greeting, Header, Kind, LAST};
use verbs_protocol::{Gid, abi, ibv};

const GROUP: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 239, 1, 2, 3];
const ALL: u32 = 0xff_ffff;
const QKEY: u32 = 5;

/// An end that datagrams can be sent to, with a receive request.
fn receiver(router: &Router, n: u8) -> End {
    let mut end = End::new(router, n, ibv::QPT_UD, n, 256);
    end.device.connect_datagrams(end.qp.number, QKEY);
    end.post_receive(n.into(), &[end.whole()]);
    end
}

fn member(router: &Router, n: u8) -> End {
    let mut end = receiver(router, n);
    end.device.group(abi::VERBS_ATTACH_MCAST, end.qp.number, GROUP).unwrap();
    end
}

/// Waits until a router knows whether an endpoint of another one is a member.
fn knows(router: &Router, n: u8, is_member: bool) {
    eventually("the agent's word", || {
        (router.net.groups(n).contains(&GROUP) == is_member).then_some(())
    });
    // It answers what it is asked after what it was told.
    router.records(statistics::KIND_ENDPOINTS, 0);
}

fn send_to_group(end: &mut End, wr_id: u64) {
    let ah = end.device.ah_to(end.pd, GROUP, 0);
    let head = abi::verbs_send {
        rkey: ALL,
        compare_add: ah.into(),
        swap: QKEY.into(),
        ..request(ibv::WR_SEND, wr_id)
    };
    end.send(&sending(head, &[end.part(0, 80)]));
    assert_eq!(end.sends.result(), (wr_id, ibv::WC_SUCCESS));
}

/// Bytes that came for an endpoint from other nodes.
fn received(router: &Router, n: u8) -> u64 {
    router.account(n).traffic[1].received
}

#[test]
fn a_group_has_members_at_other_nodes() {
    let (one, two) = nodes();
    two.add(3, Limits::default());
    let mut a = member(&one, 1);
    let mut b = member(&two, 2);
    let mut none = receiver(&two, 3);
    knows(&one, 2, true);
    // The first one waits for the connection.
    send_to_group(&mut a, 1);
    for end in [&mut a, &mut b] {
        let got = end.receives.next();
        assert_eq!((got.byte_len, got.flags), (120, ibv::WC_GRH));
        assert_eq!(end.buffer[8..40], [gid(1), GROUP].concat());
        assert_eq!(end.buffer[40..120], [1; 80]);
        end.post_receive(9, &[end.whole()]);
    }
    assert!(none.receives.poll().is_none());
    assert_eq!((received(&two, 2), one.account(1).traffic[1].sent), (80, 80));
    knows(&two, 1, true);
    send_to_group(&mut b, 2);
    for end in [&mut a, &mut b] {
        assert_eq!(end.receives.next().wr_id, 9);
        end.post_receive(10, &[end.whole()]);
    }
    // Who is destroyed is no member.
    b.device.object(abi::VERBS_DESTROY_QP, b.qp.number).unwrap();
    knows(&one, 2, false);
    send_to_group(&mut a, 3);
    assert_eq!(a.receives.next().wr_id, 10);
    assert_eq!((received(&two, 2), one.account(1).traffic[1].sent), (80, 80));
}

#[test]
fn nobody_waits_for_a_member_that_cannot_be_reached() {
    let (one, two) = nodes();
    let mut a = receiver(&one, 1);
    let mut b = member(&two, 2);
    knows(&one, 2, true);
    // 16 KiB of frames wait.
    one.net.be_silent();
    for wr_id in 0..200 {
        send_to_group(&mut a, wr_id);
    }
    let dropped = one.times(1, Reason::DatagramNoRoom);
    assert_eq!(dropped, 200 - 16 * 1024 / (48 + 80));
    // When it is refused they are lost, too.
    eventually("the end of what waits", || {
        (one.times(1, Reason::DatagramNoRoom) == 200).then_some(())
    });
    assert!(b.receives.poll().is_none());
}

#[test]
fn policy_keeps_a_sender_from_members_at_other_nodes() {
    let (one, two) = nodes();
    let mut a = member(&one, 1);
    let mut b = member(&two, 2);
    knows(&one, 2, true);
    one.net.refuse(libc::EACCES);
    send_to_group(&mut a, 1);
    assert_eq!(a.receives.next().wr_id, 1);
    eventually("the refusal", || (one.times(1, Reason::DatagramNoRoom) == 1).then_some(()));
    assert!(b.receives.poll().is_none());
    assert_eq!(received(&two, 2), 0);
}

#[test]
fn members_are_those_that_an_agent_names() {
    let (mut one, two) = nodes();
    let mut a = member(&one, 1);
    let mut b = member(&two, 2);
    knows(&one, 2, true);
    one.tell(&Message::Begin, &[]);
    let named = |groups| Message::Groups { endpoint: 0, gids: [gid(3), [0; 16]], groups };
    one.tell(&named(vec![GROUP]), &[]);
    one.tell(&named(vec![]), &[]);
    one.add(1, Limits::default());
    one.tell(&Message::End, &[]);
    knows(&one, 2, true);
    send_to_group(&mut a, 1);
    assert_eq!(a.receives.next().wr_id, 1);
    assert_eq!(one.net.connections(), 0);
    // A member of which only its own router knows that it is none gets nothing. That router says
    // so, which may be heard before the datagram is sent: then it is named once more.
    b.device.group(abi::VERBS_DETACH_MCAST, b.qp.number, GROUP).unwrap();
    let stale = Message::Groups { endpoint: 0, gids: [gid(2), [0; 16]], groups: vec![GROUP] };
    eventually("a datagram for nobody", || {
        one.tell(&stale, &[]);
        one.account(1);
        send_to_group(&mut a, 2);
        (two.times(2, Reason::DatagramUnwanted) > 0).then_some(())
    });
    assert!(b.receives.poll().is_none());
    assert!(one.runs());
}

/// A connection for datagrams on which the test plays the router of endpoint 9.
fn intrude(router: &Router, to: u8) -> TcpStream {
    let (mut ours, theirs) = tcp_pair();
    let (source, destination) = (gid(9), gid(to));
    let accepted = Message::Accepted { endpoint: to.into(), source, destination };
    router.tell(&accepted, &[theirs.as_raw_fd()]);
    ours.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let greeting = Greeting {
        version: 1,
        kind: wire::DATAGRAMS,
        status: 0,
        source_qp: 0,
        destination_qp: 0,
        source,
        destination,
        qp_type: 0,
        card: false,
    };
    ours.write_all(&greeting.encode()).unwrap();
    let mut answer = [0; wire::GREETING];
    ours.read_exact(&mut answer).unwrap();
    assert_eq!(Greeting::parse(&answer).unwrap().status, 0);
    ours
}

/// A frame for a group, and its bytes.
fn frame(group: Gid, length: usize) -> Vec<u8> {
    let halves = group.as_chunks().0;
    let header = Header {
        opcode: ibv::WR_SEND,
        flags: FIRST | LAST,
        length: u32::try_from(length).unwrap(),
        number: 7,
        status: ALL,
        key: QKEY,
        total: u64::from_be_bytes(halves[0]),
        swap: u64::from_be_bytes(halves[1]),
        ..Header::new(Kind::Datagram)
    };
    [&header.encode()[..], &vec![6; length]].concat()
}

#[test]
fn a_datagram_for_a_group_reaches_only_whom_it_came_to() {
    let router = support::node();
    let mut a = member(&router, 1);
    let mut b = member(&router, 2);
    let mut stream = intrude(&router, 1);
    for group in [gid(1), [0; 16], [0xff; 16], GROUP] {
        stream.write_all(&frame(group, 50)).unwrap();
    }
    let got = a.receives.next();
    assert_eq!((got.byte_len, got.src_qp), (90, 7));
    assert_eq!(a.buffer[8..40], [gid(9), GROUP].concat());
    assert_eq!(router.times(1, Reason::DatagramUnwanted), 3);
    assert!(a.receives.poll().is_none() && b.receives.poll().is_none());
}

/// Whether a peer can have the router copy what it sends once for each of so many members.
fn copies_all(router: &Router) -> bool {
    const MEMBERS: u64 = 64;
    const FRAMES: u64 = 400;
    router.add(1, Limits::default());
    let mut device = router.open(1);
    let pd = device.pd();
    let cq = device.cq(64, 0);
    let members: Vec<_> = (0..MEMBERS)
        .map(|_| {
            let qp = device.qp(ibv::QPT_UD, pd, &cq, &cq, 0);
            device.connect_datagrams(qp.number, QKEY);
            device.group(abi::VERBS_ATTACH_MCAST, qp.number, GROUP).unwrap();
            qp
        })
        .collect();
    let mut stream = intrude(router, 1);
    for _ in 0..FRAMES {
        stream.write_all(&frame(GROUP, 4096)).unwrap();
    }
    let (mut tried, mut left_out) = (0, 0);
    eventually("all of it", || {
        tried = router.times(1, Reason::DatagramNoReceive);
        left_out = router.times(1, Reason::DatagramNoRoom);
        (tried + left_out == MEMBERS * FRAMES).then_some(())
    });
    assert!(tried >= FRAMES && members.len() == 64);
    left_out == 0
}

#[test]
fn copies_for_a_group_are_bounded() {
    attacked("copied", copies_all);
}

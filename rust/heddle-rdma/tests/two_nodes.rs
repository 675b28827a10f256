//! Two routers with a connection between them, and what a hostile peer says on one.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use support::{
    End, Router, WAIT_TIMEOUT, at, eventually, gid, inline, node, nodes, pair, request, sending,
    tcp_pair,
};
use verbs_protocol::agent::Message;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, FIRST, Greeting, Header, Kind, LAST};
use verbs_protocol::{abi, ibv};

#[test]
fn every_verb_of_a_reliable_connection_reaches_the_other_node() {
    let (one, two) = nodes();
    let (mut a, mut b) = pair([&one, &two], ibv::QPT_RC, 1 << 20, |_| ());
    b.post_receive(7, &[b.part(0, 500_000)]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.part(0, 3), a.part(3, 399_997)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.wr_id, completion.status), (7, ibv::WC_SUCCESS));
    assert_eq!((completion.byte_len, completion.src_qp), (400_000, a.qp.number));
    assert!(b.buffer[..400_000].iter().all(|v| *v == 1));
    assert_eq!(b.buffer[400_000], 2);

    a.send(&sending(at(ibv::WR_RDMA_READ, 2, &b.buffer[399_998..], b.key), &[a.part(0, 300_000)]));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    assert_eq!([a.buffer[1], a.buffer[2], a.buffer[299_999], a.buffer[300_000]], [1, 2, 2, 1]);

    a.send(&sending(at(ibv::WR_RDMA_WRITE, 3, &b.buffer[600_000..], b.key), &[a.part(700_000, 9)]));
    b.post_receive(8, &[]);
    let mut head = at(ibv::WR_RDMA_WRITE_WITH_IMM, 4, &b.buffer[700_000..], b.key);
    head.imm = 0x0102_0304;
    a.send(&inline(head, &[9; 3]));
    assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (4, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.opcode, completion.imm), (ibv::WC_RECV_RDMA_WITH_IMM, 0x0102_0304));
    assert_eq!([b.buffer[600_008], b.buffer[600_009], b.buffer[700_002]], [1, 2, 9]);

    b.buffer[..8].copy_from_slice(&40_u64.to_ne_bytes());
    let mut head = at(ibv::WR_ATOMIC_FETCH_AND_ADD, 5, &b.buffer, b.key);
    head.compare_add = 2;
    a.send(&sending(head, &[a.part(0, 8)]));
    let mut head = at(ibv::WR_ATOMIC_CMP_AND_SWP, 6, &b.buffer, b.key);
    (head.compare_add, head.swap) = (42, 77);
    a.send(&sending(head, &[a.part(8, 8)]));
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (6, ibv::WC_SUCCESS));
    assert_eq!((a.buffer[0], a.buffer[8], b.buffer[0]), (40, 42, 77));
}

#[test]
fn many_requests_keep_their_order_in_both_directions() {
    let (one, two) = nodes();
    let (mut a, mut b) = pair([&one, &two], ibv::QPT_RC, 200_000, |_| ());
    for round in 0..40_u64 {
        for end in [&mut a, &mut b] {
            end.post_receive(round, &[end.part(0, 100_000)]);
        }
        for i in 0..4 {
            let read = at(ibv::WR_RDMA_READ, 10 * round + i, &b.buffer[100_000..], b.key);
            a.send(&sending(read, &[a.part(100_000, 70_000)]));
            let write = at(ibv::WR_RDMA_WRITE, 10 * round + i, &a.buffer[170_000..], a.key);
            b.send(&sending(write, &[b.part(170_000, 1000)]));
        }
        a.send(&sending(request(ibv::WR_SEND, 10 * round + 4), &[a.part(0, 100_000)]));
        b.send(&sending(request(ibv::WR_SEND, 10 * round + 4), &[b.part(0, 100_000)]));
        for end in [&mut a, &mut b] {
            for i in 0..5 {
                assert_eq!(end.sends.result(), (10 * round + i, ibv::WC_SUCCESS));
            }
            assert_eq!(end.receives.result(), (round, ibv::WC_SUCCESS));
        }
    }
}

#[test]
fn errors_of_the_responder_reach_the_requester() {
    type Spoil = fn(&mut abi::verbs_send);
    let cases: [(u8, Spoil, u32); 3] = [
        (ibv::WR_RDMA_WRITE, |h| h.rkey ^= 1 << 30, ibv::WC_REM_ACCESS_ERR),
        (ibv::WR_RDMA_READ, |h| h.remote_address += 1, ibv::WC_REM_ACCESS_ERR),
        (ibv::WR_ATOMIC_FETCH_AND_ADD, |h| h.remote_address += 4, ibv::WC_REM_INV_REQ_ERR),
    ];
    for (opcode, spoil, status) in cases {
        let (one, two) = nodes();
        let (mut a, mut b) = pair([&one, &two], ibv::QPT_RC, 8, |_| ());
        let good = at(opcode, 1, &b.buffer, b.key);
        let mut bad = abi::verbs_send { wr_id: 2, ..good };
        spoil(&mut bad);
        for head in [good, bad, good] {
            a.send(&sending(head, &[a.whole()]));
        }
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        assert_eq!(a.sends.result(), (2, status));
        assert_eq!(a.sends.result(), (1, ibv::WC_WR_FLUSH_ERR));
        assert_eq!(b.device.state(b.qp.number), 3);
    }
    let (one, two) = nodes();
    let (mut a, mut b) = pair([&one, &two], ibv::QPT_RC, 64, |_| ());
    b.post_receive(7, &[b.part(0, 63)]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_REM_INV_REQ_ERR));
    assert_eq!(b.receives.result(), (7, ibv::WC_LOC_LEN_ERR));
}

#[test]
fn a_sender_tries_again_until_there_is_a_receive_request() {
    let (one, two) = nodes();
    let (mut a, mut b) = pair([&one, &two], ibv::QPT_RC, 200_000, |_| ());
    // What comes after the one that is not ready is dropped and sent again, too.
    for wr_id in 0..3 {
        a.send(&sending(request(ibv::WR_SEND, wr_id), &[a.whole()]));
    }
    b.device.state(b.qp.number);
    for wr_id in 0..3 {
        assert!(a.sends.poll().is_none());
        b.post_receive(wr_id, &[b.whole()]);
        assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (wr_id, ibv::WC_SUCCESS));
    }
    let (one, two) = nodes();
    let (mut a, _b) = pair([&one, &two], ibv::QPT_RC, 64, |attr| attr.rnr_retry = 2);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_RNR_RETRY_EXC_ERR));
}

#[test]
fn datagrams_and_unreliable_connections_cross_nodes() {
    let (one, two) = nodes();
    let mut a = End::new(&one, 1, ibv::QPT_UD, 1, 4096);
    let mut b = End::new(&two, 2, ibv::QPT_UD, 2, 4096);
    a.device.connect_datagrams(a.qp.number, 5);
    b.device.connect_datagrams(b.qp.number, 6);
    let ah = a.device.ah(a.pd, 2);
    b.post_receive(7, &[b.part(0, 140)]);
    for (wr_id, qkey) in [(1, 5), (2, 6)] {
        let head = abi::verbs_send {
            rkey: b.qp.number,
            compare_add: ah.into(),
            swap: qkey,
            ..request(ibv::WR_SEND, wr_id)
        };
        a.send(&sending(head, &[a.part(0, 100)]));
        assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
    }
    let completion = b.receives.next();
    assert_eq!((completion.wr_id, completion.byte_len), (7, 140));
    assert_eq!((completion.src_qp, completion.flags), (a.qp.number, ibv::WC_GRH));
    assert_eq!(b.buffer[8..40], [gid(1), gid(2)].concat());
    assert_eq!([b.buffer[40], b.buffer[139], b.buffer[140]], [1, 1, 2]);

    let (one, two) = nodes();
    let (mut a, mut b) = pair([&one, &two], ibv::QPT_UC, 100_000, |_| ());
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    a.send(&sending(at(ibv::WR_RDMA_WRITE, 2, &b.buffer, 77), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    a.send(&sending(at(ibv::WR_RDMA_WRITE, 3, &b.buffer, b.key), &[a.whole()]));
    assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
    eventually("the bytes", || {
        let last = &raw const b.buffer[99_999];
        // SAFETY: the router writes it meanwhile, as a program with verbs has to expect.
        (unsafe { last.read_volatile() } == 1).then_some(())
    });
    assert_eq!(b.receives.poll().map(|c| c.wr_id), None);
    b.post_receive(9, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 4), &[a.whole()]));
    assert_eq!(b.receives.result(), (9, ibv::WC_SUCCESS));
}

#[test]
fn a_cut_fails_both_ends_on_one_node_and_between_nodes() {
    for between in [false, true] {
        let (one, two) = nodes();
        let same = node();
        let routers = if between { [&one, &two] } else { [&same, &same] };
        let (mut a, mut b) = pair(routers, ibv::QPT_RC, 64, |_| ());
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        b.receives.next();
        // One waits for a receive request.
        a.send(&sending(request(ibv::WR_SEND, 2), &[a.whole()]));
        assert_eq!(a.device.state(a.qp.number), 3);
        routers[0].net.cut();
        assert_eq!(a.sends.result(), (2, ibv::WC_RETRY_EXC_ERR), "{between}");
        // Of the other nothing is under way.
        let event = eventually("the end of the other", || {
            let event = b.device.event();
            (event.event != ibv::EVENT_COMM_EST).then_some(event)
        });
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, b.qp.number), "{between}");
    }
}

#[test]
fn those_that_may_not_speak_do_not() {
    for between in [false, true] {
        let (one, two) = nodes();
        let same = node();
        let routers = if between { [&one, &two] } else { [&same, &same] };
        routers[0].net.refuse(libc::EACCES);
        let (mut a, mut b) = pair(routers, ibv::QPT_RC, 64, |_| ());
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key), &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_RETRY_EXC_ERR), "{between}");
        assert!(b.buffer.iter().all(|v| *v == 2) && b.receives.poll().is_none());
    }
}

/// A connection on which the test plays the router of endpoint 2, whose queue pair has number 9.
/// What it says first is `greeting`.
fn intrude(router: &Router, greeting: &Greeting) -> TcpStream {
    intrude_with(router, greeting).0
}

/// The same, with the router's end.
fn intrude_with(router: &Router, greeting: &Greeting) -> (TcpStream, TcpStream) {
    let (ours, theirs) = tcp_pair();
    let accepted = Message::Accepted { endpoint: 1, source: gid(2), destination: gid(1) };
    router.tell(&accepted, &[theirs.as_raw_fd()]);
    ours.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    (&ours).write_all(&greeting.encode()).unwrap();
    (ours, theirs)
}

fn greeting(qp: u32) -> Greeting {
    Greeting {
        version: 1,
        kind: wire::PAIR,
        status: 0,
        source_qp: 9,
        destination_qp: qp,
        source: gid(2),
        destination: gid(1),
        qp_type: 2,
        card: false,
    }
}

/// What was said until the end of the connection.
fn rest(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A connection that is reset has ended, too.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

/// An end whose peer is queue pair 9 of endpoint 2.
fn waiting(router: &Router) -> End {
    waiting_as(router, |_| ())
}

fn waiting_as(router: &Router, edit: impl Fn(&mut abi::verbs_qp_attr)) -> End {
    let mut end = End::new(router, 1, ibv::QPT_RC, 1, 4096);
    // The lesser GID opens, and there is nobody to connect with.
    router.net.refuse(libc::ECONNREFUSED);
    end.device.connect(end.qp.number, ibv::QPT_RC, (2, 9), edit);
    end
}

#[test]
fn a_connection_that_takes_no_bytes_has_ended() {
    let (router, _) = nodes();
    // What it waits for it waits for without an end.
    let mut end = waiting_as(&router, |a| a.timeout = 0);
    let (mut ours, theirs) = intrude_with(&router, &greeting(end.qp.number));
    ours.read_exact(&mut [0; wire::GREETING]).unwrap();
    theirs.shutdown(Shutdown::Write).unwrap();
    end.send(&sending(request(ibv::WR_SEND, 1), &[end.whole()]));
    assert_eq!(end.sends.result(), (1, ibv::WC_RETRY_EXC_ERR));
}

#[test]
fn a_greeting_has_to_be_the_speaker_s() {
    let router = node();
    let end = waiting(&router);
    let good = greeting(end.qp.number);
    let stream = intrude(&router, &good);
    let mut answer = [0; wire::GREETING];
    (&stream).read_exact(&mut answer).unwrap();
    let answer = Greeting::parse(&answer).unwrap();
    assert_eq!((answer.status, answer.source_qp, answer.destination_qp), (0, end.qp.number, 9));

    for (bad, errno) in [
        (Greeting { source: gid(3), ..good }, libc::EACCES),
        (Greeting { destination: gid(2), ..good }, libc::EACCES),
        (Greeting { version: 2, ..good }, libc::EPROTONOSUPPORT),
    ] {
        let answer = rest(&intrude(&router, &bad));
        let answer = Greeting::parse(answer[..].first_chunk().unwrap()).unwrap();
        assert_eq!((answer.version, answer.status), (1, errno.unsigned_abs()));
    }
    let mut stream = intrude(&router, &Greeting { source_qp: 10, ..good });
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(stream.read(&mut [0]).is_err(), "a queue pair answers whom it does not name");
    stream.write_all(&[0]).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    assert!(rest(&stream).is_empty());
}

#[test]
fn a_peer_that_breaks_a_rule_loses_its_connection_only() {
    let head = Header { flags: FIRST | LAST, opcode: ibv::WR_SEND, ..Header::new(Kind::Request) };
    let opcode = ibv::WR_RDMA_WRITE;
    let placed = Header { opcode, flags: FIRST | LAST | wire::PLACED, ..head };
    let cases: [(&str, Header); 14] = [
        ("number", Header { number: 1, ..head }),
        ("no first", Header { flags: LAST, ..head }),
        ("too long", Header { opcode: ibv::WR_RDMA_WRITE, total: 1 << 40, ..head }),
        ("ack of nothing", Header::new(Kind::Ack)),
        ("answer of nothing", Header { flags: FIRST | LAST, ..Header::new(Kind::ReadResponse) }),
        ("atomic answer of nothing", Header::new(Kind::AtomicResponse)),
        ("not ready for nothing", Header::new(Kind::Rnr)),
        ("a card that was not agreed upon", Header::new(Kind::Card)),
        ("the same, ready", Header::new(Kind::CardReady)),
        ("a key of a card that is not the way", Header::new(Kind::CardAsk)),
        ("the same, answered", Header::new(Kind::CardKey)),
        ("bytes that no card has placed", placed),
        ("datagram", Header { flags: FIRST | LAST, ..Header::new(Kind::Datagram) }),
        ("unfinished", Header { opcode: ibv::WR_RDMA_READ, flags: FIRST, total: 8, ..head }),
    ];
    for (name, header) in cases {
        let mut router = node();
        let mut end = waiting(&router);
        let mut stream = intrude(&router, &greeting(end.qp.number));
        stream.read_exact(&mut [0; wire::GREETING]).unwrap();
        end.post_receive(1, &[end.whole()]);
        stream.write_all(&header.encode()).unwrap();
        rest(&stream);
        let event = end.device.event();
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number), "{name}");
        assert_eq!(end.receives.result(), (1, ibv::WC_WR_FLUSH_ERR), "{name}");
        assert!(router.runs());
    }
}

#[test]
fn a_peer_reaches_what_its_pair_has_registered_and_nothing_else() {
    let router = node();
    let mut end = waiting(&router);
    let other = end.device.pd();
    let mut secret = vec![7; 64];
    let foreign = end.device.register(other, &mut secret, 15).unwrap();
    let mut stream = intrude(&router, &greeting(end.qp.number));
    stream.read_exact(&mut [0; wire::GREETING]).unwrap();
    let head = Header {
        opcode: ibv::WR_RDMA_READ,
        flags: FIRST | LAST,
        key: foreign,
        address: secret.as_ptr() as u64,
        total: 64,
        ..Header::new(Kind::Request)
    };
    stream.write_all(&head.encode()).unwrap();
    let mut answer = [0; wire::HEADER];
    stream.read_exact(&mut answer).unwrap();
    let answer = Header::parse(&answer).unwrap();
    assert_eq!((answer.kind, answer.status), (Kind::Ack, ibv::WC_REM_ACCESS_ERR));
}

#[test]
fn a_peer_that_asks_and_does_not_read_loses_its_connection() {
    let mut router = node();
    let end = waiting(&router);
    let mut stream = intrude(&router, &greeting(end.qp.number));
    stream.read_exact(&mut [0; wire::GREETING]).unwrap();
    // There is no receive request: each gets a negative answer.
    let head = Header { flags: FIRST | LAST, opcode: ibv::WR_SEND, ..Header::new(Kind::Request) };
    let frames = head.encode().repeat(1000);
    let ended = (0..10_000).any(|_| stream.write_all(&frames).is_err());
    assert!(ended, "480 MB were answered and not read");
    let event = end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number));
    assert!(router.runs());
}

/// A queue pair of datagrams, and how it sends one to an endpoint.
fn datagrams(router: &Router) -> (End, impl Fn(&mut End, u8) -> Vec<shared_ring::Slot>) {
    let mut a = End::new(router, 1, ibv::QPT_UD, 1, 4096);
    a.device.connect_datagrams(a.qp.number, 5);
    let to = |a: &mut End, n| {
        let head = abi::verbs_send {
            rkey: a.qp.number,
            compare_add: a.device.ah(a.pd, n).into(),
            swap: 5,
            ..request(ibv::WR_SEND, n.into())
        };
        sending(head, &[a.part(0, 4000)])
    };
    (a, to)
}

#[test]
fn datagrams_do_not_wait_for_ever_for_a_connection() {
    let (one, _two) = nodes();
    one.net.be_silent();
    let (mut a, to) = datagrams(&one);
    let start = std::time::Instant::now();
    for n in [2, 1] {
        let slots = to(&mut a, n);
        a.send(&slots);
    }
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    assert!(start.elapsed() >= Duration::from_secs(9), "{:?}", start.elapsed());
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
}

#[test]
fn one_that_does_not_read_its_datagrams_holds_up_nobody() {
    let (one, _two) = nodes();
    let opened = Greeting { kind: wire::DATAGRAMS, qp_type: 0, ..greeting(0) };
    let opened = Greeting { source_qp: 0, destination_qp: 0, ..opened };
    let mut hostile = intrude(&one, &opened);
    let mut answer = [0; wire::GREETING];
    hostile.read_exact(&mut answer).unwrap();
    let (mut a, to) = datagrams(&one);
    let slots = to(&mut a, 2);
    // More bytes than the kernel's buffers of a connection have room for.
    for _ in 0..6000 {
        a.send(&slots);
        assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    }
    let slots = to(&mut a, 1);
    a.send(&slots);
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
}

/// A peer that opens connections for datagrams again and again has a few of them only.
#[test]
fn connections_for_datagrams_of_a_peer_are_few() {
    let (one, _two) = nodes();
    let opened = Greeting { kind: wire::DATAGRAMS, qp_type: 0, ..greeting(0) };
    let opened = Greeting { source_qp: 0, destination_qp: 0, ..opened };
    let before = one.descriptors();
    let all: Vec<TcpStream> = (0..300)
        .map(|_| {
            let mut stream = intrude(&one, &opened);
            let mut answer = [0; wire::GREETING];
            stream.read_exact(&mut answer).unwrap();
            stream
        })
        .collect();
    assert!(one.descriptors() < before + 16, "{}", one.descriptors());
    // The last one goes on.
    let mut last = all.last().unwrap();
    last.set_nonblocking(true).unwrap();
    let nothing = last.read(&mut [0; 1]).unwrap_err();
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
}

/// A peer that greets wrongly, and does not close what was refused, has so many connections only.
#[test]
fn connections_that_are_refused_count_until_they_are_closed() {
    let (one, _two) = nodes();
    let wrong = Greeting { version: 9, ..greeting(0) };
    let before = one.descriptors();
    let all: Vec<TcpStream> = (0..600).map(|_| intrude(&one, &wrong)).collect();
    // It has seen all of them, as it answers in order.
    eventually("refusals", || (one.times(1, Reason::LinkUnmatched) > 300).then_some(()));
    assert!(one.descriptors() < before + 300, "{}", one.descriptors());
    drop(all);
}

//! RDMA-CM by the page: a program's commands and events, on one node and between two, and what
//! hostile programs and peers do.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use support::channel::{
    ADDR_RESOLVED, CONNECT_REQUEST, CONNECT_RESPONSE, Channel, DISCONNECTED, ESTABLISHED, REJECTED,
    ROUTE_RESOLVED, UNREACHABLE, param, v4, word,
};
use support::{
    End, Router, WAIT_TIMEOUT, ask, gid, hello, node, nodes, readable, receive, tcp_pair,
};
use verbs_protocol::agent::{Limits, Message as AgentMessage};
use verbs_protocol::cm_message::{Message, What};
use verbs_protocol::statistics::{self, Reason};
use verbs_protocol::wire::{self, Greeting, Header, Kind};
use verbs_protocol::{abi, cm, ibv, plain};

/// A connection of ids 1 (uid 11) and 2 (uid 22), by a listener with uid 2.
fn connected(routers: [&Router; 2], port: u16) -> (Channel, u32, Channel, u32) {
    let (a, b) = (Channel::open(routers[0], 1), Channel::open(routers[1], 2));
    b.listen(2, cm::PS_TCP, port, 4);
    let x = a.resolved(11, cm::PS_TCP, 2, port);
    a.connect(x, &param(0x1234, b"from one")).unwrap();
    let request = b.expect(CONNECT_REQUEST);
    assert_eq!((request.uid, request.status), (2, 0));
    let y = request.id;
    // As of a card: 56 bytes, what the one asks for is what the other can be asked for.
    assert_eq!((word(&request.param, 0), request.param[264]), (0x1234, 56));
    assert_eq!(&request.param[8..18], b"from one\0\0");
    assert_eq!(request.param[266..271], [5, 3, 1, 6, 4]);
    assert_eq!(b.attributes(y, 2).unwrap().1, 0x1234);
    assert!(a.attributes(x, 2).is_err());
    b.accept(y, 22, &param(0x4321, b"from two")).unwrap();
    let response = a.expect(CONNECT_RESPONSE);
    assert_eq!((response.uid, response.id), (11, x));
    assert_eq!((word(&response.param, 0), response.param[264]), (0x4321, 196));
    assert_eq!(&response.param[8..18], b"from two\0\0");
    assert_eq!(a.attributes(x, 2).unwrap(), (0x12_9181, 0x4321, gid(2).to_vec()));
    a.accept(x, 0, &[0; 272]).unwrap();
    assert_eq!(b.expect(ESTABLISHED).uid, 22);
    (a, x, b, y)
}

#[test]
fn ids_connect_and_disconnect_on_one_node() {
    let router = node();
    let (a, x, b, y) = connected([&router, &router], 7175);
    assert!(!a.is_readable() && !b.is_readable());
    assert_eq!(a.command(12, &[0; 8]).unwrap_err(), libc::EAGAIN);
    a.disconnect(x).unwrap();
    assert_eq!(b.expect(DISCONNECTED).uid, 22);
    assert_eq!(a.expect(DISCONNECTED).uid, 11);
    b.disconnect(y).unwrap();
    // All events that were got: address, route, answer, end. Those of the listener are its own.
    assert_eq!((a.destroy(x), b.destroy(y)), (4, 2));
    assert_eq!(a.disconnect(x).unwrap_err(), libc::ENOENT);
}

#[test]
fn ids_connect_between_nodes_and_queue_pairs_follow() {
    let (one, two) = nodes();
    let (a, x, b, y) = connected([&one, &two], 7176);
    let mut from = End::new(&one, 1, ibv::QPT_RC, 1, 64);
    let mut to = End::new(&two, 2, ibv::QPT_RC, 2, 64);
    from.device.connect(from.qp.number, ibv::QPT_RC, to.address(), |_| ());
    to.device.connect(to.qp.number, ibv::QPT_RC, from.address(), |_| ());
    to.post_receive(7, &[to.whole()]);
    from.send(&support::sending(support::request(ibv::WR_SEND, 1), &[from.whole()]));
    assert_eq!(to.receives.result(), (7, ibv::WC_SUCCESS));
    b.disconnect(y).unwrap();
    assert_eq!(a.expect(DISCONNECTED).uid, 11);
    assert_eq!(b.expect(DISCONNECTED).uid, 22);
    assert_eq!((a.destroy(x), b.destroy(y)), (4, 2));
}

#[test]
fn an_id_that_is_destroyed_or_a_program_that_ends_disconnects_its_peer() {
    let (one, two) = nodes();
    let (a, x, b, _) = connected([&one, &two], 7177);
    a.destroy(x);
    assert_eq!(b.expect(DISCONNECTED).uid, 22);
    let (a, _, b, _) = connected([&one, &two], 7178);
    drop(b);
    assert_eq!(a.expect(DISCONNECTED).uid, 11);
}

#[test]
fn a_cut_or_a_router_that_ends_disconnects() {
    let (one, mut two) = nodes();
    let (a, _, b, _) = connected([&one, &two], 7179);
    one.net.cut();
    assert_eq!(a.expect(DISCONNECTED).uid, 11);
    assert_eq!(b.expect(DISCONNECTED).uid, 22);
    let (a, _, b, _) = connected([&one, &two], 7180);
    two.kill();
    assert_eq!(a.expect(DISCONNECTED).uid, 11);
    assert!(readable(&b.events, WAIT_TIMEOUT) && receive(&b.events).unwrap().0.is_empty());
}

#[test]
fn nobody_listens_somebody_rejects_and_policy_refuses() {
    let (one, two) = nodes();
    let (a, b) = (Channel::open(&one, 1), Channel::open(&two, 2));
    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    a.connect(x, &param(1, &[])).unwrap();
    assert_eq!(a.expect(REJECTED).status, 8);
    // There is no second try with an id, as with a card.
    assert_eq!(a.connect(x, &param(1, &[])).unwrap_err(), libc::EINVAL);

    b.listen(2, cm::PS_TCP, 99, 0);
    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    a.connect(x, &param(1, &[])).unwrap();
    let y = b.expect(CONNECT_REQUEST).id;
    assert_eq!(b.reject(y, &[7; 149]).unwrap_err(), libc::EINVAL);
    b.reject(y, &[7; 148]).unwrap();
    let rejected = a.expect(REJECTED);
    assert_eq!((rejected.status, rejected.param[264], rejected.param[155]), (28, 148, 7));
    assert_eq!(b.accept(y, 5, &param(1, &[])).unwrap_err(), libc::EINVAL);

    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    assert_eq!(a.connect(x, &param(1, &[1; 57])).unwrap_err(), libc::EINVAL);
    a.connect(x, &param(1, &[1; 56])).unwrap();
    let y = b.expect(CONNECT_REQUEST).id;
    // A program that ends before it answers has refused.
    b.destroy(y);
    assert_eq!(a.expect(REJECTED).status, 28);

    one.net.refuse(libc::EACCES);
    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    a.connect(x, &param(1, &[])).unwrap();
    assert_eq!(a.expect(UNREACHABLE).status, -libc::EACCES);
}

#[test]
fn an_agent_that_does_not_answer_is_given_up() {
    let (one, _two) = nodes();
    one.net.be_silent();
    let a = Channel::open(&one, 1);
    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    a.connect(x, &param(1, &[])).unwrap();
    assert_eq!(a.expect(UNREACHABLE).status, -libc::ETIMEDOUT);
}

#[test]
fn requests_wait_for_room_at_their_listener() {
    let router = node();
    let (a, b) = (Channel::open(&router, 1), Channel::open(&router, 2));
    let listener = b.listen(2, cm::PS_TCP, 99, 2);
    for uid in 1..=5 {
        let x = a.resolved(uid, cm::PS_TCP, 2, 99);
        a.connect(x, &param(u32::try_from(uid).unwrap(), &[])).unwrap();
    }
    let mut qps = Vec::new();
    for _ in 0..3 {
        let request = b.expect(CONNECT_REQUEST);
        qps.push(word(&request.param, 0));
    }
    // Those that wait are refused when the listener goes, and those whose event was not got.
    b.destroy(listener);
    let mut refused = [a.expect(REJECTED), a.expect(REJECTED)].map(|e| e.uid);
    refused.sort_unstable();
    qps.extend(refused.map(|uid| u32::try_from(uid).unwrap()));
    qps.sort_unstable();
    assert_eq!(qps, [1, 2, 3, 4, 5]);
}

#[test]
fn many_connect_at_once_and_the_agent_is_asked_for_few() {
    const MANY: u64 = 600;
    let (one, two) = nodes();
    let (a, b) = (Channel::open(&one, 1), Channel::open(&two, 2));
    b.listen(2, cm::PS_TCP, 99, 0);
    let ids: Vec<u32> = (1..=MANY).map(|uid| a.resolved(uid, cm::PS_TCP, 2, 99)).collect();
    for id in ids {
        a.connect(id, &param(1, &[])).unwrap();
    }
    for _ in 0..MANY {
        let y = b.expect(CONNECT_REQUEST).id;
        b.accept(y, 22, &param(2, &[])).unwrap();
    }
    for _ in 0..MANY {
        a.expect(CONNECT_RESPONSE);
    }
}

#[test]
fn datagrams_resolve_their_service() {
    let (one, two) = nodes();
    let (a, b) = (Channel::open(&one, 1), Channel::open(&two, 2));
    b.listen(2, cm::PS_UDP, 99, 0);
    let x = a.resolved(1, cm::PS_UDP, 2, 99);
    a.connect(x, &param(0, b"who")).unwrap();
    let request = b.expect(CONNECT_REQUEST);
    assert_eq!((&request.param[40..44], request.param[296]), (&b"who\0"[..], 180));
    b.accept(request.id, 22, &param(0x77, b"me")).unwrap();
    let found = a.expect(ESTABLISHED);
    let at = |at| word(&found.param, at);
    assert_eq!((at(0), at(4), found.param[296]), (0x77, 0x0123_4567, 136));
    assert_eq!(
        (&found.param[8..24], found.param[37], &found.param[40..43]),
        (&gid(2)[..], 1, &b"me\0"[..])
    );
    assert_eq!(b.attributes(request.id, 1).unwrap().0, 0x71);

    let x = a.resolved(1, cm::PS_UDP, 2, 99);
    a.connect(x, &param(0, b"who")).unwrap();
    b.reject(b.expect(CONNECT_REQUEST).id, b"no").unwrap();
    assert_eq!(a.expect(UNREACHABLE).status, 2);
    let x = a.resolved(1, cm::PS_UDP, 2, 98);
    a.connect(x, &param(0, &[])).unwrap();
    assert_eq!(a.expect(UNREACHABLE).status, 1);
}

#[test]
fn an_endpoint_reaches_itself() {
    let router = node();
    let a = Channel::open(&router, 1);
    let listener = a.create(1, cm::PS_TCP).unwrap();
    let mut loopback = v4(0, 99);
    loopback[4..8].copy_from_slice(&[127, 0, 0, 1]);
    a.bind(listener, loopback).unwrap();
    a.command(7, &[listener.to_ne_bytes(), [0; 4]].concat()).unwrap();
    let x = a.create(2, cm::PS_TCP).unwrap();
    a.resolve(x, loopback).unwrap();
    a.expect(ADDR_RESOLVED);
    a.command(4, &[x.to_ne_bytes(), [0; 4]].concat()).unwrap();
    a.expect(ROUTE_RESOLVED);
    a.connect(x, &param(9, &[])).unwrap();
    let y = a.expect(CONNECT_REQUEST).id;
    a.accept(y, 3, &param(8, &[])).unwrap();
    assert_eq!(word(&a.expect(CONNECT_RESPONSE).param, 0), 8);
    assert_eq!(router.net.connections(), 0);
}

#[test]
fn addresses_and_ports_are_the_endpoint_s() {
    let router = node();
    let (a, b) = (Channel::open(&router, 1), Channel::open(&router, 2));
    let ids: Vec<u32> = (0..4).map(|_| a.create(1, cm::PS_TCP).unwrap()).collect();
    assert_eq!(a.bind(ids[0], v4(2, 99)).unwrap_err(), libc::EADDRNOTAVAIL);
    a.bind(ids[0], v4(1, 99)).unwrap();
    assert_eq!(a.bind(ids[0], v4(1, 98)).unwrap_err(), libc::EINVAL);
    assert_eq!(a.bind(ids[1], v4(0, 99)).unwrap_err(), libc::EADDRINUSE);
    // Others' ports, and those of the other space, are others.
    b.listen(2, cm::PS_TCP, 99, 0);
    a.listen(3, cm::PS_UDP, 99, 0);
    a.bind(ids[1], v4(1, 0)).unwrap();
    a.bind(ids[2], v4(1, 0)).unwrap();
    // REUSEADDR on both, as long as none listens.
    let reuse = |id: u32| {
        let fields = [0_u32.to_ne_bytes(), [0; 4], id.to_ne_bytes(), [0; 4], 1_u32.to_ne_bytes()];
        let fields = [&fields.concat()[..], &4_u32.to_ne_bytes()].concat();
        let mut bytes = 14_u32.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&24_u16.to_ne_bytes());
        bytes.extend_from_slice(&[0; 2]);
        a.raw(&[&bytes[..], &fields, &1_u32.to_ne_bytes()].concat(), 0).unwrap();
    };
    let shared: Vec<u32> = (0..2).map(|_| a.create(1, cm::PS_TCP).unwrap()).collect();
    for id in &shared {
        reuse(*id);
        a.bind(*id, v4(1, 97)).unwrap();
    }
    a.command(7, &[shared[0].to_ne_bytes(), [0; 4]].concat()).unwrap();
    let second = a.command(7, &[shared[1].to_ne_bytes(), [0; 4]].concat());
    assert_eq!(second.unwrap_err(), libc::EADDRINUSE);
    // An IPv6 address of which there is none.
    let mut six = [0; 28];
    six[0] = 10;
    six[8] = 0xfd;
    assert_eq!(a.resolve(ids[3], six).unwrap_err(), libc::ENETUNREACH);
}

#[test]
fn ids_move_between_channels_of_their_process_with_their_events() {
    let router = node();
    let (a, other, b) =
        (Channel::open(&router, 1), Channel::open(&router, 1), Channel::open(&router, 2));
    let migrate = |to: &Channel, id: u32| {
        let fields = [&[0; 8], &id.to_ne_bytes()[..], &[0; 4]].concat();
        to.command(18, &fields).map(|r| word(&r, 0))
    };
    let x = a.resolved(1, cm::PS_TCP, 2, 99);
    a.connect(x, &param(1, &[])).unwrap();
    assert!(readable(&a.events, WAIT_TIMEOUT));
    assert_eq!(migrate(&other, x).unwrap(), 2);
    // The reply said that the old channel is drained: its message is to be taken.
    assert_eq!(receive(&a.events).unwrap().0, [0; 16]);
    assert!(!a.is_readable());
    assert_eq!(other.expect(REJECTED).status, 8);
    assert_eq!(a.disconnect(x).unwrap_err(), libc::EINVAL);
    other.disconnect(x).unwrap();
    // Of another endpoint there are other ids.
    assert_eq!(migrate(&b, x).unwrap_err(), libc::ENOENT);
    assert_eq!(other.destroy(x), 3);
}

#[test]
fn commands_without_sense_are_refused() {
    let router = node();
    let a = Channel::open(&router, 1);
    for space in [0, 0x0002, 0x013f] {
        assert_eq!(a.create(1, space).unwrap_err(), libc::EOPNOTSUPP);
    }
    let x = a.create(1, cm::PS_TCP).unwrap();
    for (number, errno) in [
        (13, libc::EOPNOTSUPP),
        (16, libc::EINVAL),
        (17, libc::ENOENT),
        (19, libc::EOPNOTSUPP),
        (20, libc::EOPNOTSUPP),
        (21, libc::EOPNOTSUPP),
        (22, libc::EOPNOTSUPP),
        (23, libc::EINVAL),
    ] {
        assert_eq!(a.command(number, &[0; 300]).unwrap_err(), errno, "{number}");
    }
    for number in 0..13 {
        assert_eq!(
            a.command(number, &[0; 3]).unwrap_err(),
            if number == 12 { libc::EAGAIN } else { libc::EINVAL }
        );
    }
    // A length that is not there, and no room for the response.
    assert_eq!(a.raw(&[4, 0, 0, 0, 9, 0, 0, 0, 1], 336).unwrap_err(), libc::EINVAL);
    let mut create = vec![0, 0, 0, 0, 24, 0, 4, 0];
    create.extend_from_slice(&[0; 16]);
    create.extend_from_slice(&cm::PS_TCP.to_ne_bytes());
    create.extend_from_slice(&[0; 6]);
    assert_eq!(a.raw(&create, 3).unwrap_err(), libc::ENOSPC);
    // What an id of this state cannot do.
    assert_eq!(a.connect(x, &param(1, &[])).unwrap_err(), libc::EINVAL);
    assert_eq!(a.accept(x, 1, &param(1, &[])).unwrap_err(), libc::EINVAL);
    assert_eq!(a.accept(x, 1, &[0; 272]).unwrap_err(), libc::EINVAL);
    assert_eq!(a.reject(x, &[]).unwrap_err(), libc::EINVAL);
    assert_eq!(a.disconnect(x).unwrap_err(), libc::EINVAL);
    assert_eq!(a.attributes(x, 1).unwrap_err(), libc::EINVAL);
    // A channel is no device, and a device no channel.
    let head = abi::verbs_request { command: abi::VERBS_ALLOC_PD, tag: 9 };
    let request = abi::verbs_plain_request { head };
    assert_eq!(ask(&a.socket, plain::bytes(&request)).unwrap_err(), libc::EOPNOTSUPP);
    assert_eq!(ask(&a.socket, plain::bytes(&hello(1, 1))).unwrap_err(), libc::EPROTO);
    let device = router.open(1);
    let head = abi::verbs_request { command: abi::VERBS_RDMA_CM, tag: 3 };
    let request = abi::verbs_rdma_cm_request { head, length: 8, response_max: 0 };
    let bytes = [plain::bytes(&request), &[12, 0, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(ask(&device.socket, &bytes).unwrap_err(), libc::EOPNOTSUPP);
}

#[test]
fn ids_and_channels_are_limited_and_come_back() {
    let router = node();
    router.add(3, Limits::default());
    let a = Channel::open(&router, 3);
    let ids: Vec<u32> = (0..4096).map(|_| a.create(1, cm::PS_TCP).unwrap()).collect();
    assert_eq!(a.create(1, cm::PS_TCP).unwrap_err(), libc::ENOMEM);
    assert!(ids.iter().all(|id| (1..1 << 16).contains(id)));
    a.destroy(ids[7]);
    a.create(1, cm::PS_TCP).unwrap();
    drop(a);
    let channels: Vec<Channel> = (0..1024).map(|_| Channel::open(&router, 3)).collect();
    let socket = router.connect(3);
    assert_eq!(ask(&socket, plain::bytes(&hello(1, 1))).unwrap_err(), libc::ENOMEM);
    channels[0].create(1, cm::PS_TCP).unwrap();
    // The others have theirs.
    Channel::open(&router, 1).create(1, cm::PS_TCP).unwrap();
    drop(channels);
    support::eventually("channels to come back", || {
        ask(&router.connect(3), plain::bytes(&hello(1, 1))).ok()
    });
}

/// Endpoints that take all ids that they get leave some for another one.
#[test]
fn ids_are_left_for_whoever_comes_next() {
    let router = Router::start();
    let take = |n: u8| {
        router.add(n, Limits::default());
        let channel = Channel::open(&router, n);
        let taken = (1..=5000).take_while(|_| channel.create(0, cm::PS_TCP).is_ok()).count();
        (channel, taken)
    };
    let all: Vec<_> = (1..=17).map(take).collect();
    assert_eq!(all[0].1, 4096);
    assert!(all[16].1 > 100, "{}", all[16].1);
    assert!(router.times(17, Reason::RouterFull) > 0);
}

/// A connection to endpoint 2 in the name of 1, greeted.
fn opened(router: &Router, greeting: Greeting) -> TcpStream {
    let (mut ours, theirs) = tcp_pair();
    let accepted = AgentMessage::Accepted { endpoint: 2, source: gid(1), destination: gid(2) };
    router.tell(&accepted, &[theirs.as_raw_fd()]);
    ours.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    ours.write_all(&greeting.encode()).unwrap();
    ours
}

fn greeting() -> Greeting {
    Greeting {
        version: wire::VERSION,
        kind: wire::RDMA_CM,
        status: 0,
        source_qp: 0,
        destination_qp: 0,
        source: gid(1),
        destination: gid(2),
        qp_type: 0,
        card: false,
    }
}

fn say(stream: &mut TcpStream, message: &Message) {
    let (header, bytes) = message.encode();
    stream.write_all(&[&header.encode()[..], &bytes].concat()).unwrap();
}

fn hear(stream: &mut TcpStream) -> Message {
    let mut head = [0; wire::HEADER];
    stream.read_exact(&mut head).unwrap();
    let header = Header::parse(&head).unwrap();
    let mut bytes = vec![0; header.length as usize];
    stream.read_exact(&mut bytes).unwrap();
    Message::parse(&header, &bytes).unwrap()
}

#[test]
fn a_hostile_peer_ends_its_own_connection_only() {
    let router = Router::start();
    router.add(2, Limits::default());
    let b = Channel::open(&router, 2);
    b.listen(2, cm::PS_TCP, 99, 0);
    let request = Message {
        space: cm::PS_TCP,
        source_port: 5,
        destination_port: 99,
        ..Message::new(What::Request)
    };
    // Each ends the connection: messages out of order, frames of other kinds, and none at all.
    let before = [What::Reply, What::ReadyToUse, What::DisconnectRequest, What::ServiceReply];
    for what in before {
        let mut peer = opened(&router, greeting());
        peer.read_exact(&mut [0; wire::GREETING]).unwrap();
        say(&mut peer, &Message::new(what));
        assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0, "{what:?}");
    }
    for kind in [Kind::Request, Kind::Datagram, Kind::Close] {
        let mut peer = opened(&router, greeting());
        peer.read_exact(&mut [0; wire::GREETING]).unwrap();
        peer.write_all(&Header::new(kind).encode()).unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0, "{kind:?}");
    }
    // A second request, and the answers of an acceptor, after a request.
    for message in [request, Message::new(What::Reply), Message::new(What::ReadyToUse)] {
        let mut peer = opened(&router, greeting());
        peer.read_exact(&mut [0; wire::GREETING]).unwrap();
        say(&mut peer, &request);
        b.expect(CONNECT_REQUEST);
        say(&mut peer, &message);
        assert_eq!(peer.read(&mut [0]).unwrap_or(0), 0, "{message:?}");
    }
    // One that keeps to the rules is served, and its end is an event.
    let mut peer = opened(&router, greeting());
    peer.read_exact(&mut [0; wire::GREETING]).unwrap();
    say(&mut peer, &request);
    let y = b.expect(CONNECT_REQUEST).id;
    b.accept(y, 22, &param(7, &[])).unwrap();
    assert_eq!((hear(&mut peer).what, hear_nothing(&peer)), (What::Reply, ()));
    say(&mut peer, &Message::new(What::ReadyToUse));
    assert_eq!(b.expect(ESTABLISHED).uid, 22);
    drop(peer);
    assert_eq!(b.expect(DISCONNECTED).uid, 22);
}

fn hear_nothing(stream: &TcpStream) {
    stream.set_nonblocking(true).unwrap();
    let mut byte = [0];
    assert!(stream.peek(&mut byte).is_err());
    stream.set_nonblocking(false).unwrap();
}

#[test]
fn the_agent_is_told_of_ids() {
    let router = node();
    let (a, b) = (Channel::open(&router, 1), Channel::open(&router, 2));
    let listening = b.listen(5, cm::PS_TCP, 4000, 1);
    let resolved = a.resolved(6, cm::PS_TCP, 2, 4000);
    let ids = |n| {
        let (records, _) = router.records(statistics::KIND_IDS, n);
        records.iter().map(|r| statistics::Id::parse(r).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(ids(0).len(), 2);
    let (of_a, of_b) = (ids(1), ids(2));
    assert_eq!((of_a.len(), of_b.len()), (1, 1));
    let (of_a, of_b) = (&of_a[0], &of_b[0]);
    assert_eq!((of_b.endpoint, of_b.number, of_b.state), (2, listening, 4));
    assert_eq!((of_b.source_port, of_b.space, of_b.qp), (4000, cm::PS_TCP, 0));
    assert_eq!((of_a.endpoint, of_a.number, of_a.state), (1, resolved, 3));
    assert_eq!((of_a.source, of_a.destination, of_a.destination_port), (gid(1), gid(2), 4000));
    assert_eq!(of_a.pid, std::process::id());
    a.destroy(resolved);
    assert_eq!(ids(1), []);
}

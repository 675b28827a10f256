//! Pairs by a card that is a test's (`liar`), of which the test plays the other node.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, Greeting, Header, Kind};
use verbs_protocol::{Gid, abi, ibv};

use super::liar::{Asked, Done, Liar};
use super::{End, Router, WAIT_TIMEOUT, gid, pair_of, receiving, request, sending, tcp_pair};

/// What a card of another node has.
pub(crate) const ELSEWHERE: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 0, 1];
pub(crate) const RECV: u32 = 128;

/// Two others of the node can speak.
pub(crate) fn others_can_speak(router: &Router) {
    let (mut a, mut b) = pair_of([router, router], [3, 4], ibv::QPT_RC, 64, |_| ());
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
}

/// A node with such a card, endpoint 2 of which has the queue pair that is about to go by it.
pub(crate) fn node(protection: &str, lie: &str) -> (Router, Liar) {
    let (router, mut liar) = Liar::start(protection, lie);
    if lie != "name" {
        liar.opened();
    }
    for n in 2..=4 {
        router.add(n, Limits { outside: u32::from(n == 2), ..Limits::default() });
    }
    (router, liar)
}

/// A pair of which the test plays the other node, queue pair 9 of endpoint 1, up to where both have
/// said where their cards are.
pub(crate) struct Pair {
    pub(crate) router: Router,
    pub(crate) liar: Liar,
    pub(crate) end: End,
    pub(crate) stream: TcpStream,
    pub(crate) receives: Vec<Asked>,
    pub(crate) probe: Asked,
    /// The number of the router's queue pair of the card.
    pub(crate) ours: u32,
}

pub(crate) fn frame(stream: &mut TcpStream) -> Header {
    let mut bytes = [0; wire::HEADER];
    stream.read_exact(&mut bytes).unwrap();
    let header = Header::parse(&bytes).unwrap();
    stream.read_exact(&mut vec![0; header.length as usize]).unwrap();
    header
}

/// A connection of the peer's, which says that it has a card; what the router answers to that.
pub(crate) fn connect(router: &Router) -> (End, TcpStream, bool) {
    let mut end = End::new(router, 2, ibv::QPT_RC, 1, 4096);
    end.device.connect(end.qp.number, ibv::QPT_RC, (1, 9), |_| ());
    let (mut stream, theirs) = tcp_pair();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    router.tell(&Message::Card { endpoint: 2, lid: 0, gids: vec![ELSEWHERE] }, &[]);
    let accepted = Message::Accepted { endpoint: 2, source: gid(1), destination: gid(2) };
    router.tell(&accepted, &[theirs.as_raw_fd()]);
    let greeting = Greeting {
        version: 1,
        kind: wire::PAIR,
        status: 0,
        source_qp: 9,
        destination_qp: end.qp.number,
        source: gid(1),
        destination: gid(2),
        qp_type: 2,
        card: true,
    };
    stream.write_all(&greeting.encode()).unwrap();
    let mut answer = [0; wire::GREETING];
    stream.read_exact(&mut answer).unwrap();
    let answer = Greeting::parse(&answer).unwrap();
    assert_eq!(answer.status, 0);
    (end, stream, answer.card)
}

impl Pair {
    pub(crate) fn probing(protection: &str, lie: &str) -> Self {
        let (router, liar) = node(protection, lie);
        let (end, mut stream, by_card) = connect(&router);
        assert!(by_card);
        let offer = frame(&mut stream);
        assert_eq!((offer.kind, offer.status), (Kind::Card, 0));
        let ours = offer.key;
        let offer = Header { length: 16, opcode: 5, key: 7, ..Header::new(Kind::Card) };
        stream.write_all(&offer.encode()).unwrap();
        stream.write_all(&ELSEWHERE).unwrap();
        let (probe, receives) = liar.sends();
        assert_eq!((probe.length, receives.len()), (0, 16));
        Self { router, liar, end, stream, receives, probe, ours }
    }

    /// Both ends have agreed on the card.
    pub(crate) fn agreed(protection: &str, lie: &str) -> Self {
        let mut pair = Self::probing(protection, lie);
        pair.says(Done { id: pair.probe.id, ..Done::default() });
        let ready = frame(&mut pair.stream);
        assert_eq!((ready.kind, ready.status), (Kind::CardReady, 0));
        pair.hears(0);
        pair
    }

    pub(crate) fn says(&self, done: Done) {
        self.liar.says(0, done, 0, &[]);
    }

    /// The card brings a frame to the next buffer that there is.
    pub(crate) fn brings(&mut self, header: &Header) {
        let asked = self.receives.remove(0);
        let bytes = header.encode();
        let length = u32::try_from(bytes.len()).unwrap();
        let done = Done { id: asked.id, opcode: RECV, length, ..Done::default() };
        self.liar.says(0, done, asked.address, &bytes);
    }

    /// The pair has ended, and nothing else has.
    pub(crate) fn ends(mut self, why: &str) {
        let event = self.end.device.event();
        let number = self.end.qp.number;
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, number), "{why}");
        assert_eq!(self.router.times(2, Reason::CardWrong), 1, "{why}");
        assert!(self.router.runs(), "{why}");
        others_can_speak(&self.router);
    }
}

/// A question that is answered whenever it comes.
pub(crate) fn question() -> Header {
    Header { key: 0x77, ..Header::new(Kind::CardAsk) }
}

impl Pair {
    /// The peer says of its card, by TCP, whether it is the way.
    pub(crate) fn hears(&mut self, status: i32) {
        let status = status.unsigned_abs();
        let ready = Header { status, ..Header::new(Kind::CardReady) };
        self.stream.write_all(&ready.encode()).unwrap();
    }

    /// A message comes by TCP, and is acknowledged so.
    pub(crate) fn goes_by_tcp(&mut self) {
        self.end.post_receive(5, &[self.end.whole()]);
        let head = Header { flags: wire::FIRST | wire::LAST, ..Header::new(Kind::Request) };
        let head = Header { opcode: ibv::WR_SEND, ..head };
        self.stream.write_all(&head.encode()).unwrap();
        assert_eq!(self.end.receives.result(), (5, ibv::WC_SUCCESS));
        assert_eq!(frame(&mut self.stream).kind, Kind::Ack);
    }
}

/// A queue pair whose peer is without Heddle, with a receive request of 64 bytes that the card has.
pub(crate) fn outside(lie: &str) -> (Router, Liar, End, Asked) {
    let (router, mut liar) = node("", lie);
    let mut end = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
    liar.has_queue();
    let slots = receiving(5, &[end.part(0, 64)]);
    let away = |a: &mut abi::verbs_qp_attr| {
        a.address.gid = ELSEWHERE;
        a.address.sgid_index = 1;
    };
    end.device.connect(end.qp.number, ibv::QPT_RC, (1, 9), away);
    end.device.post(end.qp.receive.as_mut().unwrap(), &slots);
    let asked = liar.asked();
    assert_eq!((asked.opcode, asked.length), (None, 64));
    (router, liar, end, asked)
}

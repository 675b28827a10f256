//! What becomes of what goes by a card when that is lost, or gives up on something. The kernel may
//! take long to destroy a queue pair then: nobody waits for that.

mod support;

use std::io::Read;

use support::by_card::{Pair, RECV, connect, frame, node, others_can_speak, outside, question};
use support::liar::{Done, GID};
use support::{End, eventually, request, sending};
use verbs_protocol::agent::Message;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{Header, Kind};
use verbs_protocol::{abi, ibv};

/// Bytes of the buffers of a pair by card.
const BUFFERS: u64 = 24 * 16 * 1024;
const PORT_ERR: u32 = 10;
const CQ_ERR: u32 = 0;
const GID_CHANGE: u32 = 18;

/// Bytes that endpoint 2 is charged for.
fn memory(pair: &Pair) -> u64 {
    pair.router.account(2).used[8]
}

impl Pair {
    /// The peer hears the end of the connection.
    fn is_cut(&mut self) {
        assert_eq!(self.stream.read(&mut [0; 1]).unwrap(), 0);
    }
}

#[test]
fn a_pair_whose_port_is_lost_fails_at_once() {
    let mut pair = Pair::agreed("", "stuck");
    let slots = sending(request(ibv::WR_SEND, 1), &[pair.end.part(0, 8)]);
    pair.end.send(&slots);
    pair.liar.sends();
    pair.liar.reports(PORT_ERR, 0);
    assert_eq!(pair.end.sends.result(), (1, ibv::WC_RETRY_EXC_ERR));
    pair.is_cut();
    others_can_speak(&pair.router);
    assert_eq!(pair.router.times(2, Reason::CardGone), 1);
}

#[test]
fn a_pair_that_was_about_to_go_by_the_card_goes_by_tcp_at_once() {
    let mut pair = Pair::probing("", "stuck");
    pair.liar.reports(PORT_ERR, 0);
    let ready = frame(&mut pair.stream);
    assert_eq!((ready.kind, ready.status), (Kind::CardReady, libc::ENETDOWN.unsigned_abs()));
    pair.goes_by_tcp();
    others_can_speak(&pair.router);
}

#[test]
fn what_a_queue_pair_is_charged_for_counts_until_it_is_gone() {
    let mut pair = Pair::agreed("", "stuck");
    let before = memory(&pair);
    let number = pair.end.qp.number;
    pair.liar.reports(PORT_ERR, 0);
    let event = pair.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, number));
    pair.is_cut();
    assert_eq!(memory(&pair), before);
    pair.liar.lets_go();
    eventually("the refund", || (memory(&pair) == before - BUFFERS).then_some(()));
    // That which it has for peers without Heddle.
    assert_eq!(pair.end.device.object(abi::VERBS_DESTROY_QP, number), Ok(()));
    others_can_speak(&pair.router);
    pair.liar.lets_go();
}

#[test]
fn a_program_that_ends_waits_for_no_card() {
    let Pair { mut router, liar, end, mut stream, .. } = Pair::agreed("", "stuck");
    drop(end);
    // Its last word goes by the card, which says nothing any more.
    others_can_speak(&router);
    router.tell(&Message::Remove { endpoint: 2 }, &[]);
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    others_can_speak(&router);
    liar.lets_go();
    liar.lets_go();
    others_can_speak(&router);
    assert!(router.runs());
}

/// The kernel destroys what is left.
#[test]
fn a_router_that_ends_waits_for_no_card() {
    let Pair { mut router, end, liar: _liar, .. } = Pair::agreed("", "stuck");
    drop(end);
    for endpoint in 2..=4 {
        router.tell(&Message::Remove { endpoint }, &[]);
    }
    router.tell(&Message::Drain, &[]);
    assert!(router.ends_without_agent());
}

/// A cut of policy is one: the card has stopped when the program hears of it.
#[test]
fn a_queue_pair_with_a_peer_without_heddle_ends_at_once() {
    let (router, liar, mut end, _) = outside("stuck");
    let number = end.qp.number;
    liar.reports(1, number);
    let event = end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, number));
    assert_eq!(liar.modified(number).last().unwrap(), "state 0");
    assert_eq!(end.device.object(abi::VERBS_DESTROY_QP, number), Ok(()));
    drop(end);
    others_can_speak(&router);
}

/// So is that of a connection.
#[test]
fn a_pair_that_is_cut_has_stopped() {
    let mut pair = Pair::agreed("", "stuck");
    drop(std::mem::replace(&mut pair.stream, support::tcp_pair().0));
    let event = pair.end.device.event();
    assert_eq!(event.event, ibv::EVENT_QP_FATAL);
    assert_eq!(pair.liar.modified(pair.ours).last().unwrap(), "state 0");
}

#[test]
fn a_pair_whose_card_takes_no_more_receive_requests_ends() {
    let mut pair = Pair::agreed("", "receive");
    pair.brings(&question());
    let event = pair.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, pair.end.qp.number));
    assert_eq!(pair.router.times(2, Reason::CardFailed), 1);
    others_can_speak(&pair.router);
}

/// Without one of its completion queues nobody knows what it has done, of either kind.
#[test]
fn a_card_whose_completion_queue_fails_is_gone() {
    for queue in [1, 2] {
        let mut pair = Pair::agreed("", "");
        pair.liar.reports(CQ_ERR, queue);
        let event = pair.end.device.event();
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, pair.end.qp.number));
        pair.is_cut();
        let (router, liar, mut end, _) = outside("");
        liar.reports(CQ_ERR, queue);
        let event = end.device.event();
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number));
        assert_eq!(end.receives.result(), (5, ibv::WC_WR_FLUSH_ERR));
        for router in [&pair.router, &router] {
            assert_eq!(router.times(2, Reason::CardGone), 1);
            others_can_speak(router);
            // What comes then goes by TCP.
            assert!(!connect(router).2);
        }
    }
}

/// However much the card has done for others.
#[test]
fn what_has_come_before_the_end_of_a_connection_is_taken() {
    let mut pair = Pair::agreed("", "");
    let slots = sending(request(ibv::WR_SEND, 1), &[pair.end.part(0, 8)]);
    pair.end.send(&slots);
    pair.liar.sends();
    pair.router.await_rest();
    let asked = pair.receives.remove(0);
    let ack = Header::new(Kind::Ack).encode();
    let (id, length) = (asked.id, u32::try_from(ack.len()).unwrap());
    let Pair { router, liar, mut end, stream, .. } = pair;
    router.while_stopped(|| {
        // First, as the router hears of both in this order.
        drop(stream);
        // Of nobody.
        liar.says(0, Done::default(), 2000, &[]);
        liar.says(0, Done { id, opcode: RECV, length, ..Done::default() }, asked.address, &ack);
    });
    assert_eq!(end.sends.result(), (1, ibv::WC_SUCCESS));
    let event = end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number));
}

/// That takes its time, for which all wait.
#[test]
fn the_port_is_looked_at_when_it_may_have_changed() {
    let pair = Pair::agreed("", "");
    let looks = || pair.liar.modified(0).len();
    let before = looks();
    // Of queue pairs of either kind, among them that one has had its first message; SRQs; the path.
    for event in [1, 2, 3, 4, 5, 6, 7, 14, 15, 16] {
        pair.liar.reports(event, 0);
        pair.liar.reports(event, 0x00de_adbe);
    }
    others_can_speak(&pair.router);
    assert_eq!(looks(), before);
    pair.router.while_stopped(|| [9, 11, 12, 13, 17, 18].map(|event| pair.liar.reports(event, 0)));
    others_can_speak(&pair.router);
    assert_eq!(looks(), before + 1);
}

/// A router that starts before its card has an address uses it once it has.
#[test]
fn a_card_that_gets_its_gid_later_is_used_then() {
    let (router, liar) = node("", "early");
    assert!(!connect(&router).2);
    assert!(router.times(2, Reason::CardGone) > 0);
    std::fs::write(router.folder().join("card/ports/1/gids/0"), GID).unwrap();
    liar.reports(GID_CHANGE, 0);
    eventually("the card", || connect(&router).2.then_some(()));
    others_can_speak(&router);
}

/// Only who has the region given up waits.
#[test]
fn a_region_that_the_card_does_not_let_go_holds_up_nobody_else() {
    let (router, liar) = node("", "pinned");
    let mut end = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
    let regions = || router.account(2).used[3];
    let (_, first, _memory) = end.device.shared(end.pd, 8192);
    let _second = end.device.shared(end.pd, 8192);
    end.device.ask_to_end(abi::VERBS_DEREG_MR, first);
    others_can_speak(&router);
    assert_eq!((end.device.is_answered(), regions()), (false, 3));
    liar.lets_go();
    eventually("the answer", || end.device.is_answered().then_some(()));
    assert_eq!(regions(), 2);
    // A program that has gone waits for nothing.
    drop(end);
    eventually("the end of the context", || (router.account(2).used[0] == 0).then_some(()));
    others_can_speak(&router);
    assert_eq!(regions(), 1);
    liar.lets_go();
    eventually("the refund", || (regions() == 0).then_some(()));
}

#[test]
fn a_peer_that_does_not_say_whether_its_card_gets_through_is_a_failed_card() {
    let mut pair = Pair::probing("", "");
    pair.says(Done { id: pair.probe.id, ..Done::default() });
    assert_eq!(frame(&mut pair.stream).kind, Kind::CardReady);
    pair.is_cut();
    let times = |reason| pair.router.times(2, reason);
    assert_eq!((times(Reason::CardFailed), times(Reason::LinkUnmatched)), (1, 0));
}

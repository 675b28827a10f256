//! A card, or its library, that says what is not so: the router ends what it cannot be sure of, and
//! everything else goes on. What a card writes to memory is between it and the node's IOMMU.

mod support;

use std::io::Write;

use support::by_card::{
    ELSEWHERE, Pair, RECV, connect, frame, node, others_can_speak, outside, question,
};
use support::liar::{Asked, Done, Liar};
use support::{End, Router, eventually, gid, pair_of, request, sending};
use verbs_protocol::agent::{Marks, Message};
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, Header, Kind};
use verbs_protocol::{abi, ibv};

/// The same attack as `a_completion_of_nothing_brings_no_bytes`, with the protection and without.
fn a_completion_of_nothing_is_taken(protection: &str) -> bool {
    let mut pair = Pair::agreed(protection, "");
    pair.brings(&question());
    let (answer, _) = pair.liar.sends();
    assert_eq!(answer.length, 48);
    pair.says(Done { id: answer.id, ..Done::default() });
    // A buffer that there is not, with as many bytes as the last one brought.
    let handle = answer.id >> 32 << 32;
    pair.says(Done { id: handle | 0x1000, opcode: RECV, length: 48, ..Done::default() });
    eventually("the end of the pair, or an answer", || {
        let broken = pair.router.times(2, Reason::CardWrong) > 0;
        let taken = pair.liar.has_asked() && pair.liar.asked().opcode.is_some();
        (broken || taken).then_some(taken)
    })
}

#[test]
fn a_completion_of_nothing_brings_no_bytes() {
    assert!(!a_completion_of_nothing_is_taken(""), "bytes that no card has brought are a frame");
    let gained = a_completion_of_nothing_is_taken("completions");
    assert_eq!(gained, cfg!(feature = "attack"), "without completions");
}

type Lie = fn(&Pair) -> Done;

#[test]
fn a_card_that_says_what_cannot_be_ends_its_pair_only() {
    let lies: [(&str, Lie); 6] = [
        ("a buffer that there is not", |p| Done {
            id: p.probe.id >> 32 << 32 | 0x1000,
            ..Done::default()
        }),
        ("the probe twice", |p| Done { id: p.probe.id, ..Done::default() }),
        ("a WRITE of its own that nobody wants", |p| Done {
            id: p.probe.id - 1,
            ..Done::default()
        }),
        ("a message that was not sent", |p| Done {
            id: p.probe.id >> 32 << 32 | 3,
            ..Done::default()
        }),
        ("more bytes than the buffer has", |p| Done {
            id: p.receives[0].id,
            opcode: RECV,
            length: u32::MAX,
            ..Done::default()
        }),
        ("one byte more", |p| Done {
            id: p.receives[3].id,
            opcode: RECV,
            length: 16 * 1024 + 1,
            ..Done::default()
        }),
    ];
    for (why, lie) in lies {
        let pair = Pair::agreed("", "");
        let lie = lie(&pair);
        pair.says(lie);
        pair.ends(why);
    }
}

#[test]
fn a_card_that_is_wrong_before_it_is_the_way_is_not() {
    let mut pair = Pair::probing("", "");
    pair.says(Done { id: pair.receives[0].id, length: u32::MAX, ..Done::default() });
    let refused = frame(&mut pair.stream);
    assert_eq!(refused.kind, Kind::CardReady);
    assert_ne!(refused.status, 0);
    pair.goes_by_tcp();
    assert_eq!(pair.router.times(2, Reason::CardWrong), 1);
}

/// A peer's card gets through, and is lost before the peer has heard that ours does.
#[test]
fn a_peer_that_takes_its_card_back_goes_by_tcp() {
    let mut before = Pair::probing("", "");
    before.hears(0);
    before.hears(libc::ENETDOWN);
    before.goes_by_tcp();
    let mut after = Pair::agreed("", "");
    after.hears(libc::ENETDOWN);
    after.goes_by_tcp();
    assert_eq!(after.router.times(2, Reason::CardRefused), 1);
}

/// What has begun to go by the card does not change its way; nor does a peer go by both.
#[test]
fn a_peer_that_goes_by_tcp_beside_its_card_has_ended() {
    let mut used = Pair::agreed("", "");
    used.brings(&question());
    used.liar.sends();
    used.hears(libc::ENETDOWN);
    let event = used.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, used.end.qp.number));
    let mut both = Pair::agreed("", "");
    let head = Header { flags: wire::FIRST | wire::LAST, ..Header::new(Kind::Request) };
    both.stream.write_all(&Header { opcode: ibv::WR_SEND, ..head }.encode()).unwrap();
    let event = both.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, both.end.qp.number));
}

#[test]
fn what_a_card_says_of_others_is_nothing() {
    let mut pair = Pair::agreed("", "");
    for id in [0, u64::MAX, 1 << 32, pair.probe.id ^ 1 << 60] {
        pair.says(Done { id, status: u32::MAX, length: u32::MAX, opcode: u32::MAX });
    }
    for event in (0..200).chain([u32::MAX]) {
        // Of no queue pair, and of one that there is not; not that the port or the card is gone.
        if ![8, 10].contains(&event) {
            pair.liar.reports(event, 0);
            pair.liar.reports(event, 0x00de_adbe);
        }
    }
    pair.brings(&question());
    assert_eq!(pair.liar.sends().0.length, 48);
    others_can_speak(&pair.router);
}

#[test]
fn a_card_that_reports_events_without_end_holds_up_nobody() {
    let pair = Pair::agreed("", "notices");
    let liar = &pair.liar;
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                liar.reports(11, 0);
            }
        });
        others_can_speak(&pair.router);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn a_card_with_limits_that_cannot_be_is_not_the_way() {
    // No limits, a list that is longer than it is, a name that is none, completions without end.
    for (lie, has_card) in
        [("limits", false), ("list", true), ("name", false), ("count", true), ("number", false)]
    {
        let (mut router, _liar) = node("", lie);
        if lie == "number" {
            // It is the way until it is to have a queue pair.
            let (_end, mut stream, by_card) = connect(&router);
            assert!(by_card);
            let offer = frame(&mut stream);
            assert_eq!(offer.kind, Kind::Card);
            assert_eq!(offer.status, libc::EPROTO.unsigned_abs());
        } else {
            let (_end, _stream, by_card) = connect(&router);
            assert_eq!(by_card, has_card, "{lie}");
        }
        others_can_speak(&router);
        assert!(router.runs(), "{lie}");
    }
}

#[test]
fn a_card_that_is_wrong_of_a_peer_without_heddle_ends_that_queue_pair_only() {
    let good = |asked: Asked| Done { id: asked.id, opcode: RECV, length: 64, ..Done::default() };
    for (why, lie) in
        [("one byte more than there is room for", 65), ("as many as a number has", u32::MAX)]
    {
        let (router, liar, mut end, asked) = outside("");
        liar.says(1, Done { length: lie, ..good(asked) }, 0, &[]);
        let event = end.device.event();
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number), "{why}");
        assert_eq!(router.times(2, Reason::CardWrong), 1, "{why}");
        assert_eq!(end.receives.result(), (5, ibv::WC_WR_FLUSH_ERR), "{why}");
        others_can_speak(&router);
    }
    // Once more than was asked for, and of a send request that there is not.
    for sends in [false, true] {
        let (router, liar, mut end, asked) = outside("");
        let id = if sends { asked.id & !1 } else { asked.id };
        if !sends {
            liar.says(1, good(asked), asked.address, &[9; 64]);
            assert_eq!(end.receives.result(), (5, ibv::WC_SUCCESS));
            assert!(end.buffer[..64].iter().all(|b| *b == 9));
        }
        liar.says(1, Done { id, ..good(asked) }, 0, &[]);
        let event = end.device.event();
        assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, end.qp.number));
        assert_eq!(router.times(2, Reason::CardWrong), 1);
        others_can_speak(&router);
    }
}

#[test]
fn a_status_that_there_is_not_is_a_general_error() {
    let (_router, liar, mut end, asked) = outside("");
    liar.says(1, Done { id: asked.id, status: 0xffff_0000, ..Done::default() }, 0, &[]);
    assert_eq!(end.receives.result(), (5, ibv::WC_GENERAL_ERR));
}

#[test]
fn a_card_whose_numbers_and_keys_are_all_the_same_has_one_of_each() {
    for lie in ["numbers", "keys"] {
        let (router, _liar) = node("", lie);
        let mut first = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
        let second = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
        assert_ne!(first.qp.number, second.qp.number);
        let (_, one, _memory) = first.device.shared(first.pd, 8192);
        let (_, two, _memory) = first.device.shared(first.pd, 8192);
        assert_ne!(one, two);
        let full = if lie == "keys" { one == 0x1234 } else { first.qp.number == 0x77 };
        assert!(full);
        assert!(router.times(2, Reason::CardFull) > 0, "{lie}");
        others_can_speak(&router);
    }
}

/// The card has sent one message, has received another and is to receive a third; the router hears
/// of that together with what ends the queue pair.
fn done_at_once(ends: impl FnOnce(&Router, &mut End)) -> (Router, Liar, End) {
    let (router, liar, mut end, received) = outside("");
    end.send(&sending(request(ibv::WR_SEND, 1), &[end.part(64, 8)]));
    let (sent, _) = liar.sends();
    end.post_receive(6, &[end.part(0, 64)]);
    liar.asked();
    router.await_sleep();
    router.while_stopped(|| {
        liar.says(1, Done { id: sent.id, ..Done::default() }, 0, &[]);
        let done = Done { id: received.id, opcode: RECV, length: 64, ..Done::default() };
        liar.says(1, done, received.address, &[9; 64]);
        ends(&router, &mut end);
    });
    assert_eq!(end.sends.result(), (1, ibv::WC_SUCCESS));
    (router, liar, end)
}

#[test]
fn what_the_card_has_done_is_told_before_the_rest_is_flushed() {
    let (_router, _liar, mut end) =
        done_at_once(|_, end| end.device.ask_for_state(end.qp.number, 6));
    assert_eq!(end.receives.result(), (5, ibv::WC_SUCCESS));
    assert!(end.buffer[..64].iter().all(|b| *b == 9));
    assert_eq!(end.receives.result(), (6, ibv::WC_WR_FLUSH_ERR));
}

/// A cut waits for no memory of the program: what has to be copied there is flushed.
#[test]
fn what_the_card_has_done_is_told_when_policy_cuts_the_queue_pair() {
    let (_router, _liar, mut end) = done_at_once(|router, end| {
        let (tag, errno) = (end.qp.number, libc::EACCES.unsigned_abs());
        let marks = Marks::default();
        let answer = Message::Answer { tag, endpoint: 2, destination: ELSEWHERE, errno, marks };
        router.tell(&answer, &[]);
    });
    assert_eq!(end.device.event().event, ibv::EVENT_QP_FATAL);
    assert_eq!(end.receives.result(), (5, ibv::WC_WR_FLUSH_ERR));
    assert_eq!(end.receives.result(), (6, ibv::WC_WR_FLUSH_ERR));
}

/// What a program asks of the packets to a peer without Heddle, in the words of the card.
fn marked(marks: Marks) -> String {
    let (router, mut liar) = node("", "");
    *router.net.marks.lock().unwrap() = marks;
    let mut end = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
    liar.has_queue();
    end.device.connect(end.qp.number, ibv::QPT_RC, (1, 9), |a| {
        a.address.gid = ELSEWHERE;
        a.address.sgid_index = 1;
        (a.address.traffic_class, a.address.sl, a.address.static_rate) = (0x6a, 3, 2);
    });
    eventually("RTR", || liar.modified(end.qp.number).into_iter().find(|l| l.contains("state 2")))
}

#[test]
fn packets_have_the_class_and_level_of_the_program_unless_they_are_the_operators() {
    let all = |class, level| format!("state 2 class {class} level {level} rate 2 rnr 12");
    assert_eq!(marked(Marks::default()), all(0x6a, 3));
    // Of the class the two bits of congestion are nobody's mark.
    assert_eq!(marked(Marks { dscp: Some(8), priority: false }), all(8 << 2 | 2, 3));
    assert_eq!(marked(Marks { dscp: Some(0), priority: true }), all(2, 0));
}

#[test]
fn what_a_program_changes_later_comes_to_the_card_or_is_refused() {
    let (router, mut liar) = node("", "");
    let mut end = End::new(&router, 2, ibv::QPT_RC, 1, 4096);
    liar.has_queue();
    let number = end.qp.number;
    let attr = end.device.ready_to_receive(number, ibv::QPT_RC, (1, 9), |a| {
        a.address.gid = ELSEWHERE;
        a.address.sgid_index = 1;
    });
    let receives = || liar.modified(number).pop().filter(|l| l.starts_with("state 2"));
    eventually("RTR", receives);
    let both = ibv::QP_MIN_RNR_TIMER | ibv::QP_ACCESS_FLAGS;
    let attr = abi::verbs_qp_attr { access: 3, min_rnr_timer: 5, ..attr };
    // In RTR a card takes nothing.
    assert_eq!(end.device.ready_to_send(number, ibv::QPT_RC, attr, both), Ok(3));
    assert_eq!(liar.modified(number).last().unwrap(), "state 3 access 2 rnr 5");
    let mut change = |mask, attr| end.device.modify(number, mask, attr);
    assert_eq!(change(both, abi::verbs_qp_attr { min_rnr_timer: 6, ..attr }), Ok(3));
    assert_eq!(liar.modified(number).last().unwrap(), "access 2 rnr 6");
    // Not every card can be drained; and the agent was asked for this peer.
    let drained = abi::verbs_qp_attr { qp_state: 4, ..Default::default() };
    assert_eq!(change(ibv::QP_STATE, drained), Ok(4));
    let address = abi::verbs_address {
        sgid_index: 1,
        is_global: 1,
        port: 1,
        gid: gid(7),
        ..Default::default()
    };
    let attr = abi::verbs_qp_attr { address, timeout: 20, ..Default::default() };
    for mask in [ibv::QP_AV, ibv::QP_TIMEOUT, ibv::QP_RETRY_CNT, ibv::QP_MAX_DEST_RD_ATOMIC] {
        assert_eq!(change(mask, attr), Err(libc::EINVAL));
    }
    assert_eq!(router.times(2, Reason::OutsideRefused), 4);
    // Of a peer that is a container the router takes them.
    let (mut a, _b) = pair_of([&router, &router], [3, 4], ibv::QPT_RC, 64, |_| ());
    assert_eq!(a.device.modify(a.qp.number, ibv::QP_STATE, drained), Ok(4));
    assert_eq!(a.device.modify(a.qp.number, ibv::QP_TIMEOUT, attr), Ok(4));
}

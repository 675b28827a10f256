//! Endpoints get threads of their own in the middle of what they do, and nothing stops: a router
//! that takes any copy for one that is stuck.

mod support;

use std::sync::Arc;

use support::{End, Router, Sge, eventually, pair_of, request, sending};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::ibv;
use verbs_protocol::statistics::Reason;

/// Rounds, each with two endpoints that have no thread yet.
const ROUNDS: u8 = 40;
/// Messages each way on each queue pair in a round.
const MESSAGES: u64 = 30;
/// Enough that a copy of it is seen.
const LENGTH: usize = 1 << 17;

/// Messages both ways on all pairs. Who receives is late at every other message, so that the
/// request waits for it; all wait for the last, so that the router sleeps.
fn talk(pairs: &mut [[(End, Sge); 2]]) {
    for message in 0..MESSAGES {
        for [a, b] in &mut *pairs {
            send(message, a, b);
            send(message, b, a);
        }
        for pair in &mut *pairs {
            for (end, _) in pair {
                assert_eq!(end.sends.result(), (message, ibv::WC_SUCCESS));
                assert_eq!(end.receives.result(), (message, ibv::WC_SUCCESS));
            }
        }
    }
}

fn send(message: u64, (from, sent): &mut (End, Sge), (to, received): &mut (End, Sge)) {
    let late = message.is_multiple_of(2);
    if !late {
        to.post_receive(message, &[*received]);
    }
    from.send(&sending(request(ibv::WR_SEND, message), &[*sent]));
    if late {
        to.post_receive(message, &[*received]);
    }
}

/// Memory of an end: of the program, or what the router has mapped.
fn with_memory(mut end: End, is_mapped: bool) -> (End, Sge) {
    if is_mapped {
        let (_, key, _) = end.device.shared(end.pd, LENGTH as u64);
        return (end, (0, u32::try_from(LENGTH).unwrap(), key));
    }
    let whole = end.whole();
    (end, whole)
}

fn take_overs(routers: [&Router; 2], is_mapped: bool) {
    let threads = routers.map(Router::threads);
    let mut moved = 0;
    for round in 0..ROUNDS {
        let ends = [2 * round + 1, 2 * round + 2];
        for (router, n) in routers.into_iter().zip(ends) {
            router.add(n, Limits::default());
        }
        let pair = || {
            let (a, b) = pair_of(routers, ends, ibv::QPT_RC, LENGTH, |_| ());
            [a, b].map(|end| with_memory(end, is_mapped))
        };
        let mut pairs: Vec<[(End, Sge); 2]> = (0..4).map(|_| pair()).collect();
        talk(&mut pairs);
        for (router, n) in routers.into_iter().zip(ends) {
            moved += router.times(n, Reason::MemorySlow);
            router.tell(&Message::Remove { endpoint: n.into() }, &[]);
        }
    }
    assert!(moved > u64::from(ROUNDS) / 2, "{moved}");
    // Threads end with their endpoints; the router and its first thread, which serves nobody any
    // more, do not.
    for (router, threads) in routers.into_iter().zip(threads) {
        eventually("the end of threads", || (router.threads() <= threads + 1).then_some(()));
    }
}

#[test]
fn endpoints_get_threads_on_one_node_and_nothing_stops() {
    let router = Router::start_impatient(&Arc::default());
    take_overs([&router; 2], false);
    take_overs([&router; 2], true);
}

#[test]
fn endpoints_get_threads_on_two_nodes_and_nothing_stops() {
    let net = Arc::default();
    let (one, two) = (Router::start_impatient(&net), Router::start_impatient(&net));
    take_overs([&one, &two], false);
    take_overs([&one, &two], true);
}

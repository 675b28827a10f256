//! What may go on while a worker falls asleep, and what looks at queue pairs cost.

use super::*;
use crate::endpoint::Endpoint;
use crate::objects::Context;
use crate::process::Process;

/// A loop with two contexts that are awake.
fn with_two() -> (Loop, [u32; 2]) {
    let shared: &'static Shared = Box::leak(Box::default());
    let epoll = Epoll::new().unwrap();
    let nudge = Nudge::of(&epoll).unwrap();
    let mut objects = Box::new(Objects::new(shared, Arc::new(epoll), nudge));
    let fd = || sys::eventfd().unwrap();
    let endpoint = objects.endpoints.insert(Endpoint::new(1, [[0; 16]; 2], fd()), 0).unwrap();
    let handles = [(), ()].map(|()| {
        let process = Arc::new(Process::new(endpoint, (1, fd())));
        let context = Context { awake: true, ..Context::new(endpoint, fd(), process) };
        objects.contexts.insert(context, 0).unwrap()
    });
    (Loop::new(objects, Arc::default(), Duration::ZERO), handles)
}

fn awake(all: &Loop, handles: [u32; 2]) -> [bool; 2] {
    handles.map(|handle| all.objects.contexts.get(handle).unwrap().awake)
}

#[test]
fn a_wake_up_in_the_middle_of_the_last_look_is_not_lost() {
    let (mut all, handles) = with_two();
    let now = Instant::now();
    // Another thread has the baton while this one copies, or a turn of one context wakes the
    // other; and nothing came of the look itself.
    let until = all.doze(0, now, handles.to_vec(), |all, _| {
        assert_eq!(all.contexts(0, true), handles);
        all.objects.contexts.get_mut(handles[1]).unwrap().awake = true;
        false
    });
    assert_eq!((until, awake(&all, handles)), (Doze::Wakes, [false, true]));
    let until = all.doze(0, now, handles.to_vec(), |_, until| {
        *until = Some(now);
        false
    });
    assert_eq!((until, awake(&all, handles)), (Doze::Sleeps(Some(now)), [false; 2]));
}

#[test]
fn who_has_work_does_not_sleep() {
    let (mut all, handles) = with_two();
    assert_eq!(all.doze(0, Instant::now(), handles.to_vec(), |_, _| true), Doze::Wakes);
    assert_eq!(awake(&all, handles), [true; 2]);
}

#[test]
fn a_worker_that_serves_another_one_by_now_leaves_all_awake() {
    let (mut all, handles) = with_two();
    let until = all.doze(0, Instant::now(), handles.to_vec(), |all, _| {
        all.worker.serve(7);
        false
    });
    assert_eq!((until, awake(&all, handles)), (Doze::Wakes, [true; 2]));
}

/// A connection of which another agent tells is not at a card that the one before has told of.
#[test]
fn a_card_is_told_of_by_the_agent_that_tells_of_the_connection() {
    let (mut all, _) = with_two();
    all.objects.hear_home(1, 3, &[[1; 16]]);
    all.drop_agent();
    assert!(all.objects.home.is_none());
}

/// A program has a thousand queue pairs that have nothing to do, and rings: while others have work
/// it gets no more looks in a round than are worth what others may do in it.
#[test]
fn looks_at_idle_queue_pairs_come_out_of_the_share_of_their_endpoint() {
    let (mut all, [handle, _]) = with_two();
    all.objects.contexts.get_mut(handle).unwrap().qps = (1..=1000).collect();
    let (now, mut until) = (Instant::now(), None);
    all.last_done = now;
    let mut rounds = Vec::new();
    for _ in 0..5 {
        let worked = all.turn(0, now, &mut until);
        let context = all.objects.contexts.get(handle).unwrap();
        rounds.push((worked, context.first, context.waits));
    }
    let cut = |first, waits| (true, first, waits);
    assert_eq!(rounds[..3], [cut(256, true), cut(512, true), cut(768, true)]);
    // All of them have been looked at by now.
    assert_eq!(rounds[3..], [cut(24, false), cut(280, false)]);
    // Nobody has had work for a while: all are looked at, so that the router can sleep.
    assert!(!all.turn(0, now + LOOKS_COST_FOR, &mut until));
    assert!(!all.objects.contexts.get(handle).unwrap().waits);
}

#[test]
fn a_request_that_waits_costs_as_much_as_one_that_is_done() {
    let waits = Turn { waits: true, ..Turn::default() };
    assert_eq!(cost(&waits), REQUEST_COST);
    assert_eq!(cost(&Turn { cost: 5 * REQUEST_COST, ..waits }), 5 * REQUEST_COST);
    assert_eq!(cost(&Turn::default()), LOOK_COST);
}

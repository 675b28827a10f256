//! What may go on while a worker falls asleep.

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

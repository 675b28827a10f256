//! For how long the router looks for work before it sleeps: as its endpoints say, and its operator.

mod support;

use support::{Router, pair_of, request, sending};
use verbs_protocol::agent::Limits;
use verbs_protocol::ibv;

/// More than an hour.
const FOR_EVER: u32 = u32::MAX;

/// Sends a message from one endpoint to another, and some more, each once the router sleeps if it
/// is to do so. Says how many system calls the programs have made for those to wake it.
fn rings(most: u32, wanted: u32, messages: usize, sleeps: bool) -> u64 {
    let router = Router::start_spinning(most);
    router.add(1, Limits { spin_us: wanted, ..Limits::default() });
    router.add(2, Limits::default());
    let (mut a, mut b) = pair_of([&router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let mut before = 0;
    for message in 0..=messages {
        if sleeps {
            router.await_rest();
        }
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
        if message == 0 {
            before = a.device.ringer.rings() + b.device.ringer.rings();
        }
    }
    a.device.ringer.rings() + b.device.ringer.rings() - before
}

#[test]
fn who_may_look_for_work_is_not_rung() {
    assert_eq!(rings(FOR_EVER, FOR_EVER, 100, false), 0);
}

#[test]
fn an_endpoint_that_wants_it_no_longer_has_it_sleep() {
    assert!(rings(FOR_EVER, 0, 20, true) >= 20);
}

#[test]
fn the_operator_says_for_how_long_at_most() {
    assert!(rings(0, FOR_EVER, 20, true) >= 20);
}

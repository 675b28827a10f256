//! Attacks, each on a module as it is, and on one that does without the protection that is said to
//! stop it: there it has to succeed, or it proves nothing. `cargo test --features attack`; without
//! the feature the module has no such switch, and the attacks say so.

mod support;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::flood::{Stop, connections, flood, linked};

/// Runs an attack with all protections, then without one.
fn attacked(protection: &str, attack: impl Fn(&str) -> bool) {
    assert!(!attack(""), "the attack succeeds although {protection} is in force");
    assert_eq!(attack(protection), cfg!(feature = "attack"), "without {protection}");
}

/// A greedy tenant is to have more of the module than its cap, beside another one that wants all
/// that it can have. What has come is compared with what the cap gives for the time that has
/// passed, so that a busy machine hides no attack that fails, and spoils one only by leaving a
/// megabyte a second to nobody.
#[test]
fn a_greedy_tenant_does_not_pass_its_cap() {
    const RATE: u64 = 1_000_000;
    attacked("caps", |without| {
        let start = Instant::now();
        let (mut a, mut b) = linked(without, 2, |tenant| {
            if tenant.head.tenant == 1 {
                tenant.limits.send_rate = RATE;
            }
        });
        let greedy = connections(&mut a, &mut b, 1, 8);
        let quiet = connections(&mut a, &mut b, 2, 1);
        let (done, taken, left) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let _stop = Stop(&done);
            flood(scope, &greedy, &taken, &done);
            flood(scope, &quiet, &left, &done);
            while start.elapsed() < Duration::from_secs(3) {
                std::thread::sleep(Duration::from_millis(10));
            }
            assert!(left.load(Ordering::Relaxed) > 0, "the other one gets nothing");
            let taken = u128::from(taken.load(Ordering::Relaxed));
            taken > start.elapsed().as_micros() * u128::from(RATE) / 1_000_000 * 2
        })
    });
}

//! Several tenants of one module: shares, accounts, and one that ends.

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use heddle_stack::abi::{
    STACK_CONNECT, STACK_TENANT_GONE, stack_options, stack_plain, stack_tenant,
};
use heddle_stack::client::Client;
use support::flood::{Stop, connection, connections, flood, linked};
use support::{at, eventually, tenant};

const TENANTS: u8 = 16;
/// Connections of the tenant that wants more than others.
const GREEDY: usize = 8;

#[test]
fn sixteen_tenants_share_a_module_and_pay_for_it() {
    let (mut a, mut b) = linked("", TENANTS, |_| ());
    let mut connections = Vec::new();
    for n in 1..=TENANTS {
        for _ in 0..if n == 1 { GREEDY } else { 1 } {
            connections.push((n, connection(&mut a, &mut b, n)));
        }
    }
    let got: Vec<AtomicU64> = (0..=TENANTS).map(|_| AtomicU64::new(0)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for (n, (from, to)) in &connections {
            let (got, done) = (&got[usize::from(*n)], &done);
            scope.spawn(move || {
                let bytes = vec![1; 64 << 10];
                while !done.load(Ordering::Relaxed) && (&*from).write_all(&bytes).is_ok() {}
                from.shutdown(std::net::Shutdown::Both).unwrap();
            });
            scope.spawn(move || {
                let mut bytes = vec![0; 64 << 10];
                while let Ok(n @ 1..) = (&*to).read(&mut bytes) {
                    got.fetch_add(n as u64, Ordering::Relaxed);
                }
            });
        }
        let _stop = Stop(&done);
        let sums = || -> Vec<u64> { got[1..].iter().map(|g| g.load(Ordering::Relaxed)).collect() };
        // While programs wait for a processor, and not for the module, who asks for more has more.
        // Of a module that has the kernel share the machine a second is too short to tell.
        let mut windows = 0;
        let mut before = sums();
        eventually("fair shares", || {
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(500) {
                std::thread::yield_now();
            }
            let now = sums();
            windows += 1;
            if windows < 3 {
                before = now;
                return None;
            }
            let bytes: Vec<u64> = now.iter().zip(&before).map(|(a, b)| a - b).collect();
            (jain(&bytes) >= 0.95).then_some(())
        });
        // The process has used at least what the tenants are charged with, and all but 5 % of it.
        let mut processor = |n: u8| a.client.stats(n.into()).unwrap().processor;
        let first = processor(0);
        let charged: u64 = (1..=TENANTS).map(&mut processor).sum();
        let last = processor(0);
        assert!(charged < last && charged > first * 19 / 20, "{first} {charged} {last}");
    });
}

#[test]
fn a_cap_of_the_processor_holds() {
    let (mut a, mut b) = linked("", TENANTS, |_| ());
    let mut capped = tenant(1);
    (capped.limits.processor, capped.offloads) = (100, 1);
    assert_eq!(a.client.tenant(capped, None).unwrap(), 0);
    let (from, to) = connection(&mut a, &mut b, 1);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![1; 64 << 10];
            while !done.load(Ordering::Relaxed) && (&from).write_all(&bytes).is_ok() {
                std::thread::yield_now();
            }
            from.shutdown(std::net::Shutdown::Both).unwrap();
        });
        scope.spawn(|| {
            let mut bytes = vec![0; 64 << 10];
            while let Ok(1..) = (&to).read(&mut bytes) {}
        });
        let _stop = Stop(&done);
        let begin = a.client.stats(1).unwrap().processor;
        let start = Instant::now();
        let span = eventually("two seconds", || {
            std::thread::sleep(Duration::from_millis(10));
            (start.elapsed() > Duration::from_secs(2)).then(|| start.elapsed())
        });
        let used = Duration::from_nanos(a.client.stats(1).unwrap().processor - begin);
        // A tenth, within 5 %, and a burst. What it asks for itself, as STATS, is a turn, too.
        assert!(used < span * 21 / 200 + Duration::from_millis(5), "{used:?} of {span:?}");
        assert!(used > span / 20, "{used:?} of {span:?}");
    });
}

/// What has come is never more than the rate gives for the time that has passed, by the clock that
/// buckets go by, and in some second it is no less than 95 % of that: in others the module may have
/// waited for a processor, and what a bucket has no room for is lost.
#[test]
fn caps_of_rates_hold_in_bytes() {
    const RATE: u64 = 4_000_000;
    const CONNECTIONS: usize = 4;
    // A fortieth of a second is a burst, of all connections together.
    let most_of = |by_now: u64| by_now + by_now / 20 + RATE / 40;
    for sends in [true, false] {
        let start = Instant::now();
        let cap = |tenant: &mut stack_tenant| {
            if sends {
                tenant.limits.send_rate = RATE;
            } else {
                tenant.limits.receive_rate = RATE;
            }
        };
        let (mut a, mut b) = linked("", 1, cap);
        let all = if sends {
            connections(&mut a, &mut b, 1, CONNECTIONS)
        } else {
            connections(&mut a, &mut b, 1, CONNECTIONS)
                .into_iter()
                .map(|(from, to)| (to, from))
                .collect()
        };
        let (done, got) = (AtomicBool::new(false), AtomicU64::new(0));
        // Bytes, and what there may be of them by now.
        let look = |since: Instant| {
            let bytes = got.load(Ordering::Relaxed);
            (bytes, u64::try_from(since.elapsed().as_micros()).unwrap() * RATE / 1_000_000)
        };
        std::thread::scope(|scope| {
            let _stop = Stop(&done);
            flood(scope, &all, &got, &done);
            let mut second = (Instant::now(), 0);
            eventually("a second at its cap", || {
                let (bytes, most) = look(start);
                assert!(bytes <= most_of(most), "{bytes} of {most}, sends: {sends}");
                let (now, most) = look(second.0);
                if most < RATE || start.elapsed() < Duration::from_secs(3) {
                    return None;
                }
                let here = now - second.1;
                second = (Instant::now(), now);
                (here >= most * 95 / 100 && here <= most * 105 / 100).then_some(())
            });
        });
    }
}

/// 1 if all are the same, a sixteenth if one has everything.
fn jain(shares: &[u64]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a ratio of what fits")]
    let shares: Vec<f64> = shares.iter().map(|s| *s as f64).collect();
    let count = f64::from(u32::try_from(shares.len()).unwrap());
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|s| s * s).sum();
    sum * sum / (count * squares)
}

#[test]
fn one_tenants_abuse_and_end_touch_no_other() {
    let (mut a, mut b) = linked("", TENANTS, |_| ());
    let (program, accepted) = connection(&mut a, &mut b, 2);
    let (hole, device) = Client::packet_pair().unwrap();
    let mut abuser = tenant(50);
    abuser.limits.connections = 64;
    a.tenant(abuser, device);
    // Its link is full of nonsense, and it connects to nowhere for all that it may have.
    let noise = hole.try_clone().unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = File::from(noise);
            let mut packet = vec![0x45; 1000];
            packet[0] = 0;
            while !done.load(Ordering::Relaxed) && file.write(&packet).is_ok() {
                std::thread::yield_now();
            }
        });
        let _stop = Stop(&done);
        let mut begun = Vec::new();
        for port in 1..200 {
            let to = at("10.9.0.51", port);
            begun.push(a.client.begin(50, to, stack_options::default()).unwrap());
        }
        let mut bytes = [0; 1000];
        for _ in 0..200 {
            (&program).write_all(&bytes).unwrap();
            (&accepted).read_exact(&mut bytes).unwrap();
        }
        let stats = a.client.stats(50).unwrap();
        assert!(stats.drop_malformed + stats.drop_protocol + stats.drop_checksum > 0, "{stats:?}");
        let head = a.client.head(STACK_TENANT_GONE, 50, 0);
        let gone = stack_plain { head };
        assert_eq!(a.client.ask(&gone, None).unwrap().head.error, 0);
        drop(hole);
        (&program).write_all(&bytes).unwrap();
        (&accepted).read_exact(&mut bytes).unwrap();
        let mut refused = 0;
        for (id, _program) in begun {
            let answer = a.client.answer(STACK_CONNECT, id).unwrap();
            refused += u32::from(answer.head.error == libc::EAGAIN);
            assert!(matches!(answer.head.error, libc::EAGAIN | libc::ECONNABORTED), "{answer:?}");
        }
        assert_eq!(refused, 199 - 64);
    });
    assert_eq!(a.client.stats(0).unwrap().tenants, u64::from(TENANTS));
}

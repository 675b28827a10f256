//! Several tenants of one module: shares, accounts, and one that ends.

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use heddle_stack::abi::{STACK_CONNECT, STACK_TENANT_GONE, stack_options, stack_plain};
use heddle_stack::client::Client;
use support::{Module, WAIT_TIMEOUT, at, eventually, tenant};

const TENANTS: u8 = 16;
/// Connections of the tenant that wants more than others.
const GREEDY: usize = 8;

/// Tenants 1 to 16 at one module, and 101 to 116 at another, linked two by two.
fn tenants() -> (Module, Module) {
    let (mut a, mut b) = (Module::start(), Module::start());
    for n in 1..=TENANTS {
        let (left, right) = Client::packet_pair().unwrap();
        let (mut one, mut two) = (tenant(n), tenant(100 + n));
        (one.offloads, two.offloads) = (1, 1);
        a.tenant(one, left);
        b.tenant(two, right);
    }
    (a, b)
}

/// Ends the threads of a test, also of one that fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A connection of tenant n, from the first module to the second.
fn connection(a: &mut Module, b: &mut Module, n: u8) -> (UnixStream, UnixStream) {
    let far = 100 + n;
    let (listener, address) =
        b.client.listen(far.into(), at("0.0.0.0", 0), 0, 16).unwrap().unwrap();
    let to = at(&format!("10.9.0.{far}"), address.port);
    let (_, program) = a.client.connect(n.into(), to, stack_options::default()).unwrap().unwrap();
    let (_, accepted) = b.client.accept(listener).unwrap();
    for stream in [&program, &accepted] {
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(WAIT_TIMEOUT)).unwrap();
    }
    (program, accepted)
}

#[test]
fn sixteen_tenants_share_a_module_and_pay_for_it() {
    let (mut a, mut b) = tenants();
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
    let (mut a, mut b) = tenants();
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
    let (mut a, mut b) = tenants();
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

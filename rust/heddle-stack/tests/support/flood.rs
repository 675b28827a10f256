//! Tenants that send as much as they can.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Scope;

use heddle_stack::abi::{stack_options, stack_tenant};
use heddle_stack::client::Client;

use super::{Module, WAIT_TIMEOUT, at, tenant};

/// Tenants 1 to `count` at one module, which `change` has changed, and 101 and so on at another,
/// linked two by two.
pub(crate) fn linked(
    without: &str,
    count: u8,
    change: impl Fn(&mut stack_tenant),
) -> (Module, Module) {
    let (mut a, mut b) = (Module::start_without(without), Module::start_without(without));
    for n in 1..=count {
        let (left, right) = Client::packet_pair().unwrap();
        let (mut one, mut two) = (tenant(n), tenant(100 + n));
        (one.offloads, two.offloads) = (1, 1);
        change(&mut one);
        a.tenant(one, left);
        b.tenant(two, right);
    }
    (a, b)
}

/// A connection of tenant n, from the first module to the second.
pub(crate) fn connection(a: &mut Module, b: &mut Module, n: u8) -> (UnixStream, UnixStream) {
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

/// So many of them, of which no call waits.
pub(crate) fn connections(
    a: &mut Module,
    b: &mut Module,
    n: u8,
    count: usize,
) -> Vec<(UnixStream, UnixStream)> {
    let all: Vec<_> = (0..count).map(|_| connection(a, b, n)).collect();
    for stream in all.iter().flat_map(|(from, to)| [from, to]) {
        stream.set_nonblocking(true).unwrap();
    }
    all
}

/// Ends the threads of a test, also of one that fails.
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Has a thread write to all connections, and one read at their other ends, until it is done.
pub(crate) fn flood<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    all: &'env [(UnixStream, UnixStream)],
    got: &'env AtomicU64,
    done: &'env AtomicBool,
) {
    scope.spawn(move || {
        let bytes = vec![1; 64 << 10];
        while !done.load(Ordering::Relaxed) {
            for (from, _) in all {
                let _ = (&*from).write(&bytes); // or it has no room
            }
            std::thread::yield_now();
        }
    });
    scope.spawn(move || {
        let mut bytes = vec![0; 64 << 10];
        while !done.load(Ordering::Relaxed) {
            for (_, to) in all {
                let read = (&*to).read(&mut bytes).unwrap_or(0); // or nothing has come
                got.fetch_add(read as u64, Ordering::Relaxed);
            }
            std::thread::yield_now();
        }
    });
}

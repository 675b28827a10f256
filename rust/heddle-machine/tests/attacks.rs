//! Attacks of a guest on its service, each with a protection and without it. `cargo test --features
//! attack`; without the feature there is no such switch, and the attacks say so.

mod support;

use core::mem::offset_of;
use core::sync::atomic::{AtomicUsize, Ordering};
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use heddle_machine::nqe;
use heddle_stack::queues::abi::*;
use support::{CAPACITY, Machine, attacked};

/// Whether a peer reads anything, which nobody wrote.
fn reads_something(mut machine: Machine, mut peer: std::net::TcpStream) -> bool {
    let reader = std::thread::spawn(move || matches!(peer.read(&mut [0; 64]), Ok(1..)));
    machine.until(|_| reader.is_finished().then_some(())).unwrap();
    reader.join().unwrap()
}

#[test]
fn a_counter_of_bytes_that_cannot_be_sends_nothing() {
    attacked("a_counter_of_bytes_that_cannot_be_sends_nothing", "counters", || {
        let mut machine = Machine::new();
        let (done, peer) = machine.connection();
        let at = machine.stream_at(done.stream);
        machine.poke64(at + offset_of!(queues_stream, out_produced), u64::from(CAPACITY) * 9 + 5);
        machine.push(queues_nqe { generation: done.generation, ..nqe::job(QUEUES_SEND, 2) });
        reads_something(machine, peer)
    });
}

#[test]
fn a_counter_of_room_that_cannot_be_ends_the_connection() {
    attacked("a_counter_of_room_that_cannot_be_ends_the_connection", "counters", || {
        let mut machine = Machine::new();
        let (done, _peer) = machine.connection();
        let at = machine.stream_at(done.stream);
        machine.poke64(at + offset_of!(queues_stream, in_consumed), 77);
        machine.push(queues_nqe { generation: done.generation, ..nqe::job(QUEUES_RECEIVE, 2) });
        machine.push(nqe::job(QUEUES_NOTHING, 0));
        machine.told(|n| nqe::operation(n) == QUEUES_NOTHING | QUEUES_DONE);
        machine.step();
        machine.service.counts.broken_streams == 0
    });
}

#[test]
fn what_else_listens_in_the_container_is_out_of_reach() {
    attacked("what_else_listens_in_the_container_is_out_of_reach", "own", || {
        let console = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut machine = Machine::new();
        machine.socket(1);
        let to = console.local_addr().unwrap();
        let done = machine.ask(nqe::named(nqe::job(QUEUES_CONNECT, 1), to));
        assert!([0, libc::ECONNREFUSED].contains(&done.error), "{done:?}");
        let refused = machine.service.counts.refused_own;
        assert_eq!(refused, u64::from(done.error != 0));
        done.error == 0
    });
}

#[test]
fn a_guest_has_so_many_sockets_and_no_more() {
    attacked("a_guest_has_so_many_sockets_and_no_more", "sockets", || {
        let mut machine = Machine::new();
        let most = machine.guest.layout.streams * 4;
        assert!((1..=most).all(|number| machine.socket(number) == 0));
        let error = machine.socket(most + 1);
        assert_eq!(machine.service.counts.refused_sockets, u64::from(error != 0));
        error == 0
    });
}

#[test]
fn an_index_that_cannot_be_ends_the_region() {
    attacked("an_index_that_cannot_be_ends_the_region", "indices", || {
        let mut machine = Machine::new();
        machine.ask(nqe::job(QUEUES_NOTHING, 0));
        let jobs = usize::try_from(machine.peek64(offset_of!(queues_header, jobs_at))).unwrap();
        machine.poke32(jobs + 128, 1 << 20); // `produced`
        let before = machine.service.counts.jobs;
        machine.until(|m| (m.service.counts.jobs > before || m.guest.is_over()).then_some(()));
        machine.service.counts.jobs > before
    });
}

/// What is said of numbers that are nobody's, or of another generation.
#[test]
fn numbers_of_others_are_refused() {
    let mut machine = Machine::new();
    let (done, mut peer) = machine.connection();
    let generation = done.generation;
    for (job, error) in [
        (nqe::job(QUEUES_CLOSE, 9), libc::EBADF),
        (nqe::job(QUEUES_LISTEN, 9), libc::EBADF),
        (nqe::job(QUEUES_CLOSE, 2), libc::ESTALE),
        (queues_nqe { generation: generation + 1, ..nqe::job(QUEUES_CLOSE, 2) }, libc::ESTALE),
        (queues_nqe { generation, offset: 1, ..nqe::job(QUEUES_CLOSE, 2) }, libc::EINVAL),
        (queues_nqe { generation, offset: u64::MAX, ..nqe::job(QUEUES_SHUTDOWN, 2) }, libc::EINVAL),
        (queues_nqe { length: 4, ..nqe::job(QUEUES_SOCKET, 2) }, libc::EEXIST),
        (queues_nqe { length: 4, ..nqe::job(QUEUES_SOCKET, 0) }, libc::EINVAL),
        (queues_nqe { length: 5, ..nqe::job(QUEUES_SOCKET, 9) }, libc::EINVAL),
        (queues_nqe { length: 1, ..nqe::job(QUEUES_ACCEPT, 1) }, libc::EEXIST),
        (queues_nqe { length: 9, ..nqe::job(QUEUES_ACCEPT, 2) }, libc::EINVAL),
        (nqe::job(QUEUES_CONNECT, 2), libc::EISCONN),
        (nqe::job(99, 2), libc::EPROTO),
        (queues_nqe { option: 999, ..nqe::job(QUEUES_SET, 2) }, libc::EPROTO),
    ] {
        assert_eq!(machine.ask(job).error, error, "{job:?}");
    }
    for operation in [QUEUES_SEND, QUEUES_RECEIVE] {
        machine.push(queues_nqe { generation: 7, ..nqe::job(operation, 2) });
        machine.push(nqe::job(operation, 4));
    }
    let before = machine.service.counts.refused_job;
    assert_eq!(machine.ask(nqe::job(QUEUES_NOTHING, 0)).error, 0);
    assert_eq!(machine.service.counts.refused_job, before + 4);
    // The connection has not noticed.
    let close = queues_nqe { generation, ..nqe::job(QUEUES_CLOSE, 2) };
    assert_eq!(machine.ask(close).error, 0);
    assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
}

/// A guest that changes an nqe while it is read has one or the other done, and is told of that.
#[test]
fn a_changed_nqe_is_one_or_the_other() {
    let mut machine = Machine::new();
    let jobs = usize::try_from(machine.peek64(offset_of!(queues_header, jobs_at))).unwrap();
    let place = jobs + 384 + offset_of!(queues_nqe, socket);
    let at = Arc::new(AtomicUsize::new(place));
    let (changer, seen) = (machine.changer(), Arc::clone(&at));
    let changing = std::thread::spawn(move || {
        while let at @ 1.. = seen.load(Ordering::Relaxed) {
            changer(at, 1);
            changer(at, 3);
        }
    });
    // Each nqe lies in the next slot, and none comes to a slot again.
    for round in 0..machine.guest.layout.slots / 2 {
        let slot = usize::try_from(2 * round).unwrap() * 64;
        at.store(place + slot, Ordering::Relaxed);
        machine.push(queues_nqe { length: 4, ..nqe::job(QUEUES_SOCKET, 1) });
        let done = machine.told(|n| nqe::operation(n) == QUEUES_SOCKET | QUEUES_DONE);
        assert!([1, 3].contains(&done.socket) && done.error == 0, "{done:?}");
        assert_eq!(machine.ask(nqe::job(QUEUES_CLOSE, done.socket)).error, 0);
    }
    at.store(0, Ordering::Relaxed);
    changing.join().unwrap();
}

/// A guest that is silent after it had a connection: the peer reads a reset, and another guest
/// begins with nothing.
#[test]
fn a_region_is_used_again() {
    let mut machine = Machine::new();
    let (_, mut peer) = machine.connection();
    machine.service.begin_anew().unwrap();
    assert!(machine.guest.is_over());
    let error = peer.read(&mut [0; 1]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    machine.meet_again();
    let (done, _peer) = machine.connection();
    assert_eq!((done.error, done.stream), (0, 0));
}

/// An address of the other family is refused, and one that nobody has.
#[test]
fn addresses_are_checked() {
    let mut machine = Machine::new();
    assert_eq!(machine.socket(1), 0);
    for (to, error) in [("[fd00::1]:80", libc::EAFNOSUPPORT), ("192.0.2.1:80", libc::EADDRNOTAVAIL)]
    {
        let to: SocketAddr = to.parse().unwrap();
        assert_eq!(machine.ask(nqe::named(nqe::job(QUEUES_BIND, 1), to)).error, error, "{to}");
    }
}

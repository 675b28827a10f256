//! The service of queues and guests of it, over the machine's loopback.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod queues_support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::guest::{Connection, Guest};
use heddle_stack::queues::memory::View;
use heddle_stack::queues::{ROUND, proto};

use queues_support::*;

fn connect(agent: &mut Agent, guest: &mut Guest, socket: u32, to: &TcpListener) -> Connection {
    agent.call(guest, queues_nqe { length: 4, ..job(QUEUES_SOCKET, socket) }).unwrap();
    let mut ask = job(QUEUES_CONNECT, socket);
    proto::name(&mut ask, to.local_addr().unwrap());
    let done = guest.call(ask).unwrap();
    let (stream, generation) = (done.stream, done.generation);
    Connection { socket, stream, generation, sent: 0, received: 0 }
}

fn close(guest: &mut Guest, c: &Connection) {
    let (generation, offset) = (c.generation, c.sent);
    guest.call(queues_nqe { generation, offset, ..job(QUEUES_CLOSE, c.socket) }).unwrap();
}

fn both_ways(flags: u32) {
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL | flags);
    let mut guest = Guest::open(&life).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut c = connect(&mut agent, &mut guest, 5, &listener);
    let (mut peer, from) = listener.accept().unwrap();
    let named = guest.call(job(QUEUES_NAME, 5)).unwrap();
    assert_eq!(proto::address(&named), from);
    let echo = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        peer.write_all(&all).unwrap();
    });
    let bytes = pattern(1 << 20);
    guest.send(&mut c, &bytes).unwrap();
    let (generation, offset) = (c.generation, c.sent);
    let half =
        queues_nqe { generation, offset, length: QUEUES_SHUT_WRITE, ..job(QUEUES_SHUTDOWN, 5) };
    guest.call(half).unwrap();
    let mut back = Vec::new();
    loop {
        let some = guest.receive(&mut c).unwrap();
        if some.is_empty() {
            break;
        }
        back.extend(some);
    }
    assert!(back == bytes, "other bytes came back: {} of {}", back.len(), bytes.len());
    echo.join().unwrap();
    close(&mut guest, &c);
    let stats = agent.stats(1);
    assert_eq!((stats.bytes_sent, stats.bytes_received, stats.connections), (1 << 20, 1 << 20, 0));
    let all = agent.stats(0).processor;
    assert!((1..=all).contains(&stats.processor), "{} of {all} ns", stats.processor);
    drop(life);
    agent.await_gone(1);
}

#[test]
fn a_guest_connects_sends_a_megabyte_and_gets_it_back() {
    both_ways(0);
}

#[test]
fn the_same_without_doorbells() {
    both_ways(QUEUES_POLLED);
}

#[test]
fn a_guest_listens_and_accepts() {
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL);
    let mut guest = Guest::open(&life).unwrap();
    agent.call(&mut guest, queues_nqe { length: 4, ..job(QUEUES_SOCKET, 1) }).unwrap();
    let reuse = queues_nqe {
        option: u16::try_from(QUEUES_OPTION_REUSE_ADDRESS).unwrap(),
        credit: 1,
        ..job(QUEUES_SET, 1)
    };
    guest.call(reuse).unwrap();
    assert_eq!(guest.call(queues_nqe { operation: 8, ..reuse }).unwrap().credit, 1);
    let mut bind = job(QUEUES_BIND, 1);
    proto::name(&mut bind, "127.0.0.1:0".parse().unwrap());
    let at = proto::address(&guest.call(bind).unwrap());
    let named = guest.call(queues_nqe { credit: 8, ..job(QUEUES_LISTEN, 1) }).unwrap();
    assert_eq!(proto::address(&named), at);
    // Ahead of the connection, and after it.
    let first = guest.push(queues_nqe { length: 100, ..job(QUEUES_ACCEPT, 1) }).unwrap();
    let mut a = TcpStream::connect(at).unwrap();
    let done = guest.wait(|n| n.sequence == first).unwrap();
    assert_eq!((done.error, done.length), (0, 100));
    assert_eq!(proto::address(&done), a.local_addr().unwrap());
    let b = TcpStream::connect(at).unwrap();
    let second = guest.call(queues_nqe { length: 101, ..job(QUEUES_ACCEPT, 1) }).unwrap();
    assert_eq!(proto::address(&second), b.local_addr().unwrap());
    let same = guest.call(queues_nqe { length: 101, ..job(QUEUES_ACCEPT, 1) });
    assert_eq!(errno(same), libc::EEXIST);
    // What is under way when the listener closes ends before it.
    let third = guest.push(queues_nqe { length: 102, ..job(QUEUES_ACCEPT, 1) }).unwrap();
    guest.call(job(QUEUES_CLOSE, 1)).unwrap();
    assert_eq!(guest.wait(|n| n.sequence == third).unwrap().error, libc::ECONNABORTED);
    // A reset is told.
    let (socket, stream, generation) = (100, done.stream, done.generation);
    let mut c = Connection { socket, stream, generation, sent: 0, received: 0 };
    a.write_all(b"hello").unwrap();
    assert_eq!(guest.receive(&mut c).unwrap(), b"hello");
    guest.send(&mut c, b"unread").unwrap();
    let mut one = [0];
    a.read_exact(&mut one).unwrap();
    drop(a);
    assert_eq!(errno(guest.receive(&mut c)), libc::ECONNRESET);
    let ended = guest.wait(|n| u32::from(n.operation) == QUEUES_ENDED).unwrap();
    assert_eq!((ended.socket, ended.error), (100, libc::ECONNRESET));
    close(&mut guest, &c);
}

#[test]
fn a_connect_that_fails_leaves_the_socket() {
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL);
    let mut guest = Guest::open(&life).unwrap();
    agent.call(&mut guest, queues_nqe { length: 6, ..job(QUEUES_SOCKET, 1) }).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    drop(listener);
    let mut ask = job(QUEUES_CONNECT, 1);
    proto::name(&mut ask, at);
    assert_eq!(errno(guest.call(ask)), libc::ECONNREFUSED);
    let listener = TcpListener::bind(at).unwrap();
    let done = guest.call(ask).unwrap();
    assert_eq!(listener.accept().unwrap().1, proto::address(&done));
}

#[test]
fn given_connections_are_flushed_when_their_guest_has_gone() {
    let mut agent = Agent::new();
    let life = agent.region(7, 0);
    let mut guest = Guest::open(&life).unwrap();
    let (ours, mut peer) = connected();
    let fd = OwnedFd::from(ours);
    let mut c = agent.give(7, &fd).unwrap();
    let bytes = pattern(CAPACITY as usize);
    assert_eq!(guest.put(&mut c, &bytes).unwrap(), bytes.len());
    // A guest that is killed says nothing.
    drop((guest, life, fd));
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert!(got == bytes, "{} bytes", got.len());
    agent.await_gone(7);
}

#[test]
fn shutdown_and_close_come_after_the_bytes_before_them() {
    let mut agent = Agent::new();
    let life = agent.region(7, 0);
    let mut guest = Guest::open(&life).unwrap();
    let (ours, mut peer) = connected();
    let fd = OwnedFd::from(ours);
    let mut c = agent.give(7, &fd).unwrap();
    guest.put(&mut c, b"before").unwrap();
    let (generation, offset) = (c.generation, c.sent);
    let half = queues_nqe {
        generation,
        offset,
        length: QUEUES_SHUT_WRITE,
        ..job(QUEUES_SHUTDOWN, c.socket)
    };
    guest.call(half).unwrap();
    let mut got = Vec::new();
    peer.read_to_end(&mut got).unwrap();
    assert_eq!(got, b"before");
    peer.write_all(b"back").unwrap();
    peer.shutdown(Shutdown::Write).unwrap();
    // What comes is the program's, by its own descriptor.
    let mut program = TcpStream::from(fd);
    let mut back = Vec::new();
    program.read_to_end(&mut back).unwrap();
    assert_eq!(back, b"back");
    close(&mut guest, &c);
    let again = agent.give(7, &OwnedFd::from(program)).unwrap();
    assert_eq!((again.stream, again.generation), (c.stream, c.generation + 1));
}

#[test]
fn what_is_wrong_is_an_error_and_nothing_more() {
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL);
    let mut guest = Guest::open(&life).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut c = connect(&mut agent, &mut guest, 5, &listener);
    let (mut peer, _) = listener.accept().unwrap();
    let close = job(QUEUES_CLOSE, 5);
    for (nqe, want) in [
        (job(99, 5), libc::EPROTO),
        (job(0, 5), libc::EPROTO),
        (job(QUEUES_CLOSE, 6), libc::EBADF),
        (queues_nqe { generation: c.generation + 1, ..close }, libc::ESTALE),
        (queues_nqe { generation: c.generation, offset: 1, ..close }, libc::EINVAL),
        (queues_nqe { generation: c.generation, offset: u64::MAX, ..close }, libc::EINVAL),
        (
            queues_nqe { generation: c.generation, length: 3, ..job(QUEUES_SHUTDOWN, 5) },
            libc::EINVAL,
        ),
        (queues_nqe { length: 4, ..job(QUEUES_SOCKET, 5) }, libc::EEXIST),
        (queues_nqe { length: 4, ..job(QUEUES_SOCKET, 0) }, libc::EBADF),
        (queues_nqe { length: 5, ..job(QUEUES_SOCKET, 8) }, libc::EAFNOSUPPORT),
        (queues_nqe { length: 9, ..job(QUEUES_ACCEPT, 5) }, libc::EINVAL),
        (queues_nqe { option: 77, ..job(QUEUES_SET, 5) }, libc::EPROTO),
        (job(QUEUES_CONNECT, 5), libc::EISCONN),
    ] {
        assert_eq!(errno(guest.call(nqe)), want, "{nqe:?}");
    }
    // The connection does not notice.
    guest.send(&mut c, b"still there").unwrap();
    let mut got = [0; 11];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still there");
    // Quiet ones say nothing, and are counted.
    let before = agent.stats(1).refused;
    let quiet = u8::try_from(QUEUES_QUIET).unwrap();
    guest.push(queues_nqe { flags: quiet, ..job(99, 5) }).unwrap();
    guest.call(job(QUEUES_NOTHING, 0)).unwrap();
    assert_eq!(agent.stats(1).refused, before + 1);
}

#[test]
fn a_region_without_control_makes_no_sockets() {
    let mut agent = Agent::new();
    let life = agent.region(1, 0);
    let mut guest = Guest::open(&life).unwrap();
    let refused = guest.call(queues_nqe { length: 4, ..job(QUEUES_SOCKET, 1) });
    assert_eq!(errno(refused), libc::EOPNOTSUPP);
    let (ours, _peer) = connected();
    let fd = OwnedFd::from(ours);
    for _ in 0..STREAMS {
        agent.give(1, &fd).unwrap();
    }
    assert_eq!(errno(agent.give(1, &fd)), libc::ENOBUFS);
    assert_eq!(errno(agent.give(2, &fd)), libc::ENOENT);
}

#[test]
fn a_counter_that_cannot_be_resets_its_connection_alone() {
    use std::sync::atomic::Ordering;
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL);
    let mut guest = Guest::open(&life).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let wild = connect(&mut agent, &mut guest, 1, &listener);
    let (mut reset, _) = listener.accept().unwrap();
    let mut good = connect(&mut agent, &mut guest, 2, &listener);
    let (mut peer, _) = listener.accept().unwrap();
    let beyond = u64::from(CAPACITY) + 1;
    guest.view.out_produced(wild.stream).store(beyond, Ordering::Release);
    let generation = wild.generation;
    guest.push(queues_nqe { generation, ..job(QUEUES_SEND, 1) }).unwrap();
    let ended = guest.wait(|n| u32::from(n.operation) == QUEUES_ENDED).unwrap();
    assert_eq!((ended.socket, ended.error), (1, libc::ECONNRESET));
    let _ = reset.read(&mut [0; 16]); // the end, or a reset
    guest.send(&mut good, b"unharmed").unwrap();
    let mut got = [0; 8];
    peer.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"unharmed");
}

#[test]
fn a_guest_that_ends_with_a_counter_that_cannot_be_leaves_nothing() {
    use std::sync::atomic::Ordering;
    let mut agent = Agent::new();
    let life = agent.region(1, QUEUES_CONTROL);
    let mut guest = Guest::open(&life).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let wild = connect(&mut agent, &mut guest, 1, &listener);
    let (mut reset, _) = listener.accept().unwrap();
    let beyond = u64::from(CAPACITY) + 1;
    guest.view.out_produced(wild.stream).store(beyond, Ordering::Release);
    drop((guest, life));
    agent.await_gone(1);
    let _ = reset.read(&mut [0; 16]); // the end, or a reset: it does not wait
}

#[test]
fn a_wild_index_ends_the_region_and_no_other() {
    let mut agent = Agent::new();
    let (life, other) = (agent.region(1, QUEUES_CONTROL), agent.region(2, 0));
    let mut guest = Guest::open(&life).unwrap();
    let mut second = Guest::open(&other).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    connect(&mut agent, &mut guest, 1, &listener);
    let (mut peer, _) = listener.accept().unwrap();
    // The producer's index is the ring's word 128.
    let index = guest.view.layout.jobs + 128;
    let word = guest.view.memory().as_ptr().as_ptr().wrapping_byte_add(index).cast::<[u8; 4]>();
    // SAFETY: it lies in the region, as a hostile guest has it.
    unsafe { word.write_volatile([0, 0, 0, 64]) };
    guest.push(job(QUEUES_NOTHING, 0)).ok();
    // SAFETY: as above.
    unsafe { word.write_volatile([0, 0, 0, 64]) };
    agent.await_gone(1);
    let _ = peer.read(&mut [0; 16]);
    second.call(job(QUEUES_NOTHING, 0)).unwrap();
}

#[test]
fn completions_that_nobody_takes_hold_up_that_guest_alone() {
    let mut agent = Agent::new();
    let (life, other) = (agent.region(1, QUEUES_CONTROL), agent.region(2, 0));
    let mut lazy = Guest::open(&life).unwrap();
    let mut second = Guest::open(&other).unwrap();
    let mut pushed = 0_u64;
    // Until neither ring has room.
    while pushed < 10 * u64::from(SLOTS) {
        match lazy.push(job(QUEUES_NOTHING, 0)) {
            Ok(_) => pushed += 1,
            Err(_) if agent.stats(1).jobs > u64::from(SLOTS) => break,
            Err(_) => {}
        }
    }
    assert!(pushed < 10 * u64::from(SLOTS), "nobody held it up");
    second.call(job(QUEUES_NOTHING, 0)).unwrap();
    // All are answered once there is room.
    for sequence in 1..=u32::try_from(pushed).unwrap() {
        lazy.wait(|n| n.sequence == sequence).unwrap();
    }
}

#[test]
fn regions_that_the_agent_ends_are_gone() {
    let mut agent = Agent::new();
    let life = agent.region(1, 0);
    let guest = Guest::open(&life).unwrap();
    let (ours, mut peer) = connected();
    agent.give(1, &OwnedFd::from(ours)).unwrap();
    assert_eq!(agent.ask(QUEUES_STOP, 1, 1).head.error, 0);
    let stop = heddle_stack::queues::memory::HeaderWord::Stop;
    assert_eq!(guest.view.header(stop).load(std::sync::atomic::Ordering::Relaxed), 1);
    assert_eq!(agent.ask(QUEUES_STOP, 9, 1).head.error, libc::ENOENT);
    agent.ask(QUEUES_REGION_GONE, 1, 0);
    agent.await_gone(1);
    peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(peer.read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn who_waits_for_room_wakes_when_the_agent_ends_the_region() {
    use std::sync::atomic::Ordering;
    let mut agent = Agent::new();
    let life = agent.region(1, 0);
    let mut guest = Guest::open(&life).unwrap();
    let (ours, _peer) = connected();
    let mut c = agent.give(1, &OwnedFd::from(ours)).unwrap();
    let (view, stream) = (View::new(guest.view.memory().clone(), guest.view.layout), c.stream);
    let (told, woke) = std::sync::mpsc::channel();
    let bytes = pattern(CAPACITY as usize);
    std::thread::spawn(move || {
        while guest.view.state(c.stream).load(Ordering::Acquire) == QUEUES_STREAM_USED {
            if guest.put(&mut c, &bytes).unwrap() == 0 {
                guest.wait_for_room(&c);
            }
        }
        told.send(()).unwrap();
    });
    // The socket takes nothing more, and the ring is full.
    let mut before = agent.stats(1).bytes_sent;
    let mut same = 0;
    while same < 100 {
        let now = agent.stats(1).bytes_sent;
        let waits = view.out_waiting(stream).load(Ordering::Relaxed) == 1;
        same = if now == before && now > 0 && waits { same + 1 } else { 0 };
        before = now;
    }
    agent.ask(QUEUES_REGION_GONE, 1, 0);
    woke.recv_timeout(Duration::from_secs(10)).unwrap();
}

/// A container with many processes has the rings of all their connections full; another one's write
/// waits for no more than one round of it, and none of its own processes is left out. Who has had
/// how much is counted, and no matter of time.
#[test]
fn a_container_does_not_hold_up_another_one_by_its_connections() {
    const REGIONS: u64 = 16;
    let mut agent = Agent::new();
    let mut guests = Vec::new();
    for id in 1..=REGIONS {
        let life = agent.region_of(1, id, 0);
        let ends: Vec<_> = (0..STREAMS).map(|_| UnixStream::pair().unwrap()).collect();
        let give = |(a, b): (UnixStream, UnixStream)| (agent.give(id, &a.into()).unwrap(), b);
        let connections: Vec<_> = ends.into_iter().map(give).collect();
        guests.push((Guest::open(&life).unwrap(), connections, life));
    }
    let life = agent.region_of(2, REGIONS + 1, 0);
    let (a, _b) = UnixStream::pair().unwrap();
    let mut quiet = agent.give(REGIONS + 1, &a.into()).unwrap();
    let mut other = Guest::open(&life).unwrap();
    let mut service = agent.stopped();
    let full = vec![7; CAPACITY as usize];
    for (guest, connections, _) in &mut guests {
        for (c, _) in connections {
            assert_eq!(guest.put(c, &full).unwrap(), full.len());
        }
    }
    assert_eq!(other.put(&mut quiet, &[1; 200]).unwrap(), 200);
    let sent = |guest: &Guest, c: &Connection| {
        guest.view.out_consumed(c.stream).load(std::sync::atomic::Ordering::Relaxed)
    };
    let of = |(guest, connections, _): &(Guest, Vec<(Connection, UnixStream)>, OwnedFd)| {
        connections.iter().map(|(c, _)| sent(guest, c)).sum::<u64>()
    };
    while sent(&other, &quiet) < 200 {
        service.step(Some(Duration::ZERO)).unwrap();
    }
    let before: u64 = guests.iter().map(of).sum();
    assert!(before <= ROUND as u64, "{before} bytes went before it");
    // Three of its processes have more than a round's bytes, again and again.
    for _ in 0..2 * REGIONS {
        service.step(Some(Duration::ZERO)).unwrap();
        for (guest, connections, _) in &mut guests[..3] {
            for (c, peer) in connections {
                peer.set_nonblocking(true).unwrap();
                while peer.read(&mut vec![0; 1 << 18]).is_ok() {}
                guest.put(c, &full).unwrap();
            }
        }
    }
    assert!(
        guests
            .iter()
            .all(|g| of(g) == full.len() as u64 * u64::from(STREAMS) || of(g) > ROUND as u64)
    );
}

//! Two modules whose tenants' devices are linked: what programs see of each other.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::Duration;

use heddle_stack::abi::*;
use heddle_stack::client::Client;
use support::*;

#[test]
fn ten_megabytes_go_both_ways_and_both_ends_close() {
    for offloads in [0, 1] {
        let (mut a, mut b) = two(|t| t.offloads = offloads);
        let c = connected(&mut a, &mut b, stack_options::default());
        let (there, back) = (pattern(10 << 20, 1), pattern(10 << 20, 2));
        std::thread::scope(|scope| {
            let far = scope.spawn(|| exchange(&c.to.1, &back));
            assert!(exchange(&c.from.1, &there) == back);
            assert!(far.join().unwrap() == there);
        });
        for (module, id) in [(&mut a, c.from.0), (&mut b, c.to.0)] {
            let end = module.client.ended(id).unwrap();
            assert_eq!(
                (end.head.error, end.bytes_sent, end.bytes_received),
                (0, 10 << 20, 10 << 20)
            );
        }
        let stats = a.client.stats(1).unwrap();
        assert_eq!(
            (stats.bytes_sent, stats.bytes_received, stats.connected),
            (10 << 20, 10 << 20, 1)
        );
        assert!(
            stats.processor > 0 && stats.drop_malformed + stats.drop_checksum == 0,
            "{stats:?}"
        );
    }
}

#[test]
fn a_half_closed_connection_goes_on_the_other_way() {
    let (mut a, mut b) = two(|_| {});
    let c = connected(&mut a, &mut b, stack_options::default());
    (&c.from.1).write_all(b"question").unwrap();
    c.from.1.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    (&c.to.1).read_to_end(&mut got).unwrap();
    assert_eq!(got, b"question");
    let state = b.client.info(2, c.to.0).unwrap().unwrap().state;
    assert_eq!(state, 8, "CLOSE-WAIT");
    let answer = pattern(1 << 20, 3);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (&c.to.1).write_all(&answer).unwrap();
            c.to.1.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        (&c.from.1).read_to_end(&mut got).unwrap();
        assert!(got == answer);
    });
    assert_eq!(a.client.ended(c.from.0).unwrap().head.error, 0);
    assert_eq!(b.client.ended(c.to.0).unwrap().head.error, 0);
}

fn is_reset(mut stream: &std::os::unix::net::UnixStream) -> bool {
    let mut rest = [0; 4096];
    loop {
        match stream.read(&mut rest) {
            Ok(1..) => {}
            Ok(_) => return false,
            Err(err) => return err.kind() == ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn a_program_that_leaves_data_unread_resets() {
    let (mut a, mut b) = two(|_| {});
    let c = connected(&mut a, &mut b, stack_options::default());
    (&c.from.1).write_all(b"nobody reads this").unwrap();
    eventually("the data", || {
        let info = b.client.info(2, c.to.0).unwrap().unwrap();
        (info.bytes_received == 17).then_some(())
    });
    drop(c.to.1);
    assert!(is_reset(&c.from.1));
    assert_eq!(a.client.ended(c.from.0).unwrap().head.error, libc::ECONNRESET);
    // It reads ECONNRESET once, and end of file from then on.
    let mut one = [0];
    assert_eq!((&c.from.1).read(&mut one).unwrap(), 0);
    assert_eq!((&c.from.1).write(&one).unwrap_err().kind(), ErrorKind::BrokenPipe);
}

#[test]
fn linger_zero_and_abort_reset() {
    let (mut a, mut b) = two(|_| {});
    let options = stack_options { mask: STACK_SET_LINGER, linger: 0, ..stack_options::default() };
    let c = connected(&mut a, &mut b, options);
    drop(c.from.1);
    assert!(is_reset(&c.to.1));
    assert_eq!(b.client.ended(c.to.0).unwrap().head.error, libc::ECONNRESET);

    let c = connected(&mut a, &mut b, stack_options::default());
    let head = a.client.head(STACK_CLOSE, 1, c.from.0);
    let close = stack_close { head, flags: STACK_ABORT, reserved: 0 };
    assert_eq!(a.client.ask(&close, None).unwrap().head.error, 0);
    assert!(is_reset(&c.from.1) && is_reset(&c.to.1));
    assert_eq!(a.client.ended(c.from.0).unwrap().head.error, libc::ECONNABORTED);
    assert_eq!(a.client.info(1, c.from.0).unwrap().unwrap_err(), libc::ENOENT);
}

#[test]
fn a_program_that_closes_sends_its_data_first() {
    let (mut a, mut b) = two(|_| {});
    let c = connected(&mut a, &mut b, stack_options::default());
    // As much as the pair takes: no one is there to wait.
    let data = pattern(100_000, 5);
    (&c.from.1).write_all(&data).unwrap();
    drop(c.from.1);
    let mut got = Vec::new();
    (&c.to.1).read_to_end(&mut got).unwrap();
    assert!(got == data);
    // What comes for a program that is gone is answered by RST.
    (&c.to.1).write_all(b"anybody?").unwrap();
    assert_eq!(b.client.ended(c.to.0).unwrap().head.error, libc::ECONNRESET);
    eventually("the reset", || is_reset(&c.to.1).then_some(()));
}

#[test]
fn nobody_listens_or_answers() {
    let (mut a, mut b) = two(|_| {});
    let refused = a.client.connect(1, at("10.9.0.2", 81), stack_options::default()).unwrap();
    assert_eq!(refused.unwrap_err(), libc::ECONNREFUSED);
    assert_eq!(b.client.stats(2).unwrap().segments_received, 1);
    // The link is a hole when the other module is gone.
    let timeout = stack_options {
        mask: STACK_SET_USER_TIMEOUT,
        user_timeout: 300,
        ..stack_options::default()
    };
    let (hole, device) = Client::packet_pair().unwrap();
    a.tenant(tenant(3), device);
    let lost = a.client.connect(3, at("10.9.0.2", 81), timeout).unwrap();
    assert_eq!(lost.unwrap_err(), libc::ETIMEDOUT);
    drop(hole);
    assert_eq!(a.client.stats(3).unwrap().failed, 1);
    for (to, errno) in [("224.0.0.1", libc::ENETUNREACH), ("127.0.0.9", libc::ENETUNREACH)] {
        let refused = a.client.connect(1, at(to, 81), stack_options::default()).unwrap();
        assert_eq!(refused.unwrap_err(), errno, "{to}");
    }
}

#[test]
fn a_program_that_does_not_read_stops_its_peer_and_no_other() {
    let (mut a, mut b) = two(|t| {
        t.options.mask = STACK_SET_RECEIVE_BUFFER | STACK_SET_SEND_BUFFER;
        (t.options.send_buffer, t.options.receive_buffer) = (65_536, 65_536);
    });
    let c = connected(&mut a, &mut b, stack_options::default());
    let other = connected(&mut a, &mut b, stack_options::default());
    c.from.1.set_nonblocking(true).unwrap();
    let some = pattern(10_000, 7);
    let mut written = 0;
    // Until both ends are full. How long that takes is TCP's business: it waits for delayed
    // acknowledgements, and on a busy machine for timers.
    eventually("a peer that is stopped", || {
        loop {
            match (&c.from.1).write(&some) {
                Ok(n) => written += n,
                Err(err) if err.kind() == ErrorKind::WouldBlock => break,
                Err(err) => panic!("{err}"),
            }
            // Two pairs and two buffers, and no more.
            assert!(written < 4 << 20, "{written}");
        }
        // What moves on moves while another connection goes back and forth.
        (&other.from.1).write_all(b"x").unwrap();
        let mut one = [0];
        (&other.to.1).read_exact(&mut one).unwrap();
        let sends = a.client.info(1, c.from.0).unwrap().unwrap().send_queue;
        let receives = b.client.info(2, c.to.0).unwrap().unwrap().receive_queue;
        (sends > 0 && receives >= 32_768).then_some(())
    });
    assert!(written >= 65_536, "{written}");
    // When it reads, all of it comes.
    c.from.1.shutdown(Shutdown::Write).unwrap();
    let mut got = Vec::new();
    (&c.to.1).read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), written);
}

#[test]
fn many_connections_and_a_backlog() {
    let (mut a, mut b) = two(|t| t.limits.memory = 1 << 30);
    let (listener, address) = b.client.listen(2, at("fd00:9::2", 80), 0, 4096).unwrap().unwrap();
    assert_eq!(address.port, 80);
    let count = 500;
    let begun: Vec<_> = (0..count)
        .map(|_| a.client.begin(1, at("fd00:9::2", 80), stack_options::default()).unwrap())
        .collect();
    for (id, _) in &begun {
        assert_eq!(a.client.answer(STACK_CONNECT, *id).unwrap().head.error, 0);
    }
    let accepted: Vec<_> = (0..count).map(|_| b.client.accept(listener).unwrap()).collect();
    for (i, (_, stream)) in begun.iter().enumerate() {
        (&*stream).write_all(&u32::try_from(i).unwrap().to_ne_bytes()).unwrap();
    }
    let mut seen = vec![false; count];
    for (_, stream) in &accepted {
        let mut number = [0; 4];
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        (&*stream).read_exact(&mut number).unwrap();
        seen[usize::try_from(u32::from_ne_bytes(number)).unwrap()] = true;
    }
    assert!(seen.iter().all(|s| *s));
    assert_eq!(b.client.stats(2).unwrap().connections, 500);

    // Beyond the backlog SYNs are dropped, and come again when there is place.
    let (small, address) = b.client.listen(2, at("10.9.0.2", 0), 0, 1).unwrap().unwrap();
    let to = at("10.9.0.2", address.port);
    let before = b.client.stats(2).unwrap().accepted;
    let (first, _one) = a.client.begin(1, to, stack_options::default()).unwrap();
    assert_eq!(a.client.answer(STACK_CONNECT, first).unwrap().head.error, 0);
    // A handshake that is under way there does not fill the backlog yet.
    eventually("the first connection at its listener", || {
        (b.client.stats(2).unwrap().accepted > before).then_some(())
    });
    let (second, _two) = a.client.begin(1, to, stack_options::default()).unwrap();
    eventually("a SYN beyond the backlog", || {
        (b.client.stats(2).unwrap().drop_backlog > 0).then_some(())
    });
    let _taken = b.client.accept(small).unwrap();
    assert_eq!(a.client.answer(STACK_CONNECT, second).unwrap().head.error, 0);
}

#[test]
fn a_killed_module_resets_its_programs() {
    let (mut a, mut b) = two(|_| {});
    let c = connected(&mut a, &mut b, stack_options::default());
    let idle = connected(&mut a, &mut b, stack_options::default());
    (&c.from.1).write_all(b"some data").unwrap();
    let mut got = [0; 9];
    (&c.to.1).read_exact(&mut got).unwrap();
    a.kill();
    assert!(is_reset(&c.from.1) && is_reset(&idle.from.1));
    // The other module's live on, until somebody misses an answer.
    assert_eq!(b.client.info(2, c.to.0).unwrap().unwrap().state, 1);
}

#[test]
fn a_new_agent_finds_everything() {
    let (mut a, mut b) = two(|_| {});
    let c = connected(&mut a, &mut b, stack_options::default());
    let (listener, address) = b.client.listen(2, at("10.9.0.2", 0), 0, 16).unwrap().unwrap();
    // The next agent comes while the old one is still there; a peer connects before it has said
    // which tenants it has.
    b.client = Client::open(&b.path).unwrap();
    let (id, _from) =
        a.client.begin(1, at("10.9.0.2", address.port), stack_options::default()).unwrap();
    assert_eq!(a.client.answer(STACK_CONNECT, id).unwrap().head.error, 0);
    b.client.plain(STACK_BEGIN, 0, 0).unwrap();
    assert_eq!(b.client.tenant(tenant(2), None).unwrap(), 0);
    assert_eq!(b.client.tenant(tenant(9), None).unwrap(), libc::ENODEV);
    let tag = b.client.plain(STACK_LIST, 2, 0).unwrap();
    let mut kinds = Vec::new();
    loop {
        let heard = b.client.wait(|h| h.head.tag == tag).unwrap();
        if heard.head.type_ == STACK_LIST | STACK_ANSWER {
            break;
        }
        let info: stack_info = heard.read();
        kinds.push(info.kind);
        assert!(info.kind != STACK_KIND_LISTENER || info.head.id <= listener);
    }
    kinds.sort_unstable();
    let (l, c_) = (STACK_KIND_LISTENER, STACK_KIND_CONNECTION);
    assert_eq!(kinds, [l, l, c_, c_]);
    b.client.plain(STACK_END, 0, 0).unwrap();
    let (accepted, _program) = b.client.accept(listener).unwrap();
    assert_eq!(accepted.local.port, address.port);
    (&c.from.1).write_all(b"still there").unwrap();
    let mut got = [0; 11];
    (&c.to.1).read_exact(&mut got).unwrap();

    // One that does not name a tenant has it destroyed.
    b.client = Client::open(&b.path).unwrap();
    b.client.plain(STACK_BEGIN, 0, 0).unwrap();
    b.client.plain(STACK_END, 0, 0).unwrap();
    assert!(is_reset(&c.to.1) && is_reset(&c.from.1));
    assert_eq!(b.client.stats(0).unwrap().tenants, 0);
}

#[test]
fn a_tenant_reaches_itself() {
    let (mut a, _b) = two(|_| {});
    for (listens, connects) in
        [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.9.0.1", "10.9.0.1"), ("::1", "::1")]
    {
        let (listener, address) = a.client.listen(1, at(listens, 0), 0, 4).unwrap().unwrap();
        let to = at(connects, address.port);
        let (_, program) = a.client.connect(1, to, stack_options::default()).unwrap().unwrap();
        let (_, other) = a.client.accept(listener).unwrap();
        let data = pattern(3 << 20, 4);
        std::thread::scope(|scope| {
            let far = scope.spawn(|| exchange(&other, b"thanks"));
            assert_eq!(exchange(&program, &data), b"thanks");
            assert!(far.join().unwrap() == data);
        });
    }
}

#[test]
fn binds_conflict_and_ports_come_back() {
    let (mut a, _b) = two(|_| {});
    let (id, _) = a.client.listen(1, at("0.0.0.0", 80), 0, 4).unwrap().unwrap();
    let again = a.client.listen(1, at("10.9.0.1", 80), 0, 4).unwrap();
    assert_eq!(again.unwrap_err(), libc::EADDRINUSE);
    let foreign = a.client.listen(1, at("10.9.0.77", 80), 0, 4).unwrap();
    assert_eq!(foreign.unwrap_err(), libc::EADDRNOTAVAIL);
    let head = a.client.head(STACK_CLOSE, 1, id);
    let close = stack_close { head, flags: 0, reserved: 0 };
    assert_eq!(a.client.ask(&close, None).unwrap().head.error, 0);
    assert!(a.client.listen(1, at("10.9.0.1", 80), 0, 4).unwrap().is_ok());
    assert_eq!(a.client.stats(1).unwrap().refuse_ports, 1);

    // A bound socket connects from its port.
    let id = a.client.id();
    let head = a.client.head(STACK_BIND, 1, id);
    let address = heddle_stack::proto::named(at("10.9.0.1", 4000));
    let bound = a.client.ask(&stack_bind { head, address, flags: 0, reserved: 0 }, None).unwrap();
    assert_eq!(bound.read::<stack_named>().local.port, 4000);
    assert_eq!(a.client.info(1, id).unwrap().unwrap().kind, STACK_KIND_BOUND);
}

#[test]
fn limits_hold() {
    let (mut a, mut b) = two(|t| t.limits.connections = 3);
    let (_, address) = b.client.listen(2, at("10.9.0.2", 0), 0, 16).unwrap().unwrap();
    let to = at("10.9.0.2", address.port);
    let mut open = Vec::new();
    for _ in 0..3 {
        open.push(a.client.connect(1, to, stack_options::default()).unwrap().unwrap());
    }
    let more = a.client.connect(1, to, stack_options::default()).unwrap();
    assert_eq!(more.unwrap_err(), libc::EAGAIN);
    assert_eq!(a.client.stats(1).unwrap().refuse_connections, 1);

    let mut changed = tenant(1);
    changed.limits.memory = 40_000;
    assert_eq!(a.client.tenant(changed, None).unwrap(), 0);
    open.pop();
    let more = eventually("place for a connection", || {
        let more = a.client.connect(1, to, stack_options::default()).unwrap();
        (more.as_ref().err() != Some(&libc::EAGAIN)).then_some(more)
    });
    assert_eq!(more.unwrap_err(), libc::ENOBUFS);
    assert!(a.client.stats(1).unwrap().refuse_memory > 0);
}

#[test]
fn a_rate_is_not_exceeded() {
    let rate = 4 << 20;
    for (sends, receives) in [(rate, 0), (0, rate)] {
        let (mut a, mut b) = two(|_| {});
        for (module, number) in [(&mut a, 1), (&mut b, 2)] {
            let mut changed = tenant(number);
            (changed.limits.send_rate, changed.limits.receive_rate) = (sends, receives);
            assert_eq!(module.client.tenant(changed, None).unwrap(), 0);
        }
        let c = connected(&mut a, &mut b, stack_options::default());
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| exchange(&c.from.1, &pattern(10 << 20, 1)));
            // What buffers and the burst take comes first.
            let mut bytes = vec![0; 4 << 20];
            (&c.to.1).read_exact(&mut bytes).unwrap();
            let start = std::time::Instant::now();
            (&c.to.1).read_exact(&mut bytes).unwrap();
            let took = start.elapsed();
            // A second's worth, but for what lay in the pair when it began. How long it takes
            // beyond that is the machine's business.
            assert!(took > Duration::from_millis(850), "{took:?}");
            c.to.1.shutdown(Shutdown::Write).unwrap();
            let mut rest = Vec::new();
            (&c.to.1).read_to_end(&mut rest).unwrap();
            assert_eq!(rest.len(), 2 << 20);
            writer.join().unwrap();
        });
    }
}

/// Processes of a module: its own, and those that it has started.
fn processes(module: &Module) -> Vec<u32> {
    let mut all = vec![module.pid()];
    for task in std::fs::read_dir(format!("/proc/{}/task", module.pid())).unwrap() {
        let children = std::fs::read_to_string(task.unwrap().path().join("children")).unwrap();
        all.extend(children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap()));
    }
    all
}

/// How many descriptors of a socket a module has.
fn copies(module: &Module, inode: u64) -> usize {
    let name = format!("socket:[{inode}]");
    let is = |path: std::path::PathBuf| std::fs::read_link(path).is_ok_and(|to| to == *name);
    let of = |pid| std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    processes(module).into_iter().flat_map(of).filter(|f| is(f.as_ref().unwrap().path())).count()
}

#[test]
fn a_program_s_end_is_the_agents_alone_once_the_module_says_so() {
    let (mut a, mut b) = two(|_| ());
    b.client.plain(STACK_TELL_SENT, 0, 0).unwrap();
    let (listener, address) = b.client.listen(2, at("::", 0), 0, 64).unwrap().unwrap();
    let mut programs = Vec::new();
    for _ in 0..50 {
        let to = at("10.9.0.2", address.port);
        programs.push(a.client.connect(1, to, stack_options::default()).unwrap().unwrap());
        let sent = b.client.wait(|h| h.head.type_ == STACK_SENT).unwrap();
        let (accepted, program) = b.client.accept(listener).unwrap();
        assert_eq!(sent.head.id, accepted.head.id);
        let file = std::fs::File::from(std::os::fd::OwnedFd::from(program));
        let inode = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
        assert_eq!(copies(&b, inode), 0);
    }
    // Who does not ask for it does not hear it.
    let mut again = Client::open(&b.path).unwrap();
    assert_eq!(again.tenant(tenant(2), None).unwrap(), 0);
    again.plain(STACK_END, 0, 0).unwrap();
    let to = at("10.9.0.2", address.port);
    programs.push(a.client.connect(1, to, stack_options::default()).unwrap().unwrap());
    let (accepted, _program) = again.accept(listener).unwrap();
    assert_eq!(again.info(2, accepted.head.id).unwrap().unwrap().listener, listener);
    assert!(!again.kept().any(|h| h.head.type_ == STACK_SENT));
}

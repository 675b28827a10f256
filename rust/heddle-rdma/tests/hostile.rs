//! What containers do that keep to no rule, and that nobody else notices it.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

#[path = "../../testing/seeded.rs"]
mod seeded;
mod support;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use shared_ring::Slot;
use support::{
    End, Router, ask, at, eventually, hello, node, pair, receive, receiving, request, send, sending,
};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::{abi, ibv, plain};

/// Two others of the same endpoints can speak.
fn others_can_speak(router: &Router) {
    let (mut a, mut b) = pair([router, router], ibv::QPT_RC, 64, |_| ());
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
}

#[test]
fn messages_without_sense_end_the_connection_or_are_answered() {
    let mut router = node();
    for bytes in [&[0_u8; 7][..], &[0; 4096], &[255; 3]] {
        let socket = router.connect(1);
        send(&socket, bytes, &[]).unwrap();
        let end = receive(&socket).unwrap().0;
        // A whole head is answered.
        assert_eq!(end.is_empty(), bytes.len() < 8, "{}", bytes.len());
    }
    let socket = router.connect(1);
    send(&socket, plain::bytes(&hello(1, 0)), &[socket.as_raw_fd()]).unwrap();
    assert!(receive(&socket).unwrap().0.is_empty());
    let socket = router.connect(1);
    for (version, kind, errno) in
        [(2, 0, libc::EPROTONOSUPPORT), (2, 1, libc::EPROTONOSUPPORT), (1, 2, libc::EINVAL)]
    {
        let refused = ask(&socket, plain::bytes(&hello(version, kind)));
        assert_eq!(refused.unwrap_err(), errno);
    }
    let head = abi::verbs_request { command: abi::VERBS_ALLOC_PD, tag: 9 };
    let request = abi::verbs_plain_request { head };
    assert_eq!(ask(&socket, plain::bytes(&request)).unwrap_err(), libc::EPROTO);
    assert!(router.runs());
    others_can_speak(&router);
}

#[test]
fn a_ring_with_a_wild_index_ends_its_queue_pair_only() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    // SAFETY: the producer's index of the send ring lies there.
    let index = unsafe { a.qp.memory.as_ptr().byte_add(128) }.cast::<u32>();
    // SAFETY: as above.
    unsafe { index.write_volatile(1 << 30) };
    a.device.ringer.ring().unwrap();
    let event = a.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_FATAL, a.qp.number));
    assert_eq!(a.device.state(a.qp.number), 6);
    assert_eq!(b.device.state(b.qp.number), 3);
    others_can_speak(&router);
}

#[test]
fn requests_of_any_bytes_fail_or_are_done() {
    let mut router = node();
    let mut random = seeded::numbers(0x1234_5678_9abc_def0);
    for _ in 0..60 {
        let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 4096, |a| a.rnr_retry = 0);
        let slots = [0; 9].map(|_: u32| {
            let mut slot = Slot([0; 8].map(|_: u64| random()));
            // Likely to be a request: opcode, flags, slots, entries.
            slot.0[1] = random() & 0x0307_0f07;
            slot
        });
        a.send(&slots);
        b.device.post(b.qp.receive.as_mut().unwrap(), &slots);
        let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
        for end in [&mut a, &mut b] {
            assert_eq!(end.device.modify(end.qp.number, ibv::QP_STATE, attr), Ok(6));
        }
    }
    assert!(router.runs());
    others_can_speak(&router);
}

#[test]
fn objects_of_other_contexts_are_not_there() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, 64);
    let mut b = End::new(&router, 1, ibv::QPT_RC, 2, 64);
    for (command, object) in [
        (abi::VERBS_DESTROY_QP, a.qp.number),
        (abi::VERBS_DESTROY_CQ, a.sends.handle),
        (abi::VERBS_DEALLOC_PD, a.pd),
        (abi::VERBS_DEREG_MR, a.key),
        (abi::VERBS_QUERY_QP, a.qp.number),
    ] {
        assert_eq!(b.device.object(command, object), Err(libc::EINVAL), "{command}");
    }
    let mut buffer = [0; 8];
    assert_eq!(b.device.register(a.pd, &mut buffer, 1), Err(libc::EINVAL));
    let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
    assert_eq!(b.device.modify(a.qp.number, ibv::QP_STATE, attr), Err(libc::EINVAL));
    // Nor can a request name another's region, even of the same process.
    a.device.connect(a.qp.number, ibv::QPT_RC, b.address(), |_| ());
    b.device.connect(b.qp.number, ibv::QPT_RC, a.address(), |_| ());
    a.send(&sending(request(ibv::WR_SEND, 1), &[b.whole()]));
    b.post_receive(7, &[b.whole()]);
    assert_eq!(a.sends.result(), (1, ibv::WC_LOC_PROT_ERR));
}

#[test]
fn memory_that_is_not_there_is_refused_or_fails() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    for (address, length) in [(8, 8), (u64::MAX - 4, 8), (0x7fff_ffff_f000, 8)] {
        let refused = a.device.register_at(a.pd, address, length, 1);
        let why = refused.unwrap_err();
        assert!(why == libc::EFAULT || why == libc::EINVAL, "{address:#x}: {why}");
    }
    assert_eq!(a.device.register_at(a.pd, 4096, 0, 1), Err(libc::EINVAL));
    assert_eq!(a.device.register(a.pd, &mut [0; 8], 2), Err(libc::EINVAL));
    assert_eq!(a.device.register(a.pd, &mut [0; 8], 16), Err(libc::EOPNOTSUPP));
    // Registered, and then not to be had: unmapped, another thread's test could get the same
    // address. SAFETY: the kernel reads a name.
    let file = unsafe { libc::memfd_create(c"gone".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: the kernel has just made it for this process.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(file) });
    file.set_len(8192).unwrap();
    let (length, protection) = (8192, libc::PROT_READ | libc::PROT_WRITE);
    let (flags, fd) = (libc::MAP_SHARED, file.as_raw_fd());
    // SAFETY: the kernel picks addresses that nothing uses.
    let at = unsafe { libc::mmap(core::ptr::null_mut(), length, protection, flags, fd, 0) };
    assert_ne!(at, libc::MAP_FAILED);
    let key = b.device.register_at(b.pd, at as u64, 8192, 15).unwrap();
    file.set_len(0).unwrap();
    let head =
        abi::verbs_send { remote_address: at as u64, rkey: key, ..request(ibv::WR_RDMA_WRITE, 1) };
    a.send(&sending(head, &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_REM_ACCESS_ERR));
}

#[test]
fn a_queue_without_room_ends_what_uses_it() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let small = b.device.cq(1, 0);
    let qp = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &small, 0);
    let of_a = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0);
    a.device.connect(of_a.number, ibv::QPT_RC, (2, qp.number), |_| ());
    b.device.connect(qp.number, ibv::QPT_RC, (1, of_a.number), |_| ());
    (a.qp, b.qp) = (of_a, qp);
    for wr_id in 0..2 {
        b.post_receive(wr_id, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, wr_id), &[a.whole()]));
        assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
    }
    let events = [b.device.event(), b.device.event()].map(|e| (e.event, e.object));
    assert!(events.contains(&(ibv::EVENT_CQ_ERR, small.handle)), "{events:?}");
    assert!(events.contains(&(ibv::EVENT_QP_FATAL, b.qp.number)), "{events:?}");
    others_can_speak(&router);
}

#[test]
fn quotas_bound_what_an_endpoint_has() {
    let router = Router::start();
    let limits = Limits { contexts: 2, cqs: 3, memory_mib: 1, pds: 1, ..Limits::default() };
    router.add(1, limits);
    let mut a = router.open(1);
    let cqs: Vec<_> = (0..3).map(|_| a.cq(1, 0)).collect();
    assert_eq!(a.try_cq(1, 0).err(), Some(libc::ENOMEM));
    let mut b = router.open(1);
    assert_eq!(b.try_cq(1, 0).err(), Some(libc::ENOMEM));
    assert!(ask_for_end(&router));
    a.object(abi::VERBS_DESTROY_CQ, cqs[0].handle).unwrap();
    // 64 bytes a completion: more than 1 MiB.
    assert_eq!(b.try_cq(1 << 15, 0).err(), Some(libc::ENOMEM));
    assert!(b.try_cq(1 << 10, 0).is_ok());
    b.pd();
    let head = a.head(abi::VERBS_ALLOC_PD);
    let refused = a.ask::<abi::verbs_object_reply>(&abi::verbs_plain_request { head });
    assert_eq!(refused.err(), Some(libc::ENOMEM));
}

/// Whether another connection of endpoint 1 is closed at once.
fn ask_for_end(router: &Router) -> bool {
    receive(&router.connect(1)).is_ok_and(|(bytes, _)| bytes.is_empty())
}

#[test]
fn nothing_is_left_of_those_that_end() {
    let router = node();
    others_can_speak(&router);
    // The test has the ends of all connections open, too.
    router.net.cut();
    let clean = eventually("the end of the first two", || {
        (router.mappings() == 0).then(|| router.descriptors())
    });
    for _ in 0..20 {
        let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
        let (_, channel) = a.device.channel();
        a.device.shared(a.pd, 1 << 20);
        a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
        drop((a, b, channel));
    }
    router.net.cut();
    eventually("the end of all", || {
        (router.mappings() == 0 && router.descriptors() <= clean).then_some(())
    });
}

#[test]
fn an_endpoint_that_is_removed_takes_its_devices_along() {
    let router = node();
    let (a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    router.tell(&Message::Begin, &[]);
    router.add(2, Limits::default());
    router.tell(&Message::End, &[]);
    assert!(receive(&a.device.socket).unwrap().0.is_empty());
    assert!(receive(&a.device.events).unwrap().0.is_empty());
    b.send(&sending(request(ibv::WR_SEND, 1), &[b.whole()]));
    assert_eq!(b.sends.result(), (1, ibv::WC_RETRY_EXC_ERR));
    let slots = receiving(2, &[b.whole()]);
    b.device.post(b.qp.receive.as_mut().unwrap(), &slots);
    assert_eq!(b.receives.result(), (2, ibv::WC_WR_FLUSH_ERR));
}

#[test]
fn a_router_that_dies_is_noticed() {
    let mut router = node();
    let (a, _b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    router.kill();
    assert!(receive(&a.device.socket).unwrap().0.is_empty());
    assert!(receive(&a.device.events).unwrap().0.is_empty());
}

#[test]
fn requests_in_a_second_are_bounded() {
    let router = Router::start();
    router.add(1, Limits { sends_per_second: 500, ..Limits::default() });
    router.add(2, Limits::default());
    let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let start = std::time::Instant::now();
    let head = at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key);
    // A tenth of a second's at once, and the other 250 in half a second.
    for _ in 0..300 {
        a.send(&sending(head, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    }
    let took = start.elapsed();
    assert!(took >= std::time::Duration::from_millis(450), "{took:?}");
}

/// Starts a process with this number, which waits until it is killed; `first` is what it does
/// before.
fn process(number: Option<libc::pid_t>, first: impl FnOnce()) -> Option<libc::pid_t> {
    let wanted = number.unwrap_or(0);
    // SAFETY: integers, for which zero is a value.
    let mut arguments: libc::clone_args = unsafe { core::mem::zeroed() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    if number.is_some() {
        (arguments.set_tid, arguments.set_tid_size) = (&raw const wanted as u64, 1);
    }
    // SAFETY: the kernel reads the arguments; the child gets a copy of all memory, and does nothing
    // but system calls.
    match unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) }
    {
        0 => {
            first();
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
        -1 => {
            let why = std::io::Error::last_os_error();
            assert_eq!(why.raw_os_error(), Some(libc::EEXIST), "clone3: {why}");
            None
        }
        pid => Some(libc::pid_t::try_from(pid).unwrap()),
    }
}

fn end(pid: libc::pid_t) {
    // SAFETY: a child of this test's own, that nobody has waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    // SAFETY: as above; the kernel writes no status.
    assert_eq!(unsafe { libc::waitpid(pid, core::ptr::null_mut(), 0) }, pid);
}

/// A process connects, passes the connection on and ends; then its number is another one's, before
/// the router looks who has connected. That one's memory is not to be had.
#[test]
fn a_number_that_is_another_process_s_by_now_is_not_believed() {
    let router = Router::start();
    let listener = router.listen(1);
    let (mine, its) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let path = router.path(1);
    let first = process(None, || {
        let socket = support::connect(&path).unwrap();
        send(&its.into(), b"x", &[socket.as_raw_fd()]).unwrap();
    });
    let first = first.unwrap();
    let passed = receive(&mine.into()).unwrap().1.pop().unwrap();
    end(first);
    let second = process(Some(first), || ()).expect("the number is free");
    router.add_listening(1, Limits::default(), &listener);
    let believed = send(&passed, plain::bytes(&hello(1, 0)), &[]).is_ok()
        && receive(&passed).is_ok_and(|(bytes, _)| !bytes.is_empty());
    end(second);
    assert!(!believed, "the router takes another process for the one that connected");
    // Whoever is there is believed.
    router.open(1);
}

#[test]
fn many_small_pieces_of_memory_are_bounded() {
    let router = node();
    let mut a = router.open(1);
    let mut kept = Vec::new();
    let refused = (0..2000).find_map(|_| {
        let head = a.head(abi::VERBS_CREATE_MEMORY);
        let request = abi::verbs_create_memory_request { head, length: 4096 };
        let made = a.ask::<abi::verbs_create_memory_reply>(&request);
        made.map(|(reply, _)| kept.push(reply.memory)).err()
    });
    assert_eq!((refused, kept.len()), (Some(libc::ENOMEM), 1024));
    a.object(abi::VERBS_DESTROY_MEMORY, kept[0]).unwrap();
    let head = a.head(abi::VERBS_CREATE_MEMORY);
    let request = abi::verbs_create_memory_request { head, length: 4096 };
    a.ask::<abi::verbs_create_memory_reply>(&request).unwrap();
    others_can_speak(&router);
}

#[test]
fn events_of_a_queue_that_is_gone_are_not_kept() {
    let router = node();
    let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let (handle, channel) = a.device.channel();
    let queues = [a.device.cq(64, handle), a.device.cq(64, handle)];
    let numbers = [0, 1].map(|i: usize| {
        let qp = a.device.qp(ibv::QPT_RC, a.pd, &queues[i], &queues[i], 0);
        // To itself: that needs no connection.
        a.device.connect(qp.number, ibv::QPT_RC, (1, qp.number), |_| ());
        qp
    });
    let [mut first, mut second] = queues;
    let [mut one, mut two] = numbers;
    let slots = sending(at(ibv::WR_RDMA_WRITE, 1, &a.buffer, a.key), &[a.whole()]);
    // More events than the channel's socket has room for.
    for _ in 0..1000 {
        first.arm(abi::VERBS_ARM_NEXT);
        a.device.post(&mut one.send, &slots);
        assert_eq!(first.result(), (1, ibv::WC_SUCCESS));
    }
    second.arm(abi::VERBS_ARM_NEXT);
    a.device.post(&mut two.send, &slots);
    assert_eq!(second.result(), (1, ibv::WC_SUCCESS));
    a.device.object(abi::VERBS_DESTROY_QP, two.number).unwrap();
    a.device.object(abi::VERBS_DESTROY_CQ, second.handle).unwrap();
    let mut events = 0;
    while support::readable(&channel, std::time::Duration::from_millis(100)) {
        let event: abi::verbs_completion_event =
            plain::read(&receive(&channel).unwrap().0).unwrap();
        assert_eq!(event.cq, first.handle);
        events += 1;
        if events == 1 {
            // The router sends what it held as soon as there is room.
            a.device.state(one.number);
        }
    }
    assert!(events > 1 && events < 1000, "{events} events: the socket was to be full");
    drop(b);
}

/// One that reads its asynchronous events late gets all of them, however many, and none of what is
/// gone by then.
#[test]
fn events_of_all_objects_wait_for_their_program() {
    let router = node();
    let mut device = router.open(1);
    let pd = device.pd();
    let (cq, other) = (device.cq(1, 0), device.cq(64, 0));
    // More than the socket has room for.
    let mut numbers: Vec<u32> = Vec::new();
    for _ in 0..600 {
        let number = device.qp(ibv::QPT_RC, pd, &other, &cq, 0).number;
        let attr = abi::verbs_qp_attr { qp_state: 1, port: 1, ..Default::default() };
        let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_ACCESS_FLAGS;
        assert_eq!(device.modify(number, init, attr), Ok(1));
        numbers.push(number);
    }
    let mut last = device.qp(ibv::QPT_RC, pd, &other, &cq, 0);
    device.connect(last.number, ibv::QPT_RC, (1, last.number), |_| ());
    for wr_id in 0..4 {
        device.post(last.receive.as_mut().unwrap(), &receiving(wr_id, &[]));
    }
    // The queue has no room for what they become.
    device.ask_for_state(last.number, 6);
    assert_eq!(device.event().event, ibv::EVENT_CQ_ERR);
    let gone = numbers.pop().unwrap();
    receive(&device.socket).unwrap();
    device.object(abi::VERBS_DESTROY_QP, gone).unwrap();
    for _ in &numbers {
        let event = device.event();
        assert_eq!(event.event, ibv::EVENT_QP_FATAL);
        assert!(numbers.contains(&event.object));
    }
    device.state(last.number);
    assert!(!support::readable(&device.events, std::time::Duration::ZERO));
}

/// A container has two keys and the numbers of others' queue pairs; none of them is of use to it.
#[test]
fn keys_and_numbers_of_other_containers_reach_nothing() {
    let router = node();
    router.add(3, Limits::default());
    let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let mut c = End::new(&router, 3, ibv::QPT_RC, 3, 64);
    // Of a third one, by a pair with the second one; its range; one byte more than the own.
    let foreign = at(ibv::WR_RDMA_WRITE, 1, &c.buffer, c.key);
    let ranges = [
        foreign,
        at(ibv::WR_RDMA_READ, 1, &c.buffer, b.key),
        abi::verbs_send {
            remote_address: b.buffer.as_ptr() as u64 + 1,
            ..at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key)
        },
    ];
    for head in ranges {
        let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
        a.send(&sending(abi::verbs_send { rkey: head.rkey, ..head }, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_REM_ACCESS_ERR));
        drop(b);
    }
    assert_eq!(c.buffer, [3; 64]);
    // A queue pair that is paired with another one, and one that names nobody.
    for number in [b.qp.number, a.qp.number] {
        let qp = c.device.qp(ibv::QPT_RC, c.pd, &c.sends, &c.receives, 0);
        c.device
            .connect(qp.number, ibv::QPT_RC, (2, number), |a| (a.timeout, a.retry_cnt) = (1, 0));
        c.qp = qp;
        c.send(&sending(at(ibv::WR_RDMA_WRITE, 2, &b.buffer, b.key), &[c.whole()]));
        assert_eq!(c.sends.result(), (2, ibv::WC_RETRY_EXC_ERR));
    }
    assert_eq!(b.buffer, [2; 64]);
    a.send(&sending(at(ibv::WR_RDMA_WRITE, 3, &b.buffer, b.key), &[a.whole()]));
    assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
}

/// A program writes other requests into slots that the router is reading.
#[test]
fn requests_that_change_while_they_are_read_are_one_or_the_other() {
    let mut router = node();
    for round in 0..20 {
        let (mut a, b) = pair([&router, &router], ibv::QPT_RC, 4096, |_| ());
        let memory = Arc::clone(&a.qp.memory);
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let changing = std::thread::spawn(move || {
            let mut n = 0_usize;
            while !until.load(Ordering::Relaxed) {
                n += 1;
                // The slots follow the ring's head. Every other time the opcode, flags and counts
                // of each stay as they are, so that the rest is used.
                if round % 2 == 0 && n % 8 == 1 {
                    continue;
                }
                let at = 384 + n * 8 % 2048;
                // SAFETY: all of it lies in the mapping.
                let word = unsafe { memory.as_ptr().byte_add(at) }.cast::<u64>();
                let any = (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                // SAFETY: as above; the router reads it meanwhile, which is what is tested.
                unsafe { word.write_volatile(any) };
            }
        });
        let head = at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key);
        for _ in 0..20 {
            a.send(&sending(head, &[a.part(0, 100), a.part(200, 100), a.part(400, 100)]));
            if a.device.state(a.qp.number) != 3 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        changing.join().unwrap();
        let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
        assert_eq!(a.device.modify(a.qp.number, ibv::QP_STATE, attr), Ok(6));
    }
    assert!(router.runs());
    others_can_speak(&router);
}

/// Eight connections of a container ask without end; others are served. How long that takes is the
/// machine's business: one that waits for the flood's end waits for ever.
#[test]
fn a_flood_of_requests_holds_up_nobody() {
    const MESSAGES: u32 = 200;
    let router = node();
    for n in [3, 4] {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = support::pair_of([&router; 2], [3, 4], ibv::QPT_RC, 64, |_| ());
    let (stop, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let floods: Vec<_> = (0..8)
        .map(|_| {
            let mut device = router.open(1);
            let (stop, asked) = (Arc::clone(&stop), Arc::clone(&asked));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let pd = device.pd();
                    device.object(abi::VERBS_DEALLOC_PD, pd).unwrap();
                    asked.fetch_add(2, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let mut sent = 0;
    // Until the flood was one.
    while sent < MESSAGES || asked.load(Ordering::Relaxed) < MESSAGES {
        b.post_receive(7, &[b.whole()]);
        a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
        sent += 1;
    }
    stop.store(true, Ordering::Relaxed);
    for flood in floods {
        flood.join().unwrap();
    }
}

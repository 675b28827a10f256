//! Two endpoints on one node, through a real router: sockets, rings and the memory of this process.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use support::{
    End, Sge, WAIT_TIMEOUT, at, eventually, gid, inline, node, pair, readable, receive, receiving,
    request, sending,
};
use verbs_protocol::{abi, ibv, plain};

#[test]
fn a_send_goes_from_buffer_to_buffer() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 300_000, |_| ());
    b.post_receive(7, &[b.whole()]);
    let slots = sending(request(ibv::WR_SEND, 5), &[a.part(0, 100), a.part(100, 199_900)]);
    a.send(&slots);
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.wr_id, completion.status), (7, ibv::WC_SUCCESS));
    assert_eq!((completion.byte_len, completion.opcode), (200_000, ibv::WC_RECV));
    assert_eq!((completion.qp_num, completion.src_qp), (b.qp.number, a.qp.number));
    assert!(b.buffer[..200_000].iter().all(|v| *v == 1));
    assert!(b.buffer[200_000..].iter().all(|v| *v == 2));
}

#[test]
fn inline_data_and_immediate_data() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 4096, |_| ());
    b.post_receive(7, &[b.part(0, 10), b.part(50, 100)]);
    let mut head = request(ibv::WR_SEND_WITH_IMM, 5);
    head.imm = 0x1122_3344;
    a.send(&inline(head, &[9; 77]));
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.byte_len, completion.imm), (77, 0x1122_3344));
    assert_eq!(completion.flags, ibv::WC_WITH_IMM);
    assert_eq!(
        [b.buffer[9], b.buffer[10], b.buffer[50], b.buffer[116], b.buffer[117]],
        [9, 2, 9, 9, 2]
    );
}

#[test]
fn writes_reads_and_atomics_reach_the_peer_s_memory() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 1 << 20, |_| ());
    let head = at(ibv::WR_RDMA_WRITE, 1, &b.buffer[100..], b.key);
    a.send(&sending(head, &[a.part(0, 700_000)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert!(b.buffer[..100].iter().all(|v| *v == 2));
    assert!(b.buffer[100..700_100].iter().all(|v| *v == 1));
    assert!(b.buffer[700_100..].iter().all(|v| *v == 2));

    let head = at(ibv::WR_RDMA_READ, 2, &b.buffer[800_000..], b.key);
    a.send(&sending(head, &[a.part(10, 5), a.part(20, 200_000)]));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    assert_eq!([a.buffer[9], a.buffer[10], a.buffer[15], a.buffer[20]], [1, 2, 1, 2]);

    b.buffer[..8].copy_from_slice(&40_u64.to_ne_bytes());
    let mut head = at(ibv::WR_ATOMIC_FETCH_AND_ADD, 3, &b.buffer, b.key);
    head.compare_add = 2;
    a.send(&sending(head, &[a.part(0, 8)]));
    assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
    assert_eq!((a.buffer[0], b.buffer[0]), (40, 42));
    let mut head = at(ibv::WR_ATOMIC_CMP_AND_SWP, 4, &b.buffer, b.key);
    (head.compare_add, head.swap) = (42, 77);
    a.send(&sending(head, &[a.part(0, 8)]));
    (head.wr_id, head.swap) = (5, 99);
    a.send(&sending(head, &[a.part(8, 8)]));
    assert_eq!(a.sends.result(), (4, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    assert_eq!((a.buffer[0], a.buffer[8], b.buffer[0]), (42, 77, 77));

    b.post_receive(8, &[]);
    let mut head = at(ibv::WR_RDMA_WRITE_WITH_IMM, 6, &b.buffer, b.key);
    head.imm = 17;
    a.send(&inline(head, &[5; 3]));
    assert_eq!(a.sends.result(), (6, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.opcode, completion.imm), (ibv::WC_RECV_RDMA_WITH_IMM, 17));
    assert_eq!((completion.byte_len, b.buffer[2], b.buffer[3]), (3, 5, 0));
}

#[test]
fn what_a_key_does_not_allow_fails_and_flushes() {
    type Spoil = fn(&mut abi::verbs_send, &mut End, &mut End);
    let cases: [(&str, u8, Spoil, u32); 7] = [
        ("no key", ibv::WR_RDMA_WRITE, |h, _, _| h.rkey ^= 1 << 30, ibv::WC_REM_ACCESS_ERR),
        ("range", ibv::WR_RDMA_WRITE, |h, _, _| h.remote_address += 1, ibv::WC_REM_ACCESS_ERR),
        ("wrap", ibv::WR_RDMA_READ, |h, _, _| h.remote_address = u64::MAX, ibv::WC_REM_ACCESS_ERR),
        ("own key", ibv::WR_RDMA_WRITE, |h, a, _| h.rkey = a.key, ibv::WC_REM_ACCESS_ERR),
        (
            "other PD",
            ibv::WR_RDMA_READ,
            |h, _, b| {
                let pd = b.device.pd();
                h.rkey = b.device.register(pd, &mut b.buffer, 15).unwrap();
            },
            ibv::WC_REM_ACCESS_ERR,
        ),
        (
            "no right",
            ibv::WR_RDMA_WRITE,
            |h, _, b| h.rkey = b.device.register(b.pd, &mut b.buffer, 1 | 4).unwrap(),
            ibv::WC_REM_ACCESS_ERR,
        ),
        (
            "taken away",
            ibv::WR_RDMA_WRITE,
            |h, _, b| b.device.object(abi::VERBS_DEREG_MR, h.rkey).unwrap(),
            ibv::WC_REM_ACCESS_ERR,
        ),
    ];
    for (name, opcode, spoil, status) in cases {
        let router = node();
        let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 4096, |_| ());
        let mut head = at(opcode, 1, &b.buffer, b.key);
        spoil(&mut head, &mut a, &mut b);
        a.post_receive(3, &[a.whole()]);
        a.send(&sending(head, &[a.whole()]));
        head.wr_id = 2;
        a.send(&sending(head, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, status), "{name}");
        let flushed = [a.sends.next(), a.receives.next()];
        let told = flushed.map(|c| (c.wr_id, c.status, c.opcode & ibv::WC_RECV));
        let status = ibv::WC_WR_FLUSH_ERR;
        assert_eq!(told, [(2, status, 0), (3, status, ibv::WC_RECV)], "{name}");
        assert_eq!(a.device.state(a.qp.number), 6, "{name}");
        assert_eq!(b.device.state(b.qp.number), 3, "{name}");
        assert!(a.buffer.iter().all(|v| *v == 1) && b.buffer.iter().all(|v| *v == 2), "{name}");
    }
}

#[test]
fn entries_are_checked_at_both_ends() {
    type Entry = fn(&End) -> Sge;
    let cases: [(Entry, Entry, u32, Option<u32>); 4] = [
        (|a| (a.whole().0 + 1, 4096, a.key), End::whole, ibv::WC_LOC_PROT_ERR, None),
        (|a| (a.whole().0, 1, 99), End::whole, ibv::WC_LOC_PROT_ERR, None),
        (End::whole, |b| b.part(0, 4095), ibv::WC_REM_INV_REQ_ERR, Some(ibv::WC_LOC_LEN_ERR)),
        (
            End::whole,
            |b| (b.whole().0 + 1, 4096, b.key),
            ibv::WC_REM_OP_ERR,
            Some(ibv::WC_LOC_PROT_ERR),
        ),
    ];
    for (from, to, sender, receiver) in cases {
        let router = node();
        let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 4096, |_| ());
        b.post_receive(7, &[to(&b)]);
        let entry = from(&a);
        a.send(&sending(request(ibv::WR_SEND, 1), &[entry]));
        let got = a.sends.result();
        assert_eq!(got, (1, sender));
        match receiver {
            Some(status) => {
                let told = b.receives.next();
                assert_eq!((told.wr_id, told.status, told.opcode), (7, status, ibv::WC_RECV));
            }
            None => assert_eq!(b.device.state(b.qp.number), 3),
        }
    }
}

#[test]
fn a_sender_waits_for_a_receive_request_as_long_as_it_says() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |attr| attr.rnr_retry = 2);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_RNR_RETRY_EXC_ERR));
    assert_eq!(b.device.state(b.qp.number), 3);

    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    a.send(&sending(request(ibv::WR_SEND, 2), &[a.whole()]));
    // The router has seen it and waits when it has answered this.
    assert_eq!(a.device.state(a.qp.number), 3);
    assert!(a.sends.poll().is_none());
    b.post_receive(7, &[b.whole()]);
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
}

#[test]
fn a_peer_that_is_gone_is_retried_and_given_up() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    b.device.object(abi::VERBS_DESTROY_QP, b.qp.number).unwrap();
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_RETRY_EXC_ERR));
}

#[test]
fn unreliable_senders_are_told_nothing() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_UC, 64, |_| ());
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    a.send(&sending(at(ibv::WR_RDMA_WRITE, 2, &b.buffer, 77), &[a.whole()]));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 3), &[a.whole()]));
    assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
    a.send(&sending(at(ibv::WR_RDMA_READ, 4, &b.buffer, b.key), &[a.whole()]));
    assert_eq!(a.sends.result(), (4, ibv::WC_LOC_QP_OP_ERR));
}

#[test]
fn datagrams_carry_a_header_and_need_the_key() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_UD, 1, 4096);
    let mut b = End::new(&router, 2, ibv::QPT_UD, 2, 4096);
    a.device.connect_datagrams(a.qp.number, 5);
    b.device.connect_datagrams(b.qp.number, 6);
    let ah = a.device.ah(a.pd, 2);
    b.post_receive(7, &[b.part(0, 100), b.part(200, 100)]);
    let to = |wr_id, qkey| abi::verbs_send {
        rkey: b.qp.number,
        compare_add: ah.into(),
        swap: qkey,
        ..request(ibv::WR_SEND, wr_id)
    };
    let (lost, sent) = (to(1, 5), to(2, 6));
    a.send(&sending(lost, &[a.part(0, 80)]));
    a.send(&sending(sent, &[a.part(0, 80)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.wr_id, completion.byte_len), (7, 120));
    assert_eq!((completion.src_qp, completion.flags), (a.qp.number, ibv::WC_GRH));
    assert_eq!(b.buffer[8..40], [gid(1), gid(2)].concat());
    assert_eq!((b.buffer[0], b.buffer[5], b.buffer[7]), (0x60, 80, 7));
    assert_eq!(
        [b.buffer[40], b.buffer[99], b.buffer[100], b.buffer[219], b.buffer[220]],
        [1, 1, 2, 1, 2]
    );
    let wild = abi::verbs_send { compare_add: 1 << 40, ..sent };
    a.send(&sending(wild, &[a.part(0, 80)]));
    assert_eq!(a.sends.result(), (2, ibv::WC_LOC_QP_OP_ERR));
}

#[test]
fn queue_pairs_share_receive_requests() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, 64);
    let mut b = End::new(&router, 2, ibv::QPT_RC, 2, 256);
    let (srq, mut ring) = b.device.srq(b.pd, 8, 2);
    let mut qps = Vec::new();
    for _ in 0..2 {
        let of_a = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0);
        let of_b = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &b.receives, srq);
        a.device.connect(of_a.number, ibv::QPT_RC, (2, of_b.number), |_| ());
        b.device.connect(of_b.number, ibv::QPT_RC, (1, of_a.number), |_| ());
        qps.push((of_a, of_b));
    }
    // The last one has two slots, and is one request all the same.
    for (wr_id, entries) in [(0, 1), (1, 1), (2, 4)] {
        let slots =
            receiving(wr_id, &[b.part(0, 64), b.part(0, 0), b.part(0, 0), b.part(0, 0)][..entries]);
        assert_eq!(slots.len(), entries.div_ceil(3));
        b.device.post(&mut ring, &slots);
    }
    for (i, (of_a, of_b)) in qps.iter_mut().enumerate() {
        let slots = sending(request(ibv::WR_SEND, 1), &[a.whole()]);
        a.device.post(&mut of_a.send, &slots);
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
        let completion = b.receives.next();
        assert_eq!((completion.wr_id, completion.qp_num), (i as u64, of_b.number));
    }
    let event = b.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_SRQ_LIMIT_REACHED, srq));
    let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
    assert_eq!(b.device.modify(qps[0].1.number, ibv::QP_STATE, attr), Ok(6));
    let event = b.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_QP_LAST_WQE_REACHED, qps[0].1.number));
}

#[test]
fn events_come_once_for_each_wish() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let (channel, events) = b.device.channel();
    let mut cq = b.device.cq(16, channel);
    let qp = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &cq, 0);
    let of_a = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0);
    a.device.connect(of_a.number, ibv::QPT_RC, (2, qp.number), |_| ());
    b.device.connect(qp.number, ibv::QPT_RC, (1, of_a.number), |_| ());
    (a.qp, b.qp) = (of_a, qp);
    for wr_id in 0..3 {
        b.post_receive(wr_id, &[b.whole()]);
    }
    cq.arm(abi::VERBS_ARM_SOLICITED);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(cq.result(), (0, ibv::WC_SUCCESS));
    assert_eq!(a.device.state(a.qp.number), 3);
    assert!(!readable(&events, std::time::Duration::ZERO));
    let mut head = request(ibv::WR_SEND, 2);
    head.flags |= 4;
    a.send(&sending(head, &[a.whole()]));
    assert!(readable(&events, WAIT_TIMEOUT));
    let event: abi::verbs_completion_event = plain::read(&receive(&events).unwrap().0).unwrap();
    assert_eq!((event.user, event.cq), (cq.user, cq.handle));
    assert_eq!(cq.result(), (1, ibv::WC_SUCCESS));
    // Not armed again: no event.
    a.send(&sending(head, &[a.whole()]));
    assert_eq!(cq.result(), (2, ibv::WC_SUCCESS));
    assert_eq!(b.device.state(b.qp.number), 3);
    assert!(!readable(&events, std::time::Duration::ZERO));
    assert_eq!(b.device.object(abi::VERBS_DESTROY_CHANNEL, channel), Err(libc::EBUSY));
}

#[test]
fn memory_of_the_router_s_making_is_the_same_to_peers() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 1 << 20, |_| ());
    let (memory, key, shared) = b.device.shared(b.pd, 1 << 20);
    a.send(&sending(
        abi::verbs_send { remote_address: 50, rkey: key, ..request(ibv::WR_RDMA_WRITE, 1) },
        &[a.part(0, 300_000)],
    ));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    let byte = |at| {
        // SAFETY: `at` lies in the memory, which is mapped.
        let place = unsafe { shared.as_ptr().byte_add(at) };
        // SAFETY: as above.
        unsafe { place.read_volatile() }
    };
    assert_eq!([49, 50, 300_049, 300_050].map(byte), [0, 1, 1, 0]);
    // And from it, by the owner: to the program's own memory.
    a.post_receive(7, &[a.part(400_000, 10)]);
    let slots = sending(request(ibv::WR_SEND, 2), &[(45, 10, key)]);
    b.send(&slots);
    assert_eq!(b.sends.result(), (2, ibv::WC_SUCCESS));
    assert_eq!(a.receives.result(), (7, ibv::WC_SUCCESS));
    assert_eq!(a.buffer[400_000..400_011], [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]);
    assert_eq!(b.device.object(abi::VERBS_DESTROY_MEMORY, memory), Err(libc::EBUSY));
    b.device.object(abi::VERBS_DEREG_MR, key).unwrap();
    b.device.object(abi::VERBS_DESTROY_MEMORY, memory).unwrap();
}

#[test]
fn a_queue_pair_begins_anew_after_reset() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    b.post_receive(7, &[b.whole()]);
    a.post_receive(8, &[a.whole()]);
    let attr = abi::verbs_qp_attr::default();
    for (end, other) in [(&mut a, 2), (&mut b, 1)] {
        assert_eq!(end.device.modify(end.qp.number, ibv::QP_STATE, attr), Ok(0));
        assert_eq!(other + end.device.number, 3);
    }
    a.device.connect(a.qp.number, ibv::QPT_RC, b.address(), |_| ());
    b.device.connect(b.qp.number, ibv::QPT_RC, a.address(), |_| ());
    b.post_receive(9, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[a.whole()]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    assert_eq!(b.receives.result(), (9, ibv::WC_SUCCESS));
    assert!(a.receives.poll().is_none() && b.receives.poll().is_none());
}

#[test]
fn who_waits_in_a_poll_is_woken_by_a_completion() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let memory = Arc::clone(&b.device.memory);
    let at = abi::VERBS_CONTEXT_NAP as usize;
    // SAFETY: the memory of a context is longer, and the word's address a multiple of 4.
    let word = unsafe { memory.as_ptr().byte_add(at) }.cast::<AtomicU32>();
    // SAFETY: any bytes are a value of an atomic, and `memory` keeps them mapped.
    let word: &AtomicU32 = unsafe { word.as_ref() };
    b.post_receive(7, &[b.whole()]);
    word.store(1, Ordering::SeqCst);
    let thread = AtomicI32::new(0);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| {
            // SAFETY: gettid takes nothing.
            thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
            let seconds = libc::time_t::try_from(WAIT_TIMEOUT.as_secs()).unwrap();
            let until = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
            while word.load(Ordering::SeqCst) == 1 {
                // SAFETY: the word and the time outlive the call.
                let woken = unsafe {
                    libc::syscall(
                        libc::SYS_futex,
                        word.as_ptr(),
                        libc::FUTEX_WAIT,
                        1,
                        &raw const until,
                    )
                };
                let why = std::io::Error::last_os_error();
                assert!(woken == 0 || why.kind() != std::io::ErrorKind::TimedOut);
            }
        });
        eventually("a thread that sleeps", || {
            let stat = format!("/proc/self/task/{}/stat", thread.load(Ordering::SeqCst));
            std::fs::read_to_string(stat).ok()?.contains(") S ").then_some(())
        });
        a.send(&sending(request(ibv::WR_SEND, 5), &[a.whole()]));
        sleeper.join().unwrap();
    });
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
}

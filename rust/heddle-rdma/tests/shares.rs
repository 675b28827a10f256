//! Who gets how much of the router: fair shares, caps, and what is there for all. Attacks as in
//! `attacks.rs`.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use shared_ring::Slot;
use support::{
    Device, End, Qp, Router, at, attacked, eventually, hello, node, receive, receiving, request,
    send, sending,
};
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::Reason;
use verbs_protocol::{abi, ibv, plain};

/// As many descriptors as the machine allows.
fn many_descriptors() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one rlimit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// More queue pairs of two ends, connected with each other.
fn more(a: &mut End, b: &mut End, count: usize, srq: u32) -> Vec<(Qp, Qp)> {
    let connected = (0..count).map(|_| {
        let of_a = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0);
        let of_b = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &b.receives, srq);
        let numbers = (a.device.number, b.device.number);
        a.device.connect(of_a.number, ibv::QPT_RC, (numbers.1, of_b.number), |_| ());
        b.device.connect(of_b.number, ibv::QPT_RC, (numbers.0, of_a.number), |_| ());
        (of_a, of_b)
    });
    connected.collect()
}

/// Jain's index of fairness of what `count` queue pairs get that want as much as they can have:
/// they share receive requests, of which there are half as many as messages.
fn jain(count: u32) -> f64 {
    const MESSAGE: usize = 16 * 1024;
    many_descriptors();
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, MESSAGE);
    let mut b = End::new(&router, 2, ibv::QPT_RC, 2, MESSAGE);
    b.receives = b.device.cq(1 << 14, 0);
    let (srq, mut ring) = b.device.srq(b.pd, 16 * count, 0);
    let mut qps = more(&mut a, &mut b, count as usize, srq);
    let message = sending(abi::verbs_send { flags: 0, ..request(ibv::WR_SEND, 1) }, &[a.whole()]);
    for (qp, _) in &mut qps {
        for _ in 0..32 {
            a.device.post(&mut qp.send, &message);
        }
    }
    eventually("all of them", || (router.times(2, Reason::NotReady) == count.into()).then_some(()));
    let receive = receiving(7, &[b.whole()]);
    let all: Vec<_> = (0..16 * count).flat_map(|_| receive.clone()).collect();
    assert_eq!(ring.push(&all).unwrap(), all.len());
    b.device.ringer.ring().unwrap();
    let mut got = HashMap::new();
    for _ in 0..16 * count {
        let completion = b.receives.next();
        assert_eq!(completion.status, ibv::WC_SUCCESS);
        *got.entry(completion.qp_num).or_insert(0_u32) += 1;
    }
    let sum: f64 = got.values().copied().map(f64::from).sum();
    let squares: f64 = got.values().map(|n| f64::from(*n).powi(2)).sum();
    sum * sum / (f64::from(count) * squares)
}

#[test]
fn sixty_four_queue_pairs_get_the_same() {
    let index = jain(64);
    assert!(index >= 0.97, "{index}");
}

#[test]
fn five_hundred_and_twelve_queue_pairs_get_the_same() {
    let index = jain(512);
    assert!(index >= 0.97, "{index}");
}

/// Slots of 32 signalled requests to write to a far end.
fn writes(end: &End, far: &End, wr_id: u64, length: usize) -> Vec<Slot> {
    let head = at(ibv::WR_RDMA_WRITE, wr_id, &far.buffer, far.key);
    sending(head, &[end.part(0, length)]).repeat(32)
}

#[test]
fn large_messages_get_no_more_than_small_ones() {
    let router = node();
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, 256 * 1024);
    let mut b = End::new(&router, 2, ibv::QPT_RC, 2, 256 * 1024);
    a.sends = a.device.cq(256, 0);
    let mut qps = more(&mut a, &mut b, 2, 0);
    // The large ones first.
    for ((qp, _), (wr_id, length)) in qps.iter_mut().zip([(1, 256 * 1024), (2, 16 * 1024)]) {
        let slots = writes(&a, &b, wr_id, length);
        a.device.post(&mut qp.send, &slots);
    }
    let mut done = Vec::new();
    while done.iter().filter(|wr_id| **wr_id == 2).count() < 32 {
        let (wr_id, status) = a.sends.result();
        assert_eq!(status, ibv::WC_SUCCESS);
        done.push(wr_id);
    }
    let first = done.iter().position(|wr_id| *wr_id == 2).unwrap();
    let large = done[first..].iter().filter(|wr_id| **wr_id == 1).count();
    // Those have 512 KiB together: as many of these would be two.
    assert!(large <= 4, "{large}");
}

/// The requests of a victim, which has one queue pair, each of which takes two rounds.
const WANTED: usize = 32;
const LENGTH: u32 = 128 * 1024;

/// Four endpoints' ends: a program with many queue pairs and its peer, one with one and its peer.
fn ends(router: &Router) -> [End; 4] {
    for n in 1..=4 {
        router.add(n, Limits::default());
    }
    [1, 2, 3, 4].map(|n| End::new(router, n, ibv::QPT_RC, n, 64))
}

/// Slots of 32 requests to write. All of it is mapped, so that one worker serves all: on a busy
/// machine who waits to read a program's memory gets a thread of his own, and then the kernel says
/// who has how much.
fn mapped_writes(from: &mut End, to: &mut End) -> Vec<Slot> {
    let [own, rkey] = [from, to].map(|end| end.device.shared(end.pd, LENGTH.into()).1);
    let head = abi::verbs_send { rkey, ..request(ibv::WR_RDMA_WRITE, 1) };
    sending(head, &[(0, LENGTH, own)]).repeat(32)
}

/// When so many requests of a program were completed.
fn times(end: &mut End, count: usize) -> Vec<u64> {
    (0..count).map(|_| end.sends.next().timestamp).collect()
}

/// An endpoint with 64 queue pairs that are never idle, and one with one: whether the first one
/// gets much more until the other one has what it wants. `meanwhile` has the device of the first
/// one.
fn takes_more<R>(router: &Router, meanwhile: impl FnOnce(&Device) -> R) -> bool {
    let [mut a, mut b, mut c, mut d] = ends(router);
    let (of_many, of_one) = (mapped_writes(&mut a, &mut b), mapped_writes(&mut c, &mut d));
    a.sends = a.device.cq(4096, 0);
    let mut one = more(&mut c, &mut d, 1, 0).remove(0).0;
    let mut many = more(&mut a, &mut b, 64, 0);
    let _meanwhile = meanwhile(&a.device);
    router.while_stopped(|| {
        for (qp, _) in &mut many {
            a.device.post(&mut qp.send, &of_many);
        }
        c.device.post(&mut one.send, &of_one);
    });
    let of_one = times(&mut c, WANTED);
    let of_many = times(&mut a, 64 * 32);
    let meanwhile = of_many.iter().filter(|at| of_one[0] < **at && **at < of_one[31]).count();
    // Four times as many with fair shares, which are of a round; 64 times as many without.
    meanwhile > 16 * WANTED
}

#[test]
fn an_endpoint_with_many_queue_pairs_gets_no_more_than_others() {
    attacked("rounds", |router| takes_more(router, |_| ()));
}

/// Threads that do something all the time until nobody holds them any more.
struct Spinning(Arc<AtomicBool>, Vec<JoinHandle<()>>);

impl Spinning {
    fn start(threads: usize, work: impl Fn() + Clone + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let threads = (0..threads).map(|_| {
            let (ends, work) = (Arc::clone(&ends), work.clone());
            std::thread::spawn(move || {
                while !ends.load(Ordering::Relaxed) {
                    work();
                }
            })
        });
        let threads = threads.collect();
        Self(ends, threads)
    }
}

impl Drop for Spinning {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The same, by many threads that ring all the time, also when the router is awake.
#[test]
fn a_program_that_rings_without_end_gets_no_more_than_others() {
    attacked("rounds", |router| {
        takes_more(router, |device| {
            let ring = Arc::new(device.ring.try_clone().unwrap());
            Spinning::start(4, move || {
                let one = 1_u64;
                // SAFETY: the kernel reads eight bytes.
                unsafe { libc::write(ring.as_raw_fd(), (&raw const one).cast(), 8) };
            })
        })
    });
}

/// Queue pairs in ERR complete whatever is posted to them, which is no work for anybody else and
/// uses the router as well.
#[test]
fn a_program_whose_requests_all_fail_gets_no_more_than_others() {
    const QPS: usize = 512;
    many_descriptors();
    attacked("rounds", |router| {
        let [mut a, mut b, mut c, mut d] = ends(router);
        let (good, of_one) = (mapped_writes(&mut a, &mut b), mapped_writes(&mut c, &mut d));
        let failing = a.device.cq(1 << 14, 0);
        let live = std::mem::replace(&mut a.sends, failing);
        let mut one = more(&mut c, &mut d, 1, 0).remove(0).0;
        let mut many = more(&mut a, &mut b, QPS, 0);
        for (qp, _) in &many {
            let attr = abi::verbs_qp_attr { qp_state: 6, ..Default::default() };
            assert_eq!(a.device.modify(qp.number, ibv::QP_STATE, attr), Ok(6));
        }
        a.sends = live;
        let mut last = more(&mut a, &mut b, 1, 0).remove(0).0;
        let count = good.len() / 32;
        // Both are connected once something has come.
        a.device.post(&mut last.send, &good[..count]);
        c.device.post(&mut one.send, &of_one[..count]);
        assert_eq!((times(&mut a, 1).len(), times(&mut c, 1).len()), (1, 1));
        let nothing = sending(request(ibv::WR_RDMA_WRITE, 1), &[]).repeat(32);
        router.while_stopped(|| {
            for (qp, _) in &mut many {
                a.device.post(&mut qp.send, &nothing);
            }
            a.device.post(&mut last.send, &good[..3 * count]);
            c.device.post(&mut one.send, &of_one);
        });
        // What fails has no time. The last of three good requests of the same program takes two
        // turns at least, also if its queue pair was alone just now, and all that fail have one in
        // between: those are 128 rounds, or one.
        times(&mut a, 3)[2] < times(&mut c, WANTED)[WANTED / 2]
    });
}

/// A program with many queue pairs that has had nothing to do for a while is no longer looked at in
/// each round while others have: it rings, and is served then.
#[test]
fn who_has_no_work_rings_while_others_have_some() {
    const LENGTH: usize = 256 * 1024;
    let router = node();
    for n in [3, 4] {
        router.add(n, Limits::default());
    }
    let (mut a, b) = support::pair([&router; 2], ibv::QPT_RC, LENGTH, |_| ());
    let (mut c, mut d) = support::pair_of([&router; 2], [3, 4], ibv::QPT_RC, 64, |_| ());
    more(&mut c, &mut d, 16, 0);
    let work = sending(at(ibv::WR_RDMA_WRITE, 1, &b.buffer, b.key), &[a.whole()]);
    let mut under_way = 0;
    // Has some more done, and says how much was left: with nothing the router may have slept.
    let mut go_on = || {
        while a.sends.poll().is_some() {
            under_way -= 1;
        }
        let left = under_way;
        while under_way < 48 {
            a.send(&work);
            under_way += 1;
        }
        left
    };
    let rings = |end: &End| end.device.memory.word32(0).unwrap().load(Ordering::Relaxed) == 1;
    go_on();
    d.device.ringer.ring().unwrap();
    eventually("a program that is to ring", || {
        let is_idle = rings(&d);
        if go_on() == 0 {
            d.device.ringer.ring().unwrap();
            return None;
        }
        is_idle.then_some(())
    });
    // What it rings for is done meanwhile.
    d.post_receive(1, &[d.whole()]);
    c.send(&sending(request(ibv::WR_SEND, 7), &[c.part(0, 8)]));
    let completion = eventually("a message", || {
        go_on();
        d.receives.poll()
    });
    assert_eq!((completion.wr_id, completion.status), (1, ibv::WC_SUCCESS));
}

/// Whether an endpoint copies more than it may: 100 Mb/s.
fn exceeds(router: &Router, limits: [Limits; 2], opcode: u8) -> bool {
    const LENGTH: usize = 64 * 1024;
    const TIMES: u32 = 80;
    for (n, limits) in [1, 2].into_iter().zip(limits) {
        router.add(n, limits);
    }
    let (mut a, b) = support::pair([router; 2], ibv::QPT_RC, LENGTH, |_| ());
    let slots = sending(at(opcode, 1, &b.buffer, b.key), &[a.whole()]);
    a.send(&slots);
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    let start = Instant::now();
    // More than it may have at once, however slow this program is.
    router.while_stopped(|| a.send(&slots.repeat(16)));
    for sent in 16..TIMES + 16 {
        if sent < TIMES {
            a.send(&slots);
        }
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    }
    let seconds = f64::from(TIMES) * 65_536.0 / 12_500_000.0;
    let took = start.elapsed().as_secs_f64() / seconds;
    // What is allowed at once was used by the first one, or is less than 3 % of all.
    let limited = router.times(1, Reason::RateBytes) + router.times(2, Reason::RateBytes) > 0;
    !limited || took < 0.95
}

#[test]
fn what_leaves_an_endpoint_is_capped() {
    let limits = [Limits { egress_kbit: 100_000, ..Limits::default() }, Limits::default()];
    attacked("caps", |router| exceeds(router, limits, ibv::WR_RDMA_WRITE));
}

#[test]
fn what_comes_into_an_endpoint_is_capped() {
    let limits = [Limits { ingress_kbit: 100_000, ..Limits::default() }, Limits::default()];
    // It has others' bytes come by reading them.
    attacked("caps", |router| exceeds(router, limits, ibv::WR_RDMA_READ));
}

/// An endpoint takes all shared memory that it gets; there is some left for another one.
#[test]
fn nobody_takes_what_there_is_for_all() {
    attacked("shares", |router| {
        for n in [1, 2] {
            router.add(n, Limits { memory_mib: 1 << 24, ..Limits::default() });
        }
        // SAFETY: sysconf takes a number.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        let piece = u64::try_from(pages).unwrap() / 4 / 64 * 4096;
        let (mut a, mut b) = (router.open(1), router.open(2));
        let taken = (0..1000).take_while(|_| takes(&mut a, piece)).count();
        assert!((16..80).contains(&taken), "{taken}");
        assert!(router.times(1, Reason::RouterFull) > 0);
        !takes(&mut b, piece)
    });
}

fn takes(device: &mut Device, length: u64) -> bool {
    let head = device.head(abi::VERBS_CREATE_MEMORY);
    let request = abi::verbs_create_memory_request { head, length };
    device.ask::<abi::verbs_create_memory_reply>(&request).is_ok()
}

/// With no descriptor left a connection is refused, and does not wait.
#[test]
fn without_descriptors_connections_are_refused() {
    let router = Router::start_with_descriptors(64);
    router.add(1, Limits::default());
    let (mut devices, mut others) = (Vec::new(), Vec::new());
    let refused = (0..64).any(|_| {
        let socket = router.connect(1);
        let sent = send(&socket, plain::bytes(&hello(1, 0)), &[]);
        let (bytes, fds) = sent.and_then(|()| receive(&socket)).unwrap_or_default();
        if fds.len() == 3 {
            devices.push(Device::of(socket, 1, (bytes, fds)));
            return false;
        }
        let ended = bytes.is_empty();
        others.push(socket);
        ended
    });
    assert!(refused);
    // It goes on to serve what there is.
    let pd = devices[0].pd();
    assert_ne!(pd, 0);
    assert!(router.times(1, Reason::RouterFull) > 0);
    drop((devices, others));
    let opens = |socket: &OwnedFd| {
        let sent = send(socket, plain::bytes(&hello(1, 0)), &[]);
        sent.and_then(|()| receive(socket)).is_ok_and(|(_, fds)| fds.len() == 3)
    };
    eventually("room", || opens(&router.connect(1)).then_some(()));
}

/// A datagram names a queue pair of an endpoint to which it does not go: that endpoint's cap is
/// none of its business.
#[test]
fn datagrams_use_up_the_cap_of_the_endpoint_only_that_they_go_to() {
    let router = node();
    router.add(3, Limits { ingress_kbit: 1000, ..Limits::default() });
    let mut a = End::new(&router, 1, ibv::QPT_UD, 1, 4096);
    let victim = End::new(&router, 3, ibv::QPT_UD, 3, 64);
    a.device.connect_datagrams(a.qp.number, 5);
    let ah = a.device.ah(a.pd, 2);
    let mut head = abi::verbs_send { rkey: victim.qp.number, ..request(ibv::WR_SEND, 1) };
    (head.compare_add, head.swap) = (ah.into(), 5);
    for _ in 0..100 {
        a.send(&sending(head, &[a.whole()]));
        assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    }
    assert_eq!(router.times(3, Reason::RateBytes), 0);
    assert_eq!(router.times(2, Reason::DatagramUnwanted), 100);
}

/// Many queue pairs look for their peers while the agent has something else to do: it stays the
/// router's agent, and is asked for all of them.
#[test]
fn an_agent_that_is_asked_for_many_is_not_taken_for_gone() {
    const MANY: usize = 1000;
    let router = node();
    router.net.refuse(libc::ECONNREFUSED);
    let mut a = End::new(&router, 1, ibv::QPT_RC, 1, 64);
    let qps: Vec<Qp> =
        (0..MANY).map(|_| a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.receives, 0)).collect();
    let busy = router.net.be_busy();
    for qp in &qps {
        a.device.connect(qp.number, ibv::QPT_RC, (2, 9), |_| ());
    }
    drop(busy);
    let all = MANY as u64;
    eventually("answers", || (router.times(1, Reason::ConnectRefused) >= all).then_some(()));
}

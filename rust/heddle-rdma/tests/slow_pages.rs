//! Pages of programs that do not come: whose they are waits, and nobody else. Attacks as in
//! `attacks.rs`.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shared_ring::SharedMemory;
use support::pages::{Pages, take_memory};
use support::{
    Device, End, Router, Sge, WAIT_TIMEOUT, at, attacked, attacked_without, eventually, pair_of,
    punch, receiving, request, sending, sge,
};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{abi, ibv};

/// One test at a time: who waits for a page keeps all threads of the page's process, which is that
/// of all these tests, from mapping anything.
fn one() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Before `main`, as a thread keeps the arena that it has begun with.
// SAFETY: the loader calls each function of this section once.
#[used]
#[unsafe(link_section = ".init_array")]
static TAKE_MEMORY: extern "C" fn() = take_memory;

/// What threads allocate while a page does not come is no reason to ask the kernel.
#[test]
fn memory_that_tests_allocate_is_there_before_them() {
    let _one = one();
    // SAFETY: of no bytes it says where the memory of the allocator ends.
    let end = || unsafe { libc::sbrk(0) } as usize;
    let before = end();
    // A thread that has allocated nothing yet, more than fits into an arena's first piece, and as
    // much as is mapped by itself.
    let allocate = || [4112, 1 << 17, 8 << 20].map(|size| std::hint::black_box(vec![1_u8; size]));
    let taken = std::thread::spawn(allocate).join().unwrap();
    for bytes in &taken {
        let at = bytes.as_ptr() as usize;
        assert!(at < before && at > before - (256 << 20), "{} bytes are mapped", bytes.len());
    }
    assert_eq!(end(), before);
}

/// Where an account has the number of queue pairs.
const QPS: usize = 1;

/// Whether two endpoints that have nothing to do with it cannot speak meanwhile.
fn starve((a, from): (&mut End, Sge), (b, to): (&mut End, Sge)) -> bool {
    b.post_receive(7, &[to]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[from]));
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        if let Some(completion) = a.sends.poll() {
            assert_eq!(completion.status, ibv::WC_SUCCESS);
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// What has the router touch the page of a program.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// The program sends from it.
    Own,
    /// A peer writes to it, and another one reads it.
    Peers,
    /// It is registered.
    Registration,
}

/// A page that does not come, of a program that has a peer, who waits with it, while others do not.
fn page_that_does_not_come(router: &Router, way: Way) -> bool {
    for n in 1..=4 {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let (mut c, mut d) = pair_of([router; 2], [3, 4], ibv::QPT_RC, 64, |_| ());
    // All are one process here, whose page table waits as well: these have other memory.
    let [(_, key_c, _c), (_, key_d, _d)] = [&mut c, &mut d].map(|e| e.device.shared(e.pd, 4096));
    let (of_c, of_d) = ((0, 64, key_c), (0, 64, key_d));
    assert!(!starve((&mut c, of_c), (&mut d, of_d)));
    assert_eq!(d.receives.result(), (7, ibv::WC_SUCCESS));
    let pages = Pages::new(router.folder());
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    let far = |opcode, at| abi::verbs_send { remote_address: at, rkey: key, ..request(opcode, 2) };
    let mut starved = false;
    // The second time the endpoint has a thread of its own.
    for round in 0..2 {
        let at = pages.page(round);
        match way {
            Way::Own => {
                a.post_receive(3, &[a.whole()]);
                b.send(&sending(request(ibv::WR_SEND, 2), &[(at, 64, key)]));
            }
            Way::Peers => {
                a.send(&sending(far(ibv::WR_RDMA_WRITE, at), &[a.whole()]));
                a.send(&sending(far(ibv::WR_RDMA_READ, at), &[a.whole()]));
                a.send(&sending(far(ibv::WR_ATOMIC_FETCH_AND_ADD, at), &[a.part(0, 8)]));
            }
            Way::Registration => b.device.ask_to_register(b.pd, at, 4096),
        }
        eventually("the page", || pages.is_waited_for().then_some(()));
        let held_up = starve((&mut c, of_c), (&mut d, of_d));
        starved |= held_up;
        pages.let_go();
        // Nothing is lost: it goes on when the page comes.
        match way {
            Way::Own => {
                assert_eq!(b.sends.result(), (2, ibv::WC_SUCCESS), "{round}");
                assert_eq!(a.receives.result(), (3, ibv::WC_SUCCESS), "{round}");
            }
            Way::Peers => {
                for _ in 0..3 {
                    assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS), "{round}");
                }
            }
            Way::Registration => assert!(b.device.is_registered()),
        }
        if held_up {
            assert_eq!(c.sends.result(), (1, ibv::WC_SUCCESS));
        }
        assert_eq!(d.receives.result(), (7, ibv::WC_SUCCESS));
    }
    let times = router.times(2, Reason::MemorySlow);
    assert_eq!(times, u64::from(!starved), "{way:?}");
    // It is an endpoint like others.
    let (of_a, of_b) = (a.whole(), b.whole());
    assert!(!starve((&mut a, of_a), (&mut b, of_b)));
    assert_eq!(b.receives.result(), (7, ibv::WC_SUCCESS));
    assert!(!starve((&mut b, of_b), (&mut a, of_a)));
    assert_eq!(a.receives.result(), (7, ibv::WC_SUCCESS));
    starved
}

#[test]
fn a_page_of_a_program_s_own_that_does_not_come_holds_up_nobody_else() {
    let _one = one();
    attacked("watch", |router| page_that_does_not_come(router, Way::Own));
}

#[test]
fn a_page_that_does_not_come_for_a_peer_holds_up_nobody_else() {
    let _one = one();
    attacked("watch", |router| page_that_does_not_come(router, Way::Peers));
}

#[test]
fn a_page_that_does_not_come_when_it_is_registered_holds_up_nobody_else() {
    let _one = one();
    attacked("watch", |router| page_that_does_not_come(router, Way::Registration));
}

/// How a program has its memory back.
#[derive(Clone, Copy)]
enum Ended {
    Region,
    QueuePair,
    Reset,
}

impl Ended {
    /// Asks for the end of one of these.
    fn ask(self, end: &mut End, key: u32) {
        match self {
            Self::Region => end.device.ask_to_end(abi::VERBS_DEREG_MR, key),
            Self::QueuePair => end.device.ask_to_end(abi::VERBS_DESTROY_QP, end.qp.number),
            Self::Reset => end.device.ask_to_reset(end.qp.number),
        }
    }
}

/// A program that sends from a page that does not come, and its peer, which is to receive.
fn sender_that_waits(router: &Router) -> (Pages, End, End) {
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let pages = Pages::new(router.folder());
    let (address, length) = pages.all();
    let key = a.device.register_at(a.pd, address, length, 15).unwrap();
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[(pages.page(0), 64, key)]));
    eventually("the page", || pages.is_waited_for().then_some(()));
    (pages, a, b)
}

/// The same, whose endpoint has a thread of its own. The page has come.
fn sender_with_a_thread(router: &Router) -> (Pages, End, End) {
    let (pages, mut a, b) = sender_that_waits(router);
    eventually("a thread", || (router.times(1, Reason::MemorySlow) == 1).then_some(()));
    pages.let_go();
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
    (pages, a, b)
}

/// A program sends from a page that does not come until its peer has deregistered the memory that
/// the bytes are for, or destroyed its queue pair, and put something else there. Whether that is
/// overwritten.
fn overwrites(router: &Router, ended: Ended) -> bool {
    let (pages, mut a, mut b) = sender_that_waits(router);
    let key = b.key;
    ended.ask(&mut b, key);
    // It does not wait for its peer's page.
    eventually("the answer", || b.device.is_answered().then_some(()));
    b.buffer.fill(9);
    pages.let_go();
    let (_, status) = a.sends.result();
    let overwritten = b.buffer.iter().any(|byte| *byte != 9);
    assert_eq!(status, if overwritten { ibv::WC_SUCCESS } else { ibv::WC_REM_OP_ERR });
    overwritten
}

#[test]
fn memory_that_was_deregistered_is_not_written_to() {
    let _one = one();
    attacked("under_way", |router| overwrites(router, Ended::Region));
}

#[test]
fn memory_that_a_destroyed_queue_pair_was_to_receive_into_is_not_written_to() {
    let _one = one();
    attacked("under_way", |router| overwrites(router, Ended::QueuePair));
}

#[test]
fn memory_that_a_reset_queue_pair_was_to_receive_into_is_not_written_to() {
    let _one = one();
    attacked("under_way", |router| overwrites(router, Ended::Reset));
}

/// A program whose endpoint has a thread of its own writes to a page of a peer that does not come.
/// Whether the peer is told that its memory is deregistered, or its queue pair destroyed or reset,
/// while that thread is about to write.
fn is_told_too_early(router: &Router, ended: Ended) -> bool {
    let (pages, mut a, mut b) = sender_with_a_thread(router);
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    let there = abi::verbs_send {
        remote_address: pages.page(1),
        rkey: key,
        ..request(ibv::WR_RDMA_WRITE, 2)
    };
    a.send(&sending(there, &[a.whole()]));
    eventually("its page", || pages.is_waited_for().then_some(()));
    ended.ask(&mut b, key);
    let waits = || router.times(2, Reason::MemorySlow) == 1;
    eventually("its end or a thread", || (b.device.is_answered() || waits()).then_some(()));
    let early = b.device.is_answered();
    pages.let_go();
    eventually("its end", || b.device.is_answered().then_some(()));
    // The bytes were there before that.
    assert!(early || a.sends.result() == (2, ibv::WC_SUCCESS));
    early
}

#[test]
fn who_deregisters_is_told_when_nobody_touches_the_memory_any_more() {
    let _one = one();
    attacked("under_way", |router| is_told_too_early(router, Ended::Region));
}

#[test]
fn who_destroys_a_queue_pair_is_told_when_nobody_touches_its_memory_any_more() {
    let _one = one();
    attacked("under_way", |router| is_told_too_early(router, Ended::QueuePair));
}

#[test]
fn who_resets_a_queue_pair_is_told_when_nobody_touches_its_memory_any_more() {
    let _one = one();
    attacked("under_way", |router| is_told_too_early(router, Ended::Reset));
}

/// A queue pair is reset, connected anew and used while the page of the peer that it had does not
/// come: what was begun before comes to nothing, and changes nothing of it.
#[test]
fn a_queue_pair_that_was_reset_has_nothing_to_do_with_what_was_begun() {
    let _one = one();
    let router = Router::start();
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = pair_of([&router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let pages = Pages::new(router.folder());
    let (address, length) = pages.all();
    let key = a.device.register_at(a.pd, address, length, 15).unwrap();
    let mut other = b.device.qp(ibv::QPT_RC, b.pd, &b.sends, &b.sends, 0);
    let (_, shared, _memory) = b.device.shared(b.pd, 4096);
    b.post_receive(7, &[b.whole()]);
    a.send(&sending(request(ibv::WR_SEND, 1), &[(pages.page(0), 64, key)]));
    eventually("the page", || pages.is_waited_for().then_some(()));
    assert_eq!(b.device.reset(b.qp.number), Ok(0));
    let (one, two) = (b.qp.number, other.number);
    b.device.connect(one, ibv::QPT_RC, (2, two), |_| ());
    b.device.connect(two, ibv::QPT_RC, (2, one), |_| ());
    for wr_id in [8, 9] {
        b.post_receive(wr_id, &[(0, 64, shared)]);
        let own = sending(request(ibv::WR_SEND, 5), &[(64, 64, shared)]);
        b.device.post(&mut other.send, &own);
        assert_eq!(b.sends.result(), (5, ibv::WC_SUCCESS));
        assert_eq!(b.receives.result(), (wr_id, ibv::WC_SUCCESS));
        pages.let_go();
        assert!(wr_id != 8 || a.sends.result() == (1, ibv::WC_REM_OP_ERR));
    }
    assert_eq!(b.device.state(one), 3);
    assert!(b.receives.poll().is_none());
}

/// The sender is reset and used again while its own request waits for a page of its peer.
#[test]
fn a_sender_that_was_reset_hears_nothing_of_what_it_had_asked_for() {
    let _one = one();
    let router = Router::start();
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = pair_of([&router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let pages = Pages::new(router.folder());
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    let there =
        |opcode| abi::verbs_send { remote_address: pages.page(0), rkey: key, ..request(opcode, 1) };
    let mut other = a.device.qp(ibv::QPT_RC, a.pd, &a.receives, &a.receives, 0);
    let (_, shared, _memory) = a.device.shared(a.pd, 4096);
    let own = a.part(0, 8);
    a.send(&sending(there(ibv::WR_ATOMIC_FETCH_AND_ADD), &[own]));
    eventually("the page", || pages.is_waited_for().then_some(()));
    assert_eq!(a.device.reset(a.qp.number), Ok(0));
    a.buffer.fill(9);
    let (one, two) = (a.qp.number, other.number);
    a.device.connect(one, ibv::QPT_RC, (1, two), |_| ());
    a.device.connect(two, ibv::QPT_RC, (1, one), |_| ());
    for wr_id in [2, 3] {
        let into = receiving(4, &[(0, 64, shared)]);
        a.device.post(other.receive.as_mut().unwrap(), &into);
        a.send(&sending(request(ibv::WR_SEND, wr_id), &[(64, 64, shared)]));
        assert_eq!(a.sends.result(), (wr_id, ibv::WC_SUCCESS));
        assert_eq!(a.receives.result(), (4, ibv::WC_SUCCESS));
        pages.let_go();
        // The atomic's turn is over when the endpoint's next one is had.
        eventually("its end", || {
            (router.qp_account((2, b.qp.number)).traffic.served == 1).then_some(())
        });
    }
    assert!(a.buffer.iter().all(|byte| *byte == 9));
    assert!(a.sends.poll().is_none());
}

/// A queue pair is destroyed while an atomic on its memory waits for a page: others of the endpoint
/// go on.
#[test]
fn atomics_go_on_when_the_queue_pair_of_one_is_destroyed() {
    let _one = one();
    let router = Router::start();
    let (pages, mut a, mut b) = sender_with_a_thread(&router);
    let (mut c, d) = pair_of([&router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    let there = abi::verbs_send {
        remote_address: pages.page(1),
        rkey: key,
        ..request(ibv::WR_ATOMIC_FETCH_AND_ADD, 2)
    };
    let own = a.part(0, 8);
    a.send(&sending(there, &[own]));
    eventually("the page", || pages.is_waited_for().then_some(()));
    b.device.ask_to_end(abi::VERBS_DESTROY_QP, b.qp.number);
    eventually("it to be gone", || (router.account(2).used[QPS] == 1).then_some(()));
    pages.let_go();
    eventually("the answer", || b.device.is_answered().then_some(()));
    let own = c.part(0, 8);
    let there = at(ibv::WR_ATOMIC_FETCH_AND_ADD, 2, &d.buffer, d.key);
    c.send(&sending(there, &[own]));
    assert_eq!(c.sends.result(), (2, ibv::WC_SUCCESS));
}

/// Bytes of the memory that holes are made in: long enough for the watch to see that somebody
/// waits.
const HOLED: usize = 256 << 20;

/// Fills memory that the router has mapped and makes one hole of it. Meanwhile a peer writes to it,
/// and another endpoint asks for something again and again: whether that waited for the hole;
/// `None` if the peer did not.
fn hole(
    (a, own, key): (&mut End, Sge, u32),
    (shared, fd): (&SharedMemory, &OwnedFd),
    other: &mut Device,
) -> Option<bool> {
    // SAFETY: all of the memory is mapped. The router writes to it as well, and nobody reads it.
    unsafe { shared.as_ptr().write_bytes(1, HOLED) };
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let punched = scope.spawn(|| {
            begun.store(true, Ordering::SeqCst);
            let start = Instant::now();
            let punched = punch(fd, HOLED);
            let took = start.elapsed();
            over.store(true, Ordering::SeqCst);
            punched.unwrap();
            took
        });
        let asked = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !over.load(Ordering::SeqCst) {
                let start = Instant::now();
                let pd = other.pd();
                longest = longest.max(start.elapsed());
                other.object(abi::VERBS_DEALLOC_PD, pd).unwrap();
            }
            longest
        });
        eventually("the hole", || begun.load(Ordering::SeqCst).then_some(()));
        let (mut at, mut written) = (0, Duration::ZERO);
        while !over.load(Ordering::SeqCst) {
            at = (at + 77 * 4096) % (HOLED as u64 - 4096);
            let head =
                abi::verbs_send { remote_address: at, rkey: key, ..request(ibv::WR_RDMA_WRITE, 2) };
            let start = Instant::now();
            a.send(&sending(head, &[own]));
            assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
            written = written.max(start.elapsed());
        }
        let (asked, took) = (asked.join().unwrap(), punched.join().unwrap());
        (written > took / 2).then_some(asked > took / 2)
    })
}

/// Pages that the router has mapped, in a range of which their owner makes a hole: who touches one
/// waits for all of the hole. No program can do that any more; what is swapped out is waited for
/// in the same way.
fn holes_in_mapped_memory(router: &Router) -> bool {
    const TIMES: usize = 8;
    let large = Limits { memory_mib: 1024, ..Limits::default() };
    for n in 1..=3 {
        router.add(n, large);
    }
    let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let (_, own, _) = a.device.shared(a.pd, 4096);
    let (_, key, shared) = b.device.shared(b.pd, HOLED as u64);
    let fd = shared.as_fd().try_clone_to_owned().unwrap();
    if !cfg!(feature = "attack") {
        assert_eq!(punch(&fd, HOLED), Err(libc::EPERM));
        return false;
    }
    let mut other = router.open(3);
    let is_found = || router.times(2, Reason::MemorySlow) == 1;
    let mut make = || hole((&mut a, (0, 64, own), key), (&shared, &fd), &mut other);
    let (mut starved, start) = (0, Instant::now());
    while starved < TIMES {
        starved += usize::from(make() == Some(true));
        if is_found() {
            // A processor may be busy most of the time, but not all the time.
            eventually("others that do not wait", || (make() == Some(false)).then_some(()));
            assert_eq!(router.times(1, Reason::MemorySlow), 0, "the peer does not hold up others");
            return false;
        }
        // On a busy machine most holes are made before anybody touches the memory.
        assert!(start.elapsed() < 3 * WAIT_TIMEOUT, "nobody waits for a hole");
    }
    true
}

#[test]
fn a_hole_that_is_made_in_mapped_memory_holds_up_nobody_else() {
    let _one = one();
    attacked_without("holes", "watch", holes_in_mapped_memory);
}

/// An endpoint whose pages come late until it has a thread of its own, and its peer.
fn late(router: &Router) -> (Pages, End, End) {
    const TIMES: u64 = 500;
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    let (mut a, mut b) = pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    // A quarter of the time at least has to be for pages, also where much else runs and a round
    // takes some milliseconds.
    let pages = Pages::late(router.folder(), Duration::from_millis(3));
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    for n in 0..TIMES {
        a.post_receive(3, &[a.whole()]);
        b.send(&sending(request(ibv::WR_SEND, 2), &[(pages.page(n), 64, key)]));
        assert_eq!(b.sends.result(), (2, ibv::WC_SUCCESS));
        assert_eq!(a.receives.result(), (3, ibv::WC_SUCCESS));
        if router.times(2, Reason::MemorySlow) > 0 {
            return (pages, a, b);
        }
    }
    panic!("endpoint 2 held up all others {TIMES} times");
}

/// Pages that come late, each just in time not to be called stuck: whose they are waits, too.
#[test]
fn pages_that_are_late_again_and_again_hold_up_nobody_else() {
    let _one = one();
    drop(late(&Router::start()));
}

/// The first thread of the router came to serve one endpoint: others are served when that goes.
#[test]
fn an_endpoint_with_a_thread_of_its_own_goes_alone() {
    let _one = one();
    let mut router = Router::start();
    let kept = late(&router);
    router.tell(&Message::Remove { endpoint: 2 }, &[]);
    for _ in 0..200 {
        assert_eq!(router.times(1, Reason::MemorySlow), 0);
    }
    assert!(router.runs());
    drop(kept);
}

/// A program posts a receive request while the router is awake, so without a ring; the sender's
/// thread sleeps, and was told all that the other one did before. It hears of it when that falls
/// asleep.
#[test]
fn what_comes_without_a_ring_reaches_a_thread_that_sleeps() {
    /// Turns until a thread tells the others, and as many bytes as are one turn's.
    const TURNS: usize = 16;
    const BYTES: usize = 60 << 10;
    let _one = one();
    let router = Router::start_spinning(100_000);
    for n in [1, 2] {
        router.add(n, Limits { spin_us: 100_000, ..Limits::default() });
    }
    let (mut a, mut b) = pair_of([&router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let pages = Pages::new(router.folder());
    let (address, length) = pages.all();
    let key = b.device.register_at(b.pd, address, length, 15).unwrap();
    a.post_receive(3, &[a.whole()]);
    b.send(&sending(request(ibv::WR_SEND, 2), &[(pages.page(0), 64, key)]));
    eventually("the page", || pages.is_waited_for().then_some(()));
    eventually("a thread", || (router.times(2, Reason::MemorySlow) == 1).then_some(()));
    pages.let_go();
    assert_eq!(b.sends.result(), (2, ibv::WC_SUCCESS));
    assert_eq!(a.receives.result(), (3, ibv::WC_SUCCESS));

    let mut own = a.device.qp(ibv::QPT_RC, a.pd, &a.sends, &a.sends, 0);
    a.device.connect(own.number, ibv::QPT_RC, (1, own.number), |_| ());
    let mut buffer = vec![0; BYTES];
    let key = a.device.register(a.pd, &mut buffer, 15).unwrap();
    let write = sending(at(ibv::WR_RDMA_WRITE, 5, &buffer, key), &[sge(&buffer, key)]);
    let writes: Vec<_> = (0..TURNS).flat_map(|_| write.clone()).collect();
    let mut without_a_ring = 0;
    // A machine that is busy may take longer than the router is awake.
    for _ in 0..20 {
        b.send(&sending(request(ibv::WR_SEND, 4), &[b.whole()]));
        eventually("the sender's thread to sleep", || router.first_thread_sleeps().then_some(()));
        a.device.post(&mut own.send, &writes);
        for _ in 0..TURNS {
            assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
        }
        eventually("it to sleep again", || router.first_thread_sleeps().then_some(()));
        let receive = receiving(6, &[a.whole()]);
        a.qp.receive.as_mut().unwrap().push(&receive).unwrap();
        without_a_ring += u32::from(!a.device.ringer.ring().unwrap());
        assert_eq!(a.receives.result(), (6, ibv::WC_SUCCESS));
        assert_eq!(b.sends.result(), (4, ibv::WC_SUCCESS));
        if without_a_ring == 3 {
            return;
        }
    }
    panic!("the router sleeps as soon as it has nothing to do");
}

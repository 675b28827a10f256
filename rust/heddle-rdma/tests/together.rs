//! Requests that are copied together, between some that are not: what is told of each, and where
//! its bytes are, is as if each were done by itself.

#![expect(unsafe_code, reason = "memory that a router shares")]

#[path = "../../testing/seeded.rs"]
mod seeded;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use shared_ring::{SharedMemory, Slot};
use support::{
    End, Router, Sge, eventually, inline, node, pair, readable, receiving, request, sending,
};
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::{Reason, Traffic};
use verbs_protocol::{abi, ibv};

const MEMORY: usize = 1 << 17;

/// Memory that the router has mapped, as its owner sees it.
struct Shared(Arc<SharedMemory>);

impl Shared {
    fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.0.len()];
        // SAFETY: all of it is mapped, and nothing is under way.
        unsafe { self.0.as_ptr().copy_to_nonoverlapping(bytes_at(&mut bytes), self.0.len()) };
        bytes
    }

    fn write(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.0.len());
        // SAFETY: as above.
        unsafe { self.0.as_ptr().copy_from_nonoverlapping(bytes_at(bytes), bytes.len()) };
    }
}

fn bytes_at(bytes: &mut [u8]) -> std::ptr::NonNull<u8> {
    std::ptr::NonNull::from(bytes).cast()
}

/// An end with memory that is mapped, at address 0 of its key, beside its buffer, which is not.
struct Side {
    end: End,
    key: u32,
    shared: Shared,
}

fn sides(router: &Router, kind: u32) -> (Side, Side) {
    let (a, b) = pair([router, router], kind, 4000, |_| ());
    let side = |mut end: End| {
        let (_, key, memory) = end.device.shared(end.pd, MEMORY as u64);
        Side { end, key, shared: Shared(memory) }
    };
    (side(a), side(b))
}

/// What both sides should have in memory, and what they should be told.
struct Model {
    /// The mapped memory of the two, and their buffers.
    mapped: [Vec<u8>; 2],
    buffers: [Vec<u8>; 2],
    told: Vec<u64>,
    received: Vec<(u64, u32)>,
    traffic: Traffic,
}

impl Model {
    /// Where `length` bytes of a side begin, and how they are named: mapped, or of the buffer.
    fn memory(&mut self, side: usize, mapped: bool) -> &mut Vec<u8> {
        if mapped { &mut self.mapped[side] } else { &mut self.buffers[side] }
    }
}

struct Program<R> {
    random: R,
    model: Model,
    keys: [[u32; 2]; 2],
    /// Where the buffers are.
    bases: [u64; 2],
}

impl<R: FnMut() -> u64> Program<R> {
    fn below(&mut self, n: usize) -> usize {
        usize::try_from((self.random)() % n as u64).unwrap()
    }

    /// Some place with as many bytes: whether it is mapped, and where it begins.
    fn place(&mut self, length: usize) -> (bool, usize) {
        let mapped = length > 4000 || self.below(4) > 0;
        let room = if mapped { MEMORY } else { 4000 };
        (mapped, self.below(room - length + 1))
    }

    fn name(&self, side: usize, (mapped, at): (bool, usize)) -> (u64, u32) {
        let base = if mapped { 0 } else { self.bases[side] };
        (base + at as u64, self.keys[side][usize::from(!mapped)])
    }

    /// Entries of the first side, and their bytes.
    fn entries(&mut self) -> (Vec<Sge>, Vec<u8>) {
        let (mut sges, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..=self.below(6).saturating_sub(3) {
            let lengths = [0, 1, 7, 64, 64, 2048, 2048, 4000, 9000, 40_000];
            let length = lengths[self.below(lengths.len())];
            let place = self.place(length);
            let (address, key) = self.name(0, place);
            sges.push((address, u32::try_from(length).unwrap(), key));
            let from = &self.model.memory(0, place.0)[place.1..place.1 + length];
            bytes.extend_from_slice(from);
        }
        (sges, bytes)
    }

    /// Puts bytes that are sent into one or two places of the second side, and names them.
    fn receive(&mut self, bytes: &[u8]) -> Vec<Sge> {
        let split = [0, bytes.len() / 3][self.below(2)];
        let mut sges = Vec::new();
        for bytes in [&bytes[..split], &bytes[split..]] {
            let place = self.place(bytes.len());
            let (address, key) = self.name(1, place);
            sges.push((address, u32::try_from(bytes.len()).unwrap(), key));
            self.model.memory(1, place.0)[place.1..place.1 + bytes.len()].copy_from_slice(bytes);
        }
        sges
    }

    /// A request of the first side, and a receive request of the second if it needs one.
    fn request(&mut self, id: u64) -> (Vec<Slot>, Option<Vec<Sge>>) {
        let flags = [0, 2][self.below(2)] | [0, 0, 0, 1][self.below(4)];
        let kind = self.below(20);
        let head = |opcode| abi::verbs_send { flags, ..request(opcode, id) };
        if flags & 2 != 0 {
            self.model.told.push(id);
        }
        self.model.traffic.requests += 1;
        let atomic = kind == 0;
        if atomic || kind < 4 {
            let length = if atomic { 8 } else { [0, 1, 500, 4000, 40_000][self.below(5)] };
            let (from, to) = ((true, self.below(1000) * 8), self.place(length));
            let ((remote_address, rkey), (address, key)) = (self.name(1, from), self.name(0, to));
            let bytes = self.model.mapped[1][from.1..from.1 + length].to_vec();
            if atomic {
                let sum = u64::from_ne_bytes(bytes[..].try_into().unwrap()).wrapping_add(id);
                self.model.mapped[1][from.1..from.1 + 8].copy_from_slice(&sum.to_ne_bytes());
            }
            self.model.memory(0, to.0)[to.1..to.1 + length].copy_from_slice(&bytes);
            self.model.traffic.received += length as u64;
            let opcode = if atomic { ibv::WR_ATOMIC_FETCH_AND_ADD } else { ibv::WR_RDMA_READ };
            let head = abi::verbs_send { remote_address, rkey, compare_add: id, ..head(opcode) };
            let entry = (address, u32::try_from(length).unwrap(), key);
            return (sending(head, &[entry]), None);
        }
        let (sges, mut bytes) = self.entries();
        let is_inline = matches!(kind, 4 | 5 | 8);
        if is_inline {
            bytes.truncate(100);
        }
        self.model.traffic.sent += bytes.len() as u64;
        let length = u32::try_from(bytes.len()).unwrap();
        let mut head = head(match kind {
            6..=9 => ibv::WR_SEND,
            10 => ibv::WR_SEND_WITH_IMM,
            11 | 12 => ibv::WR_RDMA_WRITE_WITH_IMM,
            _ => ibv::WR_RDMA_WRITE,
        });
        let takes = head.opcode != ibv::WR_RDMA_WRITE;
        if takes {
            self.model.received.push((id, length));
        }
        let mut receive = Vec::new();
        if (6..11).contains(&kind) {
            receive = self.receive(&bytes);
        } else {
            let to = self.place(bytes.len());
            (head.remote_address, head.rkey) = self.name(1, to);
            self.model.memory(1, to.0)[to.1..to.1 + bytes.len()].copy_from_slice(&bytes);
        }
        let slots = if is_inline { inline(head, &bytes) } else { sending(head, &sges) };
        (slots, takes.then_some(receive))
    }
}

fn random_requests(router: &Router) {
    let (mut a, mut b) = sides(router, ibv::QPT_RC);
    let mut random = seeded::numbers(0x2545_f491_4f6c_dd1d);
    let mut fill = |length: usize| (0..length).map(|_| random().to_le_bytes()[0]).collect();
    let mut mapped: [Vec<u8>; 2] = [fill(MEMORY), fill(MEMORY)];
    a.shared.write(&mut mapped[0]);
    b.shared.write(&mut mapped[1]);
    let buffers = [a.end.buffer.clone(), b.end.buffer.clone()];
    let (told, received, traffic) = (Vec::new(), Vec::new(), Traffic::default());
    let mut program = Program {
        random,
        model: Model { mapped, buffers, told, received, traffic },
        keys: [[a.key, a.end.key], [b.key, b.end.key]],
        bases: [a.end.buffer.as_ptr() as u64, b.end.buffer.as_ptr() as u64],
    };
    let mut id = 0;
    for round in 0..150 {
        let mut all = Vec::new();
        for _ in 0..=program.below(28) {
            id += 1;
            let (mut slots, receive) = program.request(id);
            if let Some(entries) = receive {
                b.end.post_receive(id, &entries);
            }
            all.append(&mut slots);
        }
        // All at once, with one behind them that says that they are done.
        let last = abi::verbs_send { rkey: 1, ..request(ibv::WR_RDMA_WRITE, u64::MAX) };
        all.append(&mut sending(last, &[]));
        program.model.traffic.requests += 1;
        a.end.send(&all);
        for wanted in program.model.told.drain(..) {
            assert_eq!(a.end.sends.result(), (wanted, ibv::WC_SUCCESS), "round {round}");
        }
        assert_eq!(a.end.sends.result(), (u64::MAX, ibv::WC_SUCCESS), "round {round}");
        for (wanted, length) in program.model.received.drain(..) {
            let completion = b.end.receives.next();
            let heard = (completion.wr_id, completion.byte_len, completion.status);
            assert_eq!(heard, (wanted, length, ibv::WC_SUCCESS), "round {round}");
        }
        let model = &program.model;
        assert!(a.shared.read() == model.mapped[0], "round {round}");
        assert!(b.shared.read() == model.mapped[1], "round {round}");
        assert_eq!(a.end.buffer, model.buffers[0], "round {round}");
        assert_eq!(b.end.buffer, model.buffers[1], "round {round}");
    }
    let Traffic { requests, sent, received, .. } = program.model.traffic;
    let moved = Traffic { requests, sent, received, served: 0 };
    assert_eq!(router.qp_account(a.end.address()).traffic, moved);
    let moved = Traffic { served: requests, sent: received, received: sent, requests: 0 };
    assert_eq!(router.qp_account(b.end.address()).traffic, moved);
}

#[test]
fn requests_of_all_kinds_do_what_they_would_do_one_by_one() {
    random_requests(&node());
}

/// Any copy is taken for one that is stuck, so that threads take over from each other.
#[test]
fn they_do_so_while_threads_take_over() {
    let router = Router::start_impatient(&Arc::default());
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    random_requests(&router);
}

/// How the middle one of many WRITEs is wrong, and with what it fails.
const WRONGS: [(&str, u32); 7] = [
    ("rkey", ibv::WC_REM_ACCESS_ERR),
    ("remote range", ibv::WC_REM_ACCESS_ERR),
    ("lkey", ibv::WC_LOC_PROT_ERR),
    ("range", ibv::WC_LOC_PROT_ERR),
    ("opcode", ibv::WC_LOC_QP_OP_ERR),
    ("flags", ibv::WC_LOC_QP_OP_ERR),
    ("entries", ibv::WC_LOC_QP_OP_ERR),
];

fn written(a: &Side, b: &Side, id: u64, wrong: &str) -> Vec<Slot> {
    let mut head = abi::verbs_send {
        remote_address: id * 100,
        rkey: b.key,
        ..request(ibv::WR_RDMA_WRITE, id)
    };
    let mut entry = (id * 100, 100, a.key);
    let mut more = Vec::new();
    match wrong {
        "rkey" => head.rkey ^= 1 << 30,
        "remote range" => head.remote_address = MEMORY as u64 - 99,
        "lkey" => entry.2 ^= 1 << 30,
        "range" => entry.0 = MEMORY as u64 - 99,
        "opcode" => head.opcode = 99,
        "flags" => head.flags |= 16,
        // More than the queue pair was granted.
        "entries" => more = vec![(0, 1, a.key); 4],
        _ => {}
    }
    more.push(entry);
    sending(head, &more)
}

/// One that is wrong fails by itself: those in front of it are complete, those behind are flushed.
#[test]
fn what_is_wrong_among_writes_fails_alone() {
    const ALL: u64 = 12;
    let router = node();
    for (wrong, status) in WRONGS {
        for at in [0, 1, 5, ALL - 1] {
            let (mut a, b) = sides(&router, ibv::QPT_RC);
            a.shared.write(&mut vec![7; MEMORY]);
            let name = |id| if id == at { wrong } else { "" };
            let all: Vec<_> = (0..ALL).flat_map(|id| written(&a, &b, id, name(id))).collect();
            a.end.send(&all);
            for id in 0..ALL {
                let wanted = match id.cmp(&at) {
                    std::cmp::Ordering::Less => ibv::WC_SUCCESS,
                    std::cmp::Ordering::Equal => status,
                    std::cmp::Ordering::Greater => ibv::WC_WR_FLUSH_ERR,
                };
                assert_eq!(a.end.sends.result(), (id, wanted), "{wrong} at {at}");
            }
            let count = usize::try_from(at).unwrap() * 100;
            let mut memory = vec![7; count];
            memory.resize(MEMORY, 0);
            assert!(b.shared.read() == memory, "{wrong} at {at}");
        }
    }
}

fn sent(a: &Side, id: u64) -> Vec<Slot> {
    sending(request(ibv::WR_SEND, id), &[(id * 100, 100, a.key)])
}

fn received(b: &Side, id: u64, wrong: &str) -> Vec<Slot> {
    let place = (id * 100, 100, b.key);
    match wrong {
        "short" => receiving(id, &[(place.0, 99, place.2)]),
        "lkey" => receiving(id, &[(place.0, 100, place.2 ^ 1 << 30)]),
        "range" => receiving(id, &[(MEMORY as u64 - 99, 100, place.2)]),
        // More than the queue was granted.
        "entries" => receiving(id, &[place; 5]),
        _ => receiving(id, &[place]),
    }
}

/// A receive request that is wrong fails by itself, and the SEND that takes it: all in front of
/// the two are complete, those behind are flushed.
#[test]
fn what_is_wrong_among_receive_requests_fails_alone() {
    const ALL: u64 = 12;
    let router = node();
    for (wrong, sender, receiver) in [
        ("short", ibv::WC_REM_INV_REQ_ERR, ibv::WC_LOC_LEN_ERR),
        ("lkey", ibv::WC_REM_OP_ERR, ibv::WC_LOC_PROT_ERR),
        ("range", ibv::WC_REM_OP_ERR, ibv::WC_LOC_PROT_ERR),
        ("entries", ibv::WC_REM_OP_ERR, ibv::WC_LOC_QP_OP_ERR),
    ] {
        for at in [0, 1, 5, ALL - 1] {
            let (mut a, mut b) = sides(&router, ibv::QPT_RC);
            a.shared.write(&mut vec![7; MEMORY]);
            let name = |id| if id == at { wrong } else { "" };
            let receives: Vec<_> = (0..ALL).flat_map(|id| received(&b, id, name(id))).collect();
            b.end.device.post(b.end.qp.receive.as_mut().unwrap(), &receives);
            a.end.send(&(0..ALL).flat_map(|id| sent(&a, id)).collect::<Vec<_>>());
            for id in 0..ALL {
                let wanted = |status| match id.cmp(&at) {
                    std::cmp::Ordering::Less => ibv::WC_SUCCESS,
                    std::cmp::Ordering::Equal => status,
                    std::cmp::Ordering::Greater => ibv::WC_WR_FLUSH_ERR,
                };
                assert_eq!(a.end.sends.result(), (id, wanted(sender)), "{wrong} at {at}");
                assert_eq!(b.end.receives.result(), (id, wanted(receiver)), "{wrong} at {at}");
            }
            let mut memory = vec![7; usize::try_from(at).unwrap() * 100];
            memory.resize(MEMORY, 0);
            assert!(b.shared.read() == memory, "{wrong} at {at}");
        }
    }
}

/// Connects the two once more, so that the second one takes receive requests of a shared queue.
fn connect_shared(a: &mut Side, b: &mut Side, srq: u32) {
    let (one, two) = (&mut a.end, &mut b.end);
    one.qp = one.device.qp(ibv::QPT_RC, one.pd, &one.sends, &one.receives, 0);
    two.qp = two.device.qp(ibv::QPT_RC, two.pd, &two.sends, &two.receives, srq);
    one.device.connect(one.qp.number, ibv::QPT_RC, two.address(), |_| ());
    two.device.connect(two.qp.number, ibv::QPT_RC, one.address(), |_| ());
}

/// Messages of all kinds take them in their order, and the program hears when few are left.
#[test]
fn messages_take_the_receive_requests_of_a_shared_queue() {
    let router = node();
    let (mut a, mut b) = sides(&router, ibv::QPT_RC);
    a.shared.write(&mut vec![7; MEMORY]);
    let (srq, mut ring) = b.end.device.srq(b.end.pd, 16, 3);
    connect_shared(&mut a, &mut b, srq);
    let receives: Vec<_> = (0..12).flat_map(|id| received(&b, id, "")).collect();
    b.end.device.post(&mut ring, &receives);
    let (own, rkey) = (a.key, b.key);
    let message = |id: u32| {
        let opcodes = [ibv::WR_SEND, ibv::WR_SEND_WITH_IMM, ibv::WR_RDMA_WRITE_WITH_IMM];
        let mut head = request(opcodes[id as usize % 3], id.into());
        head.imm = 50 + id;
        if head.opcode == ibv::WR_RDMA_WRITE_WITH_IMM {
            (head.remote_address, head.rkey) = (u64::from(id) * 100, rkey);
        }
        sending(head, &[(0, 100 - id, own)])
    };
    let mut wanted = Vec::new();
    for ids in [0..9, 9..12] {
        // Three are left after the first ones, which is the limit, and not fewer.
        assert_eq!(b.end.device.state(b.end.qp.number), 3);
        assert!(!readable(&b.end.device.events, Duration::ZERO));
        a.end.send(&ids.clone().flat_map(message).collect::<Vec<_>>());
        for id in ids {
            assert_eq!(a.end.sends.result(), (id.into(), ibv::WC_SUCCESS));
            let got = b.end.receives.next();
            assert_eq!((got.wr_id, got.status), (id.into(), ibv::WC_SUCCESS));
            let opcodes = [ibv::WC_RECV, ibv::WC_RECV, ibv::WC_RECV_RDMA_WITH_IMM];
            assert_eq!((got.byte_len, got.opcode), (100 - id, opcodes[id as usize % 3]));
            let (imm, flags) = if id % 3 == 0 { (0, 0) } else { (50 + id, ibv::WC_WITH_IMM) };
            assert_eq!((got.imm, got.flags), (imm, flags));
            assert_eq!((got.qp_num, got.src_qp), (b.end.qp.number, a.end.qp.number));
            wanted.resize(wanted.len() + 100 - id as usize, 7);
            wanted.resize(wanted.len() + id as usize, 0);
        }
    }
    let event = b.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_SRQ_LIMIT_REACHED, srq));
    wanted.resize(MEMORY, 0);
    assert!(b.shared.read() == wanted);
}

/// A receive request of a shared queue that is wrong fails the queue pair that takes it, and no
/// other: the next one's messages take those behind it.
#[test]
fn what_is_wrong_in_a_shared_queue_fails_alone() {
    const ALL: u64 = 12;
    let router = node();
    for (wrong, sender, receiver) in [
        ("short", ibv::WC_REM_INV_REQ_ERR, ibv::WC_LOC_LEN_ERR),
        ("lkey", ibv::WC_REM_OP_ERR, ibv::WC_LOC_PROT_ERR),
        ("range", ibv::WC_REM_OP_ERR, ibv::WC_LOC_PROT_ERR),
        ("entries", ibv::WC_REM_OP_ERR, ibv::WC_LOC_QP_OP_ERR),
    ] {
        for at in [0, 1, 3, 4, 6, ALL - 1] {
            let (mut a, mut b) = sides(&router, ibv::QPT_RC);
            a.shared.write(&mut vec![7; MEMORY]);
            let (srq, mut ring) = b.end.device.srq(b.end.pd, 16, 0);
            let name = |id| if id == at { wrong } else { "" };
            let receives: Vec<_> = (0..ALL).flat_map(|id| received(&b, id, name(id))).collect();
            b.end.device.post(&mut ring, &receives);
            for first in [0, at + 1] {
                connect_shared(&mut a, &mut b, srq);
                a.end.send(&(first..ALL).flat_map(|id| sent(&a, id)).collect::<Vec<_>>());
                for id in first..ALL {
                    let (sends, receives) = match id.cmp(&at) {
                        std::cmp::Ordering::Equal => (sender, Some(receiver)),
                        std::cmp::Ordering::Greater if first == 0 => (ibv::WC_WR_FLUSH_ERR, None),
                        _ => (ibv::WC_SUCCESS, Some(ibv::WC_SUCCESS)),
                    };
                    assert_eq!(a.end.sends.result(), (id, sends), "{wrong} at {at}");
                    if let Some(status) = receives {
                        assert_eq!(b.end.receives.result(), (id, status), "{wrong} at {at}");
                    }
                }
                assert!(b.end.receives.poll().is_none(), "{wrong} at {at}");
            }
            let mut memory = vec![7; usize::try_from(ALL).unwrap() * 100];
            memory[usize::try_from(at).unwrap() * 100..][..100].fill(0);
            memory.resize(MEMORY, 0);
            assert!(b.shared.read() == memory, "{wrong} at {at}");
        }
    }
}

/// SENDs for which there is no receive request yet wait behind those that had one.
#[test]
fn sends_behind_the_last_receive_request_wait_for_more() {
    let router = node();
    let (mut a, mut b) = sides(&router, ibv::QPT_RC);
    a.shared.write(&mut vec![7; MEMORY]);
    let receives: Vec<_> = (0..5).flat_map(|id| received(&b, id, "")).collect();
    b.end.device.post(b.end.qp.receive.as_mut().unwrap(), &receives);
    a.end.send(&(0..12).flat_map(|id| sent(&a, id)).collect::<Vec<_>>());
    for id in 0..5 {
        assert_eq!(a.end.sends.result(), (id, ibv::WC_SUCCESS));
    }
    // The router has seen the others and waits when it has answered this.
    assert_eq!(a.end.device.state(a.end.qp.number), 3);
    assert!(a.end.sends.poll().is_none());
    let receives: Vec<_> = (5..12).flat_map(|id| received(&b, id, "")).collect();
    b.end.device.post(b.end.qp.receive.as_mut().unwrap(), &receives);
    for id in 0..12 {
        if id >= 5 {
            assert_eq!(a.end.sends.result(), (id, ibv::WC_SUCCESS));
        }
        assert_eq!(b.end.receives.result(), (id, ibv::WC_SUCCESS));
    }
    let mut memory = vec![7; 1200];
    memory.resize(MEMORY, 0);
    assert!(b.shared.read() == memory);
}

/// A send queue that drains ends the SEND that waits, and begins none of those behind it.
#[test]
fn a_send_queue_that_drains_begins_no_more() {
    let router = node();
    let (mut a, mut b) = sides(&router, ibv::QPT_RC);
    a.shared.write(&mut vec![7; MEMORY]);
    a.end.send(&sent(&a, 0));
    eventually("a message that waits", || (router.times(2, Reason::NotReady) == 1).then_some(()));
    let change = |qp_state| abi::verbs_qp_attr {
        qp_state,
        en_sqd_async_notify: 1,
        ..abi::verbs_qp_attr::default()
    };
    let notify = ibv::QP_STATE | ibv::QP_EN_SQD_ASYNC_NOTIFY;
    assert_eq!(a.end.device.modify(a.end.qp.number, notify, change(4)), Ok(4));
    let behind = [sent(&a, 1), written(&a, &b, 2, ""), sent(&a, 3)];
    a.end.send(&behind.concat());
    assert_eq!(a.end.device.state(a.end.qp.number), 4);
    assert!(!readable(&a.end.device.events, Duration::ZERO));
    let receives: Vec<_> = [0, 1, 3].iter().flat_map(|id| received(&b, *id, "")).collect();
    b.end.device.post(b.end.qp.receive.as_mut().unwrap(), &receives);
    assert_eq!(a.end.sends.result(), (0, ibv::WC_SUCCESS));
    let event = a.end.device.event();
    assert_eq!((event.event, event.object), (ibv::EVENT_SQ_DRAINED, a.end.qp.number));
    assert_eq!(b.end.receives.result(), (0, ibv::WC_SUCCESS));
    // What the router did in that turn is done when it has answered this.
    assert_eq!(a.end.device.state(a.end.qp.number), 4);
    assert!(a.end.sends.poll().is_none() && b.end.receives.poll().is_none());
    let filled = |count| [vec![7; count], vec![0; MEMORY - count]].concat();
    assert!(b.shared.read() == filled(100));
    assert_eq!(a.end.device.modify(a.end.qp.number, ibv::QP_STATE, change(3)), Ok(3));
    for id in 1..4 {
        assert_eq!(a.end.sends.result(), (id, ibv::WC_SUCCESS));
    }
    assert!(b.shared.read() == filled(400));
}

/// Nobody tells an unreliable sender of what is wrong at its peer; what comes behind arrives.
#[test]
fn unreliable_writes_behind_a_wrong_one_arrive() {
    let router = node();
    let (mut a, b) = sides(&router, ibv::QPT_UC);
    a.shared.write(&mut vec![7; MEMORY]);
    let name = |id| if id == 5 { "rkey" } else { "" };
    let all: Vec<_> = (0..12).flat_map(|id| written(&a, &b, id, name(id))).collect();
    a.end.send(&all);
    for id in 0..12 {
        assert_eq!(a.end.sends.result(), (id, ibv::WC_SUCCESS));
    }
    let mut memory = [[7; 500].as_slice(), &[0; 100], &[7; 600]].concat();
    memory.resize(MEMORY, 0);
    assert!(b.shared.read() == memory);
}

/// The peer's queue pair goes while requests are under way: some are complete, one fails, all
/// others are flushed, in order.
#[test]
fn a_peer_that_is_destroyed_among_writes_ends_them_in_order() {
    let router = node();
    let (mut a, mut b) = sides(&router, ibv::QPT_RC);
    a.shared.write(&mut vec![7; MEMORY]);
    let all: Vec<_> = (0..30).flat_map(|id| written(&a, &b, id, "")).collect();
    a.end.send(&all);
    b.end.device.object(abi::VERBS_DESTROY_QP, b.end.qp.number).unwrap();
    // Before the answer no thread wrote for it any more.
    let seen = b.shared.read();
    a.end.send(&written(&a, &b, 30, ""));
    let results: Vec<_> = (0..31).map(|_| a.end.sends.result()).collect();
    assert!(results.iter().map(|(id, _)| *id).eq(0..31));
    let complete = results.iter().take_while(|(_, status)| *status == ibv::WC_SUCCESS).count();
    assert!(complete < 31 && results[complete].1 == ibv::WC_RETRY_EXC_ERR, "{results:?}");
    assert!(results[complete + 1..].iter().all(|(_, status)| *status == ibv::WC_WR_FLUSH_ERR));
    let mut memory = vec![7; complete * 100];
    memory.resize(MEMORY, 0);
    assert!(seen == memory && b.shared.read() == memory);
}

/// Requests that are copied together count as so many.
#[test]
fn a_limit_of_requests_holds_for_writes_that_are_copied_together() {
    let router = node();
    router.add(1, Limits { sends_per_second: 200, ..Limits::default() });
    let (mut a, b) = sides(&router, ibv::QPT_RC);
    let start = Instant::now();
    for first in [0, 30] {
        let all: Vec<_> = (first..first + 30).flat_map(|id| written(&a, &b, id, "")).collect();
        a.end.send(&all);
        for id in first..first + 30 {
            assert_eq!(a.end.sends.result(), (id, ibv::WC_SUCCESS));
        }
    }
    // A tenth of a second's at once, and the other 40 in a fifth of one.
    assert!(start.elapsed() >= Duration::from_millis(180), "{:?}", start.elapsed());
}

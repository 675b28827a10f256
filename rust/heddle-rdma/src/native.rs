//! Queue pairs whose peer is without Heddle: the card does what their programs ask for. Requests
//! are taken out of the rings, posted to the card's queue pair, and completed as the card says.
//! What the router has mapped the card reads and writes itself; other bytes go by memory of the
//! router.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use verbs_protocol::abi::verbs_qp_attr;
use verbs_protocol::agent::Marks;
use verbs_protocol::ibv;
use verbs_protocol::slots::{Receive, Send};
use verbs_protocol::statistics::Reason;
use verbs_qp::State;

use crate::bounce::{Bounce, No, Plan};
use crate::endpoint::Quota;
use crate::ibverbs::{Completion, Domain, Pair};
use crate::objects::{Current, Objects, Qp};
use crate::outside::Again;
use crate::receiving::Taken;
use crate::requests::{QUANTUM, REQUEST_COST, Turn, refusal};

mod completed;

/// Requests of a queue pair that the card has at a time.
pub(crate) const SENDS: u32 = 64;
pub(crate) const RECEIVES: u32 = 64;
/// Batches of completions that are taken before others have their turn.
const BATCHES: usize = 8;

/// How far a queue pair is with its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It has none of this kind.
    Idle,
    /// The agent is asked.
    Asked,
    /// It has allowed it.
    Allowed,
    /// The card does what is asked for.
    Live,
}

/// What a queue pair of an endpoint that may have peers without Heddle has at the card.
pub(crate) struct Native {
    // Dropped in this order.
    pub(crate) pair: Pair,
    pub(crate) bounce: Option<Bounce>,
    domain: Arc<Domain>,
    pub(crate) phase: Phase,
    pub(crate) again: Again,
    /// What of its packets is not its program's.
    pub(crate) marks: Marks,
    /// The card says that it has failed.
    pub(crate) failed: bool,
    /// The card may send.
    sends: bool,
    /// Which life of it this is.
    epoch: u32,
    sent: VecDeque<Sent>,
    received: VecDeque<Received>,
    done: VecDeque<Completion>,
}

struct Sent {
    send: Send,
    plan: Plan,
}

struct Received {
    receive: Receive,
    plan: Plan,
}

impl Received {
    /// Whether the card can have done it so: a message has at most the bytes of its entries. What a
    /// peer has written beside it the card tells as the length, too.
    fn is_for(&self, done: &Completion) -> bool {
        let all = (0..self.receive.entries()).map(|i| u64::from(self.receive.entry(i).length));
        done.status != ibv::WC_SUCCESS
            || done.opcode == ibv::WC_RECV_RDMA_WITH_IMM
            || u64::from(done.length) <= all.sum()
    }
}

impl Native {
    pub(crate) fn new(pair: Pair, domain: Arc<Domain>) -> Self {
        Self {
            pair,
            bounce: None,
            domain,
            phase: Phase::Idle,
            again: Again::default(),
            marks: Marks::default(),
            failed: false,
            sends: false,
            epoch: 0,
            sent: VecDeque::new(),
            received: VecDeque::new(),
            done: VecDeque::new(),
        }
    }

    /// Bytes that its endpoint is charged for.
    pub(crate) fn memory(&self) -> u64 {
        if self.bounce.is_some() { Bounce::BYTES } else { 0 }
    }

    /// Whether nothing that was sent is under way.
    pub(crate) fn is_drained(&self) -> bool {
        self.sent.is_empty()
    }
}

const RECEIVE: u64 = 1;

fn id(number: u32, epoch: u32, kind: u64) -> u64 {
    u64::from(number) << 40 | u64::from(epoch) << 8 | kind
}

impl Objects {
    /// Whether a queue pair's peer is without Heddle.
    pub(crate) fn is_native(&self, number: u32) -> bool {
        let native = self.qps.get(number).and_then(|qp| qp.native.as_ref());
        native.is_some_and(|n| n.phase != Phase::Idle)
    }

    pub(crate) fn native(&mut self, number: u32, epoch: u32) -> Option<&mut Native> {
        let native = self.qps.get_mut(number)?.native.as_deref_mut()?;
        (native.phase != Phase::Idle && native.epoch == epoch).then_some(native)
    }

    /// The card tells of completions.
    pub(crate) fn native_event(&mut self) {
        if let Some(completions) = self.outside.completions() {
            // One that tells no more has failed, of which the card tells otherwise.
            let _ = completions.arm();
            self.take_native();
        }
    }

    /// Takes completions, and notes them at their queue pairs.
    pub(crate) fn take_native(&mut self) {
        let Some(completions) = self.outside.completions() else { return };
        let mut batch = [Completion::default(); 32];
        for _ in 0..BATCHES {
            let got = completions.poll(&mut batch);
            for completion in &batch[..got] {
                let number = u32::try_from(completion.id >> 40).unwrap_or(0);
                let epoch = u32::try_from(completion.id >> 8 & u64::from(u32::MAX)).unwrap_or(0);
                let Some(native) = self.native(number, epoch) else { continue };
                if native.done.len() < native.sent.len() + native.received.len() {
                    native.done.push_back(*completion);
                } else {
                    native.failed = true;
                    self.note_of(number, Reason::CardWrong);
                }
                self.wake_native(number);
            }
            if got < batch.len() {
                return;
            }
        }
        // More may have come than were taken, of which nothing tells.
        let all = self.qps.iter().filter(|(_, q)| q.native.is_some()).map(|(number, _)| number);
        for number in all.collect::<Vec<_>>() {
            self.wake_native(number);
        }
    }

    pub(crate) fn wake_native(&mut self, number: u32) {
        let context = self.qps.get(number).map_or(0, |qp| qp.context);
        if let Some(context) = self.contexts.get_mut(context) {
            context.awake = true;
        }
    }

    /// A turn of a queue pair whose peer is without Heddle.
    pub(crate) fn native_turn(self: &mut Box<Self>, number: u32) -> Turn {
        let mut turn = Turn::default();
        let native = self.qps.get(number).and_then(|qp| qp.native.as_ref());
        match native.map_or(Phase::Idle, |n| n.phase) {
            Phase::Idle | Phase::Asked => return turn,
            Phase::Allowed => {
                if self.open_native(number).is_err() {
                    self.note_of(number, Reason::CardRefused);
                    self.fail_fatally(number);
                }
                turn.worked = true;
                return turn;
            }
            Phase::Live => {}
        }
        self.take_native();
        let debt = self.qps.get(number).map_or(0, |qp| qp.debt);
        let mut budget = QUANTUM - debt;
        turn.worked |= self.complete_native(number, &mut budget);
        turn.worked |= self.expect_native(number);
        turn.worked |= self.send_native(number, &mut budget);
        turn.cost = QUANTUM - debt - budget;
        if let Some(qp) = self.qps.get_mut(number) {
            qp.debt = (-budget).max(0);
        }
        turn.worked |= budget <= 0;
        turn
    }

    /// The agent has allowed it: has the card know the peer.
    fn open_native(&mut self, number: u32) -> io::Result<()> {
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        let port = self.card.as_ref().map(|c| c.port).filter(|p| p.active).ok_or_else(none)?;
        let qp = self.qps.get(number).ok_or_else(none)?;
        let (endpoint, access) = (qp.endpoint, qp.attr.access);
        let length = Bounce::BYTES;
        let free = self.free(Quota::Memory);
        let e = self.endpoints.get_mut(endpoint).ok_or_else(none)?;
        if !e.charge(Quota::Memory, length, free) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        self.pooled += length;
        let epoch = self.outside.next_epoch();
        let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
        let Some(native) = native.filter(|n| n.bounce.is_none()) else {
            // One that could not be reset.
            self.refund_bounce(endpoint);
            return Err(none());
        };
        match Bounce::new(&native.domain) {
            Ok(bounce) => native.bounce = Some(bounce),
            Err(err) => {
                self.refund_bounce(endpoint);
                return Err(err);
            }
        }
        native.phase = Phase::Live;
        native.epoch = epoch;
        native.pair.init(access)?;
        // So that the peer's first messages find receive requests.
        self.expect_native(number);
        let qp = self.qps.get(number).ok_or_else(none)?;
        match qp.native.as_ref().filter(|n| n.phase == Phase::Live) {
            Some(native) => {
                let attr = marked(&qp.attr, native.marks);
                native.pair.ready_to_receive(qp.service, &port, &attr)
            }
            // A receive request of it was wrong.
            None => Ok(()),
        }
    }

    fn refund_bounce(&mut self, endpoint: u32) {
        self.pooled -= Bounce::BYTES;
        if let Some(e) = self.endpoints.get_mut(endpoint) {
            e.refund(Quota::Memory, Bounce::BYTES);
        }
    }

    /// Gives the card receive requests, as many as it takes.
    fn expect_native(&mut self, number: u32) -> bool {
        let mut worked = false;
        loop {
            let native = self.qps.get(number).and_then(|qp| qp.native.as_ref());
            let room = native
                .is_some_and(|n| n.phase == Phase::Live && n.received.len() < RECEIVES as usize);
            if !room {
                return worked;
            }
            let Taken::Ready(receive) = self.take_receive(number) else { return worked };
            let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
            let entry = |i| receive.entry(i);
            let plan = match self.plan(number, receive.entries(), entry, usage, false) {
                Ok(plan) => plan,
                Err(No::Room) => {
                    self.give_back(number, receive);
                    return worked;
                }
                Err(No::Wrong(status)) => {
                    self.fail_receive(number, receive.wr_id, status);
                    return true;
                }
            };
            let qp = self.qps.get_mut(number);
            let Some(native) = qp.and_then(|qp| qp.native.as_mut()) else { return worked };
            let posted = native.pair.expect(id(number, native.epoch, RECEIVE), &plan.parts);
            native.received.push_back(Received { receive, plan });
            worked = true;
            if posted.is_err() {
                self.fail_fatally(number);
                return worked;
            }
        }
    }

    /// Gives the card send requests, as many as it takes and a turn may cost.
    fn send_native(self: &mut Box<Self>, number: u32, budget: &mut i64) -> bool {
        let mut worked = false;
        while *budget > 0 {
            let Some(qp) = self.qps.get_mut(number) else { return worked };
            let Some(native) = &mut qp.native else { return worked };
            if qp.state != State::ReadyToSend && qp.state != State::SendQueueDrained
                || native.phase != Phase::Live
                || native.sent.len() >= SENDS as usize
            {
                return worked;
            }
            if !native.sends {
                native.sends = true;
                if native.pair.ready_to_send(qp.service, &qp.attr, 0).is_err() {
                    self.note_of(number, Reason::CardRefused);
                    self.fail_fatally(number);
                    return true;
                }
            }
            let epoch = native.epoch;
            let Some(current) = self.take_current(number) else { return worked };
            if !self.post_native(number, epoch, current, budget) {
                return worked;
            }
            worked = true;
        }
        worked
    }

    /// Posts a request; false if it has to wait.
    fn post_native(
        self: &mut Box<Self>,
        number: u32,
        epoch: u32,
        current: Current,
        budget: &mut i64,
    ) -> bool {
        let send = &current.send;
        let length = send.length();
        let Some(qp) = self.qps.get(number) else { return false };
        if let Some(status) = refusal(qp, send, length) {
            self.fail_send(number, send, status);
            return true;
        }
        let returns = returns(send.head.opcode);
        let access = if returns { ibv::ACCESS_LOCAL_WRITE } else { 0 };
        let usage = self.local(number, access);
        let entry = |i| send.entry(i);
        let planned = if send.is_inline() {
            self.plan_inline(number, send.inline())
        } else {
            self.plan(number, send.entries(), entry, usage, true)
        };
        let plan = match planned {
            Ok(plan) => plan,
            Err(No::Room) => {
                self.keep_current(number, current);
                return false;
            }
            Err(No::Wrong(status)) => {
                self.fail_send(number, send, status);
                return true;
            }
        };
        let bounced: usize = plan.bounced.iter().map(|(_, n)| n).sum();
        *budget -= REQUEST_COST + i64::try_from(bounced).unwrap_or(0);
        if bounced > 0 && !returns && !send.is_inline() {
            let loaded = self.load_bounced(number, epoch, send, &plan, usage);
            if self.still(number, usage.epoch) == 0 {
                return false;
            }
            let Some(native) = self.native(number, epoch) else {
                // It has failed meanwhile: this one is flushed with the others.
                self.keep_current(number, current);
                return false;
            };
            if !loaded {
                if let Some(bounce) = &mut native.bounce {
                    bounce.sends.give(plan.held);
                }
                self.fail_send(number, &current.send, ibv::WC_LOC_PROT_ERR);
                return true;
            }
        }
        let Some(native) = self.native(number, epoch) else { return false };
        let posted = native.pair.ask(id(number, epoch, 0), &current.send.head, &plan.parts);
        native.sent.push_back(Sent { send: current.send, plan });
        if posted.is_err() {
            self.fail_fatally(number);
        }
        true
    }

    /// A queue pair is with this peer no more: the card forgets all that is under way.
    pub(crate) fn end_native(&mut self, number: u32) {
        let live = |qp: &Qp| qp.native.as_ref().is_some_and(|n| n.phase == Phase::Live);
        if self.qps.get(number).is_some_and(|qp| qp.state == State::Error && live(qp)) {
            self.complete_native_briefly(number);
        }
        let Some(qp) = self.qps.get_mut(number) else { return };
        let Some(native) = qp.native.as_mut().filter(|n| n.phase != Phase::Idle) else { return };
        let endpoint = qp.endpoint;
        let fails = qp.state == State::Error;
        // Of one that cannot be reset nothing more is heard either, and its memory stays until it
        // is destroyed.
        let reset = native.phase != Phase::Live || native.pair.reset().is_ok();
        native.phase = Phase::Idle;
        (native.sends, native.failed) = (false, false);
        native.done.clear();
        qp.unlinked.extend(native.sent.drain(..).map(|s| s.send.head.wr_id));
        let received: Vec<Received> = native.received.drain(..).collect();
        let bounce = if reset { native.bounce.take() } else { None };
        if bounce.is_some() {
            drop(bounce);
            self.refund_bounce(endpoint);
        }
        for received in received.iter().filter(|_| fails) {
            self.tell_failed_receive(number, received.receive.wr_id, ibv::WC_WR_FLUSH_ERR);
        }
    }

    /// Whether a queue pair may have these attributes changed. Another peer is nobody's whom the
    /// agent was asked for, and not every card can be drained, which the others need.
    pub(crate) fn may_change_native(&self, number: u32, mask: u32, to: State) -> bool {
        const FIXED: u32 = ibv::QP_AV
            | ibv::QP_TIMEOUT
            | ibv::QP_RETRY_CNT
            | ibv::QP_RNR_RETRY
            | ibv::QP_MAX_QP_RD_ATOMIC
            | ibv::QP_MAX_DEST_RD_ATOMIC;
        to != State::SendQueueDrained || mask & FIXED == 0 || !self.is_native(number)
    }

    /// A program has changed what its card goes on with: what the peer may do, and for how long it
    /// waits while there is no receive request.
    pub(crate) fn change_native(&mut self, number: u32, mask: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        let Some(native) = qp.native.as_mut().filter(|n| n.phase == Phase::Live) else { return };
        // A card in RTR takes them on its way to RTS, and not before.
        let changed = if std::mem::replace(&mut native.sends, true) {
            native.pair.change(qp.service, &qp.attr, mask)
        } else {
            native.pair.ready_to_send(qp.service, &qp.attr, mask)
        };
        if changed.is_err() {
            // It must not go on with other rights.
            native.failed = true;
            self.note_of(number, Reason::CardRefused);
            self.wake_native(number);
        }
    }
}

/// The attributes of a program, with what of them is the operator's: a DSCP, and no priority that
/// the program has chosen. The two bits of congestion are the card's business.
fn marked(attr: &verbs_qp_attr, marks: Marks) -> verbs_qp_attr {
    let mut attr = *attr;
    let address = &mut attr.address;
    if let Some(dscp) = marks.dscp {
        address.traffic_class = dscp << 2 | address.traffic_class & 3;
    }
    if marks.priority {
        address.sl = 0;
    }
    attr
}

fn returns(opcode: u8) -> bool {
    opcode == ibv::WR_RDMA_READ || crate::remote::is_atomic(opcode)
}

//! Work requests of queue pairs: what each turn of one does, on one node from memory to memory.
//!
//! A request that was taken out of its ring stays the queue pair's current one until it is
//! complete: it waits for a peer that is not ready, and a long one takes several turns.

use std::time::{Duration, Instant};

use verbs_protocol::abi::{self, verbs_completion, verbs_sge};
use verbs_protocol::ibv;
use verbs_protocol::slots::Send;
use verbs_protocol::statistics::Reason;
use verbs_qp::{Service, State};

use crate::commands::MAX_MESSAGE;
use crate::memory::{self, Fault, Regions, Use};
use crate::objects::{Current, Objects, Qp};
use crate::pieces::Piece;
use crate::protection::{Protection, protects};
use crate::queues::Dead;

/// What a turn of one queue pair may cost, in bytes that are copied (deficit round robin: Shreedhar
/// and Varghese, 1995). A turn may cost more by what was begun, and the next one has less then.
pub(crate) const QUANTUM: i64 = 64 * 1024;
/// The same while no other one has work: what a turn costs beside requests is shared by more. As
/// many bytes as are copied at a time.
const QUANTUM_ALONE: i64 = 4 * QUANTUM;
/// What a request costs beside its bytes: it and its completion take as long as this many bytes of
/// mapped memory, and two system calls for memory that is not mapped.
pub(crate) const REQUEST_COST: i64 = 4096;
/// Requests that a turn flushes.
const FLUSHES: u32 = 16;

/// What came of a turn.
#[derive(Clone, Copy, Default)]
pub(crate) struct Turn {
    /// Something was done.
    pub(crate) worked: bool,
    /// It waits for others.
    pub(crate) waits: bool,
    /// When it gives up, if it waits and ever does.
    pub(crate) until: Option<Instant>,
    /// What it has cost.
    pub(crate) cost: i64,
}

/// Why a request is not complete.
pub(crate) enum Pending {
    /// The turn is over; it goes on in the next one.
    Turn,
    /// There is no peer that takes part.
    Peer,
    /// The peer has no receive request. Its timer's code.
    NotReady(u8),
    /// The thread of this endpoint is to go on with it.
    Elsewhere(u32),
    /// An endpoint has copied as much as it may: not before then.
    Later(Instant),
    /// It failed: `enum ibv_wc_status`.
    Failed(u32),
}

pub(crate) type Step = Result<(), Pending>;

/// What the receiver's completion tells of a message.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    /// `enum ibv_wr_opcode`.
    pub(crate) opcode: u8,
    pub(crate) imm: u32,
    pub(crate) solicited: bool,
    /// The sender's queue pair.
    pub(crate) source: u32,
    pub(crate) length: u64,
}

impl Told {
    pub(crate) fn of(number: u32, send: &Send, length: u64) -> Self {
        let head = &send.head;
        let solicited = u32::from(head.flags) & abi::VERBS_SEND_SOLICITED != 0;
        Self { opcode: head.opcode, imm: head.imm, solicited, source: number, length }
    }
}

impl Objects {
    /// A turn of a queue pair.
    pub(crate) fn turn(self: &mut Box<Self>, number: u32, now: Instant) -> Turn {
        let Some(qp) = self.qps.get_mut(number) else { return Turn::default() };
        // Another thread is in the middle of it, and comes back.
        if std::mem::replace(&mut qp.in_turn, true) {
            qp.is_due = true;
            return Turn::default();
        }
        let (state, epoch) = (qp.state, qp.epoch);
        let worker = self.worker.serves();
        let mut turn = match state {
            State::Error => flushed(self.flush(number)),
            State::SendQueueError => flushed(self.flush_sends(number)),
            State::ReadyToReceive | State::ReadyToSend | State::SendQueueDrained
                if self.is_native(number) =>
            {
                self.native_turn(number)
            }
            State::ReadyToSend | State::SendQueueDrained if self.is_remote(number) => {
                self.remote_turn(number, now)
            }
            State::ReadyToSend | State::SendQueueDrained => self.send_turn(number, now),
            _ => Turn::default(),
        };
        let number = self.still(number, epoch);
        self.tell_drained(number);
        self.notify();
        self.end_turn(number, worker);
        // What is in its rings is to be flushed before the router sleeps.
        turn.worked |= self.qps.get(number).is_some_and(|qp| qp.state != state);
        if let Some(until) = self.qps.get_mut(number).and_then(|qp| qp.throttled.take()) {
            turn.waits = true;
            turn.until = Some(turn.until.map_or(until, |first| first.min(until)));
        }
        turn
    }

    /// The thread that did a turn may serve others now than those that it began with, and who came
    /// meanwhile has gone again: then the queue pair is looked at once more.
    pub(crate) fn end_turn(&mut self, number: u32, before: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        qp.in_turn = false;
        let due = std::mem::take(&mut qp.is_due);
        let serves = self.worker.serves();
        if !due && serves == before {
            return;
        }
        let context = qp.context;
        if let Some(context) = self.contexts.get_mut(context) {
            context.awake = true;
        }
        self.nudge_others(serves);
    }

    /// Completes what is in the rings of a queue pair in ERR, as far as a turn goes: how much.
    fn flush(&mut self, number: u32) -> u32 {
        for done in 0..FLUSHES {
            let Some(qp) = self.qps.get_mut(number) else { return done };
            let receives = (qp.recv_cq, ibv::WC_RECV);
            let sends = (qp.send_cq, ibv::WC_SEND);
            let inbound = qp.inbound.take().map(|r| (r.wr_id, receives));
            let inbound = inbound.or_else(|| Some((qp.unlinked.pop_front()?, sends)));
            let current = || qp.current.take().map(|c| (c.send.head.wr_id, sends));
            let next = inbound.or_else(current).or_else(|| match qp.send.next() {
                Ok(Some(Ok(send))) => Some((send.head.wr_id, sends)),
                Ok(Some(Err(wr_id))) => Some((wr_id, sends)),
                _ => None,
            });
            let next = next.or_else(|| match qp.receive.as_mut()?.next() {
                Ok(Some(Ok(receive))) => Some((receive.wr_id, receives)),
                Ok(Some(Err(wr_id))) => Some((wr_id, receives)),
                _ => None,
            });
            let Some((wr_id, (cq, opcode))) = next else {
                self.tell_last(number);
                return done;
            };
            let (status, qp_num) = (ibv::WC_WR_FLUSH_ERR, number);
            let completion =
                verbs_completion { wr_id, status, opcode, qp_num, ..Default::default() };
            self.complete(cq, &completion, false);
        }
        FLUSHES
    }

    /// Completes what is in the send ring of a queue pair in SQE, as far as a turn goes, and says
    /// how much: what comes in is not concerned.
    fn flush_sends(&mut self, number: u32) -> u32 {
        for done in 0..FLUSHES {
            let Some(qp) = self.qps.get_mut(number) else { return done };
            let wr_id = qp.unlinked.pop_front().or_else(|| match qp.send.next() {
                Ok(Some(Ok(send))) => Some(send.head.wr_id),
                Ok(Some(Err(wr_id))) => Some(wr_id),
                _ => None,
            });
            let Some(wr_id) = wr_id else { return done };
            let (status, qp_num, cq) = (ibv::WC_WR_FLUSH_ERR, number, qp.send_cq);
            let completion = verbs_completion { wr_id, status, qp_num, ..Default::default() };
            self.complete(cq, &completion, false);
        }
        FLUSHES
    }

    /// Says that a queue pair in SQD has nothing under way any more, if it is asked for.
    fn tell_drained(&mut self, number: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        let sent = self.links.get(qp.link).is_some_and(|l| !l.sent.is_empty())
            || qp.native.as_ref().is_some_and(|n| !n.is_drained());
        if qp.state != State::SendQueueDrained || !qp.tells_drained || qp.current.is_some() || sent
        {
            return;
        }
        let (context, user) = (qp.context, qp.user);
        if let Some(qp) = self.qps.get_mut(number) {
            qp.tells_drained = false;
        }
        self.tell(context, ibv::EVENT_SQ_DRAINED, number, user);
    }

    /// Nothing of a queue pair is under way any more: says so if it has to.
    fn tell_last(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        if qp.taken == 0 && std::mem::take(&mut qp.tells_last) {
            let (context, user) = (qp.context, qp.user);
            self.tell(context, ibv::EVENT_QP_LAST_WQE_REACHED, number, user);
        }
    }

    fn send_turn(self: &mut Box<Self>, number: u32, now: Instant) -> Turn {
        let mut turn = Turn::default();
        let (debt, epoch) = self.qps.get(number).map_or((0, 0), |qp| (qp.debt, qp.epoch));
        let quantum = if self.worker.is_alone() { QUANTUM_ALONE } else { QUANTUM };
        let mut bytes = quantum - debt;
        while bytes > 0 {
            let Some(mut current) = self.take_current(number) else { break };
            let before = bytes;
            let step = self.step(number, &mut current, &mut bytes);
            if self.still(number, epoch) == 0 {
                return turn;
            }
            match step {
                Ok(()) => {
                    self.complete_current(number, current);
                    turn.worked = true;
                    if let Some(qp) = self.qps.get_mut(number) {
                        qp.waits_since = None;
                    }
                }
                Err(Pending::Failed(status)) => {
                    self.fail_send(number, &current.send, status);
                    if let Some(qp) = self.qps.get_mut(number) {
                        qp.unlinked.extend(current.more.iter().map(|w| w.wr_id));
                    }
                    turn.worked = true;
                }
                Err(Pending::Turn) => {
                    self.keep_current(number, current);
                    turn.worked = true;
                }
                Err(Pending::Later(until)) => {
                    bytes += REQUEST_COST;
                    self.keep_current(number, current);
                    if let Some(qp) = self.qps.get_mut(number) {
                        qp.throttled = Some(until);
                    }
                    break;
                }
                Err(Pending::Elsewhere(endpoint)) => {
                    bytes = before;
                    self.keep_current(number, current);
                    self.visit(endpoint, number);
                    break;
                }
                Err(Pending::Peer) => {
                    bytes = before;
                    self.wait(number, current, now, None, &mut turn);
                }
                Err(Pending::NotReady(timer)) => {
                    bytes = before;
                    self.wait(number, current, now, Some(timer), &mut turn);
                }
            }
            if turn.waits {
                break;
            }
        }
        turn.cost = quantum - debt - bytes;
        if let Some(qp) = self.qps.get_mut(number) {
            // A queue pair that has nothing to do saves nothing up.
            qp.debt = (-bytes).max(0);
        }
        // It has something to do and had no turn for its debt.
        turn.worked |= bytes <= 0;
        turn
    }

    /// The current request of a queue pair, or the next one out of its ring. One that is wrong in
    /// itself fails here.
    pub(crate) fn take_current(&mut self, number: u32) -> Option<Current> {
        let live = [State::ReadyToSend, State::SendQueueDrained];
        let qp = self.qps.get_mut(number).filter(|q| live.contains(&q.state))?;
        if let Some(current) = qp.current.take() {
            return Some(current);
        }
        if qp.state == State::SendQueueDrained {
            // Nothing new is begun.
            return None;
        }
        let endpoint = self.endpoints.get_mut(qp.endpoint)?;
        if let Some(until) = endpoint.wait_to_send() {
            qp.throttled = Some(until);
            return None;
        }
        match qp.send.next() {
            Ok(Some(Ok(send))) => {
                endpoint.count_send();
                Some(Current { send, done: 0, more: Vec::new() })
            }
            Ok(Some(Err(wr_id))) => {
                self.fail_request(number, wr_id, ibv::WC_LOC_QP_OP_ERR);
                None
            }
            Ok(None) => None,
            Err(Dead) => {
                self.note_of(number, Reason::RingBroken);
                self.fail_fatally(number);
                None
            }
        }
    }

    pub(crate) fn keep_current(&mut self, number: u32, current: Current) {
        if let Some(qp) = self.qps.get_mut(number) {
            qp.current = Some(current);
        }
    }

    /// Keeps a request that has to wait, or fails it if it has waited for long enough: with `timer`
    /// for a receive request, else for a peer.
    fn wait(
        &mut self,
        number: u32,
        current: Current,
        now: Instant,
        timer: Option<u8>,
        turn: &mut Turn,
    ) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        let for_receive = timer.is_some();
        let begins = qp.waits_since.is_none_or(|(_, what)| what != for_receive);
        if begins {
            qp.waits_since = Some((now, for_receive));
        }
        let since = qp.waits_since.map_or(now, |(since, _)| since);
        let (limit, status) = match timer {
            Some(timer) => {
                (verbs_qp::rnr_give_up_after(&qp.attr, timer), ibv::WC_RNR_RETRY_EXC_ERR)
            }
            None => (verbs_qp::give_up_after(&qp.attr), ibv::WC_RETRY_EXC_ERR),
        };
        let until = limit.map(|limit: Duration| since + limit);
        if until.is_some_and(|until| until <= now) {
            self.fail_send(number, &current.send, status);
            turn.worked = true;
            return;
        }
        qp.current = Some(current);
        turn.waits = true;
        turn.until = until;
        let dest = qp.attr.dest_qp_num;
        if begins && timer.is_some() {
            self.note_of(dest, Reason::NotReady);
        }
    }

    fn step(self: &mut Box<Self>, number: u32, current: &mut Current, bytes: &mut i64) -> Step {
        let qp = self.qps.get(number).ok_or(Pending::Peer)?;
        let send = &current.send;
        let length = send.length();
        if let Some(status) = refusal(qp, send, length) {
            return Err(Pending::Failed(status));
        }
        *bytes -= REQUEST_COST;
        if qp.service == Service::UnreliableDatagram {
            *bytes -= i64::try_from(length).unwrap_or(0);
            return self.send_datagram(number, current, length);
        }
        if !self.is_own(number) && !self.is_established(number) && !qp.closed {
            return Err(Pending::Peer);
        }
        let Some(peer) = self.peer(number).filter(|_| !qp.closed) else {
            // Nobody tells an unreliable sender.
            let reliable = qp.service == Service::ReliableConnection;
            return if reliable { Err(Pending::Peer) } else { Ok(()) };
        };
        let reliable = qp.service == Service::ReliableConnection;
        let elsewhere = self.qps.get(peer).map_or(0, |p| self.shard_of(p.endpoint));
        if elsewhere != 0 && elsewhere != self.worker.serves() {
            return Err(Pending::Elsewhere(elsewhere));
        }
        if let Some(step) = self.together((number, peer), current, bytes) {
            return self.unless_dropped(step, peer, reliable);
        }
        let result = match current.send.head.opcode {
            ibv::WR_SEND | ibv::WR_SEND_WITH_IMM => {
                self.send_message(number, peer, current, length, bytes)
            }
            ibv::WR_RDMA_READ => self.read(number, peer, current, length, bytes),
            ibv::WR_ATOMIC_CMP_AND_SWP | ibv::WR_ATOMIC_FETCH_AND_ADD => {
                self.atomic(number, peer, current)
            }
            _ => self.write(number, peer, current, length, bytes),
        };
        self.unless_dropped(result, peer, reliable)
    }

    /// What came of a request, for who has sent it: nobody tells an unreliable one that its peer
    /// has no use for it.
    fn unless_dropped(&mut self, result: Step, peer: u32, reliable: bool) -> Step {
        match result {
            Err(
                Pending::NotReady(_)
                | Pending::Peer
                | Pending::Failed(
                    ibv::WC_REM_ACCESS_ERR | ibv::WC_REM_INV_REQ_ERR | ibv::WC_REM_OP_ERR,
                ),
            ) if !reliable => {
                self.note_of(peer, Reason::MessageDropped);
                Ok(())
            }
            result => result,
        }
    }

    /// The queue pair with which a connected one is paired: each names the other, by number and
    /// GID.
    pub(crate) fn peer(&self, number: u32) -> Option<u32> {
        let qp = self.qps.get(number)?;
        let peer = self.qps.get(qp.attr.dest_qp_num)?;
        let own = self.endpoints.get(qp.endpoint)?;
        let other = self.endpoints.get(peer.endpoint)?;
        let names = peer.attr.dest_qp_num == number && own.has(&peer.attr.address.gid);
        let paired = (names || !protects(Protection::Pairs))
            && other.has(&qp.attr.address.gid)
            && peer.service == qp.service
            && peer.state.receives()
            && !self.is_native(qp.attr.dest_qp_num);
        paired.then_some(qp.attr.dest_qp_num)
    }

    /// What entries of a queue pair's own requests may name.
    pub(crate) fn local(&self, number: u32, access: u32) -> Use {
        let (pd, epoch) = self.qps.get(number).map_or((0, 0), |q| (q.pd, q.epoch));
        Use { qp: number, epoch, pd, access }
    }

    /// What the peer of a queue pair may name, if the queue pair allows that at all.
    pub(crate) fn remote(&self, number: u32, access: u32) -> Option<Use> {
        let qp = self.qps.get(number)?;
        let allowed = qp.attr.access & access == access;
        allowed.then_some(Use { qp: number, epoch: qp.epoch, pd: qp.pd, access })
    }
}

/// What came of requests that were flushed.
fn flushed(count: u32) -> Turn {
    Turn { worked: count > 0, cost: i64::from(count) * REQUEST_COST, ..Turn::default() }
}

/// With which status a request fails that the queue pair may not be asked for at all.
pub(crate) fn refusal(qp: &Qp, send: &Send, length: u64) -> Option<u32> {
    let head = &send.head;
    let atomic = matches!(head.opcode, ibv::WR_ATOMIC_CMP_AND_SWP | ibv::WR_ATOMIC_FETCH_AND_ADD);
    let returns = atomic || head.opcode == ibv::WR_RDMA_READ;
    let good = qp.service.has(head.opcode)
        && u32::from(head.sge_count) <= qp.capabilities.send_sge
        && head.inline_length <= qp.capabilities.inline
        && !(returns && send.is_inline())
        && (!atomic || length == 8);
    if !good {
        return Some(ibv::WC_LOC_QP_OP_ERR);
    }
    (length > MAX_MESSAGE.into()).then_some(ibv::WC_LOC_LEN_ERR)
}

/// Finds `n` bytes from `skip` on in a list of entries. Each is looked up when it is used: a region
/// that was taken away in the middle of a message is not there any more.
pub(crate) fn gather(
    regions: &Regions,
    entries: usize,
    entry: impl Fn(usize) -> verbs_sge,
    skip: u64,
    mut n: usize,
    usage: Use,
    pieces: &mut Vec<Piece>,
) -> Result<(), Fault> {
    let mut skip = skip;
    for sge in (0..entries).map(entry) {
        if n == 0 {
            break;
        }
        let length = u64::from(sge.length);
        if skip >= length {
            skip -= length;
            continue;
        }
        let take = usize::try_from(length - skip).map_err(|_| Fault)?.min(n);
        let at = sge.address.checked_add(skip).ok_or(Fault)?;
        memory::find(regions, sge.lkey, at, take, usage, pieces)?;
        n -= take;
        skip = 0;
    }
    if n == 0 { Ok(()) } else { Err(Fault) }
}

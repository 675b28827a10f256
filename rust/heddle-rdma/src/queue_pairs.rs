//! What a library asks for on its control socket of queue pairs. `docs/protocols/verbs-control.md`.

use std::collections::VecDeque;
use std::sync::Arc;

use shared_ring::{SharedMemory, ring, ring_size};
use verbs_protocol::abi;
use verbs_protocol::control::{EINVAL, EOPNOTSUPP, Errno};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{ibv, slots};
use verbs_qp::{Service, State};

use crate::accounts::QpAccount;
use crate::commands::{
    Answer, MAX_INLINE, MAX_SGE, MAX_WR, answer, capacity, done, owns, size, usable,
};
use crate::endpoint::Quota;
use crate::objects::{Capabilities, Objects, Qp};
use crate::protection::{Protection, protects};
use crate::queues::{ReceiveRing, SendRing};

/// The asynchronous events that a queue pair can have.
const EVENTS: [u32; 4] = [
    ibv::EVENT_QP_FATAL,
    ibv::EVENT_COMM_EST,
    ibv::EVENT_SQ_DRAINED,
    ibv::EVENT_QP_LAST_WQE_REACHED,
];

impl Objects {
    pub(crate) fn create_qp(
        self: &mut Box<Self>,
        context: u32,
        request: &abi::verbs_create_qp_request,
    ) -> Result<Answer, Errno> {
        let r = *request;
        let service = Service::from_number(r.type_).ok_or(EOPNOTSUPP)?;
        self.close_to_holes(context, self.memory_of_queues(context, &r))?;
        self.check_queues(context, &r)?;
        if !is_within_limits(&r) {
            return Err(EINVAL);
        }
        let shape = Shape::of(&r);
        let endpoint = usable(self.contexts.get(context))?.endpoint;
        self.use_pd(context, r.pd)?;
        let mut native = self.prepare_native(endpoint, &r);
        let made = self.with_memory(context, Quota::Qps, shape.length, |objects, memory| {
            let (send, receive) = shape.rings(memory)?;
            let epoch = objects.next_number();
            let qp = Qp {
                context,
                endpoint,
                user: r.user,
                pd: r.pd,
                send_cq: r.send_cq,
                recv_cq: r.recv_cq,
                srq: r.srq,
                service,
                signal_all: r.sq_sig_all == 1,
                capabilities: objects.granted(&shape, r.srq),
                state: State::Reset,
                epoch,
                attr: abi::verbs_qp_attr::default(),
                send,
                receive,
                memory: Arc::clone(memory),
                current: None,
                inbound: None,
                waits_since: None,
                heard: false,
                link: 0,
                seeks: false,
                asked: None,
                closed: false,
                throttled: None,
                unlinked: VecDeque::new(),
                account: QpAccount::default(),
                debt: 0,
                in_turn: false,
                is_due: false,
                tells_last: false,
                tells_drained: false,
                taken: 0,
                native: native.take(),
            };
            // What its program tells peers is the card's number.
            match qp.native.as_ref().map(|n| n.pair.number()) {
                Some(number) => objects.qps.insert_as(number, qp),
                None => objects.qps.insert(qp, 0),
            }
        });
        let (qp, fd) = made.inspect_err(|_| {
            self.leave_pd(r.pd);
            self.drop_native(endpoint, native);
        })?;
        self.use_queues(&r)?;
        usable(self.contexts.get_mut(context))?.qps.push(qp);
        let mut answer = answer(&shape.reply(&r, qp));
        answer.descriptors.push(fd);
        Ok(answer)
    }

    /// What a queue pair's requests are held to: those to receive may be of a shared queue.
    fn granted(&self, shape: &Shape, srq: u32) -> Capabilities {
        let own = shape.granted;
        let recv_sge = self.srqs.get(srq).map_or(own.recv_sge, |s| s.max_sge);
        Capabilities { recv_sge, ..own }
    }

    /// Whether the queues that a queue pair is to be made with are the context's.
    fn check_queues(&self, context: u32, r: &abi::verbs_create_qp_request) -> Result<(), Errno> {
        for cq in [r.send_cq, r.recv_cq] {
            usable(self.cqs.get(cq).filter(|c| owns(context, c.context)))?;
        }
        if r.srq != 0 {
            usable(self.srqs.get(r.srq).filter(|s| owns(context, s.context)))?;
        }
        Ok(())
    }

    /// One more queue pair uses them.
    fn use_queues(&mut self, r: &abi::verbs_create_qp_request) -> Result<(), Errno> {
        for cq in [r.send_cq, r.recv_cq] {
            usable(self.cqs.get_mut(cq))?.users += 1;
        }
        if let Some(srq) = self.srqs.get_mut(r.srq) {
            srq.users += 1;
        }
        Ok(())
    }

    /// The memory of the queues that a queue pair is to be made with, as far as they are there.
    fn memory_of_queues(
        &self,
        context: u32,
        r: &abi::verbs_create_qp_request,
    ) -> Vec<Arc<SharedMemory>> {
        let cqs = [r.send_cq, r.recv_cq].into_iter().filter_map(|cq| self.cqs.get(cq));
        let all = cqs.map(|c| (c.context, &c.memory));
        let all = all.chain(self.srqs.get(r.srq).map(|s| (s.context, &s.memory)));
        all.filter(|(of, _)| owns(context, *of)).map(|(_, memory)| Arc::clone(memory)).collect()
    }

    pub(crate) fn modify_qp(
        self: &mut Box<Self>,
        context: u32,
        request: &abi::verbs_modify_qp_request,
    ) -> Result<Answer, Errno> {
        let qp = usable(self.qps.get(request.qp).filter(|q| owns(context, q.context)))?;
        let memory = Arc::clone(&qp.memory);
        self.close_to_holes(context, [memory])?;
        let endpoint = usable(self.contexts.get(context))?.endpoint;
        let number = request.qp;
        let limits = verbs_qp::Limits {
            gid_count: self.gids_of(number),
            max_rd_atomic: self.reads_of(number),
            mtu: self.mtu_of(endpoint),
        };
        let fails =
            request.mask & ibv::QP_STATE != 0 && request.attr.qp_state == State::Error.number();
        if fails && self.is_native(number) {
            // What is done is told before the rest is flushed.
            self.finish_native(number);
        }
        let qp = usable(self.qps.get_mut(number).filter(|q| owns(context, q.context)))?;
        let to = verbs_qp::modify(qp.state, qp.service, request.mask, &request.attr, limits);
        let Ok(to) = to else {
            self.note_outside(number, request);
            return Err(EINVAL);
        };
        if !self.may_change_native(number, request.mask, to) {
            self.note_of(number, Reason::OutsideRefused);
            return Err(EINVAL);
        }
        let qp = usable(self.qps.get_mut(number))?;
        verbs_qp::take(&mut qp.attr, request.mask, &request.attr);
        if request.mask & ibv::QP_ACCESS_FLAGS != 0 {
            self.allow_by_card(number);
        }
        if request.mask & (ibv::QP_ACCESS_FLAGS | ibv::QP_MIN_RNR_TIMER) != 0 {
            self.change_native(number, request.mask);
        }
        let qp = usable(self.qps.get_mut(number))?;
        if qp.state != to && to == State::SendQueueDrained {
            let wanted = request.mask & ibv::QP_EN_SQD_ASYNC_NOTIFY != 0;
            qp.tells_drained = wanted && request.attr.en_sqd_async_notify != 0;
        }
        match to {
            State::Error => self.fail(number),
            State::Reset => {
                self.unlink(number);
                let epoch = self.next_number();
                usable(self.qps.get_mut(number))?.reset(epoch);
                self.await_qp(endpoint, number);
            }
            State::ReadyToReceive => {
                qp.state = to;
                if !self.seek_outside(number) {
                    self.seek(number);
                }
            }
            _ => qp.state = to,
        }
        // Of a QP in RESET there is nothing to fail.
        let qp = usable(self.qps.get_mut(number))?;
        if to == State::Error {
            qp.state = to;
        }
        let qp_state = qp.state.number();
        if let Some(context) = self.contexts.get_mut(context) {
            context.awake = true;
        }
        Ok(answer(&abi::verbs_modify_qp_reply { qp_state, ..Default::default() }))
    }

    pub(crate) fn query_qp(&mut self, context: u32, number: u32) -> Result<Answer, Errno> {
        let qp = usable(self.qps.get(number).filter(|q| owns(context, q.context)))?;
        let state = qp.state.number();
        let attr = abi::verbs_qp_attr { qp_state: state, cur_qp_state: state, ..qp.attr };
        Ok(answer(&abi::verbs_query_qp_reply { attr, ..Default::default() }))
    }

    pub(crate) fn destroy_qp(
        self: &mut Box<Self>,
        context: u32,
        number: u32,
    ) -> Result<Answer, Errno> {
        self.forget_qp(context, number)?;
        let endpoint = self.contexts.get(context).map_or(0, |c| c.endpoint);
        self.await_qp(endpoint, number);
        Ok(done())
    }

    /// Waits until no thread touches memory for what a queue pair was asked before it was destroyed
    /// or reset.
    fn await_qp(self: &mut Box<Self>, endpoint: u32, number: u32) {
        if protects(Protection::UnderWay) {
            self.await_copies(endpoint, |user| user.qp == number);
        }
    }

    /// Gives a queue pair up, for which copies may still be under way.
    pub(crate) fn forget_qp(&mut self, context: u32, number: u32) -> Result<(), Errno> {
        usable(self.qps.get(number).filter(|q| owns(context, q.context)))?;
        self.unlink(number);
        self.leave_groups(number);
        let mut qp = usable(self.qps.remove(number))?;
        self.tell_no_more(context, &EVENTS, number, qp.user);
        for cq in [qp.send_cq, qp.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        if let Some(srq) = self.srqs.get_mut(qp.srq) {
            srq.users -= 1;
        }
        self.leave_pd(qp.pd);
        self.drop_native(qp.endpoint, qp.native.take());
        if let Some(context) = self.contexts.get_mut(context) {
            context.qps.retain(|q| *q != number);
        }
        self.refund(context, Quota::Qps, 1);
        let memory = Arc::clone(&qp.memory);
        drop(qp);
        self.let_go_of(context, memory);
        Ok(())
    }
}

/// How the memory of a queue pair is laid out.
struct Shape {
    send: u32,
    receive: u32,
    receive_offset: usize,
    length: usize,
    granted: Capabilities,
}

impl Shape {
    fn of(r: &abi::verbs_create_qp_request) -> Self {
        let granted = Capabilities {
            send_sge: r.max_send_sge.max(1),
            recv_sge: r.max_recv_sge.max(1),
            // What fits beside the entries that were asked for costs nothing.
            inline: r.max_inline.max(r.max_send_sge.max(1) * 16),
        };
        let slots_to_send =
            slots::slots_to_send(granted.send_sge as usize, granted.inline as usize);
        let send = capacity(r.max_send_wr, slots_to_send);
        let at = ring_size(send).next_multiple_of(shared_ring::ALIGNMENT);
        if r.srq != 0 {
            return Self { send, receive: 0, receive_offset: 0, length: at, granted };
        }
        let receive = capacity(r.max_recv_wr, slots::slots_to_receive(granted.recv_sge as usize));
        let length = at + ring_size(receive);
        Self { send, receive, receive_offset: at, length, granted }
    }

    fn rings(&self, memory: &Arc<SharedMemory>) -> Option<(SendRing, Option<ReceiveRing>)> {
        ring::create(memory, abi::VERBS_QP_SEND_RING as usize, self.send).ok()?;
        let send = SendRing::attach(memory, self.send)?;
        if self.receive == 0 {
            return Some((send, None));
        }
        ring::create(memory, self.receive_offset, self.receive).ok()?;
        Some((send, Some(ReceiveRing::attach(memory, self.receive_offset, self.receive)?)))
    }

    fn reply(&self, r: &abi::verbs_create_qp_request, qp: u32) -> abi::verbs_create_qp_reply {
        abi::verbs_create_qp_reply {
            qp,
            send_capacity: self.send,
            receive_capacity: self.receive,
            receive_offset: u32::try_from(self.receive_offset).unwrap_or(0),
            memory_size: size(self.length),
            max_send_wr: r.max_send_wr.max(1),
            max_recv_wr: if r.srq == 0 { r.max_recv_wr.max(1) } else { 0 },
            max_send_sge: self.granted.send_sge,
            max_recv_sge: self.granted.recv_sge,
            max_inline: self.granted.inline,
            ..Default::default()
        }
    }
}

/// Whether a queue pair is asked for that there can be.
fn is_within_limits(r: &abi::verbs_create_qp_request) -> bool {
    r.max_send_wr <= MAX_WR
        && r.max_recv_wr <= MAX_WR
        && r.max_send_sge <= MAX_SGE
        && r.max_recv_sge <= MAX_SGE
        && r.max_inline <= MAX_INLINE
        && r.sq_sig_all <= 1
}

impl Qp {
    /// Forgets all that is under way and in the rings.
    fn reset(&mut self, epoch: u64) {
        self.state = State::Reset;
        self.epoch = epoch;
        // A thread that has something of it under way finds out by the epoch.
        (self.in_turn, self.is_due, self.taken) = (false, false, 0);
        self.attr = abi::verbs_qp_attr::default();
        self.current = None;
        self.inbound = None;
        self.tells_last = false;
        self.tells_drained = false;
        self.waits_since = None;
        self.heard = false;
        self.closed = false;
        self.unlinked.clear();
        self.send.clear();
        if let Some(receive) = &mut self.receive {
            receive.clear();
        }
    }
}

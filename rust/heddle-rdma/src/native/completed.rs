//! What the card has done is completed, in order, as the program's requests.

use verbs_protocol::ibv;
use verbs_protocol::statistics::Reason;

use super::{Phase, RECEIVE, Received, Sent, returns};
use crate::ibverbs::Completion;
use crate::objects::Objects;
use crate::requests::Told;

impl Objects {
    /// Completes what the card has done with a queue pair whose program has it go to ERR, before
    /// the rest is flushed.
    pub(crate) fn finish_native(self: &mut Box<Self>, number: u32) {
        self.take_native();
        let worker = self.worker.serves();
        let Some(qp) = self.qps.get_mut(number) else { return };
        // A thread that is in the middle of a turn of it completes that itself.
        if std::mem::replace(&mut qp.in_turn, true) {
            return;
        }
        let (epoch, mut budget) = (qp.epoch, i64::MAX);
        self.complete_native(number, &mut budget);
        let number = self.still(number, epoch);
        self.end_turn(number, worker);
    }

    /// Completes what the card has done.
    pub(super) fn complete_native(self: &mut Box<Self>, number: u32, budget: &mut i64) -> bool {
        let mut worked = false;
        loop {
            let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
            let Some(native) = native.filter(|n| n.phase == Phase::Live) else { return worked };
            let epoch = native.epoch;
            let Some(done) = native.done.pop_front() else { break };
            worked = true;
            if done.status == ibv::WC_WR_FLUSH_ERR {
                // The request that failed may be told of later. What is flushed stays where it is.
                native.failed = true;
                continue;
            }
            let receives = done.id & RECEIVE != 0;
            if let Some(received) = native.received.pop_front_if(|r| receives && r.is_for(&done)) {
                self.complete_native_receive(number, epoch, &received, &done, budget);
            } else if let Some(sent) = native.sent.pop_front_if(|_| !receives) {
                self.complete_native_send(number, epoch, &sent, done.status, budget);
            } else {
                native.failed = true;
                self.note_of(number, Reason::CardWrong);
            }
        }
        let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
        if native.is_some_and(|n| std::mem::take(&mut n.failed)) {
            self.fail_fatally(number);
            worked = true;
        }
        worked
    }

    fn complete_native_send(
        self: &mut Box<Self>,
        number: u32,
        epoch: u32,
        request: &Sent,
        mut status: u32,
        budget: &mut i64,
    ) {
        let Sent { send, plan } = request;
        let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        if status == ibv::WC_SUCCESS && returns(send.head.opcode) {
            let entry = |i| send.entry(i);
            let (entries, length) = (send.entries(), send.length());
            *budget -= i64::try_from(plan.held).unwrap_or(0);
            if !self.store_bounced((number, epoch), plan, entries, entry, length, usage) {
                status = ibv::WC_LOC_PROT_ERR;
            }
        }
        let number = self.still(number, usage.epoch);
        if let Some(bounce) = self.native(number, epoch).and_then(|n| n.bounce.as_mut()) {
            bounce.sends.give(plan.held);
        }
        if status == ibv::WC_SUCCESS {
            self.complete_send(number, send, status);
        } else {
            self.fail_send(number, send, status);
        }
    }

    fn complete_native_receive(
        self: &mut Box<Self>,
        number: u32,
        epoch: u32,
        received: &Received,
        done: &Completion,
        budget: &mut i64,
    ) {
        let Received { receive, plan } = received;
        let written = done.opcode == ibv::WC_RECV_RDMA_WITH_IMM;
        let (mut status, length) = (done.status, u64::from(done.length));
        let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        if status == ibv::WC_SUCCESS && !written {
            let entry = |i| receive.entry(i);
            *budget -= i64::try_from(plan.held).unwrap_or(0);
            let entries = receive.entries();
            if !self.store_bounced((number, epoch), plan, entries, entry, length, usage) {
                status = ibv::WC_LOC_PROT_ERR;
            }
        }
        let number = self.still(number, usage.epoch);
        if let Some(bounce) = self.native(number, epoch).and_then(|n| n.bounce.as_mut()) {
            bounce.receives.give(plan.held);
        }
        if status != ibv::WC_SUCCESS {
            return self.fail_receive(number, receive.wr_id, status);
        }
        self.tell_native_receive(number, receive.wr_id, done);
    }

    fn tell_native_receive(&mut self, number: u32, wr_id: u64, done: &Completion) {
        let written = done.opcode == ibv::WC_RECV_RDMA_WITH_IMM;
        let opcode = match (written, done.flags & ibv::WC_WITH_IMM != 0) {
            (true, _) => ibv::WR_RDMA_WRITE_WITH_IMM,
            (false, true) => ibv::WR_SEND_WITH_IMM,
            (false, false) => ibv::WR_SEND,
        };
        let source = self.qps.get(number).map_or(0, |qp| qp.attr.dest_qp_num);
        // The card does not say whether the peer asked for an event.
        let length = u64::from(done.length);
        let told = Told { opcode, imm: done.imm, solicited: true, source, length };
        self.complete_receive(number, told, wr_id);
    }

    /// The same of a queue pair that ends where nobody may wait for memory of its program, as far
    /// as nothing has to be copied to that: what is behind such a request is flushed with it.
    pub(super) fn complete_native_briefly(&mut self, number: u32) {
        self.take_native();
        let mut stopped = [false; 2];
        loop {
            let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
            let Some(native) = native else { return };
            let Some(done) = native.done.pop_front() else { return };
            let (good, receives) = (done.status == ibv::WC_SUCCESS, done.id & RECEIVE != 0);
            let stopped = &mut stopped[usize::from(receives)];
            // Of one that was not asked for there is no request.
            *stopped |= done.status == ibv::WC_WR_FLUSH_ERR;
            if receives {
                let written = done.opcode == ibv::WC_RECV_RDMA_WITH_IMM;
                let told = |r: &mut Received| {
                    r.is_for(&done) && (!good || written || r.plan.bounced.is_empty())
                };
                match native.received.pop_front_if(|r| !*stopped && told(r)) {
                    Some(r) if good => self.tell_native_receive(number, r.receive.wr_id, &done),
                    Some(r) => self.tell_failed_receive(number, r.receive.wr_id, done.status),
                    None => *stopped = true,
                }
            } else {
                let told = |s: &mut Sent| {
                    !good || !returns(s.send.head.opcode) || s.plan.bounced.is_empty()
                };
                match native.sent.pop_front_if(|s| !*stopped && told(s)) {
                    Some(s) => self.complete_send(number, &s.send, done.status),
                    None => *stopped = true,
                }
            }
        }
    }
}

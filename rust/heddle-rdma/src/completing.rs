//! What programs hear of their requests.

use verbs_protocol::abi::{self, verbs_completion};
use verbs_protocol::ibv;
use verbs_protocol::slots::Send;
use verbs_qp::{Service, State};

use crate::objects::{Current, Objects};
use crate::requests::Told;
use crate::sys;
use crate::together::Done;

impl Objects {
    pub(crate) fn complete_send(&mut self, number: u32, send: &Send, status: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        if status == ibv::WC_SUCCESS && qp.service.is_connected() {
            self.account_request(number, send);
        }
        self.tell_sent(number, &Done::of(send), status, sys::monotonic());
    }

    /// A request is complete, and those that were copied together with it.
    pub(crate) fn complete_current(&mut self, number: u32, mut current: Current) {
        self.complete_send(number, &current.send, ibv::WC_SUCCESS);
        let now = if current.more.is_empty() { 0 } else { sys::monotonic() };
        for done in current.more.drain(..) {
            self.tell_sent(number, &done, ibv::WC_SUCCESS, now);
        }
        if let Some(batch) = &mut self.batch {
            batch.more = current.more;
        }
    }

    /// The completion of a send request that is accounted for, if there is to be one, at a time.
    fn tell_sent(&mut self, number: u32, done: &Done, status: u32, timestamp: u64) {
        let Done { wr_id, flags, opcode, length } = *done;
        let Some(qp) = self.qps.get(number) else { return };
        let asked = u32::from(flags) & abi::VERBS_SEND_SIGNALED != 0;
        if !asked && !qp.signal_all && status == ibv::WC_SUCCESS {
            return;
        }
        let opcode = match opcode {
            ibv::WR_SEND | ibv::WR_SEND_WITH_IMM => ibv::WC_SEND,
            ibv::WR_RDMA_READ => ibv::WC_RDMA_READ,
            ibv::WR_ATOMIC_CMP_AND_SWP => ibv::WC_COMP_SWAP,
            ibv::WR_ATOMIC_FETCH_AND_ADD => ibv::WC_FETCH_ADD,
            _ => ibv::WC_RDMA_WRITE,
        };
        let byte_len = u32::try_from(length).unwrap_or(0);
        let completion = verbs_completion {
            wr_id,
            status,
            opcode,
            byte_len,
            qp_num: number,
            timestamp,
            ..Default::default()
        };
        let cq = qp.send_cq;
        self.complete(cq, &completion, false);
    }

    /// Fails a send request, and its queue pair.
    pub(crate) fn fail_send(&mut self, number: u32, send: &Send, status: u32) {
        self.complete_send(number, send, status);
        self.fail_sends(number);
    }

    /// The same for one of which only the name is known.
    pub(crate) fn fail_request(&mut self, number: u32, wr_id: u64, status: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        let completion = verbs_completion { wr_id, status, qp_num: number, ..Default::default() };
        let cq = qp.send_cq;
        self.complete(cq, &completion, false);
        self.fail_sends(number);
    }

    /// An error of the send queue: an unreliable queue pair still takes what comes.
    fn fail_sends(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        let live = matches!(qp.state, State::ReadyToSend | State::SendQueueDrained);
        let service = qp.service;
        // What was begun on a connection has no end any more.
        let begun = service.is_connected() && (self.is_remote(number) || self.is_native(number));
        if service == Service::ReliableConnection || !live || begun {
            return self.fail(number);
        }
        let Some(qp) = self.qps.get_mut(number) else { return };
        qp.state = State::SendQueueError;
        qp.waits_since = None;
        let context = qp.context;
        if let Some(context) = self.contexts.get_mut(context) {
            context.awake = true;
        }
    }

    /// Fails a receive request, and its queue pair.
    pub(crate) fn fail_receive(&mut self, number: u32, wr_id: u64, status: u32) {
        self.tell_failed_receive(number, wr_id, status);
        self.fail(number);
    }

    /// The completion of a receive request into which nothing came.
    pub(crate) fn tell_failed_receive(&mut self, number: u32, wr_id: u64, status: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        let opcode = ibv::WC_RECV;
        let completion =
            verbs_completion { wr_id, status, opcode, qp_num: number, ..Default::default() };
        let cq = qp.recv_cq;
        self.complete(cq, &completion, false);
    }

    /// Completes the receive request of `peer` that a message took.
    pub(crate) fn complete_receive(&mut self, peer: u32, told: Told, wr_id: u64) {
        self.tell_received(peer, told, wr_id, sys::monotonic());
        if self.qps.get(peer).is_some_and(|qp| qp.service != Service::UnreliableDatagram) {
            self.account_served(peer, 0, told.length);
        }
    }

    /// The same for one that is accounted for, at a time.
    pub(crate) fn tell_received(&mut self, peer: u32, told: Told, wr_id: u64, timestamp: u64) {
        let Some(qp) = self.qps.get_mut(peer) else { return };
        let first = !std::mem::replace(&mut qp.heard, true);
        let tells = first && qp.state == State::ReadyToReceive && qp.service.is_connected();
        let written = told.opcode == ibv::WR_RDMA_WRITE_WITH_IMM;
        let with_imm = written || told.opcode == ibv::WR_SEND_WITH_IMM;
        let datagram = qp.service == Service::UnreliableDatagram;
        let completion = verbs_completion {
            wr_id,
            opcode: if written { ibv::WC_RECV_RDMA_WITH_IMM } else { ibv::WC_RECV },
            byte_len: u32::try_from(told.length).unwrap_or(0),
            imm: if with_imm { told.imm } else { 0 },
            qp_num: peer,
            src_qp: told.source,
            flags: if with_imm { ibv::WC_WITH_IMM } else { 0 }
                | if datagram { ibv::WC_GRH } else { 0 },
            timestamp,
            ..Default::default()
        };
        let (cq, context, user) = (qp.recv_cq, qp.context, qp.user);
        self.complete(cq, &completion, told.solicited);
        if tells {
            self.tell(context, ibv::EVENT_COMM_EST, peer, user);
        }
    }
}

//! What a library asks for on its control socket of completion queues and shared receive queues.
//! `docs/protocols/verbs-control.md`.

use std::os::fd::AsFd;
use std::sync::Arc;

use shared_ring::{SharedMemory, ring, ring_size};
use verbs_protocol::control::{EINVAL, EOPNOTSUPP, Errno};
use verbs_protocol::{abi, ibv, slots};

use crate::commands::{
    Answer, EBUSY, ENOMEM, MAX_CQE, MAX_SGE, MAX_WR, answer, capacity, done, owns, size, usable,
};
use crate::endpoint::Quota;
use crate::objects::{Cq, Objects, Srq};
use crate::queues::{CompletionRing, ReceiveRing};

impl Objects {
    pub(crate) fn create_cq(
        &mut self,
        context: u32,
        request: &abi::verbs_create_cq_request,
    ) -> Result<Answer, Errno> {
        if request.cqe == 0 || request.cqe > MAX_CQE {
            return Err(EINVAL);
        }
        let channel = request.channel;
        if channel != 0 {
            usable(self.channels.get(channel).filter(|c| owns(context, c.context)))?;
        }
        let capacity = request.cqe.next_power_of_two();
        let at = abi::VERBS_CQ_RING as usize;
        let length = at + ring_size(capacity);
        let user = request.user;
        let (cq, fd) = self.with_memory(context, Quota::Cqs, length, |objects, memory| {
            ring::create(memory, at, capacity).ok()?;
            let ring = CompletionRing::attach(memory, capacity)?;
            let memory = Arc::clone(memory);
            let cq =
                Cq { context, users: 0, user, channel, ring, memory, dead: false, touched: false };
            objects.cqs.insert(cq, 0)
        })?;
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.users += 1;
        }
        let memory_size = size(length);
        let reply = abi::verbs_create_cq_reply { cq, capacity, memory_size, ..Default::default() };
        let mut answer = answer(&reply);
        answer.descriptors.push(fd);
        Ok(answer)
    }

    /// Gives a CQ a larger ring: what comes from now on is in that one.
    pub(crate) fn resize_cq(
        &mut self,
        context: u32,
        request: &abi::verbs_resize_cq_request,
    ) -> Result<Answer, Errno> {
        let cq = usable(self.cqs.get(request.cq).filter(|c| c.context == context && !c.dead))?;
        if request.cqe > MAX_CQE || request.cqe <= cq.ring.capacity() {
            return Err(EINVAL);
        }
        let capacity = request.cqe.next_power_of_two();
        let at = abi::VERBS_CQ_RING as usize;
        let length = at + ring_size(capacity);
        self.charge(context, Quota::Memory, size(length))?;
        let made = SharedMemory::create(c"verbs-rings", length).ok().and_then(|memory| {
            ring::create(&memory, at, capacity).ok()?;
            let fd = memory.as_fd().try_clone_to_owned().ok()?;
            Some((CompletionRing::attach(&memory, capacity)?, memory, fd))
        });
        let Some((ring, memory, fd)) = made else {
            self.refund(context, Quota::Memory, size(length));
            self.full(context);
            return Err(ENOMEM);
        };
        let cq = usable(self.cqs.get_mut(request.cq))?;
        cq.ring.go_on_in(ring);
        let former = std::mem::replace(&mut cq.memory, memory);
        self.let_go_of(context, former);
        let (cq, memory_size) = (request.cq, size(length));
        let reply = abi::verbs_create_cq_reply { cq, capacity, memory_size, ..Default::default() };
        let mut answer = answer(&reply);
        answer.descriptors.push(fd);
        Ok(answer)
    }

    pub(crate) fn destroy_cq(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let cq = usable(self.cqs.get(handle).filter(|c| owns(context, c.context)))?;
        if cq.users > 0 {
            return Err(EBUSY);
        }
        let (channel, user, memory) = (cq.channel, cq.user, Arc::clone(&cq.memory));
        self.cqs.remove(handle);
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.users -= 1;
        }
        self.notify_no_more(channel, handle, user);
        self.tell_no_more(context, &[ibv::EVENT_CQ_ERR], handle, user);
        self.refund(context, Quota::Cqs, 1);
        self.let_go_of(context, memory);
        Ok(done())
    }

    pub(crate) fn create_srq(
        &mut self,
        context: u32,
        request: &abi::verbs_create_srq_request,
    ) -> Result<Answer, Errno> {
        let r = *request;
        if r.max_wr == 0 || r.max_wr > MAX_WR || r.max_sge > MAX_SGE || r.limit > r.max_wr {
            return Err(EINVAL);
        }
        let max_sge = r.max_sge.max(1);
        let capacity = capacity(r.max_wr, slots::slots_to_receive(max_sge as usize));
        let length = ring_size(capacity);
        self.use_pd(context, r.pd)?;
        let made = self.with_memory(context, Quota::Srqs, length, |objects, memory| {
            let at = abi::VERBS_SRQ_RECEIVE_RING as usize;
            ring::create(memory, at, capacity).ok()?;
            let ring = ReceiveRing::attach(memory, at, capacity)?;
            let srq = Srq {
                context,
                users: 0,
                user: r.user,
                pd: r.pd,
                ring,
                memory: Arc::clone(memory),
                max_wr: r.max_wr,
                max_sge,
                limit: r.limit,
            };
            objects.srqs.insert(srq, 0)
        });
        let (srq, fd) = made.inspect_err(|_| self.leave_pd(r.pd))?;
        let mut answer = answer(&abi::verbs_create_srq_reply {
            srq,
            capacity,
            memory_size: size(length),
            max_wr: r.max_wr,
            max_sge,
            ..Default::default()
        });
        answer.descriptors.push(fd);
        Ok(answer)
    }

    pub(crate) fn modify_srq(
        &mut self,
        context: u32,
        request: &abi::verbs_modify_srq_request,
    ) -> Result<Answer, Errno> {
        let srq = usable(self.srqs.get_mut(request.srq).filter(|s| owns(context, s.context)))?;
        if request.mask & ibv::SRQ_MAX_WR != 0 {
            return Err(EOPNOTSUPP);
        }
        if request.mask & !ibv::SRQ_LIMIT != 0 || request.limit > srq.max_wr {
            return Err(EINVAL);
        }
        if request.mask & ibv::SRQ_LIMIT != 0 {
            srq.limit = request.limit;
        }
        Ok(done())
    }

    pub(crate) fn query_srq(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let srq = usable(self.srqs.get(handle).filter(|s| owns(context, s.context)))?;
        Ok(answer(&abi::verbs_query_srq_reply {
            max_wr: srq.max_wr,
            max_sge: srq.max_sge,
            limit: srq.limit,
            ..Default::default()
        }))
    }

    pub(crate) fn destroy_srq(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let srq = usable(self.srqs.get(handle).filter(|s| owns(context, s.context)))?;
        if srq.users > 0 {
            return Err(EBUSY);
        }
        let (pd, user, memory) = (srq.pd, srq.user, Arc::clone(&srq.memory));
        self.srqs.remove(handle);
        self.tell_no_more(context, &[ibv::EVENT_SRQ_LIMIT_REACHED], handle, user);
        self.leave_pd(pd);
        self.refund(context, Quota::Srqs, 1);
        self.let_go_of(context, memory);
        Ok(done())
    }
}

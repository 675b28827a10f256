//! What a library asks for on its control socket. `docs/protocols/verbs-control.md`.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use shared_ring::{SharedMemory, Sleeper, doorbell};
use verbs_protocol::abi::{self, verbs_reply};
use verbs_protocol::control::{EINVAL, EOPNOTSUPP, Errno, Request};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{ibv, plain};

use crate::endpoint::Quota;
use crate::events::EventSocket;
use crate::memory::{ACCESS_KNOWN, Mapped, Region};
use crate::multicast::MEMBERSHIPS;
use crate::objects::{Ah, Channel, Memory, Objects, Pd, Source};
use crate::process::Process;
use crate::protection::{Protection, protects};
use crate::sys;

pub(crate) const ENOMEM: Errno = libc::ENOMEM;
pub(crate) const EBUSY: Errno = libc::EBUSY;

/// Limits of the device, whatever the endpoint's quotas are.
pub(crate) const MAX_WR: u32 = 8192;
pub(crate) const MAX_CQE: u32 = 1 << 17;
pub(crate) const MAX_SGE: u32 = abi::VERBS_SGE_MAX;
pub(crate) const MAX_INLINE: u32 = abi::VERBS_SEND_PAYLOAD_MAX;
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;
const MAX_REGION: u64 = 1 << 44;
pub(crate) const MAX_RD_ATOMIC: u8 = 16;
const PAGE: u64 = 4096;
/// A region of this many bytes is worth being mapped; one that is not is counted.
const MAPPED_RATHER: u64 = 64 * 1024;

/// The answer to a request, without its head, and the descriptors that go with it.
pub(crate) struct Answer {
    pub(crate) bytes: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

pub(crate) fn answer<T: plain::Plain>(body: &T) -> Answer {
    Answer { bytes: plain::bytes(body).to_vec(), descriptors: Vec::new() }
}

pub(crate) fn done() -> Answer {
    answer(&verbs_reply::default())
}

fn object(object: u32) -> Answer {
    answer(&abi::verbs_object_reply { object, ..Default::default() })
}

fn copy(fd: impl AsFd) -> Result<OwnedFd, Errno> {
    fd.as_fd().try_clone_to_owned().map_err(|_| ENOMEM)
}

pub(crate) fn usable<T>(handle: Option<T>) -> Result<T, Errno> {
    handle.ok_or(EINVAL)
}

/// Whether a context is the one that an object is of.
pub(crate) fn owns(context: u32, of: u32) -> bool {
    of == context || !protects(Protection::Owners)
}

pub(crate) fn size(bytes: usize) -> u64 {
    bytes as u64
}

impl Objects {
    /// Does what a context that has said hello asks for.
    pub(crate) fn serve_request(
        self: &mut Box<Self>,
        context: u32,
        request: &Request,
    ) -> Result<Answer, Errno> {
        match request {
            Request::Hello(_) => Err(libc::EPROTO),
            Request::RdmaCm { .. } => Err(EOPNOTSUPP),
            Request::AllocPd => self.allocate_pd(context),
            Request::DeallocPd(pd) => self.deallocate_pd(context, *pd),
            Request::CreateChannel => self.create_channel(context),
            Request::DestroyChannel(channel) => self.destroy_channel(context, *channel),
            Request::CreateCq(request) => self.create_cq(context, request),
            Request::ResizeCq(request) => self.resize_cq(context, request),
            Request::DestroyCq(cq) => self.destroy_cq(context, *cq),
            Request::CreateQp(request) => self.create_qp(context, request),
            Request::ModifyQp(request) => self.modify_qp(context, request),
            Request::QueryQp(qp) => self.query_qp(context, *qp),
            Request::DestroyQp(qp) => self.destroy_qp(context, *qp),
            Request::CreateSrq(request) => self.create_srq(context, request),
            Request::ModifySrq(request) => self.modify_srq(context, request),
            Request::QuerySrq(srq) => self.query_srq(context, *srq),
            Request::DestroySrq(srq) => self.destroy_srq(context, *srq),
            Request::CreateAh(request) => self.create_ah(context, request),
            Request::DestroyAh(ah) => self.destroy_ah(context, *ah),
            Request::CreateMemory(request) => self.create_memory(context, request.length),
            Request::DestroyMemory(memory) => self.destroy_memory(context, *memory),
            Request::RegMr(request) => self.register(context, request),
            Request::ShowMemory(address) => self.show_memory(context, *address),
            Request::OpenUserfaultfd => self.open_userfaultfd(context),
            Request::QueryOutside => self.query_outside(context),
            Request::DeregMr(mr) => self.deregister(context, *mr),
            Request::AttachMcast(request) => self.join_group(context, request),
            Request::DetachMcast(request) => self.leave_group(context, request),
        }
    }

    /// The first request of a connection.
    pub(crate) fn hello(
        &mut self,
        context: u32,
        request: &abi::verbs_hello_request,
    ) -> Result<Answer, Errno> {
        if request.version != abi::VERBS_VERSION {
            return Err(libc::EPROTONOSUPPORT);
        }
        match request.kind {
            abi::VERBS_KIND_DEVICE => {}
            abi::VERBS_KIND_RDMA_CM => return self.cm_hello(context),
            _ => return Err(EINVAL),
        }
        let bytes = u64::from(abi::VERBS_CONTEXT_SIZE);
        self.charge(context, Quota::Memory, bytes)?;
        let made = self.make_context(context);
        if made.is_err() {
            self.refund(context, Quota::Memory, bytes);
        }
        made
    }

    /// Makes what a device has from the first request on.
    fn make_context(&mut self, context: u32) -> Result<Answer, Errno> {
        let length = abi::VERBS_CONTEXT_SIZE as usize;
        let memory = SharedMemory::create(c"verbs-context", length).map_err(|_| ENOMEM)?;
        let ends = doorbell::descriptors().map_err(|_| ENOMEM)?;
        let at = abi::VERBS_CONTEXT_DOORBELL as usize;
        let sleeper = Sleeper::attach(&memory, at, ends.wait, Duration::ZERO);
        let sleeper = sleeper.map_err(|_| ENOMEM)?;
        let (ours, theirs) = sys::packet_pair().map_err(|_| ENOMEM)?;
        let reply = self.describe(context)?;
        let id = Source::Doorbell.id(context);
        self.epoll_of_context(context)
            .add(sleeper.as_fd(), sys::READABLE | sys::EDGE, id)
            .map_err(|_| ENOMEM)?;
        let mut answer = answer(&reply);
        answer.descriptors = vec![copy(&*memory)?, ends.ring, theirs];
        let context = usable(self.contexts.get_mut(context))?;
        context.doorbell = Some(sleeper);
        context.memory = Some(memory);
        context.events = Some(EventSocket::new(ours));
        // It arms its doorbell when it first falls asleep.
        context.awake = true;
        Ok(answer)
    }

    fn describe(&mut self, context: u32) -> Result<abi::verbs_hello_reply, Errno> {
        let handle = usable(self.contexts.get(context))?.endpoint;
        let (outside, mtu) = (self.outside_gid(handle).is_some(), self.mtu_of(handle));
        let endpoint = usable(self.endpoint_of(context))?;
        let quota = |q| endpoint.limit_of(q);
        Ok(abi::verbs_hello_reply {
            version: abi::VERBS_VERSION,
            context_size: abi::VERBS_CONTEXT_SIZE,
            node_guid: endpoint.guid(),
            gid: endpoint.gids,
            gid_count: gid_count(&endpoint.gids),
            max_qp: quota(Quota::Qps),
            max_send_wr: MAX_WR,
            max_recv_wr: MAX_WR,
            max_sge: MAX_SGE,
            max_inline: MAX_INLINE,
            max_cq: quota(Quota::Cqs),
            max_cqe: MAX_CQE,
            max_mr: quota(Quota::Mrs),
            max_pd: quota(Quota::Pds),
            max_ah: quota(Quota::Ahs),
            max_srq: quota(Quota::Srqs),
            max_srq_wr: MAX_WR,
            max_srq_sge: MAX_SGE,
            max_rd_atomic: MAX_RD_ATOMIC.into(),
            max_channels: quota(Quota::Channels),
            max_msg_size: MAX_MESSAGE,
            max_mcast_grp: MEMBERSHIPS,
            mtu,
            spin_us: endpoint.spin_us,
            max_mr_size: MAX_REGION,
            features: if outside { abi::VERBS_FEATURE_OUTSIDE.into() } else { 0 },
            ..Default::default()
        })
    }

    pub(crate) fn charge(&mut self, context: u32, quota: Quota, amount: u64) -> Result<(), Errno> {
        if matches!(quota, Quota::Memory | Quota::Memories) {
            self.take_gone();
        }
        let free = self.free(quota);
        let endpoint = usable(self.endpoint_of(context))?;
        if !endpoint.charge(quota, amount, free) {
            return Err(ENOMEM);
        }
        if matches!(quota, Quota::Memory) {
            self.pooled += amount;
        }
        Ok(())
    }

    fn note_in(&mut self, context: u32, reason: Reason) {
        if let Some(endpoint) = self.endpoint_of(context) {
            endpoint.account.note(reason);
        }
    }

    /// Something could not be made although the endpoint may have it.
    pub(crate) fn full(&mut self, context: u32) {
        self.note_in(context, Reason::RouterFull);
    }

    /// The same, if this is what an errno says.
    pub(crate) fn note_full(&mut self, context: u32, errno: Errno) {
        if errno == ENOMEM {
            self.full(context);
        }
    }

    /// The handle of an object that was charged for; a full table gives the charge back.
    fn taken(&mut self, handle: Option<u32>, context: u32, quota: Quota) -> Result<u32, Errno> {
        if handle.is_none() {
            self.refund(context, quota, 1);
            self.full(context);
        }
        handle.ok_or(ENOMEM)
    }

    /// Charges the endpoint for an object and its memory, and makes the memory; `build` makes the
    /// object in it. What fails leaves nothing charged.
    pub(crate) fn with_memory<T>(
        &mut self,
        context: u32,
        quota: Quota,
        length: usize,
        build: impl FnOnce(&mut Self, &Arc<SharedMemory>) -> Option<T>,
    ) -> Result<(T, OwnedFd), Errno> {
        self.charge(context, quota, 1)?;
        if let Err(errno) = self.charge(context, Quota::Memory, size(length)) {
            self.refund(context, quota, 1);
            return Err(errno);
        }
        let made = SharedMemory::create(c"verbs-rings", length).ok().and_then(|memory| {
            let fd = memory.as_fd().try_clone_to_owned().ok()?;
            Some((build(self, &memory)?, fd))
        });
        if made.is_none() {
            self.refund(context, quota, 1);
            self.refund(context, Quota::Memory, size(length));
            self.full(context);
        }
        made.ok_or(ENOMEM)
    }

    fn allocate_pd(&mut self, context: u32) -> Result<Answer, Errno> {
        self.charge(context, Quota::Pds, 1)?;
        let handle = self.pds.insert(Pd { context, users: 0, card: None }, 0);
        Ok(object(self.taken(handle, context, Quota::Pds)?))
    }

    pub(crate) fn deallocate_pd(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let pd = usable(self.pds.get(handle).filter(|p| owns(context, p.context)))?;
        if pd.users > 0 {
            return Err(EBUSY);
        }
        self.pds.remove(handle);
        self.refund(context, Quota::Pds, 1);
        Ok(done())
    }

    /// Checks that a PD is the context's, and counts what uses it.
    pub(crate) fn use_pd(&mut self, context: u32, handle: u32) -> Result<(), Errno> {
        let pd = usable(self.pds.get_mut(handle).filter(|p| owns(context, p.context)))?;
        pd.users += 1;
        Ok(())
    }

    pub(crate) fn leave_pd(&mut self, handle: u32) {
        if let Some(pd) = self.pds.get_mut(handle) {
            pd.users -= 1;
        }
    }

    fn create_channel(&mut self, context: u32) -> Result<Answer, Errno> {
        let made = sys::packet_pair().map_err(|_| ENOMEM);
        let (ours, theirs) = made.inspect_err(|errno| self.note_full(context, *errno))?;
        self.charge(context, Quota::Channels, 1)?;
        let channel = Channel { context, users: 0, events: EventSocket::new(ours) };
        let handle = self.channels.insert(channel, 0);
        let mut answer = object(self.taken(handle, context, Quota::Channels)?);
        answer.descriptors.push(theirs);
        Ok(answer)
    }

    pub(crate) fn destroy_channel(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let channel = usable(self.channels.get(handle).filter(|c| owns(context, c.context)))?;
        if channel.users > 0 {
            return Err(EBUSY);
        }
        self.channels.remove(handle);
        self.refund(context, Quota::Channels, 1);
        Ok(done())
    }

    fn create_ah(
        &mut self,
        context: u32,
        request: &abi::verbs_create_ah_request,
    ) -> Result<Answer, Errno> {
        let overlay = gid_count(&usable(self.endpoint_of(context))?.gids);
        if !verbs_qp::is_address(&request.address, overlay) {
            self.note_outside_of(context, &request.address);
            return Err(EINVAL);
        }
        self.charge(context, Quota::Ahs, 1)?;
        if let Err(errno) = self.use_pd(context, request.pd) {
            self.refund(context, Quota::Ahs, 1);
            return Err(errno);
        }
        let a = &request.address;
        let ah = Ah {
            context,
            pd: request.pd,
            gid: a.gid,
            hop_limit: a.hop_limit,
            sgid_index: a.sgid_index,
        };
        let handle = self.ahs.insert(ah, 0);
        let made = self.taken(handle, context, Quota::Ahs);
        Ok(object(made.inspect_err(|_| self.leave_pd(request.pd))?))
    }

    pub(crate) fn destroy_ah(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let pd = usable(self.ahs.get(handle).filter(|a| owns(context, a.context)))?.pd;
        self.ahs.remove(handle);
        self.leave_pd(pd);
        self.refund(context, Quota::Ahs, 1);
        Ok(done())
    }

    fn create_memory(&mut self, context: u32, length: u64) -> Result<Answer, Errno> {
        if length == 0 || !length.is_multiple_of(PAGE) {
            return Err(EINVAL);
        }
        self.charge(context, Quota::Memories, 1)?;
        if let Err(errno) = self.charge(context, Quota::Memory, length) {
            self.refund(context, Quota::Memories, 1);
            return Err(errno);
        }
        let made = usize::try_from(length).ok().and_then(|bytes| {
            let shared = SharedMemory::create(c"verbs-memory", bytes).ok()?;
            let fd = shared.as_fd().try_clone_to_owned().ok()?;
            Some((self.memories.insert(Memory { context, users: 0, shared }, 0)?, fd))
        });
        let Some((memory, fd)) = made else {
            self.refund(context, Quota::Memories, 1);
            self.refund(context, Quota::Memory, length);
            self.full(context);
            return Err(ENOMEM);
        };
        let reply = abi::verbs_create_memory_reply { memory, length, ..Default::default() };
        let mut answer = answer(&reply);
        answer.descriptors.push(fd);
        Ok(answer)
    }

    pub(crate) fn destroy_memory(&mut self, context: u32, handle: u32) -> Result<Answer, Errno> {
        let memory = usable(self.memories.get(handle).filter(|m| owns(context, m.context)))?;
        if memory.users > 0 {
            return Err(EBUSY);
        }
        let shared = Arc::clone(&memory.shared);
        self.memories.remove(handle);
        // It counts as one that is kept from now on.
        self.refund(context, Quota::Memories, 1);
        self.let_go_of(context, shared);
        Ok(done())
    }

    /// The process that connected has the context's memory mapped there, if it is the one whose
    /// memory the router has open.
    fn show_memory(self: &mut Box<Self>, context: u32, address: u64) -> Result<Answer, Errno> {
        let object = usable(self.contexts.get(context))?;
        let memory = Arc::clone(usable(object.memory.as_ref())?);
        let process = Arc::clone(&object.process);
        if !self.without_baton(|worker| process.maps(worker, &memory, address)) {
            return Err(libc::EACCES);
        }
        usable(self.contexts.get_mut(context))?.shown = true;
        Ok(done())
    }

    fn register(
        self: &mut Box<Self>,
        context: u32,
        request: &abi::verbs_reg_mr_request,
    ) -> Result<Answer, Errno> {
        let r = *request;
        let access = access_of(&r)?;
        let memory = self.memories.get(r.memory).filter(|m| owns(context, m.context));
        let shared = memory.map(|m| Arc::clone(&m.shared));
        self.close_to_holes(context, shared)?;
        let mapped = match r.memory {
            0 => None,
            handle => {
                let endpoint = usable(self.contexts.get(context))?.endpoint;
                let memory =
                    usable(self.memories.get(handle).filter(|m| owns(context, m.context)))?;
                let shared = &memory.shared;
                Some(usable(Mapped::of(endpoint, shared, r.memory_offset, r.length))?)
            }
        };
        let process = if mapped.as_ref().is_some_and(|m| m.is_all(r.length)) {
            None
        } else {
            Some((self.program_with(context, r.address, r.length)?, r.address))
        };
        let card = self.register_outside(context, &r, mapped.as_ref(), access);
        // It may have gone meanwhile.
        let memory = self.memories.get(r.memory).filter(|m| owns(context, m.context));
        if mapped.is_some() && memory.is_none() {
            return Err(EINVAL);
        }
        if mapped.is_none() && r.length >= MAPPED_RATHER {
            self.note_in(context, Reason::RegionUnmapped);
        }
        self.charge(context, Quota::Mrs, 1)?;
        if let Err(errno) = self.use_pd(context, r.pd) {
            self.refund(context, Quota::Mrs, 1);
            return Err(errno);
        }
        let region = Region {
            number: self.next_number(),
            context,
            pd: r.pd,
            iova: r.iova,
            length: r.length,
            access,
            memory: r.memory,
            mapped,
            process,
            card,
        };
        let skip = u32::try_from(sys::random() >> 32).unwrap_or(0);
        let handle = match region.card.as_ref().map(|c| c.rkey()).filter(|key| *key != 0) {
            Some(key) => self.regions.insert_as(key, region),
            None => self.regions.insert(region, skip),
        };
        let made = self.taken(handle, context, Quota::Mrs);
        let mr = made.inspect_err(|_| self.leave_pd(r.pd))?;
        if let Some(memory) = self.memories.get_mut(r.memory) {
            memory.users += 1;
        }
        let reply = abi::verbs_reg_mr_reply { mr, lkey: mr, rkey: mr, ..Default::default() };
        Ok(answer(&reply))
    }

    /// The program of a context, which has memory at an address: its first and its last byte.
    fn program_with(
        self: &mut Box<Self>,
        context: u32,
        address: u64,
        length: u64,
    ) -> Result<Arc<Process>, Errno> {
        let object = usable(self.contexts.get(context))?;
        if !object.shown && protects(Protection::AddressSpace) {
            return Err(libc::EACCES);
        }
        let process = Arc::clone(&object.process);
        if !self.without_baton(|worker| process.has(worker, address, length)) {
            return Err(libc::EFAULT);
        }
        Ok(process)
    }

    /// The GID by which programs reach peers without Heddle.
    fn query_outside(&mut self, context: u32) -> Result<Answer, Errno> {
        let endpoint = usable(self.contexts.get(context))?.endpoint;
        let gid = self.outside_gid(endpoint).ok_or(EOPNOTSUPP)?;
        Ok(answer(&abi::verbs_query_outside_reply { gid, ..Default::default() }))
    }

    /// The device by which a program makes a userfaultfd of its own memory.
    fn open_userfaultfd(&mut self, context: u32) -> Result<Answer, Errno> {
        let Some(device) = &self.userfaultfd else {
            self.note_in(context, Reason::NoUserfaultfd);
            return Err(EOPNOTSUPP);
        };
        let mut answer = done();
        answer.descriptors.push(copy(device)?);
        Ok(answer)
    }

    fn deregister(self: &mut Box<Self>, context: u32, handle: u32) -> Result<Answer, Errno> {
        let region = self.forget_region(context, handle)?;
        let endpoint = self.contexts.get(context).map_or(0, |c| c.endpoint);
        let number = region.number;
        if let Some(card) = region.card {
            // No peer reaches it once this is answered, for which the card may take its time.
            self.without_baton(|worker| {
                worker.touches(endpoint);
                drop(card);
            });
        }
        if let Some(e) = self.endpoints.get_mut(endpoint) {
            e.refund(Quota::Mrs, 1);
        }
        if protects(Protection::UnderWay) {
            self.await_copies(endpoint, |user| user.region == number);
        }
        Ok(done())
    }

    /// Gives a region up, which copies may still touch, the card may know, and its endpoint is
    /// still charged for.
    fn forget_region(&mut self, context: u32, handle: u32) -> Result<Region, Errno> {
        usable(self.regions.get(handle).filter(|r| owns(context, r.context)))?;
        let region = usable(self.regions.remove(handle))?;
        if let Some(memory) = self.memories.get_mut(region.memory) {
            memory.users -= 1;
        }
        self.leave_pd(region.pd);
        Ok(region)
    }

    /// The same of a program that is gone, which waits for nothing.
    pub(crate) fn end_region(&mut self, context: u32, handle: u32) -> Result<(), Errno> {
        let endpoint = usable(self.contexts.get(context))?.endpoint;
        let region = self.forget_region(context, handle)?;
        self.drop_region(endpoint, region.card);
        Ok(())
    }
}

/// What a region is to be accessible for, without what may be left out.
fn access_of(r: &abi::verbs_reg_mr_request) -> Result<u32, Errno> {
    let access = r.access & !ibv::ACCESS_OPTIONAL;
    if access & !ACCESS_KNOWN != 0 {
        return Err(EOPNOTSUPP);
    }
    let writes = access & (ibv::ACCESS_REMOTE_WRITE | ibv::ACCESS_REMOTE_ATOMIC) != 0;
    let is_wrong = writes && access & ibv::ACCESS_LOCAL_WRITE == 0;
    let wraps = [r.address, r.iova].iter().any(|a| a.checked_add(r.length).is_none());
    if is_wrong || r.length == 0 || r.length > MAX_REGION || wraps {
        return Err(EINVAL);
    }
    Ok(access)
}

pub(crate) fn gid_count(gids: &[[u8; 16]; 2]) -> u32 {
    if gids[1] == [0; 16] { 1 } else { 2 }
}

/// Slots of a ring for this many requests.
pub(crate) fn capacity(requests: u32, slots: usize) -> u32 {
    requests.max(1).saturating_mul(u32::try_from(slots).unwrap_or(1)).next_power_of_two()
}

//! Plays the library of programs: a device, its queues and their objects.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

use shared_ring::{Consumer, Producer, Ringer, SharedMemory, Slot};
use verbs_protocol::abi::{self, verbs_completion, verbs_reply, verbs_request};
use verbs_protocol::plain::{self, Plain};
use verbs_protocol::{Gid, ibv};

use super::wire::{readable, receive, send};
use super::{WAIT_TIMEOUT, eventually, gid};

/// An open device.
pub(crate) struct Device {
    pub(crate) socket: OwnedFd,
    pub(crate) number: u8,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) ringer: Ringer,
    /// What the ringer rings.
    pub(crate) ring: OwnedFd,
    pub(crate) events: OwnedFd,
    pub(crate) limits: abi::verbs_hello_reply,
    tag: u32,
}

/// Asks for something on a socket: the reply's bytes and descriptors, or the errno.
pub(crate) fn ask(socket: &OwnedFd, request: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>), i32> {
    send(socket, request, &[]).unwrap();
    let (bytes, fds) = receive(socket).unwrap();
    assert!(!bytes.is_empty(), "the router has closed the connection");
    let head: verbs_reply = plain::read(&bytes[..16]).unwrap();
    assert_eq!(head.command.to_ne_bytes(), request[..4]);
    assert_eq!(head.tag.to_ne_bytes(), request[4..8]);
    if head.error != 0 {
        assert_eq!((bytes.len(), fds.len()), (16, 0));
        return Err(head.error);
    }
    Ok((bytes, fds))
}

pub(crate) fn hello(version: u32, kind: u32) -> abi::verbs_hello_request {
    let head = verbs_request { command: abi::VERBS_HELLO, tag: 1 };
    abi::verbs_hello_request { head, version, kind }
}

impl Device {
    pub(crate) fn open(socket: OwnedFd, number: u8) -> Self {
        let answer = ask(&socket, plain::bytes(&hello(1, 0))).unwrap();
        Self::of(socket, number, answer)
    }

    /// The device of a connection that somebody has said hello on.
    pub(crate) fn of(socket: OwnedFd, number: u8, answer: (Vec<u8>, Vec<OwnedFd>)) -> Self {
        let (bytes, mut fds) = answer;
        let limits: abi::verbs_hello_reply = plain::read(&bytes).unwrap();
        assert_eq!(fds.len(), 3);
        let events = fds.pop().unwrap();
        let ring = fds.pop().unwrap();
        let size = usize::try_from(limits.context_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let ringer = Ringer::attach(&memory, 0, ring.try_clone().unwrap()).unwrap();
        let mut device = Self { socket, number, memory, ringer, ring, events, limits, tag: 1 };
        // A process that did not connect itself cannot show that it did: it has no memory then.
        let _ = device.show(device.memory.as_ptr().as_ptr() as u64);
        device
    }

    /// Shows the router that it has the memory of this process.
    pub(crate) fn show(&mut self, address: u64) -> Result<(), i32> {
        let head = self.head(abi::VERBS_SHOW_MEMORY);
        let request = abi::verbs_show_memory_request { head, address };
        self.ask::<verbs_reply>(&request).map(drop)
    }

    pub(crate) fn head(&mut self, command: u32) -> verbs_request {
        self.tag += 1;
        verbs_request { command, tag: self.tag }
    }

    pub(crate) fn ask<R: Plain>(&self, request: &impl Plain) -> Result<(R, Vec<OwnedFd>), i32> {
        let (bytes, fds) = ask(&self.socket, plain::bytes(request))?;
        Ok((plain::read(&bytes).expect("the reply has its length"), fds))
    }

    /// A command that names an object, or none if `object` is 0.
    pub(crate) fn object(&mut self, command: u32, object: u32) -> Result<(), i32> {
        let head = self.head(command);
        let request = abi::verbs_object_request { head, object, reserved: 0 };
        self.ask::<verbs_reply>(&request).map(drop)
    }

    pub(crate) fn pd(&mut self) -> u32 {
        let head = self.head(abi::VERBS_ALLOC_PD);
        let request = abi::verbs_plain_request { head };
        self.ask::<abi::verbs_object_reply>(&request).unwrap().0.object
    }

    pub(crate) fn channel(&mut self) -> (u32, OwnedFd) {
        let head = self.head(abi::VERBS_CREATE_CHANNEL);
        let request = abi::verbs_plain_request { head };
        let (reply, mut fds) = self.ask::<abi::verbs_object_reply>(&request).unwrap();
        (reply.object, fds.pop().unwrap())
    }

    pub(crate) fn cq(&mut self, cqe: u32, channel: u32) -> Cq {
        self.try_cq(cqe, channel).unwrap()
    }

    pub(crate) fn try_cq(&mut self, cqe: u32, channel: u32) -> Result<Cq, i32> {
        let head = self.head(abi::VERBS_CREATE_CQ);
        let user = 0xc0_0000 + u64::from(self.tag);
        let request = abi::verbs_create_cq_request { head, user, cqe, channel };
        let (reply, mut fds) = self.ask::<abi::verbs_create_cq_reply>(&request)?;
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let ring = Consumer::attach(&memory, 128, reply.capacity).unwrap();
        Ok(Cq { handle: reply.cq, user, memory, ring })
    }

    /// Has a larger ring for a CQ: the one that was is given back, with what it has.
    pub(crate) fn resize(&mut self, cq: &mut Cq, cqe: u32) -> Result<Cq, i32> {
        let head = self.head(abi::VERBS_RESIZE_CQ);
        let request = abi::verbs_resize_cq_request { head, cq: cq.handle, cqe };
        let (reply, mut fds) = self.ask::<abi::verbs_create_cq_reply>(&request)?;
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let ring = Consumer::attach(&memory, 128, reply.capacity).unwrap();
        let now = Cq { handle: cq.handle, user: cq.user, memory, ring };
        Ok(std::mem::replace(cq, now))
    }

    /// Has a queue pair join a group (`VERBS_ATTACH_MCAST`), or leave it.
    pub(crate) fn group(&mut self, command: u32, qp: u32, gid: Gid) -> Result<(), i32> {
        let head = self.head(command);
        let request = abi::verbs_mcast_request { head, qp, reserved: 0, gid };
        self.ask::<verbs_reply>(&request).map(drop)
    }

    pub(crate) fn qp(&mut self, kind: u32, pd: u32, send_cq: &Cq, recv_cq: &Cq, srq: u32) -> Qp {
        let head = self.head(abi::VERBS_CREATE_QP);
        let request = abi::verbs_create_qp_request {
            head,
            user: 0x9000,
            pd,
            send_cq: send_cq.handle,
            recv_cq: recv_cq.handle,
            srq,
            type_: kind,
            max_send_wr: 32,
            max_recv_wr: 32,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 200,
            ..Default::default()
        };
        let (reply, mut fds) = self.ask::<abi::verbs_create_qp_reply>(&request).unwrap();
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let send = Producer::attach(&memory, 0, reply.send_capacity).unwrap();
        let receive = (reply.receive_capacity > 0).then(|| {
            let at = usize::try_from(reply.receive_offset).unwrap();
            Producer::attach(&memory, at, reply.receive_capacity).unwrap()
        });
        Qp { number: reply.qp, memory, send, receive }
    }

    pub(crate) fn srq(&mut self, pd: u32, max_wr: u32, limit: u32) -> (u32, Producer) {
        let head = self.head(abi::VERBS_CREATE_SRQ);
        let request =
            abi::verbs_create_srq_request { head, user: 0x5000, pd, max_wr, max_sge: 4, limit };
        let (reply, mut fds) = self.ask::<abi::verbs_create_srq_reply>(&request).unwrap();
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        (reply.srq, Producer::attach(&memory, 0, reply.capacity).unwrap())
    }

    pub(crate) fn modify(
        &mut self,
        qp: u32,
        mask: u32,
        attr: abi::verbs_qp_attr,
    ) -> Result<u32, i32> {
        let head = self.head(abi::VERBS_MODIFY_QP);
        let request = abi::verbs_modify_qp_request { head, qp, mask, attr };
        Ok(self.ask::<abi::verbs_modify_qp_reply>(&request)?.0.qp_state)
    }

    pub(crate) fn reset(&mut self, qp: u32) -> Result<u32, i32> {
        self.modify(qp, ibv::QP_STATE, abi::verbs_qp_attr::default())
    }

    pub(crate) fn state(&mut self, qp: u32) -> u32 {
        let head = self.head(abi::VERBS_QUERY_QP);
        let request = abi::verbs_object_request { head, object: qp, reserved: 0 };
        self.ask::<abi::verbs_query_qp_reply>(&request).unwrap().0.attr.qp_state
    }

    /// Brings a connected queue pair to RTS; `edit` changes attributes.
    pub(crate) fn connect(
        &mut self,
        qp: u32,
        kind: u32,
        to: (u8, u32),
        edit: impl Fn(&mut abi::verbs_qp_attr),
    ) {
        let attr = self.ready_to_receive(qp, kind, to, edit);
        assert_eq!(self.ready_to_send(qp, kind, attr, 0), Ok(3));
    }

    /// The same as far as RTR: its attributes.
    pub(crate) fn ready_to_receive(
        &mut self,
        qp: u32,
        kind: u32,
        to: (u8, u32),
        edit: impl Fn(&mut abi::verbs_qp_attr),
    ) -> abi::verbs_qp_attr {
        let when = |mask| if kind == ibv::QPT_RC { mask } else { 0 };
        let mut attr = abi::verbs_qp_attr {
            qp_state: 1,
            port: 1,
            access: 15,
            path_mtu: 5,
            dest_qp_num: to.1,
            address: abi::verbs_address {
                gid: gid(to.0),
                is_global: 1,
                port: 1,
                ..Default::default()
            },
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        edit(&mut attr);
        let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_ACCESS_FLAGS;
        assert_eq!(self.modify(qp, init, attr), Ok(1));
        attr.qp_state = 2;
        let receive = ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER;
        let path = ibv::QP_AV | ibv::QP_PATH_MTU | ibv::QP_DEST_QPN | ibv::QP_RQ_PSN;
        assert_eq!(self.modify(qp, ibv::QP_STATE | path | when(receive), attr), Ok(2));
        attr
    }

    /// From there to RTS, with what else a mask names.
    pub(crate) fn ready_to_send(
        &mut self,
        qp: u32,
        kind: u32,
        mut attr: abi::verbs_qp_attr,
        also: u32,
    ) -> Result<u32, i32> {
        attr.qp_state = 3;
        let retry = ibv::QP_TIMEOUT | ibv::QP_RETRY_CNT | ibv::QP_RNR_RETRY;
        let when = if kind == ibv::QPT_RC { retry | ibv::QP_MAX_QP_RD_ATOMIC } else { 0 };
        self.modify(qp, ibv::QP_STATE | ibv::QP_SQ_PSN | when | also, attr)
    }

    /// Brings a queue pair of datagrams to RTS.
    pub(crate) fn connect_datagrams(&mut self, qp: u32, qkey: u32) {
        let mut attr = abi::verbs_qp_attr { qp_state: 1, port: 1, qkey, ..Default::default() };
        let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_QKEY;
        assert_eq!(self.modify(qp, init, attr), Ok(1));
        attr.qp_state = 2;
        assert_eq!(self.modify(qp, ibv::QP_STATE, attr), Ok(2));
        attr.qp_state = 3;
        assert_eq!(self.modify(qp, ibv::QP_STATE | ibv::QP_SQ_PSN, attr), Ok(3));
    }

    pub(crate) fn ah(&mut self, pd: u32, to: u8) -> u32 {
        self.ah_to(pd, gid(to), 0)
    }

    pub(crate) fn ah_to(&mut self, pd: u32, gid: Gid, sgid_index: u8) -> u32 {
        let head = self.head(abi::VERBS_CREATE_AH);
        let address = abi::verbs_address {
            gid,
            sgid_index,
            is_global: 1,
            port: 1,
            hop_limit: 7,
            ..Default::default()
        };
        let request = abi::verbs_create_ah_request { head, pd, reserved: 0, address };
        self.ask::<abi::verbs_object_reply>(&request).unwrap().0.object
    }

    pub(crate) fn register(&mut self, pd: u32, bytes: &mut [u8], access: u32) -> Result<u32, i32> {
        self.register_at(pd, bytes.as_mut_ptr() as u64, bytes.len() as u64, access)
    }

    pub(crate) fn register_at(
        &mut self,
        pd: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> Result<u32, i32> {
        let request = self.registration(pd, address, length, access);
        let (reply, _) = self.ask::<abi::verbs_reg_mr_reply>(&request)?;
        assert_eq!(reply.lkey, reply.rkey);
        Ok(reply.lkey)
    }

    fn registration(
        &mut self,
        pd: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> abi::verbs_reg_mr_request {
        let head = self.head(abi::VERBS_REG_MR);
        abi::verbs_reg_mr_request {
            head,
            address,
            length,
            iova: address,
            pd,
            access,
            ..Default::default()
        }
    }

    /// Asks for a region, and does not wait for the answer.
    pub(crate) fn ask_to_register(&mut self, pd: u32, address: u64, length: u64) {
        let request = self.registration(pd, address, length, 15);
        send(&self.socket, plain::bytes(&request), &[]).unwrap();
    }

    /// Asks for the end of an object, and does not wait for the answer.
    pub(crate) fn ask_to_end(&mut self, command: u32, object: u32) {
        let head = self.head(command);
        let request = abi::verbs_object_request { head, object, reserved: 0 };
        send(&self.socket, plain::bytes(&request), &[]).unwrap();
    }

    pub(crate) fn ask_to_reset(&mut self, qp: u32) {
        self.ask_for_state(qp, 0);
    }

    /// Asks for a state that needs nothing else, and does not wait for the answer.
    pub(crate) fn ask_for_state(&mut self, qp: u32, qp_state: u32) {
        let head = self.head(abi::VERBS_MODIFY_QP);
        let attr = abi::verbs_qp_attr { qp_state, ..Default::default() };
        let request = abi::verbs_modify_qp_request { head, qp, mask: ibv::QP_STATE, attr };
        send(&self.socket, plain::bytes(&request), &[]).unwrap();
    }

    /// Whether something was answered that nobody has received yet.
    pub(crate) fn is_answered(&self) -> bool {
        readable(&self.socket, Duration::ZERO)
    }

    /// Waits for the answer, and says whether it is a region.
    pub(crate) fn is_registered(&self) -> bool {
        let bytes = receive(&self.socket).unwrap().0;
        bytes.len() == size_of::<abi::verbs_reg_mr_reply>()
    }

    /// Memory of the router's making, registered as a whole, from address 0 on.
    pub(crate) fn shared(&mut self, pd: u32, length: u64) -> (u32, u32, Arc<SharedMemory>) {
        let (handle, fd) = self.create_memory(length).unwrap();
        let size = usize::try_from(length).unwrap();
        let memory = SharedMemory::open(fd, size).unwrap();
        let head = self.head(abi::VERBS_REG_MR);
        let request = abi::verbs_reg_mr_request {
            head,
            length,
            memory: handle,
            pd,
            access: 15,
            ..Default::default()
        };
        let (mr, _) = self.ask::<abi::verbs_reg_mr_reply>(&request).unwrap();
        (handle, mr.lkey, memory)
    }

    /// Memory of the router's making: its handle, and its file.
    pub(crate) fn create_memory(&mut self, length: u64) -> Result<(u32, OwnedFd), i32> {
        let head = self.head(abi::VERBS_CREATE_MEMORY);
        let request = abi::verbs_create_memory_request { head, length };
        let (reply, mut fds) = self.ask::<abi::verbs_create_memory_reply>(&request)?;
        Ok((reply.memory, fds.pop().unwrap()))
    }

    pub(crate) fn post(&mut self, ring: &mut Producer, slots: &[Slot]) {
        eventually("room in the ring", || {
            (ring.room().unwrap() as usize >= slots.len()).then_some(())
        });
        assert_eq!(ring.push(slots).unwrap(), slots.len());
        self.ringer.ring().unwrap();
    }

    /// The next asynchronous event.
    pub(crate) fn event(&self) -> abi::verbs_async_event {
        assert!(readable(&self.events, WAIT_TIMEOUT), "no event");
        plain::read(&receive(&self.events).unwrap().0).expect("an event")
    }
}

pub(crate) struct Cq {
    pub(crate) handle: u32,
    pub(crate) user: u64,
    pub(crate) memory: Arc<SharedMemory>,
    ring: Consumer,
}

impl Cq {
    pub(crate) fn poll(&mut self) -> Option<verbs_completion> {
        let mut slot = [Slot::default()];
        (self.ring.pop(&mut slot).unwrap() == 1).then(|| plain::read(&slot[0].to_bytes()).unwrap())
    }

    pub(crate) fn next(&mut self) -> verbs_completion {
        eventually("a completion", || self.poll())
    }

    /// The next completion: its request and status.
    pub(crate) fn result(&mut self) -> (u64, u32) {
        let completion = self.next();
        (completion.wr_id, completion.status)
    }

    pub(crate) fn arm(&self, wish: u32) {
        // SAFETY: the memory begins with the word, and is mapped as long as `self` is.
        let word = unsafe { self.memory.as_ptr().cast::<AtomicU32>().as_ref() };
        word.store(wish, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

pub(crate) struct Qp {
    pub(crate) number: u32,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) send: Producer,
    pub(crate) receive: Option<Producer>,
}

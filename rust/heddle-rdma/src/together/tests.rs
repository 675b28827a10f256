//! Which receive requests a batch has while it is copied.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use shared_ring::{Producer, SharedMemory, Slot};
use verbs_protocol::agent::Limits;
use verbs_protocol::control::Request;
use verbs_protocol::plain::{self, Plain};
use verbs_protocol::{abi, slots};

use super::*;
use crate::baton::Shared;
use crate::endpoint::Endpoint;
use crate::objects::Context;
use crate::process::Process;
use crate::receiving::Taken;
use crate::shards::Nudge;
use crate::sys::Epoll;

/// A program of an endpoint, whose requests are served.
struct Program {
    objects: Box<Objects>,
    context: u32,
    pd: u32,
    cq: u32,
}

impl Program {
    fn new() -> Self {
        let shared: &'static Shared = Box::leak(Box::default());
        let epoll = Epoll::new().unwrap();
        let nudge = Nudge::of(&epoll).unwrap();
        let mut objects = Box::new(Objects::new(shared, Arc::new(epoll), nudge));
        shared.place.begin(objects.hollow());
        let fd = || sys::eventfd().unwrap();
        let mut endpoint = Endpoint::new(1, [[0; 16]; 2], fd());
        endpoint.limit(&Limits::default());
        let endpoint = objects.endpoints.insert(endpoint, 0).unwrap();
        let process = Arc::new(Process::new(endpoint, (1, fd())));
        let context = Context::new(endpoint, fd(), process);
        let context = objects.contexts.insert(context, 0).unwrap();
        let mut program = Self { objects, context, pd: 0, cq: 0 };
        program.pd = program.ask::<abi::verbs_object_reply>(&Request::AllocPd).0.object;
        let cq = abi::verbs_create_cq_request { cqe: 64, ..Default::default() };
        program.cq = program.ask::<abi::verbs_create_cq_reply>(&Request::CreateCq(cq)).0.cq;
        program
    }

    fn ask<R: Plain>(&mut self, request: &Request) -> (R, Option<OwnedFd>) {
        let mut answer = self.objects.serve_request(self.context, request).unwrap();
        (plain::read(&answer.bytes).unwrap(), answer.descriptors.pop())
    }

    fn srq(&mut self) -> (u32, Producer) {
        let request = abi::verbs_create_srq_request {
            pd: self.pd,
            max_wr: 16,
            max_sge: 1,
            ..Default::default()
        };
        let (reply, fd) = self.ask::<abi::verbs_create_srq_reply>(&Request::CreateSrq(request));
        (reply.srq, ring(&memory(fd, reply.memory_size), 0, reply.capacity))
    }

    /// A queue pair that sends and receives, and its rings.
    fn qp(&mut self, srq: u32) -> (u32, Producer, Option<Producer>) {
        let request = abi::verbs_create_qp_request {
            pd: self.pd,
            send_cq: self.cq,
            recv_cq: self.cq,
            srq,
            type_: ibv::QPT_RC,
            max_send_wr: 16,
            max_recv_wr: 16,
            ..Default::default()
        };
        let (reply, fd) = self.ask::<abi::verbs_create_qp_reply>(&Request::CreateQp(request));
        self.objects.qps.get_mut(reply.qp).unwrap().state = State::ReadyToSend;
        let memory = memory(fd, reply.memory_size);
        let at = usize::try_from(reply.receive_offset).unwrap();
        let receive = (srq == 0).then(|| ring(&memory, at, reply.receive_capacity));
        (reply.qp, ring(&memory, 0, reply.send_capacity), receive)
    }
}

fn memory(fd: Option<OwnedFd>, size: u64) -> Arc<SharedMemory> {
    SharedMemory::open(fd.unwrap(), usize::try_from(size).unwrap()).unwrap()
}

fn ring(memory: &Arc<SharedMemory>, at: usize, capacity: u32) -> Producer {
    Producer::attach(memory, at, capacity).unwrap()
}

/// Posts as many requests, which are without bytes.
fn post(ring: &mut Producer, count: usize, request: &impl Plain) {
    let slot = plain::bytes(request).first_chunk::<{ slots::SLOT }>().map(Slot::from_bytes);
    assert_eq!(ring.push(&vec![slot.unwrap(); count]), Ok(count));
}

/// While the bytes of a batch are copied, which may take as long as a page does not come, the other
/// queue pairs of a shared queue have what the batch did not take.
#[test]
fn a_batch_leaves_receive_requests_of_a_shared_queue_to_others() {
    const ALL: usize = 12;
    for (shares, most) in [(true, 4), (false, ALL)] {
        let mut program = Program::new();
        let (srq, mut of_all) = program.srq();
        let (a, mut sends, _) = program.qp(0);
        let (b, _, mut own) = program.qp(if shares { srq } else { 0 });
        let receive = abi::verbs_receive { slots: 1, ..Default::default() };
        post(own.as_mut().unwrap_or(&mut of_all), ALL, &receive);
        let send = verbs_send { slots: 1, opcode: ibv::WR_SEND, ..Default::default() };
        post(&mut sends, ALL, &send);
        let objects = &mut program.objects;
        let first = objects.take_current(a).unwrap().send;
        let (mut batch, uses) = (Batch::default(), objects.uses(a, b));
        assert!(objects.fill(&mut batch, (a, b), &first, &uses, &mut (1 << 20)));
        assert_eq!((batch.receives.len(), batch.more.len()), (most, most - 1));
        let others = (0..).take_while(|_| matches!(objects.take_receive(b), Taken::Ready(_)));
        assert_eq!(others.count(), ALL - most);
    }
}

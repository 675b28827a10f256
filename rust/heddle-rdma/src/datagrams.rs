//! Datagrams, on one node and between nodes.

use std::time::{Duration, Instant};

use verbs_protocol::slots::Send;
use verbs_protocol::statistics::{Path, Reason, Traffic};
use verbs_protocol::wire::{FIRST, Header, Kind, LAST, SOLICITED};
use verbs_protocol::{Gid, ibv};
use verbs_qp::Service;

use crate::link::{SEND_HIGH, Timer};
use crate::memory::Fault;
use crate::multicast::{GROUP_QP, is_multicast};
use crate::objects::{Current, Objects};
use crate::receiving::Taken;
use crate::remote::Broken;
use crate::requests::{Pending, Step, Told, gather};

/// Bytes in front of a datagram in the receiver's buffer.
const GRH: usize = 40;
/// The most bytes of a datagram.
const DATAGRAM_MAX: u64 = DATAGRAM_MAX_BYTES as u64;
const DATAGRAM_MAX_BYTES: usize = 4096;
/// For how long datagrams wait for a connection whose other end does not read: all that the queue
/// pair has for others waits with them.
const FULL_TIME: Duration = Duration::from_millis(200);

impl Objects {
    pub(crate) fn send_datagram(
        self: &mut Box<Self>,
        number: u32,
        current: &mut Current,
        length: u64,
    ) -> Step {
        let head = current.send.head;
        let qp = self.qps.get(number).ok_or(Pending::Peer)?;
        let ah = u32::try_from(head.compare_add).ok().and_then(|ah| self.ahs.get(ah));
        let ah = ah.filter(|ah| ah.pd == qp.pd && length <= DATAGRAM_MAX);
        let Some(ah) = ah else {
            return Err(Pending::Failed(ibv::WC_LOC_QP_OP_ERR));
        };
        let qkey = u32::try_from(head.swap).unwrap_or(u32::MAX);
        let qkey = if qkey >> 31 == 1 { qp.attr.qkey } else { qkey };
        let endpoint = qp.endpoint;
        let own = self.endpoints.get(endpoint).ok_or(Pending::Peer)?;
        let way = Way {
            source: own.gid(ah.sgid_index),
            destination: ah.gid,
            hop_limit: ah.hop_limit,
            qp: head.rkey,
            qkey,
        };
        let mut payload = [0; DATAGRAM_MAX_BYTES];
        let payload = &mut payload[..usize::try_from(length).unwrap_or(0)];
        self.load_datagram(number, &current.send, payload)
            .map_err(|Fault| Pending::Failed(ibv::WC_LOC_PROT_ERR))?;
        let told = Told::of(number, &current.send, length);
        let moved = Traffic { requests: 1, sent: length, ..Traffic::default() };
        if is_multicast(&way.destination) {
            self.send_to_group(number, &way, told, payload)?;
            self.account(number, Path::Memory, &moved);
            return Ok(());
        }
        let to = if self.shards > 0 { self.endpoint_with(&way.destination) } else { None };
        let elsewhere = to.map_or(0, |e| self.shard_of(e));
        if elsewhere != 0 && elsewhere != self.worker.serves() {
            return Err(Pending::Elsewhere(elsewhere));
        }
        // What it names may be a queue pair of somebody to whom it does not go.
        let is_there = self.is_at(way.qp, &way.destination);
        let receiver = if is_there { way.qp } else { number };
        if let Some(until) = self.capped(number, receiver) {
            return Err(Pending::Later(until));
        }
        let to_itself = self.endpoints.get(endpoint).is_some_and(|e| e.has(&way.destination));
        if to_itself {
            self.deliver(endpoint, &way, told, payload, Path::Memory);
            self.account(number, Path::Memory, &moved);
            return Ok(());
        }
        let Ok(link) = self.datagram_link(endpoint, way.source, way.destination) else {
            self.note(endpoint, Reason::DatagramNoRoom);
            return Ok(());
        };
        let link = link.ok_or(Pending::Peer)?;
        if self.links.get(link).is_some_and(|l| l.is_local) {
            let to = self.endpoint_with(&way.destination);
            self.copied(number, receiver, length);
            self.deliver(to.unwrap_or(endpoint), &way, told, payload, Path::Memory);
            self.account(number, Path::Memory, &moved);
            return Ok(());
        }
        if !self.say_datagram(link, &way, told, payload) {
            return Err(Pending::Peer);
        }
        self.account(number, Path::Tcp, &moved);
        Ok(())
    }

    /// Reads the bytes of a request, as many as `payload` has.
    fn load_datagram(
        self: &mut Box<Self>,
        number: u32,
        send: &Send,
        payload: &mut [u8],
    ) -> Result<(), Fault> {
        if send.is_inline() {
            payload.copy_from_slice(send.inline());
            return Ok(());
        }
        let usage = self.local(number, 0);
        let (entries, entry) = (send.entries(), |i| send.entry(i));
        self.from.clear();
        gather(&self.regions, entries, entry, 0, payload.len(), usage, &mut self.from)?;
        self.load(payload)
    }

    /// Whether a queue pair is one of this node's endpoint with a GID.
    fn is_at(&self, number: u32, gid: &Gid) -> bool {
        let endpoint = self.qps.get(number).and_then(|qp| self.endpoints.get(qp.endpoint));
        endpoint.is_some_and(|e| e.has(gid))
    }

    /// Gives a datagram to the queue pair that it names, if that takes it.
    /// `endpoint` is the one that drops it otherwise.
    fn deliver(
        self: &mut Box<Self>,
        endpoint: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
        path: Path,
    ) {
        if !self.is_at(way.qp, &way.destination) {
            return self.note(endpoint, Reason::DatagramUnwanted);
        }
        self.deliver_to(way.qp, endpoint, way, told, payload, path);
    }

    /// The same of a queue pair that is meant, if its state and key are right.
    pub(crate) fn deliver_to(
        self: &mut Box<Self>,
        peer: u32,
        endpoint: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
        path: Path,
    ) {
        let takes = self.qps.get(peer).is_some_and(|p| {
            p.service == Service::UnreliableDatagram
                && p.state.receives()
                && p.attr.qkey == way.qkey
        });
        if !takes {
            return self.note(endpoint, Reason::DatagramUnwanted);
        }
        let Taken::Ready(receive) = self.take_receive(peer) else {
            return self.note(endpoint, Reason::DatagramNoReceive);
        };
        let length = told.length + GRH as u64;
        if receive.length() < length {
            // A datagram is dropped, and its request is the next one's.
            self.give_back(peer, receive);
            return self.note(endpoint, Reason::DatagramNoReceive);
        }
        self.hold(peer, 1);
        let usage = self.local(peer, ibv::ACCESS_LOCAL_WRITE);
        let grh = way.grh(payload.len());
        let mut stored = Ok(());
        for (skip, bytes) in [(0, &grh[..]), (GRH as u64, payload)] {
            self.to.clear();
            let (entries, entry) = (receive.entries(), |i| receive.entry(i));
            stored = stored.and_then(|()| {
                let to = &mut self.to;
                gather(&self.regions, entries, entry, skip, bytes.len(), usage, to)?;
                self.store(bytes)
            });
        }
        let peer = self.still(peer, usage.epoch);
        self.hold(peer, -1);
        match stored {
            Ok(()) => {
                self.complete_receive(peer, Told { length, ..told }, receive.wr_id);
                let received = told.length;
                let moved = Traffic { served: 1, received, ..Traffic::default() };
                self.account(peer, path, &moved);
            }
            Err(Fault) => self.fail_receive(peer, receive.wr_id, ibv::WC_LOC_PROT_ERR),
        }
    }

    /// Sends a datagram, or drops it if there has been no room for too long; false if it has to
    /// wait.
    pub(crate) fn say_datagram(
        &mut self,
        handle: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
    ) -> bool {
        let Some(link) = self.links.get_mut(handle) else { return true };
        let now = Instant::now();
        if link.unsent.len() <= SEND_HIGH / 2 {
            link.full_since = None;
        }
        match link.full_since {
            Some(since) if now >= since + FULL_TIME => {
                let endpoint = link.endpoint;
                self.note(endpoint, Reason::DatagramNoRoom);
                return true;
            }
            None if link.unsent.len() >= SEND_HIGH => {
                link.full_since = Some(now);
                // Nothing but the time may wake the router.
                self.at(now + FULL_TIME, Timer::Link(handle));
                return false;
            }
            _ if link.unsent.len() >= SEND_HIGH => return false,
            _ => {}
        }
        link.say(&way.header(told, payload.len()));
        link.unsent.extend(payload);
        self.push(handle);
        true
    }

    pub(crate) fn hear_datagram(
        self: &mut Box<Self>,
        handle: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let link = self.links.get(handle).ok_or(Broken)?;
        let known = matches!(header.opcode, ibv::WR_SEND | ibv::WR_SEND_WITH_IMM);
        if bytes.len() > DATAGRAM_MAX_BYTES || header.flags & (FIRST | LAST) != 3 || !known {
            return Err(Broken);
        }
        let other = link.other;
        let own = self.endpoints.get(link.endpoint).ok_or(Broken)?;
        let way = Way {
            source: other,
            destination: own.gid_like(&other),
            hop_limit: u8::try_from(header.address & 255).unwrap_or(0),
            qp: header.status,
            qkey: header.key,
        };
        let told = Told {
            opcode: header.opcode,
            imm: header.immediate,
            solicited: header.flags & SOLICITED != 0,
            source: header.number,
            length: bytes.len() as u64,
        };
        let endpoint = link.endpoint;
        if way.qp == GROUP_QP {
            let way = Way { destination: group(header), ..way };
            self.deliver_to_group(endpoint, &way, told, bytes);
        } else {
            self.deliver(endpoint, &way, told, bytes, Path::Tcp);
        }
        Ok(())
    }
}

/// Where a datagram comes from and goes to.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    pub(crate) source: Gid,
    pub(crate) destination: Gid,
    hop_limit: u8,
    pub(crate) qp: u32,
    qkey: u32,
}

/// The group that a datagram is for.
fn group(header: &Header) -> Gid {
    let mut group = [0; 16];
    group[..8].copy_from_slice(&header.total.to_be_bytes());
    group[8..].copy_from_slice(&header.swap.to_be_bytes());
    group
}

impl Way {
    /// One to a group.
    #[cfg(test)]
    pub(crate) fn of(source: Gid, destination: Gid) -> Self {
        Self { source, destination, hop_limit: 1, qp: GROUP_QP, qkey: 0 }
    }

    /// The header of the frame that goes this way. One for a group says which.
    pub(crate) fn header(&self, told: Told, length: usize) -> Header {
        let halves = self.destination.as_chunks().0;
        let half = |i: usize| if self.qp == GROUP_QP { u64::from_be_bytes(halves[i]) } else { 0 };
        Header {
            opcode: told.opcode,
            flags: FIRST | LAST | if told.solicited { SOLICITED } else { 0 },
            length: u32::try_from(length).unwrap_or(0),
            number: told.source,
            status: self.qp,
            immediate: told.imm,
            key: self.qkey,
            address: self.hop_limit.into(),
            total: half(0),
            swap: half(1),
            ..Header::new(Kind::Datagram)
        }
    }

    /// What lies in front of the bytes in the receiver's buffer.
    fn grh(&self, length: usize) -> [u8; GRH] {
        let mut grh = [0; GRH];
        grh[0] = 0x60;
        grh[4..6].copy_from_slice(&u16::try_from(length).unwrap_or(0).to_be_bytes());
        grh[6] = 0x1b;
        grh[7] = self.hop_limit;
        grh[8..24].copy_from_slice(&self.source);
        grh[24..].copy_from_slice(&self.destination);
        grh
    }
}

//! Requests of connected queue pairs whose peer is on this node: bytes from memory to memory.

use std::time::Instant;

use verbs_protocol::ibv;
use verbs_protocol::statistics::Reason;

use crate::copying::{CHUNK, MAPPED_CHUNK, Side};
use crate::memory::{self, Fault, Use};
use crate::objects::{Current, Objects};
use crate::pieces::Piece;
use crate::protection::{Protection, protects};
use crate::requests::{Pending, Step, Told, gather};

impl Objects {
    /// A request as it is looked at without the protection of a copy.
    #[cfg(feature = "attack")]
    pub(crate) fn as_attacked(
        &self,
        number: u32,
        send: &verbs_protocol::slots::Send,
    ) -> verbs_protocol::slots::Send {
        use crate::protection::{Protection, protects};
        let again = || Some(self.qps.get(number)?.send.looked_at_again(send));
        let again = if protects(Protection::Copies) { None } else { again() };
        again.unwrap_or_else(|| send.clone())
    }

    pub(crate) fn send_message(
        self: &mut Box<Self>,
        number: u32,
        peer: u32,
        current: &mut Current,
        length: u64,
        bytes: &mut i64,
    ) -> Step {
        let (epoch, receive) = (self.epoch(peer), self.receive_for(peer)?);
        if receive.length() < length {
            self.hold(peer, -1);
            if !self.is_reliable(peer) {
                self.give_back(peer, receive);
                return Err(Pending::Failed(ibv::WC_REM_INV_REQ_ERR));
            }
            self.fail_receive(peer, receive.wr_id, ibv::WC_LOC_LEN_ERR);
            return Err(Pending::Failed(ibv::WC_REM_INV_REQ_ERR));
        }
        let to = |objects: &mut Self, done, n| {
            let usage = objects.local(peer, ibv::ACCESS_LOCAL_WRITE);
            let (entries, entry) = (receive.entries(), |i| receive.entry(i));
            gather(&objects.regions, entries, entry, done, n, usage, &mut objects.to)
        };
        let copied = self.copy_out((number, peer), current, length, bytes, to);
        let peer = self.still(peer, epoch);
        self.hold(peer, -1);
        match copied {
            Ok(()) => {
                self.complete_receive(peer, Told::of(number, &current.send, length), receive.wr_id);
                Ok(())
            }
            Err(failure @ (Failure::Turn | Failure::Later(_))) => {
                if let Some(peer) = self.qps.get_mut(peer) {
                    peer.inbound = Some(receive);
                }
                Err(failure.pending())
            }
            Err(Failure::Source) => {
                self.give_back(peer, receive);
                Err(Pending::Failed(ibv::WC_LOC_PROT_ERR))
            }
            Err(Failure::Destination) => {
                self.fail_receive(peer, receive.wr_id, ibv::WC_LOC_PROT_ERR);
                Err(Pending::Failed(ibv::WC_REM_OP_ERR))
            }
        }
    }

    pub(crate) fn write(
        self: &mut Box<Self>,
        number: u32,
        peer: u32,
        current: &mut Current,
        length: u64,
        bytes: &mut i64,
    ) -> Step {
        let head = current.send.head;
        let usage = self.remote(peer, ibv::ACCESS_REMOTE_WRITE);
        let usage = usage.ok_or(Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
        let with_imm = head.opcode == ibv::WR_RDMA_WRITE_WITH_IMM;
        if current.done == 0 && length > 0 && (length > CHUNK as u64 || with_imm) {
            // All of it, before a byte is written or a receive request taken. What goes in one step
            // is looked at then.
            let all = usize::try_from(length).map_err(|_| Pending::Turn)?;
            let found = memory::check(&self.regions, head.rkey, head.remote_address, all, usage);
            found.map_err(|Fault| Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
        }
        let epoch = self.epoch(peer);
        let receive = if with_imm { Some(self.receive_for(peer)?) } else { None };
        let to = |objects: &mut Self, done, n| {
            let at = head.remote_address.checked_add(done).ok_or(Fault)?;
            memory::find(&objects.regions, head.rkey, at, n, usage, &mut objects.to)
        };
        let copied = self.copy_out((number, peer), current, length, bytes, to);
        let peer = self.still(peer, epoch);
        if receive.is_some() {
            self.hold(peer, -1);
        }
        match (copied, receive) {
            (Ok(()), receive) => {
                if let Some(receive) = receive {
                    let told = Told::of(number, &current.send, length);
                    self.complete_receive(peer, told, receive.wr_id);
                } else {
                    self.account_served(peer, 0, length);
                }
                Ok(())
            }
            (Err(failure), receive) => {
                if let Some(receive) = receive {
                    self.give_back(peer, receive);
                }
                Err(match failure {
                    Failure::Turn | Failure::Later(_) => failure.pending(),
                    Failure::Source => Pending::Failed(ibv::WC_LOC_PROT_ERR),
                    Failure::Destination => Pending::Failed(ibv::WC_REM_ACCESS_ERR),
                })
            }
        }
    }

    /// Copies the bytes of a send request to where `to` says, as far as the turn goes.
    fn copy_out(
        self: &mut Box<Self>,
        (number, peer): (u32, u32),
        current: &mut Current,
        length: u64,
        bytes: &mut i64,
        to: impl Fn(&mut Self, u64, usize) -> Result<(), Fault>,
    ) -> Result<(), Failure> {
        let usage = self.local(number, 0);
        let send = &current.send;
        while current.done < length {
            if *bytes <= 0 {
                return Err(Failure::Turn);
            }
            if let Some(until) = self.capped(number, peer) {
                return Err(Failure::Later(until));
            }
            let done = current.done;
            let most = self.step_of((number, peer), *bytes);
            let n = self.next_pieces(length - done, most, |objects, n| {
                to(objects, done, n).map_err(|Fault| Failure::Destination)?;
                if send.is_inline() {
                    return Ok(()); // at most 512 bytes: one chunk
                }
                let (entries, entry) = (send.entries(), |i| send.entry(i));
                gather(&objects.regions, entries, entry, done, n, usage, &mut objects.from)
                    .map_err(|Fault| Failure::Source)
            })?;
            if send.is_inline() {
                #[cfg(feature = "attack")]
                let send = &self.as_attacked(number, send);
                self.store(send.inline()).map_err(|_| Failure::Destination)?;
            } else {
                self.copy().map_err(Failure::from)?;
            }
            current.done += n as u64;
            *bytes -= cost(n);
            self.copied(number, peer, n as u64);
        }
        Ok(())
    }

    /// How many bytes may be copied at a time, if they are mapped, in what is left of a turn.
    fn step_of(&self, (from, to): (u32, u32), left: i64) -> usize {
        let most = if self.is_limited(from, to) { CHUNK } else { MAPPED_CHUNK };
        usize::try_from(left).unwrap_or(0).clamp(CHUNK, most)
    }

    /// Has `find` find the pieces of the next bytes of a message, of which so many are left, at
    /// both ends: `most` if all of them are mapped. Says how many.
    fn next_pieces<E>(
        &mut self,
        left: u64,
        mut most: usize,
        find: impl Fn(&mut Self, usize) -> Result<(), E>,
    ) -> Result<usize, E> {
        loop {
            let n = usize::try_from(left).unwrap_or(most).min(most);
            self.from.clear();
            self.to.clear();
            find(self, n)?;
            if n <= CHUNK || self.from.iter().chain(&self.to).all(Piece::is_mapped) {
                return Ok(n);
            }
            most = CHUNK;
        }
    }

    pub(crate) fn read(
        self: &mut Box<Self>,
        number: u32,
        peer: u32,
        current: &mut Current,
        length: u64,
        bytes: &mut i64,
    ) -> Step {
        let head = current.send.head;
        let remote = self.remote(peer, ibv::ACCESS_REMOTE_READ);
        let remote = remote.ok_or(Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
        let local = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        while current.done < length {
            if *bytes <= 0 {
                return Err(Pending::Turn);
            }
            if let Some(until) = self.capped(peer, number) {
                return Err(Pending::Later(until));
            }
            let (done, send) = (current.done, &current.send);
            let most = self.step_of((peer, number), *bytes);
            // The rest, and not only this chunk: what is out of range fails before a byte is read.
            let at = head.remote_address.checked_add(done);
            let rest = usize::try_from(length - done).map_err(|_| Pending::Turn)?;
            let n = self.next_pieces(length - done, most, |objects, n| {
                let (regions, from, to) = (&objects.regions, &mut objects.from, &mut objects.to);
                let found = at.ok_or(Fault).and_then(|at| {
                    memory::check(regions, head.rkey, at, rest, remote)?;
                    memory::find(regions, head.rkey, at, n, remote, from)
                });
                found.map_err(|Fault| Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
                let (entries, entry) = (send.entries(), |i| send.entry(i));
                gather(regions, entries, entry, done, n, local, to)
                    .map_err(|Fault| Pending::Failed(ibv::WC_LOC_PROT_ERR))
            })?;
            self.copy().map_err(|side| {
                Pending::Failed(match side {
                    Side::Source => ibv::WC_REM_OP_ERR,
                    Side::Destination => ibv::WC_LOC_PROT_ERR,
                })
            })?;
            current.done += n as u64;
            *bytes -= cost(n);
            self.copied(peer, number, n as u64);
        }
        self.account_served(peer, length, 0);
        Ok(())
    }

    pub(crate) fn atomic(self: &mut Box<Self>, number: u32, peer: u32, current: &Current) -> Step {
        let head = current.send.head;
        if !head.remote_address.is_multiple_of(8) {
            return Err(Pending::Failed(ibv::WC_REM_INV_REQ_ERR));
        }
        let remote = self.remote(peer, ibv::ACCESS_REMOTE_ATOMIC);
        let remote = remote.ok_or(Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
        let there = (head.rkey, head.remote_address, remote);
        memory::check(&self.regions, there.0, there.1, 8, remote)
            .map_err(|Fault| Pending::Failed(ibv::WC_REM_ACCESS_ERR))?;
        let local = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        // Checked before anything is changed.
        self.to.clear();
        let send = &current.send;
        let (entries, entry) = (send.entries(), |i| send.entry(i));
        gather(&self.regions, entries, entry, 0, 8, local, &mut self.to)
            .map_err(|Fault| Pending::Failed(ibv::WC_LOC_PROT_ERR))?;
        // What the peer's page holds up must not have this side's memory.
        self.to.clear();
        // Another thread may be in the middle of one.
        let endpoint = self.begin_atomic(peer).ok_or(Pending::Turn)?;
        let changed = self.change(head.opcode, head.compare_add, head.swap, there);
        self.end_atomic(endpoint);
        let value = changed.map_err(|Fault| Pending::Failed(ibv::WC_REM_OP_ERR))?;
        self.account_served(peer, 8, 0);
        if self.still(number, local.epoch) == 0 && protects(Protection::UnderWay) {
            return Ok(()); // its memory is the program's again
        }
        self.to.clear();
        let send = &current.send;
        let (entries, entry) = (send.entries(), |i| send.entry(i));
        gather(&self.regions, entries, entry, 0, 8, local, &mut self.to)
            .map_err(|Fault| Pending::Failed(ibv::WC_LOC_PROT_ERR))?;
        self.store(&value.to_ne_bytes()).map_err(|Fault| Pending::Failed(ibv::WC_LOC_PROT_ERR))
    }

    /// Whether there is a cap on what is copied so.
    pub(crate) fn is_limited(&self, from: u32, to: u32) -> bool {
        let of = |qp: u32| self.qps.get(qp).map_or(0, |q| q.endpoint);
        let (from, to) = (of(from), of(to));
        from != to
            && protects(Protection::Caps)
            && (self.endpoints.get(from).is_some_and(|e| e.egress.is_limited())
                || self.endpoints.get(to).is_some_and(|e| e.ingress.is_limited()))
    }

    /// When bytes may be copied out of memory of the first queue pair's endpoint to that of the
    /// second, if not now.
    pub(crate) fn capped(&mut self, from: u32, to: u32) -> Option<Instant> {
        if !self.is_limited(from, to) {
            return None;
        }
        let (from, to) = (self.qps.get(from)?.endpoint, self.qps.get(to)?.endpoint);
        let now = Instant::now();
        let mut until = None;
        for (endpoint, leaves) in [(from, true), (to, false)] {
            let endpoint = self.endpoints.get_mut(endpoint)?;
            let bucket = if leaves { &mut endpoint.egress } else { &mut endpoint.ingress };
            let Some(at) = bucket.until(now) else { continue };
            if bucket.begins_to_wait() {
                endpoint.account.note(Reason::RateBytes);
            }
            until = until.max(Some(at));
        }
        until
    }

    /// Bytes were copied so.
    pub(crate) fn copied(&mut self, from: u32, to: u32, bytes: u64) {
        let of = |qp: u32| self.qps.get(qp).map_or(0, |q| q.endpoint);
        let (from, to) = (of(from), of(to));
        if from == to {
            return;
        }
        if let Some(endpoint) = self.endpoints.get_mut(from) {
            endpoint.egress.take(bytes);
        }
        if let Some(endpoint) = self.endpoints.get_mut(to) {
            endpoint.ingress.take(bytes);
        }
    }

    /// The endpoint of a queue pair, if nobody is in the middle of an atomic on its memory. Now
    /// somebody is.
    pub(crate) fn begin_atomic(&mut self, number: u32) -> Option<u32> {
        let handle = self.qps.get(number)?.endpoint;
        let endpoint = self.endpoints.get_mut(handle)?;
        (!std::mem::replace(&mut endpoint.in_atomic, true)).then_some(handle)
    }

    /// The queue pair may be gone by now.
    pub(crate) fn end_atomic(&mut self, endpoint: u32) {
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.in_atomic = false;
        }
    }

    /// Does an atomic, and says what was there before.
    pub(crate) fn change(
        self: &mut Box<Self>,
        opcode: u8,
        compare_add: u64,
        swap: u64,
        (key, address, usage): (u32, u64, Use),
    ) -> Result<u64, Fault> {
        let mut value = [0; 8];
        self.from.clear();
        memory::find(&self.regions, key, address, 8, usage, &mut self.from)?;
        self.load(&mut value)?;
        let old = u64::from_ne_bytes(value);
        let new = if opcode == ibv::WR_ATOMIC_FETCH_AND_ADD {
            Some(old.wrapping_add(compare_add))
        } else {
            (old == compare_add).then_some(swap)
        };
        if let Some(new) = new {
            self.to.clear();
            memory::find(&self.regions, key, address, 8, usage, &mut self.to)?;
            self.store(&new.to_ne_bytes())?;
        }
        Ok(old)
    }
}

/// Why bytes were not copied.
enum Failure {
    Turn,
    Later(Instant),
    Source,
    Destination,
}

impl Failure {
    /// Of one after which the copy goes on.
    fn pending(&self) -> Pending {
        match self {
            Self::Later(until) => Pending::Later(*until),
            _ => Pending::Turn,
        }
    }
}

impl From<Side> for Failure {
    fn from(side: Side) -> Self {
        match side {
            Side::Source => Self::Source,
            Side::Destination => Self::Destination,
        }
    }
}

fn cost(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

//! Requests of one queue pair to its peer on this node that are copied together, while the baton is
//! down once: to put it down and take it up again for each costs as much as copying 2 KiB.
//!
//! Only those are whose bytes are all mapped here, so that no copy fails in the middle. They are
//! copied in their order, so that a READ has what a WRITE in front of it has written. What is
//! behind them in the ring and is no such request, has no good receive request, or is wrong, is put
//! back and has its turn afterwards: so whatever fails does after all that is in front of it is
//! complete.

use verbs_protocol::abi::{verbs_send, verbs_sge};
use verbs_protocol::ibv;
use verbs_protocol::slots::{Receive, Send};
use verbs_protocol::statistics::{Path, Traffic};
use verbs_qp::State;

use crate::copying::{MAPPED_CHUNK, Side};
use crate::memory::{self, Regions, Use};
use crate::objects::{Current, Objects};
use crate::pieces::Piece;
use crate::queues::Dead;
use crate::requests::{Pending, REQUEST_COST, Step, Told, refusal};
use crate::sys;

#[cfg(test)]
mod tests;

/// Receive requests of a shared queue that a batch takes at most: others, whose queue pairs have
/// the same one, are without them as long as the copy waits for a page.
const SHARED_RECEIVES: usize = 4;

/// Bytes of one side of a batch: of a piece, or of the requests themselves.
pub(crate) struct Span {
    /// None of what was in requests.
    pub(crate) piece: Option<usize>,
    pub(crate) skip: usize,
    pub(crate) length: usize,
}

/// What is told of a send request.
pub(crate) struct Done {
    pub(crate) wr_id: u64,
    pub(crate) flags: u8,
    pub(crate) opcode: u8,
    pub(crate) length: u64,
}

impl Done {
    pub(crate) fn of(send: &Send) -> Self {
        let verbs_send { wr_id, flags, opcode, .. } = send.head;
        Self { wr_id, flags, opcode, length: send.length() }
    }
}

/// What is copied together. Its memory is used again.
#[derive(Default)]
pub(crate) struct Batch {
    pub(crate) from: Vec<Span>,
    pub(crate) to: Vec<Span>,
    /// Inline data.
    pub(crate) own: Vec<u8>,
    pub(crate) more: Vec<Done>,
    /// Receive requests of the peer that were taken, and what is told of the messages.
    receives: Vec<(Receive, Told)>,
    length: usize,
    /// Of it, what READs have.
    returned: usize,
}

impl Batch {
    fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
        self.own.clear();
        self.more.clear();
        self.receives.clear();
        (self.length, self.returned) = (0, 0);
    }

    /// Adds inline data.
    fn add_own(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.from.push(Span { piece: None, skip: self.own.len(), length: bytes.len() });
            self.own.extend_from_slice(bytes);
        }
    }
}

/// What requests of a queue pair to its peer may name; None is what is not allowed, or has a limit.
struct Uses {
    from: Option<Use>,
    to: Use,
    received: Use,
    written: Option<Use>,
    read: Option<Use>,
    /// How many receive requests a batch may take.
    receives: usize,
}

/// Adds the places of `length` bytes that a key and an address name, if all are mapped.
fn place(
    regions: &Regions,
    (key, address): (u32, u64),
    length: usize,
    usage: Use,
    (pieces, spans): (&mut Vec<Piece>, &mut Vec<Span>),
) -> Option<()> {
    // Without bytes it needs no valid key.
    if length > 0 {
        let (piece, skip) = memory::place(regions, key, address, length, usage, pieces)?;
        spans.push(Span { piece: Some(piece), skip, length });
    }
    Some(())
}

/// The same for the first bytes of a list of entries.
fn place_all(
    regions: &Regions,
    entries: impl Iterator<Item = verbs_sge>,
    mut length: usize,
    usage: Use,
    (pieces, spans): (&mut Vec<Piece>, &mut Vec<Span>),
) -> Option<()> {
    for sge in entries {
        let n = length.min(sge.length as usize);
        place(regions, (sge.lkey, sge.address), n, usage, (pieces, spans))?;
        length -= n;
    }
    (length == 0).then_some(())
}

impl Objects {
    /// Copies a request, and as many of those behind it as the turn goes: what is told of these is
    /// in [`Current::more`] then. None if it has to be done by itself.
    pub(crate) fn together(
        self: &mut Box<Self>,
        (number, peer): (u32, u32),
        current: &mut Current,
        bytes: &mut i64,
    ) -> Option<Step> {
        if current.done > 0 {
            return None;
        }
        let uses = self.uses(number, peer);
        let epochs = (uses.to.epoch, uses.received.epoch);
        // None if another thread is in the middle of a copy with it.
        let mut batch = self.batch.take().unwrap_or_default();
        if !self.fill(&mut batch, (number, peer), &current.send, &uses, bytes) {
            self.batch = Some(batch);
            return None;
        }
        let copied = self.copy_batch(&batch);
        let still = (self.still(number, epochs.0), self.still(peer, epochs.1));
        current.more = std::mem::take(&mut batch.more);
        self.hold(still.1, -i32::try_from(batch.receives.len()).unwrap_or(0));
        let step = copied.map_err(|side| {
            // What is mapped is never at fault. If it were, nothing would be known of the others.
            while let Some((receive, _)) = batch.receives.pop() {
                self.give_back(still.1, receive);
            }
            let is_own = (side == Side::Source) != (current.send.head.opcode == ibv::WR_RDMA_READ);
            Pending::Failed(if is_own { ibv::WC_LOC_PROT_ERR } else { ibv::WC_REM_ACCESS_ERR })
        });
        if step.is_ok() {
            self.account_batch(still, &batch, current);
            let now = if batch.receives.is_empty() { 0 } else { sys::monotonic() };
            for (receive, told) in batch.receives.drain(..) {
                self.tell_received(still.1, told, receive.wr_id, now);
            }
        }
        self.batch = Some(batch);
        Some(step)
    }

    fn uses(&self, number: u32, peer: u32) -> Uses {
        let unless = |is_limited: bool, usage: Option<Use>| usage.filter(|_| !is_limited);
        let back = self.is_limited(peer, number);
        let shares = self.qps.get(peer).is_some_and(|qp| qp.srq != 0);
        Uses {
            from: unless(self.is_limited(number, peer), Some(self.local(number, 0))),
            to: self.local(number, ibv::ACCESS_LOCAL_WRITE),
            received: self.local(peer, ibv::ACCESS_LOCAL_WRITE),
            written: self.remote(peer, ibv::ACCESS_REMOTE_WRITE),
            read: unless(back, self.remote(peer, ibv::ACCESS_REMOTE_READ)),
            receives: if shares { SHARED_RECEIVES } else { usize::MAX },
        }
    }

    /// Counts what was copied for both. The first request counts for who has sent it when it is
    /// told of, as any.
    fn account_batch(&mut self, (number, peer): (u32, u32), batch: &Batch, current: &Current) {
        let (requests, returned) = (current.more.len() as u64, batch.returned as u64);
        let sent = batch.length as u64 - returned;
        self.copied(number, peer, sent);
        self.copied(peer, number, returned);
        let served = Traffic { served: 1 + requests, received: sent, sent: returned, requests: 0 };
        self.account(peer, Path::Memory, &served);
        let is_read = current.send.head.opcode == ibv::WR_RDMA_READ;
        let first = current.send.length();
        let (sent, received) =
            if is_read { (sent, returned - first) } else { (sent - first, returned) };
        self.account(number, Path::Memory, &Traffic { requests, sent, received, served: 0 });
    }

    /// Gathers a request and those behind it. False if the first one is none that can be.
    fn fill(
        &mut self,
        batch: &mut Batch,
        (number, peer): (u32, u32),
        first: &Send,
        uses: &Uses,
        bytes: &mut i64,
    ) -> bool {
        batch.clear();
        self.from.clear();
        self.to.clear();
        let Some(length) = self.add(batch, (number, peer), first, uses) else { return false };
        *bytes -= length;
        while *bytes > 0
            && let Some(send) = self.next_good(number)
        {
            let Some(length) = self.add(batch, (number, peer), &send, uses) else {
                if let Some(qp) = self.qps.get_mut(number) {
                    qp.send.put_back(Ok(send));
                }
                break;
            };
            *bytes -= REQUEST_COST + length;
            batch.more.push(Done::of(&send));
            if let Some(endpoint) = self.qps.get(number).map(|q| q.endpoint)
                && let Some(endpoint) = self.endpoints.get_mut(endpoint)
            {
                endpoint.count_send();
            }
        }
        true
    }

    /// The next request of a queue pair, if it is one that may be asked for, and now.
    fn next_good(&mut self, number: u32) -> Option<Send> {
        // A send queue that drains begins nothing new.
        let qp = self.qps.get_mut(number).filter(|qp| qp.state == State::ReadyToSend)?;
        if self.endpoints.get_mut(qp.endpoint)?.wait_to_send().is_some() {
            return None;
        }
        let next = match qp.send.next() {
            Ok(next) => next?,
            // A ring that is dead stays dead.
            Err(Dead) => return None,
        };
        match next {
            Ok(send) if refusal(qp, &send, send.length()).is_none() => Some(send),
            other => {
                qp.send.put_back(other);
                None
            }
        }
    }

    /// Adds the bytes of a request, if all are mapped and there are not too many, and the peer has
    /// what it needs for it. What they cost.
    fn add(
        &mut self,
        batch: &mut Batch,
        pair: (u32, u32),
        send: &Send,
        uses: &Uses,
    ) -> Option<i64> {
        let length = usize::try_from(send.length()).ok()?;
        if length > MAPPED_CHUNK - batch.length {
            return None;
        }
        let begun = (batch.from.len(), batch.to.len());
        if self.add_spans(batch, pair, send, uses, length).is_none() {
            batch.from.truncate(begun.0);
            batch.to.truncate(begun.1);
            return None;
        }
        batch.length += length;
        if send.head.opcode == ibv::WR_RDMA_READ {
            batch.returned += length;
        }
        i64::try_from(length).ok()
    }

    fn add_spans(
        &mut self,
        batch: &mut Batch,
        (number, peer): (u32, u32),
        send: &Send,
        uses: &Uses,
        length: usize,
    ) -> Option<()> {
        let (head, regions) = (&send.head, &self.regions);
        let there = (head.rkey, head.remote_address);
        let entries = || (0..send.entries()).map(|i| send.entry(i));
        let (takes, writes) = match head.opcode {
            ibv::WR_SEND | ibv::WR_SEND_WITH_IMM => (true, false),
            ibv::WR_RDMA_WRITE => (false, true),
            ibv::WR_RDMA_WRITE_WITH_IMM => (true, true),
            ibv::WR_RDMA_READ => {
                place(regions, there, length, uses.read?, (&mut self.from, &mut batch.from))?;
                let to = (&mut self.to, &mut batch.to);
                return place_all(regions, entries(), length, uses.to, to);
            }
            _ => return None,
        };
        if takes && batch.receives.len() >= uses.receives {
            return None;
        }
        let usage = uses.from?;
        if writes {
            place(regions, there, length, uses.written?, (&mut self.to, &mut batch.to))?;
        }
        if send.is_inline() {
            #[cfg(feature = "attack")]
            let send = &self.as_attacked(number, send);
            batch.add_own(send.inline());
        } else {
            place_all(regions, entries(), length, usage, (&mut self.from, &mut batch.from))?;
        }
        if takes {
            let receive = self.good_receive(peer)?;
            let to = (&mut self.to, &mut batch.to);
            let entries = (0..receive.entries()).map(|i| receive.entry(i));
            let room = if writes { 0 } else { length };
            if place_all(&self.regions, entries, room, uses.received, to).is_none() {
                self.hold(peer, -1);
                self.give_back(peer, receive);
                return None;
            }
            batch.receives.push((receive, Told::of(number, send, send.length())));
        }
        Some(())
    }
}

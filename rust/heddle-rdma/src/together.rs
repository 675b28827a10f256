//! WRITEs of one queue pair to its peer on this node that are copied together, while the baton is
//! down once: to put it down and take it up again for each costs as much as copying 2 KiB.
//!
//! Only those are whose bytes are all mapped here, so that no copy fails in the middle. What is
//! behind them in the ring and is no such WRITE, or is wrong, is put back and has its turn
//! afterwards: so whatever fails does after all that is in front of it is complete.

use verbs_protocol::ibv;
use verbs_protocol::slots::Send;
use verbs_protocol::statistics::{Path, Traffic};

use crate::copying::{MAPPED_CHUNK, Side};
use crate::memory::{self, Use};
use crate::objects::{Current, Objects};
use crate::queues::Dead;
use crate::requests::{Pending, REQUEST_COST, Step, refusal};

/// Bytes that are copied from one piece to another: the pieces, and from which of their bytes on.
pub(crate) struct Run {
    pub(crate) from: (usize, usize),
    pub(crate) to: (usize, usize),
    pub(crate) length: usize,
}

/// What is told of a WRITE that was copied behind another one.
pub(crate) struct Written {
    pub(crate) wr_id: u64,
    flags: u8,
    length: u64,
}

/// What is copied together. Its memory is used again.
#[derive(Default)]
pub(crate) struct Batch {
    runs: Vec<Run>,
    more: Vec<Written>,
    length: usize,
}

impl Objects {
    /// Copies a WRITE, and as many of those behind it as the turn goes: what is told of these is in
    /// [`Current::more`] then. None if it has to be copied by itself.
    pub(crate) fn write_together(
        self: &mut Box<Self>,
        (number, peer): (u32, u32),
        current: &mut Current,
        remote: Use,
        bytes: &mut i64,
    ) -> Option<Step> {
        let is_plain = current.send.head.opcode == ibv::WR_RDMA_WRITE && current.done == 0;
        if !is_plain || self.is_limited(number, peer) {
            return None;
        }
        let mut batch = std::mem::take(&mut self.batch);
        let usages = (self.local(number, 0), remote);
        if !self.fill(&mut batch, number, &current.send, usages, bytes) {
            self.batch = batch;
            return None;
        }
        let copied = self.copy_runs(&batch.runs);
        let (number, peer) = (self.still(number, usages.0.epoch), self.still(peer, usages.1.epoch));
        let first = current.send.length();
        let (length, more) = (batch.length as u64, batch.more.len() as u64);
        current.more = std::mem::take(&mut batch.more);
        self.batch = batch;
        if let Err(side) = copied {
            // What is mapped is never at fault. If it were, nothing would be known of the others.
            let is_own = side == Side::Source;
            let status = if is_own { ibv::WC_LOC_PROT_ERR } else { ibv::WC_REM_ACCESS_ERR };
            return Some(Err(Pending::Failed(status)));
        }
        self.copied(number, peer, length);
        // The first one counts for who has sent it when it is told of, as any.
        let sent = Traffic { requests: more, sent: length - first, ..Traffic::default() };
        self.account(number, Path::Memory, &sent);
        let served = Traffic { served: 1 + more, received: length, ..Traffic::default() };
        self.account(peer, Path::Memory, &served);
        Some(Ok(()))
    }

    /// Gathers a WRITE and those behind it. False if the first one is none that can be.
    fn fill(
        &mut self,
        batch: &mut Batch,
        number: u32,
        first: &Send,
        usages: (Use, Use),
        bytes: &mut i64,
    ) -> bool {
        batch.runs.clear();
        batch.more.clear();
        batch.length = 0;
        self.from.clear();
        self.to.clear();
        let Some(length) = self.add(batch, first, usages) else { return false };
        *bytes -= length;
        while *bytes > 0
            && let Some(send) = self.next_write(number)
        {
            let Some(length) = self.add(batch, &send, usages) else {
                if let Some(qp) = self.qps.get_mut(number) {
                    qp.send.put_back(Ok(send));
                }
                break;
            };
            *bytes -= REQUEST_COST + length;
            let (wr_id, flags, length) = (send.head.wr_id, send.head.flags, send.length());
            batch.more.push(Written { wr_id, flags, length });
            if let Some(endpoint) = self.qps.get(number).map(|q| q.endpoint)
                && let Some(endpoint) = self.endpoints.get_mut(endpoint)
            {
                endpoint.count_send();
            }
        }
        true
    }

    /// The next request of a queue pair, if it is a WRITE that may be asked for, and now.
    fn next_write(&mut self, number: u32) -> Option<Send> {
        let qp = self.qps.get_mut(number)?;
        if self.endpoints.get_mut(qp.endpoint)?.wait_to_send().is_some() {
            return None;
        }
        let next = match qp.send.next() {
            Ok(next) => next?,
            // A ring that is dead stays dead.
            Err(Dead) => return None,
        };
        match next {
            Ok(send)
                if send.head.opcode == ibv::WR_RDMA_WRITE
                    && refusal(qp, &send, send.length()).is_none() =>
            {
                Some(send)
            }
            other => {
                qp.send.put_back(other);
                None
            }
        }
    }

    /// Adds the bytes of a WRITE, if all are mapped and there are not too many. What it costs.
    fn add(&mut self, batch: &mut Batch, send: &Send, (local, remote): (Use, Use)) -> Option<i64> {
        let length = usize::try_from(send.length()).ok()?;
        if send.is_inline() || length > MAPPED_CHUNK - batch.length {
            return None;
        }
        if length == 0 {
            // It needs no valid key.
            return Some(0);
        }
        let (head, begun) = (&send.head, batch.runs.len());
        let (key, address, regions) = (head.rkey, head.remote_address, &self.regions);
        let (to, mut at) = memory::place(regions, key, address, length, remote, &mut self.to)?;
        for sge in (0..send.entries()).map(|i| send.entry(i)).filter(|sge| sge.length > 0) {
            let (key, address, length) = (sge.lkey, sge.address, sge.length as usize);
            let from = memory::place(regions, key, address, length, local, &mut self.from);
            let Some(from) = from else {
                batch.runs.truncate(begun);
                return None;
            };
            batch.runs.push(Run { from, to: (to, at), length });
            at += length;
        }
        batch.length += length;
        i64::try_from(length).ok()
    }

    /// What was copied behind a WRITE is complete.
    pub(crate) fn complete_more(&mut self, number: u32, mut more: Vec<Written>) {
        for Written { wr_id, flags, length } in more.drain(..) {
            self.tell_sent(number, (wr_id, flags, ibv::WR_RDMA_WRITE), length, ibv::WC_SUCCESS);
        }
        self.batch.more = more;
    }
}

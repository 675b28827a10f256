//! Where the bytes of requests are for the card, of queue pairs whose peer is without Heddle
//! (`native`): where the router has them mapped, or in memory of its own, which stands in for what
//! the card cannot reach.

use std::io;
use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::abi::verbs_sge;
use verbs_protocol::ibv;
use verbs_protocol::slots::Send;
use verbs_protocol::statistics::Reason;

use crate::copying::CHUNK;
use crate::ibverbs::{Domain, PARTS, Part, Region};
use crate::memory::{self, Use};
use crate::objects::Objects;
use crate::requests::gather;

/// Memory for bytes that the card cannot reach where they lie, in either direction.
const BOUNCE: usize = 256 * 1024;
/// Its parts begin at multiples of this: atomics need 8.
const ALIGNMENT: usize = 64;

/// Memory of the router that stands in for that of a program.
pub(crate) struct Bounce {
    region: Region,
    pub(crate) sends: Ring,
    pub(crate) receives: Ring,
}

impl Bounce {
    /// How much of it a queue pair has.
    pub(crate) const BYTES: u64 = 2 * BOUNCE as u64;

    pub(crate) fn new(domain: &Arc<Domain>) -> io::Result<Self> {
        let memory = SharedMemory::create(c"verbs-outside", 2 * BOUNCE)
            .map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let region = Region::new(domain, memory)?;
        Ok(Self { region, sends: Ring::new(0), receives: Ring::new(BOUNCE) })
    }
}

/// A part of it, given out and taken back in the same order.
pub(crate) struct Ring {
    base: usize,
    next: usize,
    used: usize,
}

impl Ring {
    fn new(base: usize) -> Self {
        Self { base, next: 0, used: 0 }
    }

    /// So many bytes in a row: where, and what is to be given back.
    fn take(&mut self, length: usize) -> Option<(usize, usize)> {
        if length == 0 {
            return Some((self.base, 0));
        }
        let length = length.next_multiple_of(ALIGNMENT);
        let skipped = if self.next + length > BOUNCE { BOUNCE - self.next } else { 0 };
        if self.used + skipped + length > BOUNCE {
            return None;
        }
        let at = if skipped > 0 { 0 } else { self.next };
        self.next = at + length;
        self.used += skipped + length;
        Some((self.base + at, skipped + length))
    }

    pub(crate) fn give(&mut self, length: usize) {
        self.used -= length;
    }
}

/// Where the bytes of a request are for the card.
pub(crate) struct Plan {
    pub(crate) parts: Vec<Part>,
    /// Those of the message that go by memory of the router, one behind the other: from which byte
    /// on, and how many.
    pub(crate) bounced: Vec<(u64, usize)>,
    at: usize,
    pub(crate) held: usize,
}

/// Why a request cannot be posted.
pub(crate) enum No {
    /// There is no room for its bytes now.
    Room,
    Wrong(u32),
}

impl Objects {
    /// Copies bytes of a program to where the card reads them.
    pub(crate) fn load_bounced(
        self: &mut Box<Self>,
        number: u32,
        epoch: u32,
        send: &Send,
        plan: &Plan,
        usage: Use,
    ) -> bool {
        let (mut at, entries) = (plan.at, send.entries());
        for (skip, length) in &plan.bounced {
            self.from.clear();
            let entry = |i| send.entry(i);
            let pieces = &mut self.from;
            let found = gather(&self.regions, entries, entry, *skip, *length, usage, pieces);
            let loaded = found.is_ok()
                && self
                    .load_own(*length, |objects, bytes| {
                        if let Some(native) = objects.native(number, epoch)
                            && let Some(bounce) = &native.bounce
                        {
                            bounce.region.fill(at, bytes);
                        }
                    })
                    .is_ok();
            if !loaded {
                return false;
            }
            at += length;
        }
        true
    }

    /// Finds out where the bytes of a request's entries are for the card.
    pub(crate) fn plan(
        &mut self,
        number: u32,
        entries: usize,
        entry: impl Fn(usize) -> verbs_sge,
        usage: Use,
        sends: bool,
    ) -> Result<Plan, No> {
        let wrong = || No::Wrong(ibv::WC_LOC_PROT_ERR);
        let mut pieces = std::mem::take(&mut self.from);
        let mut places: Vec<(Option<Part>, usize)> = Vec::with_capacity(PARTS);
        let mut found = Ok(());
        for sge in (0..entries).map(entry).filter(|s| s.length > 0) {
            let length = usize::try_from(sge.length).unwrap_or(usize::MAX);
            let (key, mut address) = (sge.lkey, sge.address);
            pieces.clear();
            found = memory::find(&self.regions, key, address, length, usage, &mut pieces);
            if found.is_err() {
                break;
            }
            let region = self.regions.get(key).and_then(|r| r.card.clone());
            for piece in &pieces {
                let part = region.as_ref().filter(|_| piece.is_mapped());
                let part = part.and_then(|r| r.at(address, piece.length()));
                places.push((part, piece.length()));
                address += piece.length() as u64;
            }
        }
        pieces.clear();
        self.from = pieces;
        found.map_err(|memory::Fault| wrong())?;
        let bounced = places.iter().filter(|(part, _)| part.is_none()).map(|(_, n)| n);
        let bounced = bounced.fold(0_usize, |sum, n| sum.saturating_add(*n));
        if places.len() > PARTS || bounced > CHUNK {
            // The card cannot reach it, and it is too much to be copied.
            self.note_of(number, Reason::OutsideUnmapped);
            return Err(wrong());
        }
        let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
        let bounce = native.and_then(|n| n.bounce.as_mut()).ok_or_else(wrong)?;
        let ring = if sends { &mut bounce.sends } else { &mut bounce.receives };
        let (at, held) = ring.take(bounced).ok_or(No::Room)?;
        let mut plan = Plan { parts: Vec::with_capacity(PARTS), bounced: Vec::new(), at, held };
        let (mut offset, mut next) = (0, at);
        for (part, length) in places {
            plan.parts.push(part.unwrap_or_else(|| bounce.region.slice(next, length)));
            if part.is_none() {
                plan.bounced.push((offset, length));
                next += length;
            }
            offset += length as u64;
        }
        Ok(plan)
    }

    /// The same for bytes that are in the request itself.
    pub(crate) fn plan_inline(&mut self, number: u32, bytes: &[u8]) -> Result<Plan, No> {
        let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
        let bounce = native.and_then(|n| n.bounce.as_mut());
        let bounce = bounce.ok_or(No::Wrong(ibv::WC_LOC_QP_OP_ERR))?;
        let (at, held) = bounce.sends.take(bytes.len()).ok_or(No::Room)?;
        bounce.region.fill(at, bytes);
        let parts =
            if bytes.is_empty() { Vec::new() } else { vec![bounce.region.slice(at, bytes.len())] };
        Ok(Plan { parts, bounced: Vec::new(), at, held })
    }

    /// Copies what the card has written for a program to where the program has it, `length` bytes
    /// of the message.
    pub(crate) fn store_bounced(
        self: &mut Box<Self>,
        (number, epoch): (u32, u32),
        plan: &Plan,
        entries: usize,
        entry: impl Fn(usize) -> verbs_sge,
        length: u64,
        usage: Use,
    ) -> bool {
        let mut at = plan.at;
        for (skip, part) in &plan.bounced {
            let left = usize::try_from(length.saturating_sub(*skip)).unwrap_or(usize::MAX);
            let n = left.min(*part);
            if n == 0 {
                break;
            }
            let mut bytes = vec![0; n];
            let native = self.native(number, epoch);
            let Some(bounce) = native.and_then(|n| n.bounce.as_ref()) else { return false };
            bounce.region.read(at, &mut bytes);
            self.to.clear();
            let found = gather(&self.regions, entries, &entry, *skip, n, usage, &mut self.to);
            if found.is_err() || self.store(&bytes).is_err() {
                return false;
            }
            at += part;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[test]
    fn a_ring_gives_nothing_twice() {
        let mut ring = Ring::new(BOUNCE);
        assert_eq!(ring.take(0), Some((BOUNCE, 0)));
        let mut held = VecDeque::new();
        // 96 KiB each: the third does not fit behind the others, nor before them.
        for at in [0, 96 * 1024] {
            let (place, length) = ring.take(96 * 1024 - 1).unwrap();
            assert_eq!((place, length), (BOUNCE + at, 96 * 1024));
            held.push_back(length);
        }
        assert_eq!(ring.take(96 * 1024), None);
        ring.give(held.pop_front().unwrap());
        // It begins again at the front, and holds what it has left out.
        assert_eq!(ring.take(96 * 1024), Some((BOUNCE, 96 * 1024 + 64 * 1024)));
        assert_eq!(ring.take(1), None);
    }
}

//! WRITEs whose bytes the card places by itself: from memory that this router has mapped to memory
//! that the other one has. What the peer's key is called at its card is asked for by the
//! connection, and a frame tells of the message in its turn. `docs/protocols/verbs-wire.md`, "By a
//! card".

use std::sync::Arc;
use std::time::Instant;

use verbs_protocol::ibv;
use verbs_protocol::wire::{FIRST, Header, Kind, LAST, PLACED, SOLICITED};
use verbs_protocol::{abi, abi::verbs_sge};

use crate::card::{Carrier, place_id};
use crate::ibverbs::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, Region};
use crate::link::{Link, Response};
use crate::memory::{self, Use};
use crate::objects::Objects;
use crate::remote::Broken;

/// WRITEs of a pair that the card has under way by itself.
pub(crate) const PLACES: u16 = 16;
/// Entries of a request that the card places: others go by frames.
const ENTRIES: usize = 4;
/// What is shorter is copied sooner than two requests are done.
const SHORTEST: u64 = 16 * 1024;
/// Keys of the peer that are remembered, and that are asked for at a time: others go by frames.
const KEYS: usize = 1024;
const ASKED: usize = 8;
/// Bytes of a region that the card gets to know, and how many regions of an endpoint in a second:
/// all endpoints wait meanwhile.
const LARGEST: u64 = 16 << 20;
pub(crate) const REGISTERED_A_SECOND: u64 = 32;

/// What is known of a key of the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Asked,
    /// Its bytes go by frames.
    None,
    /// What the card calls it, its first address and its length.
    At(u32, u64, u64),
}

/// What becomes of a request.
pub(crate) enum Placing {
    /// It goes by frames.
    Frames,
    /// Not now.
    Wait,
    /// The card does it.
    Placed,
}

/// Whether a request is one that a card may have placed.
pub(crate) fn may_be_placed(link: &Link, header: &Header) -> bool {
    let whole = header.flags & (FIRST | LAST) == FIRST | LAST && header.length == 0;
    let write = matches!(header.opcode, ibv::WR_RDMA_WRITE | ibv::WR_RDMA_WRITE_WITH_IMM);
    whole && write && link.card.as_ref().is_some_and(|c| c.active)
}

impl Carrier {
    /// What the peer's card calls a request's key, if it is known and all of its bytes lie there.
    fn key_for(&self, head: &abi::verbs_send, length: u64) -> Option<u32> {
        let Place::At(rkey, first, all) = *self.keys.get(&head.rkey)? else { return None };
        covers(first, all, head, length).then_some(rkey)
    }

    /// Whether the peer is to be asked for a key, which it is from now on.
    fn asks_for(&mut self, key: u32) -> bool {
        let few = self.keys.len() < KEYS && self.asked < ASKED;
        let asks = few && !self.keys.contains_key(&key);
        if asks {
            self.keys.insert(key, Place::Asked);
            self.asked += 1;
        }
        asks
    }
}

impl Objects {
    /// Has the card do the request that is next on a connection, if it can.
    pub(crate) fn place(&mut self, number: u32, handle: u32) -> Placing {
        let usage = self.local(number, 0);
        if !self.is_reliable(number) {
            // Its requests are complete before the card has read their bytes.
            return Placing::Frames;
        }
        let Some(link) = self.links.get_mut(handle) else { return Placing::Frames };
        let (next, begun) = (link.next, link.offset > 0);
        let Some(carrier) = link.card.as_mut().filter(|c| c.active && !begun) else {
            return Placing::Frames;
        };
        let Some(sent) = link.sent.get(next) else { return Placing::Frames };
        let (head, length, entries) = (sent.send.head, sent.send.length(), sent.send.entries());
        let write = matches!(head.opcode, ibv::WR_RDMA_WRITE | ibv::WR_RDMA_WRITE_WITH_IMM);
        if !write || length < SHORTEST || sent.send.is_inline() || entries > ENTRIES {
            return Placing::Frames;
        }
        let Some(rkey) = carrier.key_for(&head, length) else {
            if carrier.asks_for(head.rkey) {
                link.say(&Header { key: head.rkey, ..Header::new(Kind::CardAsk) });
            }
            return Placing::Frames;
        };
        let all: Vec<verbs_sge> = (0..entries).map(|i| sent.send.entry(i)).collect();
        let (sent_number, places) = (sent.number, carrier.places);
        // What was sent before has to be in memory: the card does not wait for the other router.
        // Those that the card does itself are in order.
        let before = link.sent.iter().take(next).all(|s| s.placed);
        let mut regions = Vec::with_capacity(ENTRIES);
        for sge in &all {
            let Some(region) = self.card_region(sge, usage) else { return Placing::Frames };
            regions.push(region);
        }
        // It goes before.
        self.push(handle);
        let Some(link) = self.links.get_mut(handle) else { return Placing::Frames };
        let room = usize::from(places) + all.len() <= usize::from(PLACES);
        if !before || !link.unsent.is_empty() || !room {
            return Placing::Wait;
        }
        let (Some(carrier), Some(card)) = (link.card.as_mut(), self.card.as_mut()) else {
            return Placing::Frames;
        };
        let mut to = head.remote_address;
        for (region, sge) in regions.iter().zip(&all) {
            let from = (&**region, sge.address, sge.length);
            if carrier.pair.write(place_id(handle), from, (rkey, to)).is_err() {
                carrier.broken = true;
                card.wake(handle, carrier);
                return Placing::Wait;
            }
            carrier.places += 1;
            to += u64::from(sge.length);
        }
        let solicited = u32::from(head.flags) & abi::VERBS_SEND_SOLICITED != 0;
        link.say(&Header {
            opcode: head.opcode,
            number: sent_number,
            immediate: head.imm,
            key: head.rkey,
            address: head.remote_address,
            total: length,
            flags: FIRST | LAST | PLACED | if solicited { SOLICITED } else { 0 },
            ..Header::new(Kind::Request)
        });
        if let Some(sent) = link.sent.get_mut(next) {
            sent.placed = true;
        }
        link.next += 1;
        Placing::Placed
    }

    /// The region of an entry at the card, if all of the entry's bytes are mapped.
    fn card_region(&mut self, sge: &verbs_sge, usage: Use) -> Option<Arc<Region>> {
        let length = usize::try_from(sge.length).ok()?;
        memory::check(&self.regions, sge.lkey, sge.address, length, usage).ok()?;
        let region = self.at_card(sge.lkey)?;
        region.covers(sge.address, sge.length.into()).then_some(region)
    }

    /// What a key is at the card, registered there the first time.
    fn at_card(&mut self, key: u32) -> Option<Arc<Region>> {
        let region = self.regions.get_mut(key)?;
        if let Some(known) = &region.card {
            return Some(Arc::clone(known));
        }
        let domain = self.pds.get(region.pd)?.card.as_ref()?;
        let (memory, part, before) = region.mapped.as_ref()?.part();
        let endpoint = self.contexts.get(region.context)?.endpoint;
        let bucket = &mut self.endpoints.get_mut(endpoint)?.registers;
        if part.1 > LARGEST || bucket.until(Instant::now()).is_some() {
            return None;
        }
        bucket.take(1);
        let iova = region.iova.checked_add(before)?;
        let access = region.access & (ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE);
        let made = Region::register(domain, memory, part, iova, access).ok()?;
        Some(Arc::clone(region.card.insert(Arc::new(made))))
    }

    /// The peer wants to have its card place bytes.
    pub(crate) fn hear_ask(&mut self, handle: u32, header: &Header) -> Result<(), Broken> {
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        link.card.as_ref().filter(|c| c.active).ok_or(Broken)?;
        link.responses.push_back(Response::Key { key: header.key });
        Ok(())
    }

    /// What a key of this end is at the card: only what the peer may write to by frames, too.
    pub(crate) fn describe_key(&mut self, handle: u32, key: u32) -> Header {
        let none =
            Header { key, status: libc::EOPNOTSUPP.unsigned_abs(), ..Header::new(Kind::CardKey) };
        let number = self.links.get(handle).map_or(0, |l| l.qp);
        let Some(usage) = self.remote(number, ibv::ACCESS_REMOTE_WRITE) else { return none };
        let Some(first) = self.regions.get(key).map(|r| r.iova) else { return none };
        if memory::check(&self.regions, key, first, 1, usage).is_err() {
            return none;
        }
        let Some(region) = self.at_card(key) else { return none };
        let (address, swap, total) = (region.iova, region.length, region.rkey().into());
        Header { status: 0, address, swap, total, ..none }
    }

    /// The peer says what a key of it is at its card.
    pub(crate) fn hear_key(&mut self, handle: u32, header: &Header) -> Result<(), Broken> {
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        let carrier = link.card.as_mut().ok_or(Broken)?;
        let place = carrier.keys.get_mut(&header.key).filter(|p| **p == Place::Asked);
        let place = place.ok_or(Broken)?;
        carrier.asked -= 1;
        let rkey = u32::try_from(header.total).map_err(|_| Broken)?;
        *place = match header.status {
            0 => Place::At(rkey, header.address, header.swap),
            _ => Place::None,
        };
        Ok(())
    }

    /// A program has changed what peers may do by a queue pair.
    pub(crate) fn allow_by_card(&mut self, number: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        let (link, access) = (qp.link, qp.attr.access);
        let Some(link) = self.links.get_mut(link) else { return };
        if let (Some(carrier), Some(card)) = (&mut link.card, &mut self.card)
            && carrier.active
            && carrier.pair.allow(access).is_err()
        {
            // It must not go on with other rights.
            carrier.broken = true;
            card.wake(qp.link, carrier);
        }
    }
}

/// Whether a request's bytes lie in what a key of the peer has at its card.
fn covers(first: u64, all: u64, head: &abi::verbs_send, length: u64) -> bool {
    let offset = head.remote_address.checked_sub(first);
    offset.and_then(|o| o.checked_add(length)).is_some_and(|end| end <= all)
}

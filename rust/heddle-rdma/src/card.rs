//! Pairs whose bytes go by a card. The connection of a pair stays what it is: it says that the two
//! may speak, until it ends. What is said on it goes by a queue pair of the card once both ends
//! have found that it gets through. `docs/protocols/verbs-wire.md`, "By a card".

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use shared_ring::SharedMemory;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{Header, Kind};

use crate::endpoint::Quota;
use crate::ibverbs::{Completion, Completions, Device, Pair, Port, Region, Remote};
use crate::link::{GREETING_TIME, Phase};
use crate::objects::{Objects, Source};
use crate::placing::{PLACES, Place};
use crate::protection::{Protection, protects};
use crate::remote::Broken;
use crate::sys::{self, Epoll};

/// Bytes of a message of the card, and how many a pair has under way and has room for. They are
/// charged to its endpoint, as its queues are.
const BUFFER: usize = 16 * 1024;
const SENDS: u16 = 8;
const RECEIVES: u16 = 16;
const MESSAGES: u16 = SENDS + RECEIVES;
pub(crate) const MEMORY: usize = BUFFER * MESSAGES as usize;
/// What stands for a buffer in the message that finds out whether the card gets through.
const PROBE: u16 = u16::MAX;
/// The same in a WRITE that the card does by itself.
const PLACE: u16 = u16::MAX - 1;
/// Completions of a pair that there may be at once.
const COMPLETIONS: u32 = (SENDS + RECEIVES + 2 + PLACES) as u32;
/// Completions that there is room for, of all pairs: cards can have millions, at 64 bytes each.
const ALL_COMPLETIONS: u32 = 1 << 17;
/// Batches of completions that are taken before others have their turn.
const BATCHES: u32 = 8;

/// The card of the node.
pub(crate) struct Card {
    pub(crate) device: Arc<Device>,
    pub(crate) completions: Arc<Completions>,
    pub(crate) port: Port,
    /// Pairs that it can have, and has.
    pub(crate) most: u64,
    pub(crate) pairs: u64,
    /// Connections to which it has brought something that was not looked at.
    woken: Vec<u32>,
    /// There may be more completions than were taken.
    more: bool,
}

impl Card {
    /// Opens a card, and has its events come to a set.
    pub(crate) fn open(name: &str, epoll: &Epoll) -> Result<Self, String> {
        let device = Device::open(name)?;
        let failed = |err: io::Error| format!("{name}: {err}");
        let (pairs, entries) = device.limits().map_err(failed)?;
        let entries = entries.min(ALL_COMPLETIONS);
        let completions = Completions::new(&device, entries).map_err(failed)?;
        let port = device.port().map_err(failed)?;
        if !port.active {
            eprintln!(
                "heddle-rdma: {name}: its port is down or has no GID: pairs go by TCP meanwhile"
            );
        }
        sys::set_nonblocking(&*device).map_err(failed)?;
        sys::set_nonblocking(&*completions).map_err(failed)?;
        completions.arm().map_err(failed)?;
        let events = Source::CardEvents.id(0);
        epoll.add(device.as_fd(), sys::READABLE, events).map_err(failed)?;
        epoll.add(completions.as_fd(), sys::READABLE, Source::Card.id(0)).map_err(failed)?;
        let most = pairs.min(entries / COMPLETIONS).into();
        Ok(Self { device, completions, port, most, pairs: 0, woken: Vec::new(), more: false })
    }

    pub(crate) fn wake(&mut self, handle: u32, carrier: &mut Carrier) {
        if !std::mem::replace(&mut carrier.woken, true) {
            self.woken.push(handle);
        }
    }
}

/// A connection's queue pair of the card.
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub(crate) struct Carrier {
    // Dropped in this order: the card lets the memory go before it is unmapped.
    pub(crate) pair: Pair,
    region: Region,
    psn: u32,
    /// The peer has said where its queue pair is.
    connected: bool,
    /// The message that was sent to find out has come through; and the peer's has, as it says.
    probed: bool,
    heard: bool,
    /// Bytes of the connection go this way; and some have.
    pub(crate) active: bool,
    used: bool,
    /// The card has given up on it.
    pub(crate) broken: bool,
    woken: bool,
    /// Messages that the card has been asked for, a bit each: it may say that others are done.
    asked_for: u32,
    /// Buffers that nothing is being sent from.
    free: Vec<u16>,
    /// Buffers that have come, with their bytes, and how many of the first one's are taken.
    arrived: VecDeque<(u16, usize)>,
    taken: usize,
    /// WRITEs that the card has under way by itself, and the peer's keys that are known or asked
    /// for.
    pub(crate) places: u16,
    pub(crate) keys: HashMap<u32, Place>,
    pub(crate) asked: usize,
}

impl Carrier {
    pub(crate) fn agreed(&self) -> bool {
        self.probed && self.heard
    }

    /// Whether what comes by TCP can only be wrong. A peer whose card was lost between its word
    /// that the card gets through and ours takes that back.
    pub(crate) fn is_settled(&self) -> bool {
        self.active && self.used
    }

    /// Has the card do nothing more for it: what was under way may be told as failed. One that
    /// cannot be reset goes on until it is destroyed, a moment later.
    pub(crate) fn stop(&self) {
        let _: io::Result<()> = self.pair.reset();
    }

    fn receive(&mut self, handle: u32, slot: u16) -> io::Result<()> {
        self.asked_for |= bit(slot);
        self.pair.receive(id(handle, slot), &self.region, usize::from(slot) * BUFFER, BUFFER)
    }

    fn send(&mut self, handle: u32, slot: u16, length: usize) -> io::Result<()> {
        self.asked_for |= bit(slot);
        let at = if slot == PROBE { 0 } else { usize::from(slot) * BUFFER };
        self.pair.send(id(handle, slot), &self.region, at, length)
    }

    /// Takes over what the card says is done. False if it was not asked for that, or not for so
    /// many bytes: it, or its library, is wrong, and nothing of the pair is certain any more.
    fn done(&mut self, handle: u32, slot: u16, length: usize) -> bool {
        let asked = match slot {
            PLACE => self.places > 0,
            _ => self.asked_for & bit(slot) != 0,
        };
        self.asked_for &= !bit(slot);
        let receives = !matches!(slot, PLACE | PROBE | 0..SENDS);
        if (!asked || receives && length > BUFFER) && protects(Protection::Completions) {
            return false;
        }
        match slot {
            PLACE => self.places = self.places.saturating_sub(1),
            PROBE => self.probed = true,
            0..SENDS => self.free.push(slot),
            // The peer's probe.
            _ if length == 0 => self.broken |= self.receive(handle, slot).is_err(),
            _ => {
                self.used = true;
                self.arrived.push_back((slot, length.min(BUFFER)));
            }
        }
        true
    }
}

/// The bit of a message in [`Carrier::asked_for`]; none of one that there is not.
fn bit(slot: u16) -> u32 {
    match slot {
        0..MESSAGES => 1 << slot,
        PROBE => 1 << MESSAGES,
        _ => 0,
    }
}

pub(crate) fn place_id(handle: u32) -> u64 {
    id(handle, PLACE)
}

fn id(handle: u32, slot: u16) -> u64 {
    u64::from(handle) << 32 | u64::from(slot)
}

impl Objects {
    /// Whether a pair with a GID may go by the card, as far as this node is concerned. Says why
    /// not.
    pub(crate) fn offers_card(&mut self, endpoint: u32, other: &verbs_protocol::Gid) -> bool {
        if !self.card_wanted || self.endpoint_with(other).is_some() {
            return false;
        }
        let Some(e) = self.endpoints.get(endpoint) else { return false };
        let reason = match &self.card {
            None => Some(Reason::CardGone),
            Some(card) if !card.port.active => Some(Reason::CardGone),
            _ if e.is_capped() && protects(Protection::Caps) => Some(Reason::CardCapped),
            // No endpoint gets more than it leaves for the others, as of the router's objects.
            Some(card) if e.card_pairs + 1 > card.most.saturating_sub(card.pairs) => {
                Some(Reason::CardFull)
            }
            _ => None,
        };
        if let Some(reason) = reason {
            self.note(endpoint, reason);
        }
        reason.is_none()
    }

    /// Both nodes have a card: says where this one's queue pair is.
    pub(crate) fn begin_card(&mut self, handle: u32) {
        let mut offer = Header { length: 16, ..Header::new(Kind::Card) };
        let mut gid = [0; 16];
        match self.make_carrier(handle) {
            Ok((carrier, port)) => {
                offer.opcode = port.mtu;
                offer.number = carrier.psn;
                offer.key = carrier.pair.number();
                offer.address = port.lid.into();
                gid = port.gid;
                if let Some(link) = self.links.get_mut(handle) {
                    link.card = Some(Box::new(carrier));
                }
                self.set_deadline(handle, GREETING_TIME);
            }
            Err(err) => {
                offer.status = errno(&err);
                let endpoint = self.links.get(handle).map_or(0, |l| l.endpoint);
                self.note(endpoint, Reason::CardRefused);
            }
        }
        if let Some(link) = self.links.get_mut(handle) {
            link.card_offered = true;
            link.say(&offer);
            link.unsent.extend(gid);
            self.push(handle);
        }
    }

    fn make_carrier(&mut self, handle: u32) -> io::Result<(Carrier, Port)> {
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        let link = self.links.get(handle).ok_or_else(none)?;
        let (endpoint, qp) = (link.endpoint, link.qp);
        let pd = self.qps.get(qp).map_or(0, |q| q.pd);
        let domain = self.card_domain(pd)?;
        let card = self.card.as_ref().ok_or_else(none)?;
        let (completions, port) = (Arc::clone(&card.completions), card.port);
        let free = self.free(Quota::Memory);
        let full = || io::Error::from_raw_os_error(libc::ENOMEM);
        let e = self.endpoints.get_mut(endpoint).ok_or_else(none)?;
        if !e.charge(Quota::Memory, MEMORY as u64, free) {
            return Err(full());
        }
        e.card_pairs += 1;
        self.pooled += MEMORY as u64;
        if let Some(card) = &mut self.card {
            card.pairs += 1;
        }
        let made = (|| {
            let memory = SharedMemory::create(c"verbs-card", MEMORY).map_err(|_| full())?;
            let sends = u32::from(SENDS + PLACES) + 1;
            let pair = Pair::new(&domain, &completions, sends, RECEIVES.into())?;
            let mut carrier = Carrier {
                pair,
                region: Region::new(&domain, memory)?,
                // Hard to guess for whoever can send packets to the card.
                psn: u32::try_from(sys::random() & 0xff_ffff).unwrap_or(0),
                connected: false,
                probed: false,
                heard: false,
                active: false,
                used: false,
                broken: false,
                woken: false,
                asked_for: 0,
                free: (0..SENDS).collect(),
                arrived: VecDeque::with_capacity(RECEIVES.into()),
                taken: 0,
                places: 0,
                keys: HashMap::new(),
                asked: 0,
            };
            (SENDS..MESSAGES).try_for_each(|slot| carrier.receive(handle, slot))?;
            Ok(carrier)
        })();
        if made.is_err() {
            self.refund_carrier(endpoint);
        }
        made.map(|carrier| (carrier, port))
    }

    /// The pair goes by TCP.
    fn fall_back(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (endpoint, carrier) = (link.endpoint, link.card.take());
        link.knows_its_way();
        if let Some(carrier) = &carrier {
            carrier.stop();
        }
        self.note(endpoint, Reason::CardRefused);
        self.push(handle);
        self.wake_endpoint(endpoint);
        self.drop_carrier(endpoint, carrier);
    }

    /// The same, of which the peer hears.
    pub(crate) fn refuse_card(&mut self, handle: u32, errno: u32) {
        if let Some(link) = self.links.get_mut(handle) {
            link.say(&Header { status: errno, ..Header::new(Kind::CardReady) });
        }
        self.fall_back(handle);
    }

    /// The peer says where its queue pair of the card is.
    pub(crate) fn hear_card(
        &mut self,
        handle: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let port = self.card.as_ref().map(|c| c.port);
        let number = self.links.get(handle).map_or(0, |l| l.qp);
        let access = self.qps.get(number).map_or(0, |q| q.attr.access);
        let link = self.links.get_mut(handle).filter(|l| l.card_offered).ok_or(Broken)?;
        let Some(carrier) = &mut link.card else { return Ok(()) };
        if std::mem::replace(&mut carrier.connected, true) {
            return Err(Broken);
        }
        if header.status != 0 {
            self.fall_back(handle);
            return Ok(());
        }
        let remote = Remote {
            number: header.key,
            psn: header.number,
            mtu: header.opcode,
            lid: u16::try_from(header.address).map_err(|_| Broken)?,
            gid: *bytes.first_chunk().ok_or(Broken)?,
        };
        if !self.is_at_home(handle, &remote) {
            let endpoint = self.links.get(handle).map_or(0, |l| l.endpoint);
            self.note(endpoint, Reason::CardElsewhere);
            self.refuse_card(handle, libc::EACCES.unsigned_abs());
            return Ok(());
        }
        let Some(link) = self.links.get_mut(handle) else { return Ok(()) };
        let Some(carrier) = &mut link.card else { return Ok(()) };
        let gone = || io::Error::from_raw_os_error(libc::ENETDOWN);
        let connected = port.filter(|p| p.active).ok_or_else(gone).and_then(|port| {
            carrier.pair.allow(access)?;
            carrier.pair.connect(carrier.psn, &port, &remote)?;
            carrier.send(handle, PROBE, 0)
        });
        if let Err(err) = connected {
            self.refuse_card(handle, errno(&err));
        }
        Ok(())
    }

    /// The peer says whether its message has come through.
    pub(crate) fn hear_card_ready(&mut self, handle: u32, header: &Header) -> Result<(), Broken> {
        let link = self.links.get_mut(handle).filter(|l| l.card_offered).ok_or(Broken)?;
        let Some(carrier) = &mut link.card else { return Ok(()) };
        let before = std::mem::replace(&mut carrier.heard, true);
        let again = before && (header.status == 0 || carrier.is_settled());
        if !carrier.connected || again {
            return Err(Broken);
        }
        if header.status != 0 {
            self.fall_back(handle);
        } else {
            self.agree(handle);
        }
        Ok(())
    }

    fn agree(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.card.as_ref().is_some_and(|c| c.agreed()) {
            link.knows_its_way();
            let endpoint = link.endpoint;
            self.push(handle);
            self.wake_endpoint(endpoint);
        }
    }

    /// All that was to go by TCP has gone: from now on bytes go by the card, if that is agreed.
    pub(crate) fn activate_card(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if let (Some(carrier), Some(card)) = (&mut link.card, &mut self.card)
            && link.unsent.is_empty()
            && carrier.agreed()
        {
            carrier.active = true;
            card.wake(handle, carrier);
        }
    }

    /// Whether the requests of a pair wait until it is known which way they go.
    pub(crate) fn awaits_card(&self, handle: u32) -> bool {
        let carrier = self.links.get(handle).and_then(|l| l.card.as_ref());
        carrier.is_some_and(|c| !c.active)
    }

    /// Whether the bytes of a pair go by the card.
    pub(crate) fn is_by_card(&self, number: u32) -> bool {
        let link = self.qps.get(number).and_then(|qp| self.links.get(qp.link));
        link.and_then(|l| l.card.as_ref()).is_some_and(|c| c.active)
    }

    /// Sends what waits on a connection whose bytes go by the card, as far as it has buffers.
    pub(crate) fn push_by_card(&mut self, handle: u32) {
        let (Some(link), Some(card)) = (self.links.get_mut(handle), &mut self.card) else { return };
        let Some(carrier) = &mut link.card else { return };
        while !link.unsent.is_empty() && !carrier.broken {
            let Some(slot) = carrier.free.pop() else { break };
            carrier.used = true;
            let (at, length) = (usize::from(slot) * BUFFER, link.unsent.len().min(BUFFER));
            let (first, second) = link.unsent.as_slices();
            let first = &first[..length.min(first.len())];
            carrier.region.fill(at, first);
            carrier.region.fill(at + first.len(), &second[..length - first.len()]);
            link.unsent.drain(..length);
            if carrier.send(handle, slot, length).is_err() {
                carrier.broken = true;
                card.wake(handle, carrier);
            }
        }
        let sent = link.unsent.is_empty() && carrier.free.len() == usize::from(SENDS);
        if sent && link.phase == Phase::Closing {
            // The peer has the last bytes before it hears the end.
            let _: io::Result<()> = link.stream.shutdown(Shutdown::Write);
        }
    }

    /// The card tells of completions.
    pub(crate) fn card_event(&mut self) {
        if let Some(card) = &mut self.card {
            // One that tells no more has failed, of which it tells otherwise.
            let _ = card.completions.arm();
            self.take_completions();
        }
    }

    /// Takes all completions that there are; a card that has more than it has room for has more
    /// without end.
    pub(crate) fn take_all_completions(&mut self) {
        for _ in 0..=ALL_COMPLETIONS / (BATCHES * 32) {
            self.take_completions();
            if self.card.as_ref().is_none_or(|c| !c.more) {
                return;
            }
        }
    }

    /// Takes completions, and notes what they say at their connections.
    pub(crate) fn take_completions(&mut self) {
        let Some(card) = &mut self.card else { return };
        let mut batch = [Completion::default(); 32];
        card.more = true;
        for _ in 0..BATCHES {
            let got = card.completions.poll(&mut batch);
            for completion in &batch[..got] {
                let handle = u32::try_from(completion.id >> 32).unwrap_or(0);
                let slot = u16::try_from(completion.id & 0xffff).unwrap_or(PROBE);
                let Some(link) = self.links.get_mut(handle) else { continue };
                let Some(carrier) = &mut link.card else { continue };
                link.heard = Instant::now();
                if completion.status != 0 {
                    // Those before it are complete.
                    if let Some(first) = link.sent.front_mut().filter(|_| slot == PLACE) {
                        first.failed.get_or_insert(completion.status);
                    }
                    carrier.broken = true;
                } else if !carrier.done(handle, slot, completion.length as usize) {
                    carrier.broken = true;
                    if let Some(e) = self.endpoints.get_mut(link.endpoint) {
                        e.account.note(Reason::CardWrong);
                    }
                } else if slot == PROBE {
                    link.say(&Header::new(Kind::CardReady));
                }
                if let Some(carrier) = &mut link.card {
                    card.wake(handle, carrier);
                }
            }
            if got < batch.len() {
                card.more = false;
                return;
            }
        }
    }

    /// Goes on with connections of a worker's endpoints to which the card has brought something.
    pub(crate) fn card_turn(self: &mut Box<Self>, shard: u32) -> bool {
        if self.card.as_ref().is_some_and(|c| shard == 0 && c.more) {
            self.take_completions();
        }
        let Some(card) = self.card.as_mut().filter(|c| !c.woken.is_empty()) else { return false };
        let woken = std::mem::take(&mut card.woken);
        let (mut worked, mut left) = (false, false);
        for handle in woken {
            let Some(endpoint) = self.links.get(handle).map(|l| l.endpoint) else { continue };
            if self.shard_of(endpoint) == shard && self.worker.serves() == shard {
                self.take_from_card(handle);
                self.notify();
                worked = true;
            } else {
                left = true;
                if let Some(card) = &mut self.card {
                    card.woken.push(handle);
                }
            }
        }
        if left {
            self.nudge_others(self.worker.serves());
        }
        worked
    }

    /// Takes what the card has brought to a connection.
    pub(crate) fn take_from_card(self: &mut Box<Self>, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(carrier) = &mut link.card else { return };
        carrier.woken = false;
        if carrier.broken {
            if !carrier.agreed() {
                return self.refuse_card(handle, libc::EHOSTUNREACH.unsigned_abs());
            }
            let endpoint = link.endpoint;
            self.note(endpoint, Reason::CardFailed);
            return self.end_link(handle);
        }
        if !carrier.active {
            // The answer to the peer, or the first bytes.
            self.push(handle);
            return self.agree(handle);
        }
        loop {
            let Some(link) = self.links.get_mut(handle) else { return };
            let Some(carrier) = &mut link.card else { break };
            let Some((slot, length)) = carrier.arrived.front().copied() else { break };
            let room = &mut link.received[link.filled..];
            let n = room.len().min(length - carrier.taken);
            let at = usize::from(slot) * BUFFER + carrier.taken;
            carrier.region.read(at, &mut room[..n]);
            link.filled += n;
            carrier.taken += n;
            if carrier.taken == length {
                carrier.taken = 0;
                carrier.arrived.pop_front();
                carrier.broken |= carrier.receive(handle, slot).is_err();
            }
            self.take_in(handle);
        }
        if let (Some(link), Some(card)) = (self.links.get_mut(handle), &mut self.card)
            && let Some(carrier) = link.card.as_mut().filter(|c| c.broken)
        {
            // A buffer could not be given back: nothing may come any more that tells of it.
            card.wake(handle, carrier);
        }
        self.after_bytes(handle);
    }
}

fn errno(err: &io::Error) -> u32 {
    err.raw_os_error().unwrap_or(libc::EIO).unsigned_abs()
}

//! Peers without Heddle: which queue pairs may have one, and until when. An endpoint that the
//! operator lets outside has the card's own GID behind its others. Its connected queue pairs have
//! one of the card each from the start, under whose number they go, as nobody translates what
//! programs tell such a peer. One that names that GID at RTR goes by the card alone (`native`),
//! once the agent has said that it may. `docs/decisions/0080-peers-without-heddle.md`.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbs_protocol::agent::{Marks, Message};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{Gid, abi, ibv};
use verbs_qp::Service;

use crate::commands::{MAX_RD_ATOMIC, gid_count, owns};
use crate::endpoint::Endpoint;
use crate::ibverbs::{Completions, Domain, Pair, Region};
use crate::link::Timer;
use crate::memory::Mapped;
use crate::native::{Native, Phase, RECEIVES, SENDS};
use crate::objects::{Objects, Source};
use crate::protection::{Protection, protects};
use crate::sys;

/// Completions that there is room for.
const ALL_COMPLETIONS: u32 = 1 << 16;
/// How often the card is asked for a number that is nobody's here.
const TRIES: usize = 16;
/// After which an agent that does not answer is asked again.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// How often the agent is asked for queue pairs of an endpoint: programs may change their state as
/// often as they like, and all that others ask for waits behind it.
pub(crate) const ASKS_A_SECOND: u64 = 1024;

/// When a queue pair is asked for again, if there is no answer.
#[derive(Default)]
pub(crate) struct Again(Option<Instant>);

impl Again {
    /// It is asked for. When a timer is to run out, if none is under way.
    fn begin(&mut self, now: Instant) -> Option<Instant> {
        if self.0.is_some_and(|at| at > now) {
            return None;
        }
        self.0 = Some(now + ANSWER_TIME);
        self.0
    }

    /// Whether a timer that has run out is this one, and not that of a queue pair before it.
    fn is_over(&self, now: Instant) -> bool {
        self.0.is_some_and(|at| at <= now)
    }
}

/// What of the card is for peers without Heddle.
#[derive(Default)]
pub(crate) struct Outside {
    /// Made for the first queue pair.
    completions: Option<Arc<Completions>>,
    most: u64,
    pub(crate) pairs: u64,
    reads: u8,
    /// Tells the lives of a queue pair apart.
    epoch: u32,
}

impl Outside {
    pub(crate) fn completions(&self) -> Option<Arc<Completions>> {
        self.completions.clone()
    }

    pub(crate) fn next_epoch(&mut self) -> u32 {
        self.epoch = self.epoch.wrapping_add(1);
        self.epoch
    }
}

impl Objects {
    /// The GID by which an endpoint reaches peers without Heddle, if it may have any.
    pub(crate) fn outside_gid(&self, endpoint: u32) -> Option<Gid> {
        let allowed = self.endpoints.get(endpoint).is_some_and(|e| e.outside);
        let port = self.card.as_ref().map(|c| c.port).filter(|p| p.active && allowed)?;
        Some(port.gid)
    }

    /// The largest MTU that programs of an endpoint may use: that of all its ways.
    pub(crate) fn mtu_of(&self, endpoint: u32) -> u32 {
        let card = self.card.as_ref().map(|c| c.port.mtu.into());
        card.filter(|_| self.outside_gid(endpoint).is_some()).unwrap_or(ibv::MTU_4096)
    }

    /// Says whether a queue pair names the card's GID as its own.
    fn is_outside(&self, number: u32) -> bool {
        self.qps.get(number).is_some_and(|qp| {
            let overlay = self.endpoints.get(qp.endpoint).map_or(0, |e| gid_count(&e.gids));
            qp.native.is_some() && u32::from(qp.attr.address.sgid_index) >= overlay
        })
    }

    /// How many entries of the table of GIDs a queue pair may choose from.
    pub(crate) fn gids_of(&self, number: u32) -> u32 {
        let Some(qp) = self.qps.get(number) else { return 0 };
        let overlay = self.endpoints.get(qp.endpoint).map_or(0, |e| gid_count(&e.gids));
        let may = self.outside_gid(qp.endpoint).is_some() || !protects(Protection::Outside);
        overlay + u32::from(qp.native.is_some() && may)
    }

    /// A change was refused: counts it if it is for the card's GID, and the endpoint has that.
    pub(crate) fn note_outside(&mut self, number: u32, request: &abi::verbs_modify_qp_request) {
        let Some(context) = self.qps.get(number).map(|qp| qp.context) else { return };
        if request.mask & ibv::QP_AV != 0 {
            self.note_outside_of(context, &request.attr.address);
        }
    }

    /// The same of an address that was refused.
    pub(crate) fn note_outside_of(&mut self, context: u32, address: &abi::verbs_address) {
        let Some(endpoint) = self.contexts.get(context).map(|c| c.endpoint) else { return };
        let overlay = self.endpoints.get(endpoint).map_or(0, |e| gid_count(&e.gids));
        if u32::from(address.sgid_index) == overlay && self.outside_gid(endpoint).is_some() {
            self.note(endpoint, Reason::OutsideRefused);
        }
    }

    /// READs and atomics that a queue pair may have under way: as many as the card can, if its peer
    /// may be one that asks for so many.
    pub(crate) fn reads_of(&self, number: u32) -> u8 {
        let native = self.qps.get(number).is_some_and(|qp| qp.native.is_some());
        if native { self.outside.reads.max(MAX_RD_ATOMIC) } else { MAX_RD_ATOMIC }
    }

    /// A queue pair of the card for one of a program that may have a peer without Heddle. Whatever
    /// fails, the program can do without.
    pub(crate) fn prepare_native(
        &mut self,
        endpoint: u32,
        request: &abi::verbs_create_qp_request,
    ) -> Option<Box<Native>> {
        let service = Service::from_number(request.type_)?;
        let may = self.endpoints.get(endpoint)?.outside || !protects(Protection::Outside);
        if !may || !service.is_connected() || request.srq != 0 {
            return None;
        }
        let reason = match self.make_native(endpoint, request.pd, service) {
            Ok(native) => return Some(native),
            Err(err) if err.raw_os_error() == Some(libc::ENODEV) => Reason::CardGone,
            Err(err) if err.raw_os_error() == Some(libc::ENOSPC) => Reason::CardFull,
            Err(_) => Reason::CardRefused,
        };
        self.note(endpoint, reason);
        None
    }

    fn make_native(&mut self, endpoint: u32, pd: u32, service: Service) -> io::Result<Box<Native>> {
        let error = io::Error::from_raw_os_error;
        let completions = self.outside_completions()?;
        let domain = self.card_domain(pd)?;
        let card = self.card.as_mut().ok_or_else(|| error(libc::ENODEV))?;
        let e = self.endpoints.get_mut(endpoint).ok_or_else(|| error(libc::ENODEV))?;
        let left = card.most.saturating_sub(card.pairs);
        // No endpoint gets more than it leaves for the others.
        if e.card_pairs + 1 > left || self.outside.pairs >= self.outside.most {
            return Err(error(libc::ENOSPC));
        }
        let mut others = Vec::new();
        let pair = loop {
            let pair = Pair::of_program(&domain, &completions, service, (SENDS, RECEIVES))?;
            if self.qps.get(pair.number()).is_none() {
                break pair;
            }
            // Kept meanwhile, so that the card has another number next.
            others.push(pair);
            if others.len() == TRIES {
                return Err(error(libc::ENOSPC));
            }
        };
        e.card_pairs += 1;
        card.pairs += 1;
        self.outside.pairs += 1;
        Ok(Box::new(Native::new(pair, domain)))
    }

    /// The completion queue of them all.
    fn outside_completions(&mut self) -> io::Result<Arc<Completions>> {
        if let Some(completions) = &self.outside.completions {
            return Ok(Arc::clone(completions));
        }
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        let card = self.card.as_ref().filter(|c| c.port.active).ok_or_else(none)?;
        let entries = card.device.limits()?.1.min(ALL_COMPLETIONS);
        let reads = card.device.reads()?;
        let completions = Completions::new(&card.device, entries)?;
        sys::set_nonblocking(&*completions)?;
        completions.arm()?;
        let id = Source::Outside.id(0);
        self.epoll.add(completions.as_fd(), sys::READABLE, id)?;
        self.outside.reads = reads;
        self.outside.most = u64::from(entries / (SENDS + RECEIVES));
        self.outside.completions = Some(Arc::clone(&completions));
        Ok(completions)
    }

    /// The protection domain of the card for one of a program.
    pub(crate) fn card_domain(&mut self, pd: u32) -> io::Result<Arc<Domain>> {
        let none = || io::Error::from_raw_os_error(libc::ENODEV);
        let card = self.card.as_ref().ok_or_else(none)?;
        let pd = self.pds.get_mut(pd).ok_or_else(none)?;
        if pd.card.is_none() {
            pd.card = Some(Domain::new(&card.device)?);
        }
        pd.card.clone().ok_or_else(none)
    }

    /// Registers what of a region is mapped with the card, for an endpoint that may have peers
    /// without Heddle: these can name it by the card's own key only, which becomes the region's.
    pub(crate) fn register_outside(
        self: &mut Box<Self>,
        context: u32,
        request: &abi::verbs_reg_mr_request,
        mapped: Option<&Mapped>,
        access: u32,
    ) -> Option<Arc<Region>> {
        let endpoint = self.contexts.get(context)?.endpoint;
        self.outside_gid(endpoint)?;
        self.pds.get(request.pd).filter(|p| owns(context, p.context))?;
        let remote = ibv::ACCESS_REMOTE_WRITE | ibv::ACCESS_REMOTE_READ | ibv::ACCESS_REMOTE_ATOMIC;
        let is_all = mapped.is_some_and(|m| m.is_all(request.length));
        if access & remote != 0 && !is_all {
            self.note(endpoint, Reason::OutsideUnmapped);
        }
        let (memory, part, before) = mapped?.part();
        let iova = request.iova.checked_add(before)?;
        let domain = self.card_domain(request.pd).ok()?;
        let mut others = Vec::new();
        while others.len() < TRIES {
            let memory = Arc::clone(&memory);
            // The kernel takes its time to find the pages of a long one.
            let made = self.without_baton(|worker| {
                worker.touches(endpoint);
                Region::register(&domain, memory, part, iova, access)
            });
            let Ok(made) = made else {
                self.note(endpoint, Reason::CardRefused);
                return None;
            };
            // Without rights for peers there is none.
            if made.rkey() == 0 || self.regions.get(made.rkey()).is_none() {
                return Some(Arc::new(made));
            }
            others.push(made);
        }
        self.note(endpoint, Reason::CardFull);
        None
    }

    /// A queue pair has come to know its peer. Says whether that is one without Heddle.
    pub(crate) fn seek_outside(&mut self, number: u32) -> bool {
        if !self.is_outside(number) {
            return false;
        }
        if let Err(reason) = self.may_ask(number) {
            self.refuse_outside(number, reason);
            return true;
        }
        if let Some(native) = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut()) {
            native.phase = Phase::Asked;
        }
        self.ask_paced(number);
        true
    }

    fn may_ask(&self, number: u32) -> Result<(), Reason> {
        let Some(qp) = self.qps.get(number) else { return Ok(()) };
        let gid = qp.attr.address.gid;
        let capped = self.endpoints.get(qp.endpoint).is_some_and(Endpoint::is_capped);
        if capped && protects(Protection::Caps) {
            return Err(Reason::CardCapped);
        }
        // Neither a container of this node, nor the node itself, is outside. The peer's queue pair
        // has one peer: packets of another container, which come from the same card, are not to be
        // taken for those of that one.
        let is_here = self.endpoint_with(&gid).is_some() || self.card_gid() == Some(gid);
        let is_taken = self.qps.iter().any(|(other, q)| {
            other != number
                && q.native.as_ref().is_some_and(|n| n.phase != Phase::Idle)
                && (q.attr.address.gid, q.attr.dest_qp_num) == (gid, qp.attr.dest_qp_num)
        });
        let foreign = (is_here || is_taken) && protects(Protection::Peers);
        if foreign { Err(Reason::OutsideRefused) } else { Ok(()) }
    }

    fn card_gid(&self) -> Option<Gid> {
        self.card.as_ref().map(|c| c.port.gid)
    }

    fn refuse_outside(&mut self, number: u32, reason: Reason) {
        self.note_of(number, reason);
        self.fail_fatally(number);
    }

    /// Asks the agent whether a queue pair may speak to the peer that it names.
    fn ask_outside(&mut self, number: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        let Some(endpoint) = self.endpoints.get(qp.endpoint).map(|e| e.number) else { return };
        let destination = qp.attr.address.gid;
        let source = self.card_gid().unwrap_or_default();
        self.asks.push(Message::Ask { tag: number, endpoint, source, destination });
        self.nudge_first();
    }

    /// The same, as often as its endpoint may be asked for; else once the time for an answer is
    /// over.
    fn ask_paced(&mut self, number: u32) {
        let now = Instant::now();
        let Some(qp) = self.qps.get_mut(number) else { return };
        let (endpoint, native) = (qp.endpoint, qp.native.as_mut());
        // One timer, however often the program changes the state.
        if let Some(again) = native.and_then(|n| n.again.begin(now)) {
            self.at(again, Timer::Seek(number, 0));
        }
        let Some(own) = self.endpoints.get_mut(endpoint) else { return };
        if own.asks.until(now).is_none() {
            own.asks.take(1);
            self.ask_outside(number);
        } else if own.asks.begins_to_wait() {
            own.account.note(Reason::RateRequests);
        }
    }

    /// Asks again, if there was no answer. Says whether the queue pair is such a one.
    pub(crate) fn ask_outside_again(&mut self, number: u32) -> bool {
        let native = self.qps.get(number).and_then(|qp| qp.native.as_ref());
        let phase = native.map_or(Phase::Idle, |n| n.phase);
        if phase == Phase::Asked && native.is_some_and(|n| n.again.is_over(Instant::now())) {
            self.ask_paced(number);
        }
        phase != Phase::Idle
    }

    /// The agent says whether an endpoint's queue pair may speak to a peer, or that it may no
    /// longer.
    pub(crate) fn hear_answer(
        &mut self,
        number: u32,
        endpoint: u32,
        gid: &Gid,
        (errno, marks): (u32, Marks),
    ) {
        let Some(qp) = self.qps.get_mut(number).filter(|q| q.endpoint == endpoint) else { return };
        // It may be of a peer that the queue pair had before.
        let same = qp.attr.address.gid == *gid;
        let Some(native) = qp.native.as_mut().filter(|n| n.phase != Phase::Idle && same) else {
            return;
        };
        let was_asked = native.phase == Phase::Asked;
        if errno != 0 && protects(Protection::Outside) {
            let reason = if was_asked { Reason::OutsideRefused } else { Reason::OutsideCut };
            return self.refuse_outside(number, reason);
        }
        if was_asked {
            native.phase = Phase::Allowed;
            native.marks = marks;
            let context = qp.context;
            if let Some(context) = self.contexts.get_mut(context) {
                context.awake = true;
            }
        }
    }

    /// Policy has changed, or another agent has come: all that there is is asked for again.
    pub(crate) fn ask_outside_anew(&mut self) {
        let live = |n: &Native| n.phase != Phase::Idle;
        let all = self.qps.iter().filter(|(_, q)| q.native.as_deref().is_some_and(live));
        for number in all.map(|(number, _)| number).collect::<Vec<_>>() {
            self.ask_outside(number);
        }
    }

    /// Ends what endpoints have with peers without Heddle.
    pub(crate) fn end_outside(&mut self, reason: Reason, which: impl Fn(u32) -> bool) {
        let live = |n: &Native| n.phase != Phase::Idle;
        let all = self.qps.iter().filter(|(_, q)| q.native.as_deref().is_some_and(live));
        let all = all.filter(|(_, q)| which(q.endpoint)).map(|(number, _)| number);
        for number in all.collect::<Vec<_>>() {
            self.refuse_outside(number, reason);
        }
        self.notify();
    }

    /// What an endpoint may do has changed.
    pub(crate) fn check_outside(&mut self, endpoint: u32) {
        let Some(e) = self.endpoints.get(endpoint) else { return };
        if !e.outside && protects(Protection::Outside) {
            self.end_outside(Reason::OutsideCut, |e| e == endpoint);
        } else if e.is_capped() && protects(Protection::Caps) {
            self.end_outside(Reason::CardCapped, |e| e == endpoint);
        }
    }

    /// The card tells that a queue pair of it has failed. Says whether it is one of these.
    pub(crate) fn native_failed(&mut self, number: u32) -> bool {
        self.take_native();
        let native = self.qps.get_mut(number).and_then(|qp| qp.native.as_mut());
        let Some(native) = native.filter(|n| n.pair.number() == number) else { return false };
        // What is complete by now is told first.
        native.failed = native.phase != Phase::Idle;
        self.wake_native(number);
        true
    }

    /// The card has gone.
    pub(crate) fn lose_outside(&mut self) {
        self.end_outside(Reason::CardGone, |_| true);
        if let Some(completions) = self.outside.completions.take() {
            self.epoll.remove(completions.as_fd());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_has_one_timer() {
        let (mut again, now) = (Again::default(), Instant::now());
        let late = now + ANSWER_TIME;
        assert_eq!((again.begin(now), again.begin(now)), (Some(late), None));
        // One of a queue pair that had the number before.
        assert!(!again.is_over(now) && !again.is_over(now + ANSWER_TIME / 2));
        assert!(again.is_over(late));
        assert_eq!(again.begin(late), Some(late + ANSWER_TIME));
        assert!(!again.is_over(late));
    }
}

//! The service: one thread, one epoll. It serves the agent and gives regions turns.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use unix_io::packets::{accept, listen_packets, receive, send};
use unix_io::{Epoll, epoll::READABLE, monotonic, would_block};

use super::abi::*;
use super::proto::{self, Errno, Message};
use super::region::{Context, Region};
use super::sockets;
use super::stream::Next;
use crate::sys;

const LISTENER: u64 = u64::MAX;
const AGENT: u64 = u64::MAX - 1;
/// Between looks at rings that had bytes a moment ago, in nanoseconds.
const NAP: i64 = 20_000;
/// Regions of a service.
const REGIONS: usize = 4096;
/// What the regions of one endpoint move in a round, in bytes: another one's turn waits no longer.
pub const ROUND: usize = 1 << 20;
/// Messages of the agent's that are served before regions have their turns.
const MESSAGES: usize = 64;
const SECOND: u64 = 1_000_000_000;

/// The service of a node's queues.
#[derive(Debug)]
pub struct Service {
    epoll: Epoll,
    listener: Option<OwnedFd>,
    agent: Option<OwnedFd>,
    greeted: bool,
    regions: Vec<Option<Box<Region>>>,
    by_id: HashMap<u64, usize>,
    /// Regions that were awake in the last round.
    awake: Vec<usize>,
    /// What is left in this one of what an owner may move.
    left: HashMap<u64, usize>,
    events: Vec<(u64, u32)>,
    ticked: u64,
    beat: u32,
    /// Of regions that are gone.
    gone: queues_stats,
    /// The thread's processor time when a region was charged last.
    charged: u64,
}

impl Service {
    /// A service without an agent.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new() -> io::Result<Self> {
        sockets::wake_in_time();
        Ok(Self {
            epoll: Epoll::new()?,
            listener: None,
            agent: None,
            greeted: false,
            regions: Vec::new(),
            by_id: HashMap::new(),
            awake: Vec::new(),
            left: HashMap::new(),
            events: Vec::new(),
            ticked: monotonic(),
            beat: 0,
            gone: queues_stats::default(),
            charged: 0,
        })
    }

    /// Has agents connect at a path.
    ///
    /// # Errors
    ///
    /// The kernel's: the path is in use, say.
    pub fn listen(&mut self, path: &Path) -> io::Result<()> {
        let listener = listen_packets(path)?;
        self.epoll.add(listener.as_fd(), READABLE, LISTENER)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Takes an agent's connection in place of the one before.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn connect(&mut self, agent: OwnedFd) -> io::Result<()> {
        self.part();
        self.epoll.add(agent.as_fd(), READABLE, AGENT)?;
        self.agent = Some(agent);
        // Nobody looks after what programs have of an earlier agent.
        self.regions.iter().flatten().for_each(|region| region.leave());
        Ok(())
    }

    fn part(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.epoll.remove(agent.as_fd());
        }
        self.greeted = false;
        for region in self.regions.iter_mut().flatten() {
            region.ask_again();
        }
    }

    /// Waits for something to do, so long at most, and does it.
    ///
    /// # Errors
    ///
    /// The kernel's, of epoll.
    pub fn step(&mut self, most: Option<Duration>) -> io::Result<()> {
        let next = self.round();
        self.make();
        self.reap();
        let timeout = match next {
            Next::Again => Some(Duration::ZERO),
            Next::Soon => {
                self.nap();
                Some(Duration::ZERO)
            }
            Next::Wait => self.sleep(most),
        };
        let mut events = core::mem::take(&mut self.events);
        self.epoll.wait(&mut events, timeout)?;
        for (token, what) in events.drain(..) {
            match token {
                LISTENER => self.accept(),
                AGENT => self.hear(),
                _ => self.region_event(token, what),
            }
        }
        self.events = events;
        self.tick();
        Ok(())
    }

    /// For how long to sleep: not at all if a guest has something to do after all.
    fn sleep(&mut self, most: Option<Duration>) -> Option<Duration> {
        let mut more = false;
        let regions = &mut self.regions;
        self.awake.retain(|slot| {
            let Some(Some(region)) = regions.get_mut(*slot) else { return false };
            let has = region.arm();
            more |= has;
            has || region.is_polled()
        });
        if more {
            return Some(Duration::ZERO);
        }
        let own = if self.awake.is_empty() {
            (!self.by_id.is_empty()).then_some(Duration::from_secs(1))
        } else {
            Some(Duration::from_millis(1))
        };
        own.map_or(most, |own| Some(most.map_or(own, |m| m.min(own))))
    }

    fn nap(&self) {
        sockets::nap(self.epoll.as_fd(), NAP);
    }

    fn wake(&mut self, slot: usize) {
        if !self.awake.contains(&slot) {
            self.awake.push(slot);
        }
    }

    /// A turn for each region that is awake, as far as what its owner may move goes; those that get
    /// none come first in the next round.
    fn round(&mut self) -> Next {
        let now = monotonic();
        let mut next = Next::Wait;
        let mut served = Vec::with_capacity(self.awake.len());
        self.left.clear();
        for slot in core::mem::take(&mut self.awake) {
            let Some(Some(region)) = self.regions.get_mut(slot) else { continue };
            let left = self.left.entry(owner(region, slot)).or_insert(ROUND);
            if *left == 0 {
                self.awake.push(slot);
                next = Next::Again;
                continue;
            }
            served.push(slot);
            let context = context(&self.epoll, slot, now);
            let turned = region.turn(&context, left);
            let used = sys::thread_time();
            region.stats.processor += used - core::mem::replace(&mut self.charged, used);
            match turned {
                Ok(Next::Again) => next = Next::Again,
                Ok(Next::Soon) if next == Next::Wait => next = Next::Soon,
                Ok(_) => {}
                Err(broken) => {
                    eprintln!("heddle-stack: region {}: {broken}", region.id);
                    region.guest_gone(&context);
                    region.close_all(&context, true);
                }
            }
        }
        self.awake.append(&mut served);
        next
    }

    fn region_event(&mut self, token: u64, what: u32) {
        let slot = usize::try_from(token >> 32).unwrap_or(usize::MAX);
        let now = monotonic();
        let Some(Some(region)) = self.regions.get_mut(slot) else { return };
        let of_what = u32::try_from(token & u64::from(u32::MAX)).unwrap_or(0);
        region.event(of_what, what, &context(&self.epoll, slot, now));
        self.wake(slot);
    }

    fn tick(&mut self) {
        let now = monotonic();
        if now - self.ticked < SECOND {
            return;
        }
        self.ticked = now;
        self.beat = self.beat.wrapping_add(1).max(1);
        for slot in 0..self.regions.len() {
            if let Some(Some(region)) = self.regions.get_mut(slot) {
                region.tick(self.beat, &context(&self.epoll, slot, now));
                self.wake(slot);
            }
        }
    }

    /// Forgets regions of which nothing is left.
    fn reap(&mut self) {
        for slot in 0..self.regions.len() {
            if !matches!(self.regions.get(slot), Some(Some(region)) if region.is_over()) {
                continue;
            }
            let Some(region) = self.regions.get_mut(slot).and_then(Option::take) else { continue };
            self.by_id.remove(&region.id);
            add(&mut self.gone, &region.stats);
            let head = queues_head { type_: QUEUES_GONE, region: region.id, ..Default::default() };
            self.say(&queues_plain { head, value: 0 }, &[]);
        }
    }

    // The agent.

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let Ok(agent) = accept(listener) else { return };
        if let Err(err) = self.connect(agent) {
            eprintln!("heddle-stack: take the agent's connection: {err}");
        }
    }

    /// Asks for the sockets that guests want.
    fn make(&mut self) {
        if !self.greeted {
            return;
        }
        let mut all = Vec::new();
        for region in self.regions.iter_mut().flatten() {
            let id = region.id;
            all.extend(region.wanted.drain(..).map(|(number, family)| (id, number, family)));
        }
        for (region, tag, family) in all {
            let head = queues_head { type_: QUEUES_MAKE, tag, region, error: 0, reserved: 0 };
            self.say(&queues_make { head, family, reserved: 0 }, &[]);
        }
    }

    /// Says something to the agent, which reads: one that does not is none.
    fn say<T: unix_io::plain::Plain>(&mut self, message: &T, fds: &[BorrowedFd<'_>]) {
        let Some(agent) = &self.agent else { return };
        if let Err(err) = send(agent, unix_io::plain::bytes(message), fds) {
            eprintln!("heddle-stack: tell the agent: {err}");
            self.part();
        }
    }

    fn hear(&mut self) {
        let mut bytes = [0; proto::MESSAGE_MAX];
        for _ in 0..MESSAGES {
            let Some(agent) = &self.agent else { return };
            let mut descriptors = Vec::new();
            let length = match receive(agent, &mut bytes, &mut descriptors) {
                Ok(n @ 1..) => n,
                Err(err) if would_block(&err) => return,
                _ => return self.part(),
            };
            let parsed = bytes.get(..length).map(|b| proto::parse(b, descriptors.len()));
            let Some(Ok((head, message))) = parsed else {
                eprintln!("heddle-stack: a malformed message of {length} bytes from the agent");
                return self.part();
            };
            if !self.greeted && !matches!(message, Message::Hello { .. }) {
                return self.part();
            }
            self.serve(&head, message, descriptors.pop());
        }
    }

    fn serve(&mut self, head: &queues_head, message: Message, descriptor: Option<OwnedFd>) {
        match (message, descriptor) {
            (Message::Hello { version }, _) => {
                let good = version == u64::from(QUEUES_VERSION) && !self.greeted;
                let error = if good { 0 } else { libc::EPROTONOSUPPORT };
                let head = proto::answer_to(head, error);
                self.greeted = good;
                let value = u64::from(QUEUES_VERSION) | QUEUES_OWNERS;
                self.say(&queues_plain { head, value }, &[]);
                if !good {
                    self.part();
                }
            }
            (Message::Region(asked), Some(life)) => self.region(&asked, life),
            (Message::RegionGone, _) => {
                if let Some((slot, region, context)) = self.find(head.region) {
                    region.guest_gone(&context);
                    region.close_all(&context, true);
                    self.wake(slot);
                }
                self.say(&queues_plain { head: proto::answer_to(head, 0), value: 0 }, &[]);
            }
            (Message::Give, Some(fd)) => self.give(head, fd),
            (Message::Stop(yes), _) => {
                let found = self.find(head.region).map(|(_, region, _)| region.stop(yes));
                let error = if found.is_some() { 0 } else { libc::ENOENT };
                let head = proto::answer_to(head, error);
                self.say(&queues_plain { head, value: yes.into() }, &[]);
            }
            (Message::Stats, _) => self.stats(head),
            (Message::Made, fd) => {
                if let Some((slot, region, context)) = self.find(head.region) {
                    region.made(head.tag, fd.ok_or(Errno(head.error)), &context);
                    self.wake(slot);
                }
            }
            _ => self.part(),
        }
    }

    fn find(&mut self, id: u64) -> Option<(usize, &mut Region, Context<'_>)> {
        let slot = *self.by_id.get(&id)?;
        let region = self.regions.get_mut(slot).and_then(Option::as_mut)?;
        Some((slot, region, context(&self.epoll, slot, monotonic())))
    }

    fn region(&mut self, asked: &queues_region, life: OwnedFd) {
        let id = asked.head.region;
        let free = self.regions.iter().position(Option::is_none).unwrap_or(self.regions.len());
        let made = if self.by_id.contains_key(&id) {
            Err(Errno(libc::EEXIST))
        } else if free >= REGIONS {
            Err(Errno(libc::EMFILE))
        } else {
            Region::new(asked, life, &context(&self.epoll, free, monotonic()))
        };
        let error = made.as_ref().err().map_or(0, |e| e.0);
        let answer = queues_plain { head: proto::answer_to(&asked.head, error), value: 0 };
        let Ok(region) = made else { return self.say(&answer, &[]) };
        // Of its own, because `say` may have this one's part.
        let Ok(memory) = region.memory().try_clone_to_owned() else { return self.part() };
        if free == self.regions.len() {
            self.regions.push(None);
        }
        if let Some(place) = self.regions.get_mut(free) {
            *place = Some(Box::new(region));
        }
        self.by_id.insert(id, free);
        self.wake(free);
        self.say(&answer, &[memory.as_fd()]);
    }

    fn give(&mut self, head: &queues_head, fd: OwnedFd) {
        let (given, slot) = match self.find(head.region) {
            Some((slot, region, context)) => (region.give(fd, &context), Some(slot)),
            None => (Err(Errno(libc::ENOENT)), None),
        };
        if let Some(slot) = slot {
            self.wake(slot);
        }
        let head = proto::answer_to(head, given.err().map_or(0, |e| e.0));
        let (stream, generation) = given.unwrap_or_default();
        self.say(&queues_give { head, stream: stream.into(), generation }, &[]);
    }

    fn stats(&mut self, head: &queues_head) {
        let mut all = queues_stats::default();
        if head.region == 0 {
            add(&mut all, &self.gone);
        }
        let of = head.region;
        for region in self.regions.iter().flatten().filter(|r| of == 0 || r.id == of) {
            add(&mut all, &region.stats);
            let (connections, sockets) = region.count();
            all.connections += connections;
            all.sockets += sockets;
        }
        if of == 0 {
            all.processor = sys::process_time();
        }
        let known = of == 0 || self.by_id.contains_key(&of);
        all.head = proto::answer_to(head, if known { 0 } else { libc::ENOENT });
        self.say(&all, &[]);
    }
}

/// Whose share a region has: one whose owner nobody has named has one of its own.
fn owner(region: &Region, slot: usize) -> u64 {
    let own = 1 << 32 | u64::try_from(slot).unwrap_or(u64::MAX);
    if region.owner == 0 { own } else { region.owner.into() }
}

fn context(epoll: &Epoll, slot: usize, now: u64) -> Context<'_> {
    Context { epoll, slot: u32::try_from(slot).unwrap_or(u32::MAX), now }
}

fn add(to: &mut queues_stats, one: &queues_stats) {
    to.jobs += one.jobs;
    to.completions += one.completions;
    to.refused += one.refused;
    to.bytes_sent += one.bytes_sent;
    to.bytes_received += one.bytes_received;
    to.calls += one.calls;
    to.processor += one.processor;
}

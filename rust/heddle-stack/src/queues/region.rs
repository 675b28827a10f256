//! A region: the queues of one guest, and what it has by them. The paper's `ServiceLib`.

mod jobs;

use core::sync::atomic::Ordering;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shared_ring::{Consumer, Producer, Ringer, SharedMemory, Sleeper, Slot, doorbell, ring};
use unix_io::epoll::{EDGE, READABLE, WRITABLE};
use unix_io::{Epoll, random};

use super::abi::*;
use super::memory::{COMPLETION_BELL, HeaderWord, JOB_BELL, Layout, View};
use super::proto::{self, Errno};
use super::sockets;
use super::stream::{Moved, Next, Stream};
use jobs::{CLOSE, ENDED_EVENT, READABLE_EVENT, WRITABLE_EVENT};

/// Jobs of one region that are served before the next region's.
const JOBS: usize = 64;
/// A connection that was closed is given up if its socket takes nothing for so long, in ns.
const FLUSH: u64 = 60_000_000_000;
/// A polled guest is given up when it has not beaten for so long.
const GUEST: u64 = 10_000_000_000;
/// Numbers of descriptors in the service's set, beside sockets'.
pub(super) const LIFE: u32 = 0;
pub(super) const BELL: u32 = 1;
const SOCKETS: u32 = 2;

/// What the service gives a region for its turn.
#[derive(Debug)]
pub(super) struct Context<'a> {
    pub(super) epoll: &'a Epoll,
    /// Where the region is among the service's: the upper half of numbers in the set.
    pub(super) slot: u32,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) now: u64,
}

impl Context<'_> {
    pub(super) fn token(&self, what: u32) -> u64 {
        u64::from(self.slot) << 32 | u64::from(what)
    }

    fn watch(&self, fd: BorrowedFd<'_>, events: u32, index: usize) -> Result<(), Errno> {
        let what = SOCKETS + u32::try_from(index).unwrap_or(u32::MAX - SOCKETS);
        let added = self.epoll.add(fd, events | EDGE, self.token(what));
        added.map_err(|err| Errno(sockets::errno(&err)))
    }

    /// Asks for room of a given connection, or not to be told of it. The kernel would say so of a
    /// pair with each byte that its other end takes, whoever wrote that.
    fn watch_room(&self, fd: BorrowedFd<'_>, yes: bool, index: usize) {
        let what = SOCKETS + u32::try_from(index).unwrap_or(u32::MAX - SOCKETS);
        let events = if yes { WRITABLE } else { 0 };
        // It is in the set since it was given.
        let _ = self.epoll.modify(fd, events | EDGE, self.token(what));
    }
}

#[derive(Debug)]
enum Kind {
    /// The agent is making it.
    Wanted(queues_nqe),
    Idle,
    Listener(VecDeque<queues_nqe>),
    /// With the stream that it gets.
    Connecting(queues_nqe, u16),
    Connection(Stream),
}

#[derive(Debug)]
struct Socket {
    number: u32,
    fd: Option<OwnedFd>,
    v6: bool,
    kind: Kind,
    queued: bool,
}

/// Whom a stream is of.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    taken: bool,
    generation: u32,
}

/// The bells of a region that is not polled.
#[derive(Debug)]
struct Bells {
    jobs: Sleeper,
    completions: Ringer,
    armed: bool,
}

/// A region.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) id: u64,
    flags: u32,
    view: View,
    jobs: Consumer,
    completions: Producer,
    bells: Option<Bells>,
    life: OwnedFd,
    /// Completions that the guest has left no room for.
    waiting: VecDeque<queues_nqe>,
    sockets: Vec<Option<Socket>>,
    by_number: HashMap<u32, usize>,
    most: usize,
    streams: Vec<Use>,
    active: VecDeque<usize>,
    /// Sockets that the agent is to make: number and family.
    pub(super) wanted: Vec<(u32, u32)>,
    /// The guest is not there any more.
    pub(super) gone: bool,
    guest_beat: (u32, u64),
    pub(super) stats: queues_stats,
}

fn refused(err: impl std::fmt::Display) -> Errno {
    eprintln!("heddle-stack: make a region: {err}");
    Errno(libc::ENOMEM)
}

fn rings(
    memory: &std::sync::Arc<SharedMemory>,
    layout: &Layout,
) -> Result<(Consumer, Producer), Errno> {
    for at in [layout.jobs, layout.completions] {
        ring::create(memory, at, layout.slots).map_err(refused)?;
    }
    let jobs = Consumer::attach(memory, layout.jobs, layout.slots).map_err(refused)?;
    let completions =
        Producer::attach(memory, layout.completions, layout.slots).map_err(refused)?;
    Ok((jobs, completions))
}

/// Has a stream be over outside of its turn. Who waits at its futex would wait for ever.
fn end_stream(stream: &mut Stream, view: &View, errno: i32) {
    let mut moved = Moved::default();
    stream.die(view, errno, &mut moved);
    if moved.writable {
        View::wake(view.out_waiting(stream.number));
    }
}

impl Region {
    /// Makes a region and tells its guest.
    pub(super) fn new(
        asked: &queues_region,
        life: OwnedFd,
        context: &Context<'_>,
    ) -> Result<Self, Errno> {
        let layout = Layout::new(asked.slots, asked.streams, asked.capacity)?;
        let memory = SharedMemory::create(c"heddle-queues", layout.size).map_err(refused)?;
        let (jobs, completions) = rings(&memory, &layout)?;
        let view = View::new(memory.clone(), layout);
        view.describe(asked.flags, random().max(1));
        let watch = |fd: BorrowedFd<'_>, what| {
            context.epoll.add(fd, READABLE, context.token(what)).map_err(refused)
        };
        let made = queues_made {
            head: queues_head {
                type_: QUEUES_MADE,
                region: asked.head.region,
                ..Default::default()
            },
            size: layout.size as u64,
            flags: asked.flags,
            reserved: 0,
        };
        let bytes = proto::bytes(&made);
        let bells = if asked.flags & QUEUES_POLLED == 0 {
            // The service makes both bells: it sleeps in one and rings the other.
            let ours = doorbell::descriptors().map_err(refused)?;
            let theirs = doorbell::descriptors().map_err(refused)?;
            let fds = [memory.as_fd(), ours.ring.as_fd(), theirs.wait.as_fd()];
            unix_io::packets::send(&life, &bytes, &fds).map_err(refused)?;
            let time = std::time::Duration::ZERO;
            let sleeper = Sleeper::attach(&memory, JOB_BELL, ours.wait, time).map_err(refused)?;
            let ringer = Ringer::attach(&memory, COMPLETION_BELL, theirs.ring).map_err(refused)?;
            watch(sleeper.as_fd(), BELL)?;
            sleeper.arm();
            Some(Bells { jobs: sleeper, completions: ringer, armed: true })
        } else {
            unix_io::packets::send(&life, &bytes, &[memory.as_fd()]).map_err(refused)?;
            None
        };
        watch(life.as_fd(), LIFE)?;
        Ok(Self {
            id: asked.head.region,
            flags: asked.flags,
            view,
            jobs,
            completions,
            bells,
            life,
            waiting: VecDeque::new(),
            sockets: Vec::new(),
            by_number: HashMap::new(),
            most: asked.sockets as usize,
            streams: vec![Use::default(); asked.streams as usize],
            active: VecDeque::new(),
            wanted: Vec::new(),
            gone: false,
            guest_beat: (0, 0),
            stats: queues_stats::default(),
        })
    }

    /// The memory, for the agent.
    pub(super) fn memory(&self) -> BorrowedFd<'_> {
        self.view.memory().as_fd()
    }

    fn controls(&self) -> bool {
        self.flags & QUEUES_CONTROL != 0
    }

    /// Whether somebody has to look at the rings though nobody rings.
    pub(super) fn is_polled(&self) -> bool {
        self.bells.is_none() && !self.gone
    }

    /// Whether nothing is left of it.
    pub(super) fn is_over(&self) -> bool {
        self.gone && self.by_number.is_empty()
    }

    /// STOP.
    pub(super) fn stop(&self, yes: bool) {
        self.view.header(HeaderWord::Stop).store(yes.into(), Ordering::Release);
    }

    /// Has programs that have sockets of their own go back to them.
    pub(super) fn leave(&self) {
        if !self.controls() {
            self.stop(true);
        }
    }

    // Sockets.

    fn insert(&mut self, number: u32, v6: bool, kind: Kind) -> usize {
        let socket = Socket { number, fd: None, v6, kind, queued: false };
        let free = self.sockets.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.sockets.push(None);
            self.sockets.len() - 1
        });
        self.sockets[index] = Some(socket);
        self.by_number.insert(number, index);
        index
    }

    fn remove(&mut self, index: usize, context: &Context<'_>) {
        let Some(socket) = self.sockets.get_mut(index).and_then(Option::take) else { return };
        self.by_number.remove(&socket.number);
        if let Some(fd) = &socket.fd {
            // Others may have the file open, too.
            context.epoll.remove(fd.as_fd());
        }
        match &socket.kind {
            Kind::Connection(stream) => {
                stream.end(&self.view);
                self.release(stream.number);
            }
            Kind::Connecting(_, stream) => self.release(*stream),
            _ => {}
        }
    }

    fn release(&mut self, stream: u16) {
        if let Some(u) = self.streams.get_mut(usize::from(stream)) {
            u.taken = false;
        }
        // A listener may have waited for one.
        for index in 0..self.sockets.len() {
            if matches!(self.sockets.get(index), Some(Some(Socket { kind: Kind::Listener(_), .. })))
            {
                self.activate(index);
            }
        }
    }

    fn take_stream(&mut self) -> Option<u16> {
        let free = self.streams.iter().position(|u| !u.taken)?;
        let u = self.streams.get_mut(free)?;
        u.taken = true;
        u.generation = u.generation.wrapping_add(1).max(1);
        u16::try_from(free).ok()
    }

    fn begin(&self, number: u16) -> Stream {
        let generation = self.streams.get(usize::from(number)).map_or(1, |u| u.generation);
        Stream::begin(&self.view, number, generation, self.controls())
    }

    fn activate(&mut self, index: usize) {
        if let Some(Some(socket)) = self.sockets.get_mut(index)
            && !socket.queued
        {
            socket.queued = true;
            self.active.push_back(index);
        }
    }

    fn get(&mut self, number: u32) -> Result<(usize, &mut Socket), Errno> {
        let index = *self.by_number.get(&number).ok_or(Errno(libc::EBADF))?;
        let socket = self.sockets.get_mut(index).and_then(Option::as_mut);
        socket.map(|s| (index, s)).ok_or(Errno(libc::EBADF))
    }

    /// GIVE: a duplicate of a socket that a program has.
    pub(super) fn give(&mut self, fd: OwnedFd, context: &Context<'_>) -> Result<(u16, u32), Errno> {
        if self.controls() || self.gone || !sockets::is_stream(fd.as_fd()) {
            return Err(Errno(libc::EINVAL));
        }
        let number = self.take_stream().ok_or(Errno(libc::ENOBUFS))?;
        let stream = self.begin(number);
        let generation = stream.generation;
        let index = self.insert(u32::from(number) + 1, false, Kind::Connection(stream));
        let watched = context.watch(fd.as_fd(), 0, index);
        if let Some(Some(socket)) = self.sockets.get_mut(index) {
            socket.fd = Some(fd);
        }
        if let Err(err) = watched {
            self.remove(index, context);
            return Err(err);
        }
        self.activate(index); // it may be over already
        Ok((number, generation))
    }

    /// The agent's answer to MAKE.
    pub(super) fn made(
        &mut self,
        number: u32,
        made: Result<OwnedFd, Errno>,
        context: &Context<'_>,
    ) {
        let Ok((index, socket)) = self.get(number) else { return };
        let Kind::Wanted(job) = socket.kind else { return };
        let result = made.and_then(|fd| {
            unix_io::set_nonblocking(&fd).map_err(|err| Errno(sockets::errno(&err)))?;
            socket.fd = Some(fd);
            socket.kind = Kind::Idle;
            Ok(())
        });
        if result.is_err() {
            self.remove(index, context);
        }
        self.complete(&job, result);
    }

    /// Sockets that an agent was asked for that has gone.
    pub(super) fn ask_again(&mut self) {
        self.wanted.clear();
        for socket in self.sockets.iter().flatten() {
            if let Kind::Wanted(job) = &socket.kind {
                self.wanted.push((socket.number, job.length));
            }
        }
    }

    // Completions.

    fn push(&mut self, nqe: queues_nqe) {
        self.stats.completions += 1;
        if !self.gone {
            self.waiting.push_back(nqe);
        }
    }

    fn complete(&mut self, job: &queues_nqe, result: Result<(), Errno>) {
        let error = result.err().map_or(0, |e| e.0);
        self.complete_with(job, proto::done(job, error));
    }

    fn complete_with(&mut self, job: &queues_nqe, done: queues_nqe) {
        if u32::from(job.flags) & QUEUES_QUIET == 0 {
            self.push(done);
        }
    }

    /// Says what there is room for. An error: the guest does not keep to the rules.
    fn flush(&mut self) -> Result<bool, shared_ring::PeerBroken> {
        let mut said = false;
        while !self.waiting.is_empty() {
            let slots: Vec<Slot> = self.waiting.iter().take(JOBS).map(proto::slot).collect();
            let pushed = self.completions.push(&slots)?;
            self.waiting.drain(..pushed);
            said |= pushed > 0;
            if pushed < slots.len() {
                break;
            }
        }
        Ok(said)
    }

    // A turn.

    /// What epoll says of a descriptor of the region's.
    pub(super) fn event(&mut self, what: u32, events: u32, context: &Context<'_>) {
        match what {
            LIFE => self.guest_gone(context),
            BELL => {
                if let Some(bells) = &mut self.bells {
                    // Takes the ring, of which there may be more: the guest's turn comes anyway.
                    let _ = bells.jobs.take_ring();
                    bells.jobs.disarm();
                    bells.armed = false;
                }
            }
            n => {
                let index = (n - SOCKETS) as usize;
                if let Some(Some(socket)) = self.sockets.get_mut(index)
                    && let Kind::Connection(stream) = &mut socket.kind
                {
                    stream.event(events);
                    let bad = (libc::EPOLLERR | libc::EPOLLHUP).cast_unsigned();
                    let ours = self.flags & QUEUES_CONTROL == 0;
                    if ours
                        && events & WRITABLE != 0
                        && let Some(fd) = &socket.fd
                    {
                        context.watch_room(fd.as_fd(), false, index);
                    }
                    // The kernel has told this side alone of nothing yet: the program's next call
                    // is to hear of it.
                    if ours
                        && events & bad != 0
                        && socket.fd.as_ref().is_some_and(|fd| sockets::is_over(fd.as_fd()))
                    {
                        end_stream(stream, &self.view, 0);
                    }
                }
                self.activate(index);
            }
        }
    }

    /// A turn. Says whether there is more to do; an error ends the region.
    pub(super) fn turn(&mut self, context: &Context<'_>) -> Result<Next, shared_ring::PeerBroken> {
        let mut next = Next::Wait;
        let mut popped = 0;
        let mut said = self.flush()?;
        if self.waiting.is_empty() && !self.gone {
            let mut slots = [Slot::default(); JOBS];
            popped = self.jobs.pop(&mut slots)?;
            for slot in &slots[..popped] {
                self.stats.jobs += 1;
                self.serve(&proto::nqe(slot), context);
            }
            if popped == JOBS {
                next = Next::Again;
            }
        }
        for _ in 0..self.active.len() {
            let Some(index) = self.active.pop_front() else { break };
            match self.run(index, context) {
                Next::Wait => {}
                one => {
                    self.activate(index);
                    if next != Next::Again {
                        next = one;
                    }
                }
            }
        }
        said |= self.flush()?;
        if (said || popped > 0)
            && let Some(bells) = &mut self.bells
        {
            // Who cannot be rung looks by itself, or not at all.
            let _ = bells.completions.ring();
        }
        Ok(next)
    }

    /// Before the service sleeps: has the guest ring. True: there is something to do after all.
    pub(super) fn arm(&mut self) -> bool {
        let Some(bells) = &mut self.bells else { return false };
        if bells.armed || self.gone {
            return false;
        }
        bells.jobs.arm();
        // Of completions that wait, room is what there is to do.
        let ready = if self.waiting.is_empty() {
            self.jobs.is_ready()
        } else {
            self.completions.is_ready()
        };
        if ready {
            bells.jobs.disarm();
            return true;
        }
        bells.armed = true;
        false
    }

    /// Each second: the beat, connections that nobody takes the rest of, guests that beat no more.
    pub(super) fn tick(&mut self, beat: u32, context: &Context<'_>) {
        self.view.header(HeaderWord::Beat).store(beat, Ordering::Relaxed);
        for index in 0..self.sockets.len() {
            let Some(Some(socket)) = self.sockets.get_mut(index) else { continue };
            if let (Kind::Connection(stream), Some(fd)) = (&mut socket.kind, &socket.fd)
                && stream.close.is_some()
                && context.now.saturating_sub(stream.progress) > FLUSH
            {
                sockets::reset_at_close(fd.as_fd());
                sockets::shutdown(fd.as_fd(), QUEUES_SHUT_BOTH);
                end_stream(stream, &self.view, libc::ETIMEDOUT);
                self.activate(index);
            }
        }
        if self.bells.is_some() || self.gone {
            return;
        }
        let now = self.view.header(HeaderWord::GuestBeat).load(Ordering::Relaxed);
        if now != self.guest_beat.0 {
            self.guest_beat = (now, context.now);
        } else if self.guest_beat.1 != 0 && context.now - self.guest_beat.1 > GUEST {
            self.renew(context);
        }
    }

    /// The guest of a polled region has ended, and another one may come.
    fn renew(&mut self, context: &Context<'_>) {
        self.close_all(context, true);
        self.waiting.clear();
        self.guest_beat = (0, 0);
        match rings(self.view.memory(), &self.view.layout) {
            Ok((jobs, completions)) => {
                self.jobs = jobs;
                self.completions = completions;
                self.view.describe(self.flags, random().max(1));
            }
            Err(_) => self.gone = true,
        }
    }

    /// Nobody has the other end of the region's socket any more, or the agent says so.
    pub(super) fn guest_gone(&mut self, context: &Context<'_>) {
        if self.gone {
            return;
        }
        self.gone = true;
        context.epoll.remove(self.life.as_fd());
        if let Some(bells) = &self.bells {
            context.epoll.remove(bells.jobs.as_fd());
        }
        self.view.header(HeaderWord::Ended).store(1, Ordering::Release);
        self.close_all(context, false);
    }

    /// Closes what there is; connections when they have sent what was given them, unless at once.
    pub(super) fn close_all(&mut self, context: &Context<'_>, at_once: bool) {
        let numbers: Vec<u32> = self.by_number.keys().copied().collect();
        for socket in numbers {
            let flags =
                u8::try_from(QUEUES_QUIET | if at_once { QUEUES_ABORT } else { 0 }).unwrap_or(0);
            let Some(index) = self.by_number.get(&socket).copied() else { continue };
            let mut job = queues_nqe { operation: CLOSE, flags, socket, ..Default::default() };
            if let Some(Some(Socket { kind: Kind::Connection(stream), .. })) =
                self.sockets.get_mut(index)
            {
                job.generation = stream.generation;
                if stream.close.is_some() && !at_once {
                    continue;
                }
                job.offset = stream.produced(&self.view);
                stream.close = None;
            }
            // Each is there, and takes this, but for a connection whose counter cannot be.
            if self.close(&job, context).is_err() {
                job.flags |= u8::try_from(QUEUES_ABORT).unwrap_or(0);
                let _ = self.close(&job, context);
            }
            if at_once && let Some(index) = self.by_number.get(&socket).copied() {
                self.remove(index, context);
            }
        }
    }

    fn run(&mut self, index: usize, context: &Context<'_>) -> Next {
        let Some(Some(socket)) = self.sockets.get_mut(index) else { return Next::Wait };
        socket.queued = false;
        match &socket.kind {
            Kind::Connection(_) => self.move_bytes(index, context),
            Kind::Listener(_) => self.accept(index, context),
            Kind::Connecting(..) => {
                self.connected(index, context);
                Next::Wait
            }
            _ => Next::Wait,
        }
    }

    fn move_bytes(&mut self, index: usize, context: &Context<'_>) -> Next {
        let view = &self.view;
        let Some(Some(Socket { number, fd: Some(fd), kind: Kind::Connection(stream), .. })) =
            self.sockets.get_mut(index)
        else {
            return Next::Wait;
        };
        let mut moved = Moved::default();
        let blocked = stream.out_blocked;
        let next = stream.turn(view, fd, &mut moved);
        if self.flags & QUEUES_CONTROL == 0 && stream.out_blocked && !blocked {
            context.watch_room(fd.as_fd(), true, index);
        }
        if self.flags & QUEUES_CONTROL == 0 && moved.edge {
            sockets::tell_of_room(fd.as_fd());
        }
        if moved.sent > 0 {
            stream.progress = context.now;
        }
        self.stats.bytes_sent += moved.sent;
        self.stats.bytes_received += moved.received;
        self.stats.calls += moved.calls;
        let event = queues_nqe {
            socket: *number,
            stream: stream.number,
            generation: stream.generation,
            ..Default::default()
        };
        let mut said = Vec::new();
        if let Some(later) = stream.shutdown
            && stream.has_sent(later.offset)
        {
            sockets::shutdown(fd.as_fd(), later.job.length);
            stream.shutdown = None;
            said.push(later.job);
        }
        let closes = stream.close.filter(|c| stream.has_sent(c.offset));
        if closes.is_some() && stream.is_unread(view) {
            sockets::reset_at_close(fd.as_fd());
        }
        let (in_produced, (out_consumed, room)) = (stream.in_produced(), stream.out_state(view));
        if self.controls() {
            if moved.readable {
                self.push(queues_nqe { operation: READABLE_EVENT, offset: in_produced, ..event });
            }
            if moved.writable {
                self.push(queues_nqe {
                    operation: WRITABLE_EVENT,
                    offset: out_consumed,
                    credit: room,
                    ..event
                });
            }
            if let Some(error) = moved.ended {
                self.push(queues_nqe { operation: ENDED_EVENT, error, ..event });
            }
        } else if moved.writable || moved.ended.is_some() {
            View::wake(view.out_waiting(event.stream));
        }
        for job in said {
            self.complete(&job, Ok(()));
        }
        if let Some(later) = closes {
            self.remove(index, context);
            self.complete(&later.job, Ok(()));
            return Next::Wait;
        }
        next
    }

    /// Counts what there is.
    pub(super) fn count(&self) -> (u64, u64) {
        let all = self.by_number.len() as u64;
        let is_connection = |s: &&Socket| matches!(s.kind, Kind::Connection(_));
        let connections = self.sockets.iter().flatten().filter(is_connection).count() as u64;
        (connections, all - connections)
    }
}

//! A region: the queues of one guest, and what it has by them. The paper's `ServiceLib`.
//!
//! | module | what it owns |
//! |---|---|
//! | `jobs` | what the guest asks for |
//! | `completions` | what it is told |
//! | `table` | its sockets and streams |
//! | `turn` | its turns |
//! | `ends` | its end |

mod completions;
mod ends;
mod jobs;
mod table;
mod turn;

use core::sync::atomic::Ordering;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use shared_ring::{Consumer, Producer, Ringer, SharedMemory, Sleeper, doorbell, ring};
use unix_io::epoll::{EDGE, READABLE, WRITABLE};
use unix_io::{Epoll, random};

use super::abi::*;
use super::memory::{COMPLETION_BELL, HeaderWord, JOB_BELL, Layout, View};
use super::proto::{self, Errno};
use super::sockets;
use super::stream::{Moved, Stream};

/// Jobs of one region that are served before the next region's.
const JOBS: usize = 64;
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
    pub(super) owner: u32,
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
            owner: asked.owner,
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
}

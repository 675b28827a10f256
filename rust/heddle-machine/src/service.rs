//! The service of a machine: takes its jobs, and runs them by sockets of this process, which is one
//! of the machine's container. One thread owns all of it. The guest is hostile.
//!
//! | module | what it owns |
//! |---|---|
//! | `jobs` | what a guest asks for |
//! | `flow` | a connection: a socket on one side, a stream on the other |
//! | `own` | whom of its own container a guest may reach |

mod flow;
mod jobs;
mod own;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::{SharedMemory, Slot};
use unix_io::epoll::{EDGE, GONE, READABLE, WRITABLE};
use unix_io::{Epoll, monotonic, would_block};

use crate::nqe;
use crate::region::{Layout, Made};
use crate::sys;
use flow::{Flow, Outcome};

const SECOND: u64 = 1_000_000_000;
/// A guest that has shown nothing for so long is over.
const GUEST_SILENT: u64 = 10 * SECOND;
/// So long a connection that is closed may send nothing of what is left.
const CLOSE_SILENT: u64 = 60 * SECOND;
/// Jobs that are taken before connections have their turns.
const JOBS: usize = 64;
/// Sockets that are no connections, for each stream that there is.
const SOCKETS_FOR_STREAM: usize = 4;

/// What a service has done, and what it has refused by which reason.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Jobs that were taken.
    pub jobs: u64,
    /// Connections that were made and accepted.
    pub connected: u64,
    /// See above.
    pub accepted: u64,
    /// Bytes out of byte rings, and into them.
    pub sent: u64,
    /// See above.
    pub received: u64,
    /// Jobs that broke a rule.
    pub refused_job: u64,
    /// Connects to what the guest does not serve itself in its own container.
    pub refused_own: u64,
    /// Sockets beyond those that a region may have.
    pub refused_sockets: u64,
    /// Connections that were reset because the guest broke their counters.
    pub broken_streams: u64,
    /// Regions that were given up because the guest broke their rings.
    pub broken_regions: u64,
    /// Guests that ended without a word.
    pub silent_guests: u64,
}

enum Kind {
    Fresh,
    Listener { accepts: VecDeque<queues_nqe> },
    Connection(Box<Flow>),
}

#[expect(clippy::struct_excessive_bools, reason = "events, states and an option")]
struct Socket {
    /// None once a connection is over.
    fd: Option<OwnedFd>,
    family: u32,
    kind: Kind,
    readable: bool,
    writable: bool,
    queued: bool,
    /// `SO_LINGER` of the guest's is 0: closing resets.
    resets: bool,
}

/// The service of one region.
pub struct Service {
    memory: Arc<SharedMemory>,
    layout: Layout,
    region: Made,
    epoll: Epoll,
    sockets: HashMap<u32, Socket>,
    free: Vec<u16>,
    generation: u32,
    outbox: VecDeque<queues_nqe>,
    ready: VecDeque<u32>,
    events: Vec<(u64, u32)>,
    /// When the beat was shown last, and the guest's was seen to change.
    shown: u64,
    guest: (u32, u64),
    /// What it has done.
    pub counts: Counts,
}

impl Service {
    /// Serves a region of this layout in the memory, of which another service may have served one.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new(memory: &Arc<SharedMemory>, layout: Layout) -> io::Result<Self> {
        let mut service = Self {
            memory: Arc::clone(memory),
            layout,
            region: Made::make(memory, layout)?,
            epoll: Epoll::new()?,
            sockets: HashMap::new(),
            free: Vec::new(),
            generation: 0,
            outbox: VecDeque::new(),
            ready: VecDeque::new(),
            events: Vec::new(),
            shown: 0,
            guest: (0, 0),
            counts: Counts::default(),
        };
        service.free = (0..u16::try_from(layout.streams).unwrap_or(u16::MAX)).rev().collect();
        Ok(service)
    }

    /// Does what there is to do, after waiting so long at most. Says whether there was anything.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn step(&mut self, most: Duration) -> io::Result<bool> {
        let mut events = core::mem::take(&mut self.events);
        self.epoll.wait(&mut events, Some(most))?;
        let mut busy = !events.is_empty();
        for (token, what) in events.drain(..) {
            self.happened(u32::try_from(token).unwrap_or(0), what);
        }
        self.events = events;
        self.beat()?;
        if self.flush().is_err() || (self.outbox.is_empty() && self.take_jobs(&mut busy).is_err()) {
            self.counts.broken_regions += 1;
            eprintln!("heddle-machine: the guest broke a ring of nqes, and begins anew");
            self.begin_anew()?;
            return Ok(true);
        }
        for _ in 0..self.ready.len() {
            if !self.outbox.is_empty() && self.outbox.len() > self.layout.slots as usize {
                break; // it does not take what it is told
            }
            let Some(number) = self.ready.pop_front() else { break };
            busy = true;
            self.turn(number);
        }
        let _ = self.flush(); // a ring that is broken is seen in the next step
        Ok(busy)
    }

    fn happened(&mut self, number: u32, what: u32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        socket.readable |= what & (READABLE | GONE) != 0;
        socket.writable |= what & (WRITABLE | GONE) != 0;
        self.enqueue(number);
    }

    fn enqueue(&mut self, number: u32) {
        if let Some(socket) = self.sockets.get_mut(&number)
            && !socket.queued
        {
            socket.queued = true;
            self.ready.push_back(number);
        }
    }

    /// Shows that there is a service, and looks whether there is a guest.
    fn beat(&mut self) -> io::Result<()> {
        let now = monotonic();
        if now - self.shown < SECOND {
            return Ok(());
        }
        self.shown = now;
        self.region.beat();
        let closing = |s: &Socket| matches!(&s.kind, Kind::Connection(f) if f.is_closing());
        let numbers = self.sockets.iter().filter(|(_, s)| closing(s)).map(|(n, _)| *n);
        for number in numbers.collect::<Vec<_>>() {
            self.enqueue(number);
        }
        let beat = self.region.guest_beat();
        if beat != self.guest.0 {
            self.guest = (beat, now);
        } else if beat != 0 && now - self.guest.1 > GUEST_SILENT {
            self.counts.silent_guests += 1;
            eprintln!("heddle-machine: the guest is silent: what it had is reset");
            self.begin_anew()?;
        }
        Ok(())
    }

    /// Ends all that the guest has, and makes the region anew for another one.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn begin_anew(&mut self) -> io::Result<()> {
        self.sockets.clear(); // each is closed with SO_LINGER 0, so that peers read ECONNRESET
        self.outbox.clear();
        self.ready.clear();
        self.free = (0..u16::try_from(self.layout.streams).unwrap_or(u16::MAX)).rev().collect();
        self.guest = (0, 0);
        self.region = loop {
            match Made::make(&self.memory, self.layout) {
                Ok(region) => break region,
                // It writes to the rings that are being made: a hostile one, at its own cost.
                Err(err) if err.raw_os_error().is_none() => std::thread::yield_now(),
                Err(err) => return Err(err),
            }
        };
        Ok(())
    }

    /// Pushes what the completion ring has room for.
    fn flush(&mut self) -> Result<(), shared_ring::PeerBroken> {
        while let Some(nqe) = self.outbox.front() {
            if self.region.completions.push(&[proto::slot(nqe)])? == 0 {
                break;
            }
            self.outbox.pop_front();
        }
        Ok(())
    }

    fn take_jobs(&mut self, busy: &mut bool) -> Result<(), shared_ring::PeerBroken> {
        let mut slots = [Slot::default(); JOBS];
        let count = self.region.jobs.pop(&mut slots)?;
        *busy |= count > 0;
        self.counts.jobs += count as u64;
        for slot in &slots[..count] {
            self.job(&proto::nqe(slot));
        }
        Ok(())
    }

    fn say(&mut self, nqe: queues_nqe) {
        self.outbox.push_back(nqe);
    }

    /// Answers a job, unless nobody wants to know.
    fn answer(&mut self, job: &queues_nqe, answer: queues_nqe) {
        if u32::from(job.flags) & QUEUES_QUIET == 0 {
            self.say(answer);
        }
    }

    fn complete(&mut self, job: &queues_nqe, error: i32) {
        self.answer(job, proto::done(job, error));
    }

    /// Has the events of a socket come here.
    fn watch(&self, fd: &OwnedFd, number: u32) -> io::Result<()> {
        self.epoll.add(fd.as_fd(), READABLE | WRITABLE | EDGE | GONE, number.into())
    }

    fn turn(&mut self, number: u32) {
        let Some(mut socket) = self.sockets.remove(&number) else { return };
        socket.queued = false;
        let stays = match &mut socket.kind {
            Kind::Fresh => true,
            Kind::Listener { .. } => {
                self.sockets.insert(number, socket);
                self.accept(number);
                return;
            }
            Kind::Connection(_) => self.serve(number, &mut socket),
        };
        if stays {
            let again = socket.queued;
            self.sockets.insert(number, socket);
            if again {
                self.ready.push_back(number);
            }
        }
    }

    /// A turn of a connection. Says whether it stays.
    fn serve(&mut self, number: u32, socket: &mut Socket) -> bool {
        let Socket { fd, kind: Kind::Connection(flow), readable, writable, .. } = socket else {
            return true;
        };
        let before = (flow.sent, flow.received);
        let outcome = flow.turn(fd, readable, writable, &mut self.outbox);
        self.counts.sent += flow.sent - before.0;
        self.counts.received += flow.received - before.1;
        match outcome {
            Outcome::Waits => return true,
            Outcome::Again => {
                socket.queued = true;
                return true;
            }
            Outcome::Connected => {
                self.counts.connected += 1;
                socket.queued = true;
                return true;
            }
            Outcome::Broken => {
                self.counts.broken_streams += 1;
                eprintln!("heddle-machine: the guest broke a byte ring of socket {number}");
                return true;
            }
            // The number has no connection any more, but still is the guest's.
            Outcome::Failed => {
                if let Some(fd) = &socket.fd {
                    self.epoll.remove(fd.as_fd());
                }
                self.free_stream(flow.number);
            }
            Outcome::Closed => {
                self.free_stream(flow.number);
                if let Some(fd) = socket.fd.take()
                    && !socket.resets
                    && !flow.aborts
                {
                    sys::set_linger(&fd, None);
                }
                return false;
            }
        }
        socket.kind = Kind::Fresh;
        true
    }

    fn free_stream(&mut self, number: u16) {
        self.free.push(number);
        let listeners = self.sockets.iter().filter(|(_, s)| {
            matches!(&s.kind, Kind::Listener { accepts } if !accepts.is_empty()) && !s.queued
        });
        for number in listeners.map(|(n, _)| *n).collect::<Vec<_>>() {
            self.enqueue(number);
        }
    }

    /// Gives waiting ACCEPTs the connections that there are.
    fn accept(&mut self, number: u32) {
        loop {
            let Some(Socket { fd: Some(fd), family, kind: Kind::Listener { accepts }, .. }) =
                self.sockets.get_mut(&number)
            else {
                return;
            };
            if accepts.is_empty() || self.free.is_empty() {
                return;
            }
            let family = *family;
            let accepted = sys::accept(fd);
            if accepted.as_ref().is_err_and(would_block) {
                return;
            }
            let Some(job) = accepts.pop_front() else { return };
            match accepted {
                Ok((fd, peer)) => self.accepted(&job, fd, peer, family),
                Err(err) => self.complete(&job, err.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
    }

    fn accepted(&mut self, job: &queues_nqe, fd: OwnedFd, peer: std::net::SocketAddr, family: u32) {
        sys::set_linger(&fd, Some(0));
        if self.sockets.contains_key(&job.length) {
            return self.complete(job, libc::EEXIST);
        }
        let Some(flow) = self.begin_flow(job.length, None) else {
            return self.complete(job, libc::ENOBUFS);
        };
        if let Err(err) = self.watch(&fd, job.length) {
            self.free.push(flow.number);
            return self.complete(job, err.raw_os_error().unwrap_or(libc::EIO));
        }
        self.counts.accepted += 1;
        let done = queues_nqe {
            stream: flow.number,
            generation: flow.generation,
            length: job.length,
            ..nqe::named(proto::done(job, 0), peer)
        };
        let socket = Socket {
            fd: Some(fd),
            family,
            kind: Kind::Connection(Box::new(flow)),
            readable: true,
            writable: true,
            queued: false,
            resets: false,
        };
        self.sockets.insert(job.length, socket);
        self.answer(job, done);
        self.enqueue(job.length);
    }

    /// A stream for a connection; `None` if all are taken.
    fn begin_flow(&mut self, socket: u32, connecting: Option<queues_nqe>) -> Option<Flow> {
        let number = self.free.pop()?;
        self.generation = self.generation.wrapping_add(1).max(1);
        let id = (number, self.generation);
        Flow::begin(&self.memory, &self.layout, socket, id, connecting)
    }
}

//! Inside a machine: gives programs sockets, which are socket pairs, and has a service outside run
//! what is asked of them. One thread owns all of it.
//!
//! | module | what it owns |
//! |---|---|
//! | `asked` | what programs' libraries ask for |
//! | `requests` | what that becomes |
//! | `told` | what the service answers |
//! | `flow` | a connection: a program's socket on one side, a stream on the other |

mod asked;
mod flow;
mod requests;
mod told;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::{SharedMemory, Slot};
use unix_io::epoll::{EDGE, GONE, READABLE, WRITABLE};
use unix_io::{Epoll, monotonic, packets};

use crate::nqe;
use crate::region::Met;
use crate::sys;
use flow::{Flow, Seen};

const SECOND: u64 = 1_000_000_000;
/// A service that has shown nothing for so long is over.
const SERVICE_SILENT: u64 = 10 * SECOND;
const LISTENER: u64 = u64::MAX;
/// Connections of libraries have this bit in their tokens.
const ASKS: u64 = 1 << 32;
const COMPLETIONS: usize = 64;

/// How far a program's socket is.
enum State {
    Fresh,
    Bound,
    /// Connections that came and that the socket has no room for, with what the program is told.
    Listens {
        backlog: u32,
        under_way: u32,
        parked: VecDeque<(OwnedFd, asked::Accepted)>,
    },
    Connects,
    Connected(Box<Flow>),
}

/// A program's socket.
struct Socket {
    /// The other end of its pair.
    pair: OwnedFd,
    cookie: u64,
    family: u32,
    state: State,
    /// The service has it.
    made: bool,
    options: BTreeMap<u16, u32>,
    local: Option<SocketAddr>,
    remote: Option<SocketAddr>,
    /// `SO_ERROR`.
    error: i32,
    /// Bytes in the pair that are not the program's.
    skip: usize,
    /// Who waits for an answer.
    asks: Option<OwnedFd>,
    seen: Seen,
    queued: bool,
}

/// The guest's side of a machine.
pub struct Guest {
    memory: Arc<SharedMemory>,
    region: Option<Met>,
    epoll: Epoll,
    listener: OwnedFd,
    asking: HashMap<u64, OwnedFd>,
    asked: u64,
    sockets: HashMap<u32, Socket>,
    by_cookie: HashMap<u64, u32>,
    /// Numbers that the service still has, and those for connections to come, with their listener.
    closing: HashSet<u32>,
    coming: HashMap<u32, u32>,
    /// Connections whose own name is not known yet: their listener, and the program's end.
    arriving: HashMap<u32, (u32, OwnedFd)>,
    number: u32,
    outbox: VecDeque<queues_nqe>,
    ready: VecDeque<u32>,
    events: Vec<(u64, u32)>,
    shown: u64,
    service: (u32, u64),
}

impl Guest {
    /// Serves the programs that connect at a path, by a region in the memory.
    ///
    /// # Errors
    ///
    /// The kernel's: the path is in use, say.
    pub fn new(memory: Arc<SharedMemory>, path: &Path) -> io::Result<Self> {
        let listener = packets::listen_packets(path)?;
        let epoll = Epoll::new()?;
        epoll.add(listener.as_fd(), READABLE, LISTENER)?;
        Ok(Self {
            memory,
            region: None,
            epoll,
            listener,
            asking: HashMap::new(),
            asked: 0,
            sockets: HashMap::new(),
            by_cookie: HashMap::new(),
            closing: HashSet::new(),
            coming: HashMap::new(),
            arriving: HashMap::new(),
            number: 0,
            outbox: VecDeque::new(),
            ready: VecDeque::new(),
            events: Vec::new(),
            shown: 0,
            service: (0, 0),
        })
    }

    /// Whether somebody outside serves this machine.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.region.is_some()
    }

    /// Whether any program has a socket: without, nothing can come from outside.
    #[must_use]
    pub fn has_sockets(&self) -> bool {
        !self.sockets.is_empty() || !self.closing.is_empty()
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
        self.watch_service();
        for (token, what) in events.drain(..) {
            match token {
                LISTENER => self.take_asker()?,
                token if token & ASKS != 0 => self.hear(token),
                token => self.happened(u32::try_from(token).unwrap_or(0), what),
            }
        }
        self.events = events;
        busy |= self.hear_service();
        for _ in 0..self.ready.len() {
            let Some(number) = self.ready.pop_front() else { break };
            busy = true;
            self.turn(number);
        }
        self.flush();
        Ok(busy)
    }

    fn happened(&mut self, number: u32, what: u32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        socket.seen.readable |= what & (READABLE | GONE) != 0;
        socket.seen.writable |= what & (WRITABLE | GONE) != 0;
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

    /// Looks whether there is a service, or another one, and shows that there is a guest.
    fn watch_service(&mut self) {
        let now = monotonic();
        if let Some(region) = &self.region {
            if region.beat() != self.service.0 {
                self.service = (region.beat(), now);
            }
            let silent = now - self.service.1 > SERVICE_SILENT;
            if region.is_over() || silent {
                self.lose(if silent { "is silent" } else { "has ended" });
            } else if now - self.shown >= SECOND {
                self.shown = now;
                region.show_beat();
                self.ask_for_more();
            }
        }
        if self.region.is_none()
            && let Ok(met) = Met::meet(&self.memory)
        {
            eprintln!("heddle-machine: there is a service, with {} streams", met.layout.streams);
            self.service = (met.beat(), now);
            self.shown = now;
            self.region = Some(met);
            self.restore();
        }
    }

    /// The service is no more, or another one: connections are over, what is bound stays.
    fn lose(&mut self, why: &str) {
        eprintln!("heddle-machine: the service {why}: all connections are over");
        self.region = None;
        self.outbox.clear();
        self.closing.clear();
        self.coming.clear();
        self.arriving.clear();
        for number in self.sockets.keys().copied().collect::<Vec<_>>() {
            let Some(socket) = self.sockets.get_mut(&number) else { continue };
            socket.made = false;
            match &mut socket.state {
                State::Fresh | State::Bound => self.answer(number, libc::ENETDOWN),
                State::Listens { under_way, .. } => {
                    *under_way = 0;
                    self.answer(number, libc::ENETDOWN);
                }
                State::Connects => self.connect_failed(number, libc::ECONNRESET),
                State::Connected(_) => self.drop_socket(number),
            }
        }
    }

    /// Gives a new service what was bound and what listened.
    fn restore(&mut self) {
        for number in self.sockets.keys().copied().collect::<Vec<_>>() {
            let Some(socket) = self.sockets.get(&number) else { continue };
            let backlog = match &socket.state {
                State::Bound => None,
                State::Listens { backlog, .. } => Some(*backlog),
                _ => continue,
            };
            let local = socket.local;
            self.make(number);
            if let Some(local) = local {
                // Connections of the service before may be in TIME-WAIT there.
                let option = u16::try_from(QUEUES_OPTION_REUSE_ADDRESS).unwrap_or(0);
                let reuse = queues_nqe { option, credit: 1, ..nqe::job(QUEUES_SET, number) };
                self.say(queues_nqe { flags: 1, ..reuse });
                self.say(nqe::named(nqe::job(QUEUES_BIND, number), local));
            }
            if let Some(credit) = backlog {
                self.say(queues_nqe { credit, ..nqe::job(QUEUES_LISTEN, number) });
            }
        }
        self.ask_for_more();
    }

    /// Has the service make a socket that it does not have yet, with its options.
    fn make(&mut self, number: u32) {
        let Some(socket) = self.sockets.get_mut(&number).filter(|s| !s.made) else { return };
        socket.made = true;
        let (length, options) = (socket.family, socket.options.clone());
        let quiet = |job: queues_nqe| queues_nqe { flags: 1, ..job };
        self.say(quiet(queues_nqe { length, ..nqe::job(QUEUES_SOCKET, number) }));
        for (option, credit) in options {
            self.say(quiet(queues_nqe { option, credit, ..nqe::job(QUEUES_SET, number) }));
        }
    }

    fn say(&mut self, job: queues_nqe) {
        if self.region.is_some() {
            self.outbox.push_back(job);
        }
    }

    fn flush(&mut self) {
        let Some(region) = &mut self.region else { return };
        while let Some(job) = self.outbox.front() {
            match region.jobs.push(&[proto::slot(job)]) {
                Ok(0) => break,
                Ok(_) => drop(self.outbox.pop_front()),
                Err(err) => return self.lose(&format!("broke the job ring ({err})")),
            }
        }
    }

    /// Takes what the service says.
    fn hear_service(&mut self) -> bool {
        let mut slots = [Slot::default(); COMPLETIONS];
        let Some(region) = &mut self.region else { return false };
        let count = match region.completions.pop(&mut slots) {
            Ok(count) => count,
            Err(err) => {
                self.lose(&format!("broke the completion ring ({err})"));
                return true;
            }
        };
        for slot in &slots[..count] {
            self.told(&proto::nqe(slot));
        }
        count > 0
    }

    /// A number that nothing has.
    fn next_number(&mut self) -> u32 {
        loop {
            self.number = self.number.wrapping_add(1).max(1);
            let n = self.number;
            let used = self.sockets.contains_key(&n)
                || self.closing.contains(&n)
                || self.coming.contains_key(&n);
            if !used {
                return n;
            }
        }
    }

    /// Keeps the other end of a program's socket.
    fn keep(&mut self, number: u32, socket: Socket) -> io::Result<()> {
        let events = READABLE | WRITABLE | EDGE | GONE;
        self.epoll.add(socket.pair.as_fd(), events, number.into())?;
        self.by_cookie.insert(socket.cookie, number);
        self.sockets.insert(number, socket);
        Ok(())
    }

    /// Gives up the other end of a program's socket, as it is.
    fn drop_socket(&mut self, number: u32) {
        if let Some(socket) = self.sockets.remove(&number) {
            self.by_cookie.remove(&socket.cookie);
        }
    }

    /// Has the service close what it has by a number; a connection after all that was sent.
    fn close(&mut self, number: u32, aborts: bool) {
        let Some(socket) = self.sockets.get(&number) else { return };
        let (generation, offset) = match &socket.state {
            State::Connected(flow) => (flow.generation, flow.produced()),
            _ => (0, 0),
        };
        if socket.made && self.region.is_some() {
            let flags = if aborts { u8::try_from(QUEUES_ABORT).unwrap_or(0) } else { 0 };
            self.closing.insert(number);
            self.say(queues_nqe { flags, generation, offset, ..nqe::job(QUEUES_CLOSE, number) });
        }
        self.coming.retain(|_, listener| *listener != number);
        self.drop_socket(number);
    }

    fn turn(&mut self, number: u32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        socket.queued = false;
        let flow = match &mut socket.state {
            State::Connected(flow) => flow,
            State::Listens { .. } if !sys::other_end(&socket.pair).gone => {
                return self.park(number);
            }
            _ if sys::other_end(&socket.pair).gone => return self.close(number, true),
            _ => return,
        };
        let Ok(turn) = flow.turn(&socket.pair, &mut socket.seen) else {
            eprintln!("heddle-machine: the service broke the stream of socket {number}");
            return self.close(number, true);
        };
        let (generation, offset) = (flow.generation, flow.produced());
        let resets = socket.options.get(&linger()) == Some(&0);
        let job = |operation| queues_nqe { generation, ..nqe::job(operation, number) };
        if turn.send {
            self.say(queues_nqe { offset, ..job(QUEUES_SEND) });
        }
        if turn.receive {
            self.say(job(QUEUES_RECEIVE));
        }
        if turn.shut {
            let quiet = u8::try_from(QUEUES_QUIET).unwrap_or(0);
            let shut =
                queues_nqe { length: QUEUES_SHUT_WRITE, flags: quiet, ..job(QUEUES_SHUTDOWN) };
            self.say(queues_nqe { offset, ..shut });
        }
        match turn.closed {
            Some(unread) => self.close(number, unread || resets),
            None if turn.over => self.close(number, true),
            None if turn.moved => self.enqueue(number),
            None => {}
        }
    }
}

fn linger() -> u16 {
    u16::try_from(QUEUES_OPTION_LINGER).unwrap_or(0)
}

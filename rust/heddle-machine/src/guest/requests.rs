//! What programs ask for becomes jobs.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use heddle_stack::queues::abi::*;
use unix_io::epoll::READABLE;
use unix_io::{packets, plain, would_block};

use super::asked::{self, Answer, Request};
use super::{ASKS, Guest, Seen, Socket, State};
use crate::nqe;
use crate::sys;

/// Connections that are taken ahead for a listener.
const AHEAD: u32 = 16;

impl Guest {
    /// Another library wants something.
    pub(super) fn take_asker(&mut self) -> io::Result<()> {
        let asker = match packets::accept(&self.listener) {
            Ok(asker) => asker,
            Err(err) if would_block(&err) => return Ok(()),
            Err(err) => {
                // No descriptors, say: it is asked again, by the event that stays.
                eprintln!("heddle-machine: take a program's request: {err}");
                return Ok(());
            }
        };
        self.asked += 1;
        let token = ASKS | (self.asked & (ASKS - 1));
        self.epoll.add(asker.as_fd(), READABLE, token)?;
        self.asking.insert(token, asker);
        Ok(())
    }

    /// Reads a request and serves it.
    pub(super) fn hear(&mut self, token: u64) {
        let Some(asker) = self.asking.remove(&token) else { return };
        self.epoll.remove(asker.as_fd());
        let mut bytes = [0; size_of::<Request>()];
        let mut fds = Vec::new();
        let Ok(length) = packets::receive(&asker, &mut bytes, &mut fds) else { return };
        let request = bytes.get(..length).and_then(plain::read::<Request>);
        let Some(request) = request else { return };
        if request.kind == asked::SOCKET {
            return self.new_socket(&request, &asker);
        }
        let cookie = fds.pop().as_ref().and_then(|fd| sys::cookie(fd).ok());
        let number = cookie.and_then(|c| self.by_cookie.get(&c)).copied();
        match number {
            Some(number) => self.serve(number, &request, asker),
            None => reply(&asker, &Answer { error: libc::ENOTSOCK, ..Answer::default() }, None),
        }
    }

    /// A pair's other end, as a socket that nothing is known of.
    fn socket_of(pair: OwnedFd, cookie: u64, family: u32) -> Socket {
        Socket {
            pair,
            cookie,
            family,
            state: State::Fresh,
            made: false,
            options: BTreeMap::new(),
            local: None,
            remote: None,
            error: 0,
            skip: 0,
            asks: None,
            seen: Seen { readable: true, writable: true },
            queued: false,
        }
    }

    fn new_socket(&mut self, request: &Request, asker: &OwnedFd) {
        let made = self.make_pair(request.family);
        let error = made.as_ref().err().map_or(0, |e| e.raw_os_error().unwrap_or(libc::ENOBUFS));
        let answer = Answer { error, family: request.family, ..Answer::default() };
        reply(asker, &answer, made.ok().as_ref());
    }

    /// A new socket; gives the program's end.
    fn make_pair(&mut self, family: u32) -> io::Result<OwnedFd> {
        if !matches!(family, 4 | 6) {
            return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT));
        }
        let (program, own) = sys::pair()?;
        let number = self.next_number();
        self.keep(number, Self::socket_of(own, sys::cookie(&program)?, family))?;
        Ok(program)
    }

    fn serve(&mut self, number: u32, request: &Request, asker: OwnedFd) {
        let served = self.region.is_some();
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        let waits = socket.asks.is_some();
        let answer = |error| Answer { error, ..Answer::default() };
        let job = match (request.kind, &socket.state) {
            (asked::NAMES, _) => {
                return reply(&asker, &names(socket), None);
            }
            (asked::GET, _) => {
                let value = if request.option == asked::ERROR {
                    core::mem::take(&mut socket.error).cast_unsigned()
                } else {
                    socket.options.get(&request.option).copied().unwrap_or(0)
                };
                return reply(&asker, &Answer { value, ..names(socket) }, None);
            }
            (asked::SET, _) => {
                socket.options.insert(request.option, request.value);
                let made = socket.made;
                if made {
                    let (option, credit) = (request.option, request.value);
                    let set = nqe::job(QUEUES_SET, number);
                    self.say(queues_nqe { option, credit, flags: 1, ..set });
                }
                return reply(&asker, &answer(0), None);
            }
            (asked::CONNECT, State::Connects) => {
                return reply(&asker, &answer(libc::EALREADY), None);
            }
            (asked::CONNECT, State::Connected(_)) => {
                return reply(&asker, &answer(libc::EISCONN), None);
            }
            _ if waits => return reply(&asker, &answer(libc::EBUSY), None),
            _ if !served => return reply(&asker, &answer(libc::ENETDOWN), None),
            (asked::BIND, State::Fresh) => {
                nqe::named(nqe::job(QUEUES_BIND, number), request.address())
            }
            (asked::LISTEN, State::Fresh | State::Bound | State::Listens { .. }) => {
                queues_nqe { credit: request.value, ..nqe::job(QUEUES_LISTEN, number) }
            }
            (asked::CONNECT, State::Fresh | State::Bound) => {
                socket.skip += request.value as usize;
                socket.remote = Some(plain_address(request.address(), socket.family));
                socket.state = State::Connects;
                socket.error = 0;
                nqe::named(nqe::job(QUEUES_CONNECT, number), request.address())
            }
            _ => return reply(&asker, &answer(libc::EINVAL), None),
        };
        if request.kind == asked::LISTEN {
            let (under_way, parked) = match &mut socket.state {
                State::Listens { under_way, parked, .. } => (*under_way, core::mem::take(parked)),
                _ => (0, VecDeque::new()),
            };
            socket.seen.writable = true;
            socket.state = State::Listens { backlog: request.value, under_way, parked };
        }
        if request.kind == asked::CONNECT && request.flags & asked::NO_WAIT != 0 {
            reply(&asker, &answer(libc::EINPROGRESS), None);
        } else {
            socket.asks = Some(asker);
        }
        self.make(number);
        self.say(job);
    }

    /// Tells who waits for a socket what came of it.
    pub(super) fn answer(&mut self, number: u32, error: i32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        if let Some(asker) = socket.asks.take() {
            reply(&asker, &Answer { error, ..names(socket) }, None);
        }
    }

    /// A connect that came to nothing.
    pub(super) fn connect_failed(&mut self, number: u32, error: i32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        socket.state = State::Fresh;
        socket.local = None;
        if socket.asks.is_some() {
            return self.answer(number, error);
        }
        // Nobody waits but for the socket to become writable, and asks SO_ERROR then.
        socket.error = error;
        sys::skip(&socket.pair, socket.skip);
        socket.skip = 0;
        let _ = sys::shutdown(&socket.pair, libc::SHUT_WR);
    }

    /// Asks for as many connections as listeners may have taken ahead.
    pub(super) fn ask_for_more(&mut self) {
        let mut wanted = Vec::new();
        for (number, socket) in &mut self.sockets {
            if let State::Listens { backlog, under_way, parked } = &mut socket.state
                && parked.is_empty()
                && socket.made
            {
                let most = (*backlog).clamp(1, AHEAD);
                wanted.extend(core::iter::repeat_n(
                    *number,
                    (most - (*under_way).min(most)) as usize,
                ));
                *under_way = most.max(*under_way);
            }
        }
        for listener in wanted {
            let length = self.next_number();
            self.coming.insert(length, listener);
            self.say(queues_nqe { length, ..nqe::job(QUEUES_ACCEPT, listener) });
        }
    }

    /// The pair of a connection that has come: the socket, and its program's end.
    pub(super) fn arrived(family: u32) -> io::Result<(Socket, OwnedFd)> {
        let (program, own) = sys::pair()?;
        // The guard, before the program has its end.
        sys::send(&program, core::ptr::NonNull::from(&mut 0_u8), 1)?;
        let socket = Self::socket_of(own, sys::cookie(&program)?, family);
        Ok((Socket { made: true, ..socket }, program))
    }

    /// Puts connections into the socket of their listener, as many as it takes.
    pub(super) fn park(&mut self, number: u32) {
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        let State::Listens { parked, .. } = &mut socket.state else { return };
        while let Some((program, told)) = parked.front() {
            match sys::pass(&socket.pair, plain::bytes(told), program.as_fd()) {
                Err(err) if would_block(&err) => return,
                // Its program has closed it, or reads no more: the connection goes with its end.
                _ => drop(parked.pop_front()),
            }
        }
        self.ask_for_more();
    }
}

/// An address of IPv4 as a socket of IPv4 has it.
pub(super) fn plain_address(at: SocketAddr, family: u32) -> SocketAddr {
    let nqe = nqe::named(queues_nqe::default(), at);
    nqe::address(&nqe, family).unwrap_or(at)
}

fn names(socket: &Socket) -> Answer {
    let state = match &socket.state {
        State::Fresh => 0,
        State::Bound => 1,
        State::Listens { .. } => 2,
        State::Connects => 3,
        State::Connected(_) => 4,
    };
    let octets = |at: Option<SocketAddr>| at.map_or([0; 16], asked::octets);
    let port = |at: Option<SocketAddr>| at.map_or(0, |a| a.port());
    Answer {
        state,
        family: socket.family,
        local: octets(socket.local),
        local_port: port(socket.local),
        remote: octets(socket.remote),
        remote_port: port(socket.remote),
        ..Answer::default()
    }
}

/// Whoever does not hear it has gone.
fn reply(asker: &OwnedFd, answer: &Answer, fd: Option<&OwnedFd>) {
    let _ = packets::send(asker, plain::bytes(answer), fd.map(AsFd::as_fd).as_slice());
}

//! What the service answers, and tells of its own accord.

use std::net::SocketAddr;

use heddle_stack::queues::abi::*;

use super::asked::{self, Accepted};
use super::flow::Flow;
use super::requests::plain_address;
use super::{Guest, State};
use crate::nqe;
use crate::stream::Stream;

impl Guest {
    /// Takes a completion or an event. One of a socket that is no more is nobody's.
    pub(super) fn told(&mut self, nqe: &queues_nqe) {
        let number = nqe.socket;
        let operation = nqe::operation(nqe);
        match operation & !QUEUES_DONE {
            QUEUES_BIND => self.bound(number, nqe),
            QUEUES_LISTEN => self.listens(number, nqe),
            QUEUES_CONNECT => self.connected(number, nqe),
            QUEUES_ACCEPT => self.accepted(nqe),
            QUEUES_NAME => self.named(number, nqe),
            // A connect was faster than its end: its own completion has led to another CLOSE.
            QUEUES_CLOSE if nqe.error == libc::ESTALE => {}
            QUEUES_CLOSE => drop(self.closing.remove(&number)),
            QUEUES_READABLE | QUEUES_WRITABLE | QUEUES_ENDED => self.enqueue_stream(nqe),
            _ => {}
        }
    }

    /// Events name the stream; its socket is the one that has it.
    fn enqueue_stream(&mut self, nqe: &queues_nqe) {
        let has =
            |state: &State| matches!(state, State::Connected(f) if f.generation == nqe.generation);
        let known = self.sockets.get(&nqe.socket).is_some_and(|s| has(&s.state));
        if known {
            self.enqueue(nqe.socket);
        }
    }

    fn own_name(&self, number: u32, nqe: &queues_nqe) -> Option<SocketAddr> {
        nqe::address(nqe, self.sockets.get(&number)?.family)
    }

    fn bound(&mut self, number: u32, nqe: &queues_nqe) {
        let own = self.own_name(number, nqe);
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        if nqe.error == 0 {
            socket.local = own;
            if matches!(socket.state, State::Fresh) {
                socket.state = State::Bound;
            }
        } else if socket.asks.is_none() {
            // It was bound at an earlier service: its program is to hear of it.
            return self.close(number, true);
        }
        self.answer_of_socket(number, nqe.error);
    }

    /// A socket that the service could not make is one too many.
    fn answer_of_socket(&mut self, number: u32, error: i32) {
        let error = if error == libc::EBADF { libc::EMFILE } else { error };
        if error == libc::EMFILE
            && let Some(socket) = self.sockets.get_mut(&number)
        {
            socket.made = false;
        }
        self.answer(number, error);
    }

    fn listens(&mut self, number: u32, nqe: &queues_nqe) {
        let own = self.own_name(number, nqe);
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        if nqe.error == 0 {
            socket.local = own;
            self.answer(number, 0);
            return self.ask_for_more();
        }
        socket.state = if socket.local.is_some() { State::Bound } else { State::Fresh };
        if socket.asks.is_none() {
            // It listened at an earlier service: its program is to hear of it.
            return self.close(number, true);
        }
        self.answer_of_socket(number, nqe.error);
    }

    fn connected(&mut self, number: u32, nqe: &queues_nqe) {
        let Some(region) = &self.region else { return };
        let stream = Stream::find(&region.memory, &region.layout, nqe.stream);
        if !self.sockets.contains_key(&number) {
            // Its program has closed it meanwhile.
            if nqe.error == 0 {
                let flags = u8::try_from(QUEUES_ABORT).unwrap_or(0);
                let generation = nqe.generation;
                self.say(queues_nqe { flags, generation, ..nqe::job(QUEUES_CLOSE, number) });
            }
            return;
        }
        if nqe.error != 0 {
            let error = if nqe.error == libc::EBADF { libc::EMFILE } else { nqe.error };
            // What is there of it is not used again: a socket that failed to connect stays odd.
            self.closing.insert(number);
            self.say(nqe::job(QUEUES_CLOSE, number));
            return self.renumber(number, error);
        }
        let own = self.own_name(number, nqe);
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        let Some(stream) = stream else { return self.close(number, true) };
        socket.local = own;
        let flow = Flow::new(stream, nqe.generation, &socket.pair, socket.skip);
        socket.skip = 0;
        socket.state = State::Connected(Box::new(flow));
        self.answer(number, 0);
        self.enqueue(number);
    }

    /// A connect failed: the program's socket is one that the service does not have.
    fn renumber(&mut self, number: u32, error: i32) {
        let another = self.next_number();
        let Some(mut socket) = self.sockets.remove(&number) else { return };
        socket.made = false;
        self.epoll.remove(std::os::fd::AsFd::as_fd(&socket.pair));
        if self.keep(another, socket).is_ok() {
            self.connect_failed(another, error);
        }
    }

    fn accepted(&mut self, nqe: &queues_nqe) {
        let (listener, number) = (nqe.socket, nqe.length);
        let number = if nqe.error == 0 { number } else { self.one_coming(listener) };
        let expected = self.coming.remove(&number) == Some(listener);
        let family = match self.sockets.get_mut(&listener) {
            Some(socket) => {
                if let State::Listens { under_way, .. } = &mut socket.state {
                    *under_way = under_way.saturating_sub(1);
                }
                Some(socket.family)
            }
            None => None,
        };
        if nqe.error != 0 {
            return; // asked for again by the next beat
        }
        let Some(region) = &self.region else { return };
        let stream = Stream::find(&region.memory, &region.layout, nqe.stream);
        let (Some(family), Some(stream), true) = (family, stream, expected) else {
            return self.refuse(number, nqe.generation);
        };
        let Ok((mut socket, program)) = Self::arrived(family) else {
            return self.refuse(number, nqe.generation);
        };
        let remote = nqe::address(nqe, family).unwrap_or(SocketAddr::from(([0; 4], 0)));
        socket.remote = Some(plain_address(remote, family));
        let flow = Flow::new(stream, nqe.generation, &socket.pair, 1);
        socket.state = State::Connected(Box::new(flow));
        if self.keep(number, socket).is_err() {
            return self.refuse(number, nqe.generation);
        }
        self.arriving.insert(number, (listener, program));
        self.say(nqe::job(QUEUES_NAME, number));
    }

    fn one_coming(&self, listener: u32) -> u32 {
        self.coming.iter().find(|(_, l)| **l == listener).map_or(0, |(n, _)| *n)
    }

    fn refuse(&mut self, number: u32, generation: u32) {
        let flags = u8::try_from(QUEUES_ABORT).unwrap_or(0);
        self.closing.insert(number);
        self.say(queues_nqe { flags, generation, ..nqe::job(QUEUES_CLOSE, number) });
    }

    /// The own name of a connection that was accepted: its listener's program can have it.
    fn named(&mut self, number: u32, nqe: &queues_nqe) {
        let own = self.own_name(number, nqe);
        let Some((listener, program)) = self.arriving.remove(&number) else { return };
        let Some(socket) = self.sockets.get_mut(&number) else { return };
        socket.local = own;
        let remote = socket.remote;
        let told = Accepted {
            remote: remote.map_or([0; 16], asked::octets),
            remote_port: remote.map_or(0, |r| r.port()),
            ..Accepted::default()
        };
        if let Some(listener) = self.sockets.get_mut(&listener)
            && let State::Listens { parked, .. } = &mut listener.state
        {
            parked.push_back((program, told));
        }
        self.enqueue(number);
        self.park(listener);
    }
}

//! A connection: a socket on one side, a stream on the other.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::SharedMemory;
use unix_io::{monotonic, would_block};

use super::CLOSE_SILENT;
use crate::nqe;
use crate::region::Layout;
use crate::stream::{Broken, Reader, Stream, Writer};
use crate::sys;

/// Pieces that a connection moves each way before it is others' turn.
const PIECES: usize = 8;

/// What came of a turn.
pub(super) enum Outcome {
    /// It waits for something.
    Waits,
    /// It has more to do.
    Again,
    /// The peer has taken the connection.
    Connected,
    /// The peer has not; nothing is left of the connection.
    Failed,
    /// The guest does not keep to the rules; the connection is over.
    Broken,
    /// Nothing is left of it: the guest had closed it.
    Closed,
}

/// A connection's stream, and what is to become of it.
pub(super) struct Flow {
    socket: u32,
    pub(super) number: u16,
    pub(super) generation: u32,
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) aborts: bool,
    stream: Stream,
    out: Reader,
    back: Writer,
    /// The CONNECT that has no answer yet.
    connecting: Option<queues_nqe>,
    /// The peer sends no more; the connection is over.
    ended: bool,
    dead: bool,
    /// SHUTDOWNs and CLOSEs after bytes that were not sent yet.
    ends: VecDeque<queues_nqe>,
    moved: u64,
}

impl Flow {
    pub(super) fn begin(
        memory: &Arc<SharedMemory>,
        layout: &Layout,
        socket: u32,
        (number, generation): (u16, u32),
        connecting: Option<queues_nqe>,
    ) -> Option<Self> {
        let stream = Stream::find(memory, layout, number)?;
        stream.begin(generation);
        Some(Self {
            socket,
            number,
            generation,
            sent: 0,
            received: 0,
            aborts: false,
            out: Reader::of_service(stream.clone()),
            back: Writer::of_service(stream.clone()),
            stream,
            connecting,
            ended: false,
            dead: false,
            ends: VecDeque::new(),
            moved: monotonic(),
        })
    }

    /// Whether the guest has closed it.
    pub(super) fn is_closing(&self) -> bool {
        self.ends.back().is_some_and(|job| nqe::operation(job) == QUEUES_CLOSE)
    }

    pub(super) fn is_connecting(&self) -> bool {
        self.connecting.is_some()
    }

    /// The CONNECT that will not be answered otherwise.
    pub(super) fn take_connecting(&mut self) -> Option<queues_nqe> {
        self.connecting.take()
    }

    /// A SHUTDOWN or CLOSE of the guest's; an errno if it cannot be.
    pub(super) fn end(&mut self, job: &queues_nqe) -> Result<(), i32> {
        if job.generation != self.generation {
            return Err(libc::ESTALE);
        }
        if self.is_closing() || self.ends.len() >= 8 {
            return Err(libc::EINVAL);
        }
        // A ring that is broken is seen in the turn that follows.
        let _ = self.out.bytes();
        if job.offset > self.out.produced() {
            return Err(libc::EINVAL);
        }
        self.moved = monotonic();
        self.ends.push_back(*job);
        Ok(())
    }

    fn event(&self, operation: u32) -> queues_nqe {
        queues_nqe {
            operation: u8::try_from(operation).unwrap_or(0),
            socket: self.socket,
            stream: self.number,
            generation: self.generation,
            ..queues_nqe::default()
        }
    }

    pub(super) fn turn(
        &mut self,
        fd: &mut Option<OwnedFd>,
        readable: &mut bool,
        writable: &mut bool,
        say: &mut VecDeque<queues_nqe>,
    ) -> Outcome {
        if let Some(outcome) = self.connect(fd, *writable, say) {
            return outcome;
        }
        let before = self.sent + self.received;
        let moved = self.send(fd, writable, say).and_then(|()| self.receive(fd, readable, say));
        if moved.is_err() {
            self.die(fd, libc::EPROTO, say);
            return Outcome::Broken;
        }
        if self.sent + self.received != before {
            self.moved = monotonic();
        }
        let closed = self.finish(fd, say);
        if closed {
            return Outcome::Closed;
        }
        let more = !self.dead && self.sent + self.received != before;
        if more { Outcome::Again } else { Outcome::Waits }
    }

    /// Looks what has become of a connect; `None`: it is connected.
    fn connect(
        &mut self,
        fd: &mut Option<OwnedFd>,
        writable: bool,
        say: &mut VecDeque<queues_nqe>,
    ) -> Option<Outcome> {
        let job = self.connecting?;
        let Some(socket) = fd else { return Some(Outcome::Waits) };
        if !writable {
            return Some(Outcome::Waits);
        }
        let error = sys::take_error(socket);
        if error == 0 && sys::name(socket, true).is_err() {
            return Some(Outcome::Waits); // not yet
        }
        let own = sys::name(socket, false);
        self.connecting = None;
        let error = own.as_ref().map_or(libc::ENETDOWN, |_| error);
        let mut done = proto::done(&job, error);
        if let (0, Ok(own)) = (error, own) {
            sys::set_linger(socket, Some(0));
            done = nqe::named(done, own);
            done.stream = self.number;
            done.generation = self.generation;
            say.push_back(done);
            return Some(Outcome::Connected);
        }
        say.push_back(done);
        Some(Outcome::Failed)
    }

    /// Sends what the guest has put into the out ring.
    fn send(
        &mut self,
        fd: &mut Option<OwnedFd>,
        writable: &mut bool,
        say: &mut VecDeque<queues_nqe>,
    ) -> Result<(), Broken> {
        for _ in 0..PIECES {
            let Some(socket) = fd else { return Ok(()) };
            let (at, count) = self.out.bytes()?;
            if count == 0 {
                if self.out.ask()? {
                    continue;
                }
                return Ok(());
            }
            if !*writable {
                return Ok(());
            }
            match sys::send(socket, at, count) {
                Ok(sent) => {
                    self.sent += sent as u64;
                    if self.out.take(sent) {
                        let offset = self.out.consumed();
                        say.push_back(queues_nqe { offset, ..self.event(QUEUES_WRITABLE) });
                    }
                }
                Err(err) if would_block(&err) => *writable = false,
                Err(err) => {
                    self.die(fd, err.raw_os_error().unwrap_or(libc::EIO), say);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Receives what the in ring has room for.
    fn receive(
        &mut self,
        fd: &mut Option<OwnedFd>,
        readable: &mut bool,
        say: &mut VecDeque<queues_nqe>,
    ) -> Result<(), Broken> {
        for _ in 0..PIECES {
            let Some(socket) = fd else { return Ok(()) };
            if self.ended || !*readable {
                return Ok(());
            }
            let (at, room) = self.back.room()?;
            if room == 0 {
                if self.back.ask()? {
                    continue;
                }
                return Ok(());
            }
            match sys::receive(socket, at, room) {
                Ok(0) => {
                    self.ended = true;
                    self.stream.set_state(QUEUES_STREAM_USED | QUEUES_STREAM_END, 0);
                    if self.stream.wakes_reader() {
                        self.tell_readable(say);
                    }
                }
                Ok(got) => {
                    self.received += got as u64;
                    if self.back.put(got) {
                        self.tell_readable(say);
                    }
                }
                Err(err) if would_block(&err) => *readable = false,
                Err(err) => {
                    self.die(fd, err.raw_os_error().unwrap_or(libc::EIO), say);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn tell_readable(&self, say: &mut VecDeque<queues_nqe>) {
        let offset = self.back.produced();
        say.push_back(queues_nqe { offset, ..self.event(QUEUES_READABLE) });
    }

    /// The connection is over, though nobody closed it.
    fn die(&mut self, fd: &mut Option<OwnedFd>, error: i32, say: &mut VecDeque<queues_nqe>) {
        drop(fd.take());
        self.dead = true;
        let end = if self.ended { QUEUES_STREAM_END } else { 0 };
        self.stream.set_state(QUEUES_STREAM_USED | end | QUEUES_STREAM_DEAD, error);
        say.push_back(queues_nqe { error, ..self.event(QUEUES_ENDED) });
    }

    /// Does those ends whose bytes have been sent. Says whether it is closed.
    fn finish(&mut self, fd: &mut Option<OwnedFd>, say: &mut VecDeque<queues_nqe>) -> bool {
        while let Some(job) = self.ends.front().copied() {
            let aborts = u32::from(job.flags) & QUEUES_ABORT != 0;
            let closes = nqe::operation(&job) == QUEUES_CLOSE;
            let given_up = closes && monotonic() - self.moved > CLOSE_SILENT;
            if !self.dead && !aborts && !given_up && self.out.consumed() < job.offset {
                return false;
            }
            self.ends.pop_front();
            let mut error = 0;
            if !closes && let Some(socket) = fd {
                let how = match job.length {
                    QUEUES_SHUT_READ => libc::SHUT_RD,
                    QUEUES_SHUT_WRITE => libc::SHUT_WR,
                    _ => libc::SHUT_RDWR,
                };
                error =
                    sys::shutdown(socket, how).err().and_then(|e| e.raw_os_error()).unwrap_or(0);
            }
            if u32::from(job.flags) & QUEUES_QUIET == 0 {
                say.push_back(proto::done(&job, error));
            }
            if closes {
                self.aborts = aborts || given_up;
                return true;
            }
        }
        false
    }
}

//! What a guest asks for.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use unix_io::epoll::{READABLE, WRITABLE};

use super::{Context, Kind, Region, Socket, end_stream};
use crate::queues::abi::*;
use crate::queues::proto::{self, Errno};
use crate::queues::sockets;
use crate::queues::stream::{Later, Next};

/// ACCEPTs of a listener.
const ACCEPTS: usize = 64;

impl Region {
    pub(super) fn serve(&mut self, job: &queues_nqe, context: &Context<'_>) {
        let result = match job.operation {
            NOTHING => return self.complete(job, Ok(())),
            SEND | RECEIVE => {
                match self.connection(job) {
                    Ok(index) => self.activate(index),
                    Err(_) => self.stats.refused += 1,
                }
                return;
            }
            SHUTDOWN => self.shutdown(job),
            CLOSE => self.close(job, context),
            SOCKET | BIND | LISTEN | CONNECT | ACCEPT | NAME | SET | GET if !self.controls() => {
                Err(Errno(libc::EOPNOTSUPP))
            }
            SOCKET => self.socket(job),
            LISTEN => self.listen(job, context),
            CONNECT => self.connect(job, context),
            ACCEPT => self.want_accept(job),
            BIND | NAME | SET | GET => self.ask(job),
            _ => Err(Errno(libc::EPROTO)),
        };
        if let Err(errno) = result {
            self.stats.refused += 1;
            self.complete(job, Err(errno));
        }
    }

    /// The connection that a job is about.
    fn connection(&mut self, job: &queues_nqe) -> Result<usize, Errno> {
        let (index, socket) = self.get(job.socket)?;
        match &socket.kind {
            Kind::Connection(s) if s.generation == job.generation => Ok(index),
            Kind::Connection(_) => Err(Errno(libc::ESTALE)),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    fn may_be(&self, number: u32) -> Result<(), Errno> {
        if number == 0 {
            return Err(Errno(libc::EBADF));
        }
        if self.by_number.contains_key(&number) {
            return Err(Errno(libc::EEXIST));
        }
        if self.by_number.len() >= self.most { Err(Errno(libc::EMFILE)) } else { Ok(()) }
    }

    fn socket(&mut self, job: &queues_nqe) -> Result<(), Errno> {
        if job.length != 4 && job.length != 6 {
            return Err(Errno(libc::EAFNOSUPPORT));
        }
        self.may_be(job.socket)?;
        self.insert(job.socket, job.length == 6, Kind::Wanted(*job));
        self.wanted.push((job.socket, job.length));
        Ok(())
    }

    /// A socket that exists, and its descriptor.
    fn open(&mut self, number: u32) -> Result<(usize, &mut Socket), Errno> {
        let (index, socket) = self.get(number)?;
        if socket.fd.is_none() { Err(Errno(libc::EINVAL)) } else { Ok((index, socket)) }
    }

    /// BIND, NAME, SET and GET, which are answered at once.
    fn ask(&mut self, job: &queues_nqe) -> Result<(), Errno> {
        let (_, socket) = self.open(job.socket)?;
        let Some(fd) = socket.fd.as_ref().map(AsFd::as_fd) else { return Err(Errno(libc::EBADF)) };
        let mut done = proto::done(job, 0);
        match job.operation {
            BIND => {
                sockets::bind(fd, socket.v6, proto::address(job))?;
                proto::name(&mut done, sockets::name(fd, false)?);
            }
            NAME => {
                let peer = u32::from(job.flags) & QUEUES_PEER != 0;
                proto::name(&mut done, sockets::name(fd, peer)?);
            }
            SET => sockets::set_option(fd, job.option, job.credit)?,
            _ => done.credit = sockets::get_option(fd, job.option)?,
        }
        self.complete_with(job, done);
        Ok(())
    }

    fn listen(&mut self, job: &queues_nqe, context: &Context<'_>) -> Result<(), Errno> {
        let (index, socket) = self.open(job.socket)?;
        let Some(fd) = &socket.fd else { return Err(Errno(libc::EBADF)) };
        let mut done = proto::done(job, 0);
        match socket.kind {
            Kind::Listener(_) => sockets::listen(fd.as_fd(), job.credit)?,
            Kind::Idle => {
                sockets::listen(fd.as_fd(), job.credit)?;
                context.watch(fd.as_fd(), READABLE, index)?;
                socket.kind = Kind::Listener(VecDeque::new());
            }
            _ => return Err(Errno(libc::EINVAL)),
        }
        if let Some(fd) = &socket.fd {
            proto::name(&mut done, sockets::name(fd.as_fd(), false)?);
        }
        self.complete_with(job, done);
        Ok(())
    }

    fn connect(&mut self, job: &queues_nqe, context: &Context<'_>) -> Result<(), Errno> {
        match self.open(job.socket)?.1.kind {
            Kind::Idle => {}
            Kind::Connecting(..) => return Err(Errno(libc::EALREADY)),
            Kind::Connection(_) => return Err(Errno(libc::EISCONN)),
            _ => return Err(Errno(libc::EINVAL)),
        }
        let stream = self.take_stream().ok_or(Errno(libc::ENOBUFS))?;
        let (index, socket) = self.open(job.socket)?;
        let begun = match &socket.fd {
            Some(fd) => sockets::connect(fd.as_fd(), socket.v6, proto::address(job)),
            None => Err(Errno(libc::EBADF)),
        };
        match begun {
            Ok(()) | Err(Errno(libc::EINPROGRESS)) => {}
            Err(errno) => {
                self.release(stream);
                return Err(errno);
            }
        }
        socket.kind = Kind::Connecting(*job, stream);
        let watched = socket.fd.as_ref().map_or(Ok(()), |fd| {
            context.watch(fd.as_fd(), READABLE | WRITABLE | unix_io::epoll::HALF_CLOSED, index)
        });
        if let Err(errno) = watched {
            socket.kind = Kind::Idle;
            self.release(stream);
            return Err(errno);
        }
        Ok(())
    }

    /// The kernel says that a connect is over.
    pub(super) fn connected(&mut self, index: usize, context: &Context<'_>) {
        let Some(Some(socket)) = self.sockets.get_mut(index) else { return };
        let (Kind::Connecting(job, number), Some(fd)) = (&socket.kind, &socket.fd) else { return };
        let (job, number) = (*job, *number);
        // Asked so, and not by SO_ERROR, the kernel lets the socket connect again.
        let failed = match sockets::connect(fd.as_fd(), socket.v6, proto::address(&job)) {
            Ok(()) | Err(Errno(libc::EISCONN)) => 0,
            Err(Errno(libc::EALREADY | libc::EINPROGRESS)) => return,
            Err(errno) => errno.0,
        };
        if failed != 0 {
            context.epoll.remove(fd.as_fd());
            socket.kind = Kind::Idle;
            self.release(number);
            return self.complete(&job, Err(Errno(failed)));
        }
        let local = sockets::name(fd.as_fd(), false);
        let stream = self.begin(number);
        let mut done = proto::done(&job, 0);
        done.stream = number;
        done.generation = stream.generation;
        if let Ok(at) = local {
            proto::name(&mut done, at);
        }
        if let Some(Some(socket)) = self.sockets.get_mut(index) {
            socket.kind = Kind::Connection(stream);
        }
        self.complete_with(&job, done);
        self.activate(index);
    }

    fn want_accept(&mut self, job: &queues_nqe) -> Result<(), Errno> {
        self.may_be(job.length)?;
        let (index, socket) = self.open(job.socket)?;
        let Kind::Listener(waiting) = &mut socket.kind else { return Err(Errno(libc::EINVAL)) };
        if waiting.len() >= ACCEPTS {
            return Err(Errno(libc::EMFILE));
        }
        waiting.push_back(*job);
        self.activate(index);
        Ok(())
    }

    pub(super) fn accept(&mut self, index: usize, context: &Context<'_>) -> Next {
        loop {
            let Some(Some(Socket { fd: Some(fd), v6, kind: Kind::Listener(waiting), .. })) =
                self.sockets.get_mut(index)
            else {
                return Next::Wait;
            };
            let (v6, Some(job)) = (*v6, waiting.front().copied()) else { return Next::Wait };
            if self.streams.iter().all(|u| u.taken) {
                return Next::Wait; // `release` comes back
            }
            let refused = self.by_number.contains_key(&job.length).then_some(Errno(libc::EEXIST));
            let got = match refused {
                Some(errno) => Err(errno),
                None => sockets::accept(fd.as_fd()),
            };
            if got.as_ref().is_err_and(|e| e.0 == libc::EAGAIN) {
                return Next::Wait;
            }
            waiting.pop_front();
            match got {
                Ok((fd, peer)) => self.accepted(&job, fd, v6, peer, context),
                Err(errno) => self.complete(&job, Err(errno)),
            }
        }
    }

    fn accepted(
        &mut self,
        job: &queues_nqe,
        fd: OwnedFd,
        v6: bool,
        peer: core::net::SocketAddr,
        context: &Context<'_>,
    ) {
        let Some(number) = self.take_stream() else {
            return self.complete(job, Err(Errno(libc::ENOBUFS)));
        };
        let stream = self.begin(number);
        let mut done = proto::done(job, 0);
        (done.length, done.stream, done.generation) = (job.length, number, stream.generation);
        proto::name(&mut done, peer);
        let index = self.insert(job.length, v6, Kind::Connection(stream));
        let all = READABLE | WRITABLE | unix_io::epoll::HALF_CLOSED;
        let watched = context.watch(fd.as_fd(), all, index);
        if let Some(Some(socket)) = self.sockets.get_mut(index) {
            socket.fd = Some(fd);
        }
        if let Err(errno) = watched {
            self.remove(index, context);
            return self.complete(job, Err(errno));
        }
        self.complete_with(job, done);
        self.activate(index);
    }

    fn shutdown(&mut self, job: &queues_nqe) -> Result<(), Errno> {
        let index = self.connection(job)?;
        let view = &self.view;
        let Some(Some(Socket { fd: Some(fd), kind: Kind::Connection(stream), .. })) =
            self.sockets.get_mut(index)
        else {
            return Err(Errno(libc::EBADF));
        };
        if job.length > QUEUES_SHUT_BOTH || stream.shutdown.is_some() {
            return Err(Errno(libc::EINVAL));
        }
        if job.length == QUEUES_SHUT_READ {
            stream.stop_reading();
            sockets::shutdown(fd.as_fd(), job.length);
            self.complete(job, Ok(()));
            return Ok(());
        }
        if !stream.may_wait_for(view, job.offset) {
            return Err(Errno(libc::EINVAL));
        }
        if job.length == QUEUES_SHUT_BOTH {
            stream.stop_reading();
        }
        stream.shutdown = Some(Later { offset: job.offset, job: *job });
        self.activate(index);
        Ok(())
    }

    pub(super) fn close(&mut self, job: &queues_nqe, context: &Context<'_>) -> Result<(), Errno> {
        let (index, socket) = self.get(job.socket)?;
        match &mut socket.kind {
            Kind::Wanted(asked) | Kind::Connecting(asked, _) => {
                let asked = *asked;
                self.complete(&asked, Err(Errno(libc::ECONNABORTED)));
            }
            Kind::Listener(waiting) => {
                for asked in core::mem::take(waiting) {
                    self.complete(&asked, Err(Errno(libc::ECONNABORTED)));
                }
            }
            Kind::Connection(_) | Kind::Idle => {}
        }
        if self.connection(job) == Err(Errno(libc::EINVAL)) {
            self.remove(index, context);
            self.complete(job, Ok(()));
            return Ok(());
        }
        self.connection(job)?;
        let view = &self.view;
        let Some(Some(Socket { fd: Some(fd), kind: Kind::Connection(stream), .. })) =
            self.sockets.get_mut(index)
        else {
            return Err(Errno(libc::EBADF));
        };
        let aborts = u32::from(job.flags) & QUEUES_ABORT != 0;
        if stream.close.is_some() || (!aborts && !stream.may_wait_for(view, job.offset)) {
            return Err(Errno(libc::EINVAL));
        }
        if aborts {
            if self.flags & QUEUES_CONTROL != 0 {
                sockets::reset_at_close(fd.as_fd());
            }
            end_stream(stream, view, libc::ECONNABORTED);
        }
        stream.close = Some(Later { offset: job.offset, job: *job });
        stream.stop_reading();
        stream.progress = context.now;
        self.activate(index);
        Ok(())
    }
}

macro_rules! operations {
    ($($name:ident = $value:ident,)*) => {
        $(pub(super) const $name: u8 = {
            assert!($value < 128, "an operation fits its byte");
            #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
            { $value as u8 }
        };)*
    };
}

operations! {
    SOCKET = QUEUES_SOCKET,
    BIND = QUEUES_BIND,
    LISTEN = QUEUES_LISTEN,
    CONNECT = QUEUES_CONNECT,
    ACCEPT = QUEUES_ACCEPT,
    NAME = QUEUES_NAME,
    SET = QUEUES_SET,
    GET = QUEUES_GET,
    SHUTDOWN = QUEUES_SHUTDOWN,
    CLOSE = QUEUES_CLOSE,
    SEND = QUEUES_SEND,
    RECEIVE = QUEUES_RECEIVE,
    NOTHING = QUEUES_NOTHING,
    READABLE_EVENT = QUEUES_READABLE,
    WRITABLE_EVENT = QUEUES_WRITABLE,
    ENDED_EVENT = QUEUES_ENDED,
}

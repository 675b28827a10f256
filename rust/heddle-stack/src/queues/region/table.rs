//! What sockets and streams a region has.

use std::os::fd::{AsFd, OwnedFd};

use super::{Context, Kind, Region, Socket};
use crate::queues::proto::Errno;
use crate::queues::sockets;
use crate::queues::stream::Stream;

impl Region {
    pub(super) fn insert(&mut self, number: u32, v6: bool, kind: Kind) -> usize {
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

    pub(super) fn remove(&mut self, index: usize, context: &Context<'_>) {
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

    pub(super) fn release(&mut self, stream: u16) {
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

    pub(super) fn take_stream(&mut self) -> Option<u16> {
        let free = self.streams.iter().position(|u| !u.taken)?;
        let u = self.streams.get_mut(free)?;
        u.taken = true;
        u.generation = u.generation.wrapping_add(1).max(1);
        u16::try_from(free).ok()
    }

    pub(super) fn begin(&self, number: u16) -> Stream {
        let generation = self.streams.get(usize::from(number)).map_or(1, |u| u.generation);
        Stream::begin(&self.view, number, generation, self.controls())
    }

    pub(super) fn activate(&mut self, index: usize) {
        if let Some(Some(socket)) = self.sockets.get_mut(index)
            && !socket.queued
        {
            socket.queued = true;
            self.active.push_back(index);
        }
    }

    pub(super) fn get(&mut self, number: u32) -> Result<(usize, &mut Socket), Errno> {
        let index = *self.by_number.get(&number).ok_or(Errno(libc::EBADF))?;
        let socket = self.sockets.get_mut(index).and_then(Option::as_mut);
        socket.map(|s| (index, s)).ok_or(Errno(libc::EBADF))
    }

    /// GIVE: a duplicate of a socket that a program has.
    pub(in crate::queues) fn give(
        &mut self,
        fd: OwnedFd,
        context: &Context<'_>,
    ) -> Result<(u16, u32), Errno> {
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
    pub(in crate::queues) fn made(
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
    pub(in crate::queues) fn ask_again(&mut self) {
        self.wanted.clear();
        for socket in self.sockets.iter().flatten() {
            if let Kind::Wanted(job) = &socket.kind {
                self.wanted.push((socket.number, job.length));
            }
        }
    }

    /// Counts what there is.
    pub(in crate::queues) fn count(&self) -> (u64, u64) {
        let all = self.by_number.len() as u64;
        let is_connection = |s: &&Socket| matches!(s.kind, Kind::Connection(_));
        let connections = self.sockets.iter().flatten().filter(is_connection).count() as u64;
        (connections, all - connections)
    }
}

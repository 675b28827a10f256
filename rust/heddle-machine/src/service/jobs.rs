//! What a guest asks for. Each job is a copy, whose numbers are looked up and never trusted.

use core::ffi::c_int;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;

use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::protection::protects;
use unix_io::would_block;

use super::{Kind, SOCKETS_FOR_STREAM, Service, Socket, own};
use crate::nqe;
use crate::sys;

/// ACCEPTs of a listener that may wait.
const ACCEPTS: usize = 64;

/// An errno, or what the completion says.
type Answer = Result<queues_nqe, i32>;

fn errno(err: &io::Error) -> i32 {
    err.raw_os_error().unwrap_or(libc::EIO)
}

/// The kernel's level and name of an option, and what its unit is of ours.
fn option_of(option: u32) -> Option<(c_int, c_int)> {
    Some(match option {
        QUEUES_OPTION_REUSE_ADDRESS => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        QUEUES_OPTION_REUSE_PORT => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        QUEUES_OPTION_V6_ONLY => (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        QUEUES_OPTION_NO_DELAY => (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        QUEUES_OPTION_KEEPALIVE => (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        QUEUES_OPTION_KEEPALIVE_IDLE => (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        QUEUES_OPTION_KEEPALIVE_INTERVAL => (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
        QUEUES_OPTION_KEEPALIVE_COUNT => (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
        QUEUES_OPTION_USER_TIMEOUT => (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
        QUEUES_OPTION_SEND_BUFFER => (libc::SOL_SOCKET, libc::SO_SNDBUF),
        QUEUES_OPTION_RECEIVE_BUFFER => (libc::SOL_SOCKET, libc::SO_RCVBUF),
        _ => return None,
    })
}

impl Service {
    /// Serves a job.
    pub(super) fn job(&mut self, job: &queues_nqe) {
        let done = match nqe::operation(job) {
            QUEUES_SEND | QUEUES_RECEIVE => return self.moves(job),
            QUEUES_NOTHING => Ok(proto::done(job, 0)),
            QUEUES_SOCKET => self.socket(job),
            QUEUES_BIND => self.bind(job),
            QUEUES_LISTEN => self.listen(job),
            QUEUES_NAME => self.name(job),
            QUEUES_SET => self.set(job),
            QUEUES_GET => self.get(job),
            QUEUES_CONNECT => match self.connect(job) {
                Ok(()) => return,
                Err(errno) => Err(errno),
            },
            QUEUES_ACCEPT => match self.wants(job) {
                Ok(()) => return,
                Err(errno) => Err(errno),
            },
            QUEUES_SHUTDOWN | QUEUES_CLOSE => match self.ends(job) {
                Ok(()) => return,
                Err(errno) => Err(errno),
            },
            _ => Err(libc::EPROTO),
        };
        match done {
            Ok(answer) => self.answer(job, answer),
            Err(errno) => {
                let rule = [libc::EPROTO, libc::EBADF, libc::EEXIST, libc::ESTALE, libc::EINVAL];
                self.counts.refused_job += u64::from(rule.contains(&errno));
                self.complete(job, errno);
            }
        }
    }

    fn of(&mut self, job: &queues_nqe) -> Result<&mut Socket, i32> {
        self.sockets.get_mut(&job.socket).ok_or(libc::EBADF)
    }

    /// SEND and RECEIVE: there are bytes, or there is room. Wrong ones change nothing.
    fn moves(&mut self, job: &queues_nqe) {
        let known = match self.of(job) {
            Ok(Socket { kind: Kind::Connection(flow), .. }) => flow.generation == job.generation,
            _ => false,
        };
        if known {
            self.enqueue(job.socket);
        } else {
            self.counts.refused_job += 1;
        }
    }

    fn may_have_another(&mut self) -> Result<(), i32> {
        let most = self.layout.streams as usize * SOCKETS_FOR_STREAM;
        if self.sockets.len() >= most && protects("sockets") {
            self.counts.refused_sockets += 1;
            return Err(libc::EMFILE);
        }
        Ok(())
    }

    fn socket(&mut self, job: &queues_nqe) -> Answer {
        if job.socket == 0 || !matches!(job.length, 4 | 6) {
            return Err(libc::EINVAL);
        }
        if self.sockets.contains_key(&job.socket) {
            return Err(libc::EEXIST);
        }
        self.may_have_another()?;
        let fd = sys::socket(job.length).map_err(|e| errno(&e))?;
        let socket = Socket {
            fd: Some(fd),
            family: job.length,
            kind: Kind::Fresh,
            readable: false,
            writable: false,
            queued: false,
            resets: false,
        };
        self.sockets.insert(job.socket, socket);
        Ok(proto::done(job, 0))
    }

    fn bind(&mut self, job: &queues_nqe) -> Answer {
        let socket = self.of(job)?;
        let at = nqe::address(job, socket.family).ok_or(libc::EAFNOSUPPORT)?;
        let (Kind::Fresh, Some(fd)) = (&socket.kind, &socket.fd) else { return Err(libc::EINVAL) };
        sys::bind(fd, at).map_err(|e| errno(&e))?;
        let own = sys::name(fd, false).map_err(|e| errno(&e))?;
        Ok(nqe::named(proto::done(job, 0), own))
    }

    fn listen(&mut self, job: &queues_nqe) -> Answer {
        let socket = self.of(job)?;
        let first = matches!(socket.kind, Kind::Fresh);
        let Some(fd) = &socket.fd else { return Err(libc::EINVAL) };
        if !first && !matches!(socket.kind, Kind::Listener { .. }) {
            return Err(libc::EINVAL);
        }
        sys::listen(fd, job.credit).map_err(|e| errno(&e))?;
        let own = sys::name(fd, false).map_err(|e| errno(&e))?;
        if first {
            socket.kind = Kind::Listener { accepts: VecDeque::new() };
            self.begin_to_watch(job.socket)?;
        }
        Ok(nqe::named(proto::done(job, 0), own))
    }

    fn begin_to_watch(&mut self, number: u32) -> Result<(), i32> {
        let Some(Socket { fd: Some(fd), .. }) = self.sockets.get(&number) else { return Ok(()) };
        self.watch(fd, number).map_err(|e| errno(&e))
    }

    fn connect(&mut self, job: &queues_nqe) -> Result<(), i32> {
        let family = self.of(job)?.family;
        let to = nqe::address(job, family).ok_or(libc::EAFNOSUPPORT)?;
        match &self.of(job)?.kind {
            Kind::Fresh => {}
            Kind::Connection(flow) if flow.is_connecting() => return Err(libc::EALREADY),
            Kind::Connection(_) => return Err(libc::EISCONN),
            Kind::Listener { .. } => return Err(libc::EINVAL),
        }
        self.may_reach(to)?;
        let quiet = u32::from(job.flags) & QUEUES_QUIET != 0;
        if quiet {
            return Err(libc::EINVAL); // nobody would learn of the stream
        }
        let flow = self.begin_flow(job.socket, Some(*job)).ok_or(libc::ENOBUFS)?;
        let number = flow.number;
        let socket = self.of(job)?;
        let Some(fd) = &socket.fd else { return Err(libc::EINVAL) };
        let begun = match sys::connect(fd, to) {
            Err(err) if err.raw_os_error() == Some(libc::EINPROGRESS) || would_block(&err) => {
                Ok(())
            }
            Err(err) => Err(errno(&err)),
            Ok(()) => {
                socket.writable = true;
                Ok(())
            }
        };
        let begun = begun.and_then(|()| {
            self.of(job)?.kind = Kind::Connection(Box::new(flow));
            self.begin_to_watch(job.socket)
        });
        if let Err(errno) = begun {
            self.free.push(number);
            self.of(job)?.kind = Kind::Fresh;
            return Err(errno);
        }
        self.enqueue(job.socket);
        Ok(())
    }

    /// Refuses what in the guest's own container is not the guest's.
    fn may_reach(&mut self, to: SocketAddr) -> Result<(), i32> {
        if !protects("own") || !own::is_own(to.ip(), &sys::own_addresses()) {
            return Ok(());
        }
        let listens = |s: &Socket| match (&s.kind, &s.fd) {
            (Kind::Listener { .. }, Some(fd)) => {
                sys::name(fd, false).is_ok_and(|at| own::takes(at, to))
            }
            _ => false,
        };
        if self.sockets.values().any(listens) {
            return Ok(());
        }
        self.counts.refused_own += 1;
        Err(libc::ECONNREFUSED)
    }

    /// ACCEPT: waits for a connection.
    fn wants(&mut self, job: &queues_nqe) -> Result<(), i32> {
        let quiet = u32::from(job.flags) & QUEUES_QUIET != 0;
        if job.length == 0 || quiet {
            return Err(libc::EINVAL);
        }
        if self.sockets.contains_key(&job.length) {
            return Err(libc::EEXIST);
        }
        self.may_have_another()?;
        match &mut self.of(job)?.kind {
            Kind::Listener { accepts } if accepts.len() >= ACCEPTS => return Err(libc::EMFILE),
            Kind::Listener { accepts } => accepts.push_back(*job),
            _ => return Err(libc::EINVAL),
        }
        self.enqueue(job.socket);
        Ok(())
    }

    fn name(&mut self, job: &queues_nqe) -> Answer {
        let socket = self.of(job)?;
        let fd = socket.fd.as_ref().ok_or(libc::ENOTCONN)?;
        let peer = u32::from(job.flags) & QUEUES_PEER != 0;
        let name = sys::name(fd, peer).map_err(|e| errno(&e))?;
        Ok(nqe::named(proto::done(job, 0), name))
    }

    fn set(&mut self, job: &queues_nqe) -> Answer {
        let socket = self.of(job)?;
        let option = u32::from(job.option);
        if option == QUEUES_OPTION_LINGER {
            socket.resets = job.credit == 0;
            return Ok(proto::done(job, 0));
        }
        let (level, name) = option_of(option).ok_or(libc::EPROTO)?;
        let fd = socket.fd.as_ref().ok_or(libc::EINVAL)?;
        let value = c_int::try_from(job.credit).map_err(|_| libc::EINVAL)?;
        sys::set_option(fd, level, name, value).map_err(|e| errno(&e))?;
        Ok(proto::done(job, 0))
    }

    fn get(&mut self, job: &queues_nqe) -> Answer {
        let socket = self.of(job)?;
        let option = u32::from(job.option);
        let linger = if socket.resets { 0 } else { QUEUES_LINGER_OFF };
        let fd = socket.fd.as_ref().ok_or(libc::EINVAL)?;
        let credit = match option {
            QUEUES_OPTION_LINGER => linger,
            QUEUES_OPTION_SEND_QUEUE => sys::unsent(fd).map_err(|e| errno(&e))?,
            _ => {
                let (level, name) = option_of(option).ok_or(libc::EPROTO)?;
                sys::option(fd, level, name).map_err(|e| errno(&e))?.cast_unsigned()
            }
        };
        Ok(queues_nqe { credit, ..proto::done(job, 0) })
    }

    /// SHUTDOWN and CLOSE.
    fn ends(&mut self, job: &queues_nqe) -> Result<(), i32> {
        let closes = nqe::operation(job) == QUEUES_CLOSE;
        let socket = self.of(job)?;
        match &mut socket.kind {
            Kind::Connection(flow) if !flow.is_connecting() => {
                flow.end(job)?;
                self.enqueue(job.socket);
                return Ok(());
            }
            _ if !closes => return Err(libc::ENOTCONN),
            Kind::Connection(flow) => {
                let number = flow.number;
                if let Some(connect) = flow.take_connecting() {
                    self.complete(&connect, libc::ECONNABORTED);
                }
                self.free_stream(number);
            }
            Kind::Listener { accepts } => {
                for accept in core::mem::take(accepts) {
                    self.complete(&accept, libc::ECONNABORTED);
                }
            }
            Kind::Fresh => {}
        }
        self.sockets.remove(&job.socket);
        self.complete(job, 0);
        Ok(())
    }
}

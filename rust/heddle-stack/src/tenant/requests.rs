//! What the agent asks of a tenant's sockets.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use smoltcp::time::Instant;
use smoltcp::wire::IpEndpoint;

use super::addresses::reachable;
use super::{Context, Socket, Tenant, interface};
use crate::abi::*;
use crate::connection::{Connection, Phase};
use crate::proto::{self, Errno, named};

const BACKLOG_MAX: u32 = 4096;

impl Tenant {
    pub(crate) fn bind(
        &mut self,
        id: u64,
        at: IpEndpoint,
        flags: u32,
    ) -> Result<IpEndpoint, Errno> {
        if self.sockets.contains_key(&id) {
            return Err(Errno(libc::EEXIST));
        }
        self.has_place()?;
        self.is_own(at.addr)?;
        let local =
            self.ports.bind(id, at, flags).inspect_err(|_| self.counts.refuse_ports += 1)?;
        self.sockets.insert(id, Socket::Bound { local });
        Ok(local)
    }

    pub(crate) fn listen(
        &mut self,
        id: u64,
        at: IpEndpoint,
        flags: u32,
        backlog: u32,
        options: &stack_options,
    ) -> Result<IpEndpoint, Errno> {
        let backlog = backlog.clamp(1, BACKLOG_MAX);
        let settings = self.settings.with(options)?;
        let local = match self.sockets.get_mut(&id) {
            Some(Socket::Connection { .. }) => return Err(Errno(libc::EINVAL)),
            Some(Socket::Listener { local, backlog: of_before, .. }) => {
                *of_before = backlog;
                return Ok(*local);
            }
            Some(Socket::Bound { local }) => *local,
            None => self.bind(id, at, flags)?,
        };
        self.ports.listen(id, local.port).inspect_err(|_| self.counts.refuse_ports += 1)?;
        self.sockets.insert(id, Socket::Listener { local, backlog, pending: 0, settings });
        Ok(local)
    }

    /// Begins to connect. If it cannot be, the pair comes back; otherwise the answer comes later.
    pub(crate) fn connect(
        &mut self,
        asked: &stack_head,
        remote: IpEndpoint,
        skip: u32,
        options: &stack_options,
        pair: OwnedFd,
        context: &Context<'_>,
    ) -> Result<(), (Errno, OwnedFd)> {
        match self.open(asked, remote, skip, options, context.now) {
            Ok(slot) => {
                let pair = UnixStream::from(pair);
                if let Some(mut connection) = self.connections[slot].take() {
                    let watched = self.watch(slot, pair, &mut connection, context);
                    let pair = watched.is_err().then(|| connection.take_pair()).flatten();
                    self.connections[slot] = Some(connection);
                    if let (Err(err), Some(pair)) = (watched, pair) {
                        self.remove(slot);
                        return Err((err, pair.into()));
                    }
                }
                self.enqueue(slot);
                Ok(())
            }
            Err(err) => Err((err, pair)),
        }
    }

    fn open(
        &mut self,
        asked: &stack_head,
        remote: IpEndpoint,
        skip: u32,
        options: &stack_options,
        now: Instant,
    ) -> Result<usize, Errno> {
        let settings = self.settings.with(options)?;
        let bound = match self.sockets.get(&asked.id) {
            Some(Socket::Bound { local }) => Some(*local),
            Some(_) => return Err(Errno(libc::EEXIST)),
            None => None,
        };
        let remote = reachable(remote)?;
        let local = self.local_for(bound, remote)?;
        if self.connect.available(now) == 0 {
            self.counts.refuse_rate += 1;
            return Err(Errno(libc::EAGAIN));
        }
        if !self.has_connection() {
            self.counts.refuse_connections += 1;
            return Err(Errno(libc::EAGAIN));
        }
        let Some(settings) = self.afford(settings) else {
            self.counts.refuse_memory += 1;
            return Err(Errno(libc::ENOBUFS));
        };
        self.connect.take(1);
        let phase = Phase::Connecting { asked: *asked, skip };
        let mut connection = Connection::new(asked.id, 0, settings, phase);
        // A sequence number that nobody can predict: smoltcp's own generator can be.
        self.interface = interface(&mut self.device, self.addresses, now);
        let opened = connection.socket_mut().connect(self.interface.context(), remote, local);
        opened.map_err(|_| Errno(libc::EADDRNOTAVAIL))?;
        if let Some(bound) = bound {
            self.ports.release(asked.id, bound.port);
        }
        connection.local = local;
        connection.remote = remote;
        Ok(self.insert(connection))
    }

    pub(crate) fn set(&mut self, id: u64, options: &stack_options) -> Result<(), Errno> {
        let fixed = STACK_SET_SEND_BUFFER | STACK_SET_RECEIVE_BUFFER;
        let options = stack_options { mask: options.mask & !fixed, ..*options };
        match self.sockets.get_mut(&id) {
            None => Err(Errno(libc::ENOENT)),
            Some(Socket::Bound { .. }) => Err(Errno(libc::EINVAL)),
            Some(Socket::Listener { settings, .. }) => {
                *settings = settings.with(&options)?;
                Ok(())
            }
            Some(Socket::Connection { slot }) => {
                let slot = *slot;
                let connection = self.connections[slot].as_mut().ok_or(Errno(libc::ENOENT))?;
                let settings = connection.settings.with(&options)?;
                let other = settings.congestion != connection.settings.congestion;
                connection.settings = settings;
                settings.apply(connection.socket_mut());
                if other {
                    connection.socket_mut().set_congestion_control(settings.congestion);
                }
                self.enqueue(slot);
                Ok(())
            }
        }
    }

    pub(crate) fn info(&self, id: u64) -> Result<stack_info, Errno> {
        let head = stack_head { tenant: self.id, id, ..stack_head::default() };
        let local = named;
        match self.sockets.get(&id).ok_or(Errno(libc::ENOENT))? {
            Socket::Bound { local: at } => Ok(stack_info {
                head,
                kind: STACK_KIND_BOUND,
                state: 7,
                local: local(*at),
                remote: local(proto::nowhere()),
                options: self.settings.to_abi(),
                ..stack_info::default()
            }),
            Socket::Listener { local: at, backlog, pending, settings } => Ok(stack_info {
                head,
                kind: STACK_KIND_LISTENER,
                state: 10,
                local: local(*at),
                remote: local(proto::nowhere()),
                options: settings.to_abi(),
                pending: *pending,
                backlog: *backlog,
                ..stack_info::default()
            }),
            Socket::Connection { slot } => {
                let connection = self.connections[*slot].as_ref().ok_or(Errno(libc::ENOENT))?;
                Ok(connection.info(head, self.mtu))
            }
        }
    }

    /// What there is, for an agent that has just come.
    pub(crate) fn list(&self) -> Vec<stack_info> {
        let mut ids: Vec<u64> = self.sockets.keys().copied().collect();
        ids.sort_unstable();
        ids.into_iter().filter_map(|id| self.info(id).ok()).collect()
    }

    pub(crate) fn close(&mut self, id: u64, abort: bool) -> Result<(), Errno> {
        match self.sockets.get(&id).copied() {
            None => Err(Errno(libc::ENOENT)),
            Some(Socket::Bound { local } | Socket::Listener { local, .. }) => {
                self.sockets.remove(&id);
                self.ports.release(id, local.port);
                let untaken = |c: &Option<Box<Connection>>| {
                    c.as_ref().is_some_and(|c| c.listener == id && (!c.taken || c.is_half_open()))
                };
                let all: Vec<usize> = (0..self.connections.len())
                    .filter(|i| untaken(&self.connections[*i]))
                    .collect();
                for slot in all {
                    self.abort(slot);
                }
                Ok(())
            }
            Some(Socket::Connection { slot }) => {
                if abort {
                    self.abort(slot);
                } else if let Some(connection) = &mut self.connections[slot] {
                    connection.close();
                    self.enqueue(slot);
                }
                Ok(())
            }
        }
    }
}

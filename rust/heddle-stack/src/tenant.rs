//! A tenant: an endpoint whose TCP the module runs. It finds the connection of each packet itself,
//! and has smoltcp see one connection at a time: smoltcp would ask all of them.

use core::cmp::Reverse;
use core::hash::BuildHasher;
use core::net::{Ipv4Addr, Ipv6Addr};
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpEndpoint};

use crate::abi::*;
use crate::bucket::Bucket;
use crate::connection::{Budget, Change, Connection, Phase};
use crate::device::{Arrived, Device, Facts, Reading};
use crate::outbox::Outbox;
use crate::packet::{self, Bad, Segment};
use crate::ports::Ports;
use crate::proto::{self, Errno, ID_OF_MODULE, named};
use crate::settings::{BUFFER_MIN, Settings};
use crate::sys::{self, Epoll};

/// What a packet costs beside its bytes, in the scheduler's units: processor time as bytes.
pub(crate) const PACKET_COST: usize = 2048;
/// Bytes that a connection may move in its turn.
const CONNECTION_QUANTUM: usize = 256 << 10;
/// Packets that are read before connections have their turns.
const PACKETS: usize = 64;
/// What a connection takes beside its buffers.
const OVERHEAD: usize = 2048;
/// The least a buffer gets when memory is short.
const BUFFER_SHORT: u32 = 16 << 10;
/// For how long a handshake holds its place in a full backlog: until its SYN-ACK is sent again.
const HANDSHAKE: Duration = Duration::from_secs(1);
/// How soon tenants that wait for their rates are looked at again.
const REFILL: Duration = Duration::from_millis(2);

const MEMORY: u64 = 512 << 20;
const CONNECTIONS: u32 = 16_384;
const SOCKETS: u32 = 4096;
/// Bytes that may lie in a pair, in each direction.
const PAIR_BUFFER: u32 = 256 << 10;

const BACKLOG_MAX: u32 = 4096;

/// What everything that a tenant does may need of the host.
pub(crate) struct Context<'a> {
    pub(crate) epoll: &'a Epoll,
    pub(crate) outbox: &'a mut Outbox,
    pub(crate) now: Instant,
}

/// What an id of the agent's or of ours stands for.
#[derive(Clone, Copy, Debug)]
enum Socket {
    Bound { local: IpEndpoint },
    Listener { local: IpEndpoint, backlog: u32, pending: u32, settings: Settings },
    Connection { slot: usize },
}

/// A tenant.
#[expect(
    clippy::struct_excessive_bools,
    reason = "events and states are independent of each other"
)]
pub(crate) struct Tenant {
    pub(crate) id: u64,
    pub(crate) generation: u64,
    /// Its place in the host.
    slot: u32,
    name: String,
    addresses: [Option<IpAddress>; 2],
    mtu: usize,
    device: Device,
    interface: Interface,
    limits: stack_limits,
    settings: Settings,
    sockets: HashMap<u64, Socket>,
    connections: Vec<Option<Box<Connection>>>,
    free: Vec<usize>,
    live: u32,
    by_addresses: HashMap<(IpEndpoint, IpEndpoint), usize>,
    ports: Ports,
    /// Handshakes by listener, the oldest first: when, where and which. Some may be over.
    handshakes: HashMap<u64, VecDeque<(Instant, usize, u64)>>,
    last_id: u64,
    ready: VecDeque<usize>,
    /// Those in TIME-WAIT, the oldest first; some may be gone.
    time_wait: VecDeque<usize>,
    /// Those that wait for the tenant's rates, and for the device.
    throttled: Vec<usize>,
    blocked: Vec<usize>,
    refill: Option<Instant>,
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    readable: bool,
    watches_output: bool,
    send: Bucket,
    receive: Bucket,
    connect: Bucket,
    /// Nanoseconds of processor.
    time: Bucket,
    reserved: usize,
    counts: stack_stats,
    processor: u64,
    /// Deficit round robin: what it may still use. It is below 0 after a turn that took more.
    pub(crate) credit: isize,
    /// It is among the tenants that have something to do.
    pub(crate) active: bool,
    /// It was named since BEGIN.
    pub(crate) named: bool,
    /// When its timer in the host's heap is due.
    pub(crate) timer: Option<Instant>,
}

impl Tenant {
    /// Makes a tenant at its device.
    pub(crate) fn new(
        message: &stack_tenant,
        device: OwnedFd,
        slot: u32,
        context: &Context<'_>,
    ) -> Result<Self, Errno> {
        let settings = Settings::default().with(&message.options)?;
        let facts = facts(message)?;
        let addresses = addresses(message)?;
        sys::set_nonblocking(device.as_fd()).map_err(|e| errno(&e))?;
        let token = u64::from(slot) << 32;
        // An edge: a tenant that may not run is not to be told again and again.
        context
            .epoll
            .add(device.as_fd(), sys::READABLE | sys::EDGE, token)
            .map_err(|e| errno(&e))?;
        let own = own(addresses);
        let mut device = Device::new(File::from(device), facts, own);
        let interface = interface(&mut device, addresses, context.now);
        let length = message.name.iter().position(|b| *b == 0).unwrap_or(message.name.len());
        let mut tenant = Self {
            id: message.head.tenant,
            generation: message.generation,
            slot,
            name: String::from_utf8_lossy(&message.name[..length]).into_owned(),
            addresses,
            mtu: facts.mtu,
            device,
            interface,
            limits: message.limits,
            settings,
            sockets: HashMap::new(),
            connections: Vec::new(),
            free: Vec::new(),
            live: 0,
            by_addresses: HashMap::new(),
            ports: Ports::default(),
            handshakes: HashMap::new(),
            last_id: ID_OF_MODULE,
            ready: VecDeque::new(),
            time_wait: VecDeque::new(),
            throttled: Vec::new(),
            blocked: Vec::new(),
            refill: None,
            timers: BinaryHeap::new(),
            readable: false,
            watches_output: false,
            send: Bucket::new(0, context.now),
            receive: Bucket::new(0, context.now),
            connect: Bucket::new(0, context.now),
            time: Bucket::new(0, context.now),
            reserved: 0,
            counts: stack_stats::default(),
            processor: 0,
            credit: 0,
            active: false,
            named: true,
            timer: None,
        };
        tenant.update(message, settings, context.now);
        Ok(tenant)
    }

    /// Gives it other limits and options.
    pub(crate) fn change(&mut self, message: &stack_tenant, now: Instant) -> Result<(), Errno> {
        let settings = Settings::default().with(&message.options)?;
        if addresses(message)? != self.addresses || facts(message)?.mtu != self.mtu {
            return Err(Errno(libc::EINVAL));
        }
        self.update(message, settings, now);
        Ok(())
    }

    fn update(&mut self, message: &stack_tenant, settings: Settings, now: Instant) {
        let mut limits = message.limits;
        if limits.memory == 0 {
            limits.memory = MEMORY;
        }
        if limits.connections == 0 {
            limits.connections = CONNECTIONS;
        }
        if limits.sockets == 0 {
            limits.sockets = SOCKETS;
        }
        limits.weight = limits.weight.clamp(1, 100);
        self.limits = limits;
        self.settings = settings;
        self.send = Bucket::new(limits.send_rate, now);
        self.receive = Bucket::new(limits.receive_rate, now);
        self.connect = Bucket::new(limits.connect_rate.into(), now);
        self.time = Bucket::new(u64::from(limits.processor.min(64_000)) * 1_000_000, now);
    }

    pub(crate) fn weight(&self) -> isize {
        isize::try_from(self.limits.weight).unwrap_or(1)
    }

    /// Whether it may use the processor; if not, it has a timer.
    pub(crate) fn may_run(&mut self, now: Instant) -> bool {
        let may = self.time.available(now) > 0;
        if !may && self.refill.is_none_or(|at| at <= now) {
            self.refill = Some(now + REFILL);
        }
        may
    }

    /// It has used so many nanoseconds of processor.
    pub(crate) fn used(&mut self, nanoseconds: u64) {
        self.processor += nanoseconds;
        self.time.take(usize::try_from(nanoseconds).unwrap_or(usize::MAX));
    }

    pub(crate) fn device_readable(&mut self) {
        self.readable = true;
    }

    /// The device takes packets again.
    pub(crate) fn device_writable(&mut self) {
        if self.device.flush() {
            self.unblock();
        }
    }

    /// Events of a connection's pair.
    pub(crate) fn pair_event(&mut self, slot: usize, events: u32) {
        if let Some(Some(connection)) = self.connections.get_mut(slot) {
            connection.event(events);
            self.enqueue(slot);
        }
    }

    fn enqueue(&mut self, slot: usize) {
        if let Some(Some(connection)) = self.connections.get_mut(slot)
            && !connection.queued
        {
            connection.queued = true;
            self.ready.push_back(slot);
        }
    }

    fn unblock(&mut self) {
        for slot in core::mem::take(&mut self.blocked) {
            self.enqueue(slot);
        }
    }

    // Requests.

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

    fn has_place(&mut self) -> Result<(), Errno> {
        if self.ports.count() >= self.limits.sockets as usize {
            self.counts.refuse_sockets += 1;
            return Err(Errno(libc::EMFILE));
        }
        Ok(())
    }

    fn is_own(&self, address: IpAddress) -> Result<(), Errno> {
        let own = address.is_unspecified() || own(self.addresses).contains(&address);
        if own { Ok(()) } else { Err(Errno(libc::EADDRNOTAVAIL)) }
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

    /// The address and port that a connection to `remote` comes from.
    fn local_for(
        &mut self,
        bound: Option<IpEndpoint>,
        remote: IpEndpoint,
    ) -> Result<IpEndpoint, Errno> {
        let natural = match remote.addr {
            a if is_loopback(a) => Some(a),
            IpAddress::Ipv4(_) => self.addresses[0],
            IpAddress::Ipv6(_) => self.addresses[1],
        };
        let address = match bound.map(|b| b.addr).filter(|a| !a.is_unspecified()) {
            Some(a) if a.version() != remote.addr.version() => {
                return Err(Errno(libc::EAFNOSUPPORT));
            }
            // Nothing comes back from out there to a loopback address.
            Some(a) if is_loopback(a) && !own(self.addresses).contains(&remote.addr) => {
                return Err(Errno(libc::EINVAL));
            }
            Some(a) => a,
            None => natural.ok_or(Errno(libc::ENETUNREACH))?,
        };
        if let Some(port) = bound.map(|b| b.port).filter(|p| *p != 0) {
            let local = IpEndpoint::new(address, port);
            let taken = self.by_addresses.contains_key(&(local, remote));
            return if taken { Err(Errno(libc::EADDRNOTAVAIL)) } else { Ok(local) };
        }
        let free = |port: u16| {
            let local = IpEndpoint::new(address, port);
            local != remote && !self.by_addresses.contains_key(&(local, remote))
        };
        match self.ports.choose(remote, free) {
            Ok(port) => Ok(IpEndpoint::new(address, port)),
            Err(err) => {
                self.counts.refuse_ports += 1;
                Err(err)
            }
        }
    }

    /// Whether there may be one more connection; one in TIME-WAIT goes if need be.
    fn has_connection(&mut self) -> bool {
        self.live < self.limits.connections || self.evict()
    }

    /// Ends the connection that is longest in TIME-WAIT.
    fn evict(&mut self) -> bool {
        while let Some(slot) = self.time_wait.pop_front() {
            if self.waits(slot) {
                self.remove(slot);
                return true;
            }
        }
        false
    }

    /// Whether a connection is in TIME-WAIT, and nobody needs it any more.
    fn waits(&self, slot: usize) -> bool {
        self.connections.get(slot).and_then(Option::as_ref).is_some_and(|c| c.waits())
    }

    /// The settings with such buffers as the memory that is left allows, if there is enough of it.
    fn afford(&mut self, mut settings: Settings) -> Option<Settings> {
        let limit = usize::try_from(self.limits.memory).unwrap_or(usize::MAX);
        let mut left = limit.saturating_sub(self.reserved);
        while left < 2 * BUFFER_SHORT as usize + OVERHEAD {
            if !self.evict() {
                return None;
            }
            left = limit.saturating_sub(self.reserved);
        }
        let share = u32::try_from(left / 128).unwrap_or(u32::MAX).max(BUFFER_SHORT);
        settings.send_buffer = settings.send_buffer.min(share).max(BUFFER_MIN);
        settings.receive_buffer = settings.receive_buffer.min(share).max(BUFFER_MIN);
        Some(settings)
    }

    fn insert(&mut self, mut connection: Connection) -> usize {
        let settings = connection.settings;
        connection.reserved =
            settings.send_buffer as usize + settings.receive_buffer as usize + OVERHEAD;
        self.reserved += connection.reserved;
        self.live += 1;
        self.ports.connected(connection.local.port);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        self.by_addresses.insert((connection.local, connection.remote), slot);
        self.sockets.insert(connection.id, Socket::Connection { slot });
        self.connections[slot] = Some(Box::new(connection));
        slot
    }

    /// Gives a connection its pair, whose events come here.
    fn watch(
        &self,
        slot: usize,
        pair: UnixStream,
        connection: &mut Connection,
        context: &Context<'_>,
    ) -> Result<(), Errno> {
        let token = (u64::from(self.slot) << 32) | (slot as u64 + 1);
        let events = sys::READABLE | sys::WRITABLE | sys::HALF_CLOSED | sys::EDGE;
        let watched = pair
            .set_nonblocking(true)
            .and_then(|()| context.epoll.add(pair.as_fd(), events, token))
            .map_err(|e| errno(&e));
        connection.set_pair(pair);
        watched
    }

    /// Takes a connection out of all tables.
    fn remove(&mut self, slot: usize) -> Option<Box<Connection>> {
        let connection = self.connections.get_mut(slot)?.take()?;
        self.free.push(slot);
        self.live -= 1;
        self.reserved -= connection.reserved;
        self.by_addresses.remove(&(connection.local, connection.remote));
        self.ports.disconnected(connection.local.port);
        self.not_pending(&connection);
        // TIME-WAIT: the id was free before.
        if let Some(Socket::Connection { slot: of_id }) = self.sockets.get(&connection.id)
            && *of_id == slot
        {
            self.sockets.remove(&connection.id);
        }
        Some(connection)
    }

    fn not_pending(&mut self, connection: &Connection) {
        if !connection.taken
            && let Some(Socket::Listener { pending, .. }) =
                self.sockets.get_mut(&connection.listener)
        {
            *pending -= 1;
        }
    }

    /// A program has got a connection by `accept()`.
    pub(crate) fn taken(&mut self, id: u64) {
        if let Some(Socket::Connection { slot }) = self.sockets.get(&id).copied()
            && let Some(mut connection) = self.connections[slot].take()
        {
            self.not_pending(&connection);
            connection.taken = true;
            self.connections[slot] = Some(connection);
        }
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
                self.handshakes.remove(&id);
                self.ports.release(id, local.port);
                let untaken = |c: &Option<Box<Connection>>| {
                    c.as_ref().is_some_and(|c| c.listener == id && !c.taken)
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

    fn abort(&mut self, slot: usize) {
        if let Some(connection) = &mut self.connections[slot] {
            connection.abort(libc::ECONNABORTED);
            // Nobody took it, and nobody will.
            connection.program = None;
            self.enqueue(slot);
        }
    }

    /// Tells an agent that has just come of connections that nobody was told of.
    pub(crate) fn announce_all(&mut self, outbox: &mut Outbox) {
        for connection in self.connections.iter_mut().flatten() {
            announce(self.id, connection, outbox);
        }
    }

    /// Peers get RST, programs see a reset: all pairs close with their guards in them.
    pub(crate) fn end(mut self, context: &mut Context<'_>) {
        for slot in 0..self.connections.len() {
            self.abort(slot);
        }
        while let Some(slot) = self.ready.pop_front() {
            let mut budget = Budget { bytes: CONNECTION_QUANTUM, send: 0, receive: usize::MAX };
            self.serve(slot, &mut budget, context);
        }
        context.epoll.remove(self.device.file().as_fd());
    }

    // Packets.

    /// Does what there is to do, until the credit is used up. Says whether there is more.
    pub(crate) fn turn(&mut self, context: &mut Context<'_>) -> bool {
        self.timers(context.now);
        // What it sends to itself, a part of it: it would find new ones for ever.
        for _ in 0..PACKETS {
            match self.device.read_own() {
                Reading::Packet(packet) => self.packet(packet, context),
                _ => break,
            }
        }
        for _ in 0..PACKETS {
            if !self.readable || self.credit <= 0 {
                break;
            }
            self.read(context);
        }
        if self.device.out.ready() {
            self.unblock();
        }
        for _ in 0..self.ready.len() {
            if self.credit <= 0 {
                break;
            }
            let Some(slot) = self.ready.pop_front() else { break };
            let mut budget = Budget {
                bytes: CONNECTION_QUANTUM,
                send: self.send.available(context.now),
                receive: self.receive.available(context.now),
            };
            let before = budget;
            self.serve(slot, &mut budget, context);
            self.send.take(before.send - budget.send);
            self.receive.take(before.receive - budget.receive);
            self.charge(before.bytes - budget.bytes + PACKET_COST / 4);
        }
        let cost = core::mem::take(&mut self.device.out.cost);
        self.charge(cost);
        self.watch_output(context.epoll);
        self.readable || self.device.has_own() || !self.ready.is_empty()
    }

    fn charge(&mut self, cost: usize) {
        self.credit -= isize::try_from(cost).unwrap_or(isize::MAX);
    }

    /// Waits for the device to take packets only while one is held.
    fn watch_output(&mut self, epoll: &Epoll) {
        let wanted = self.device.holds();
        if wanted != self.watches_output {
            self.watches_output = wanted;
            let events = sys::READABLE | sys::EDGE | if wanted { sys::WRITABLE } else { 0 };
            // It is in the set since it was made.
            let _ = epoll.modify(self.device.file().as_fd(), events, u64::from(self.slot) << 32);
        }
    }

    fn read(&mut self, context: &mut Context<'_>) {
        match self.device.read() {
            Reading::Empty => self.readable = false,
            Reading::Packet(packet) => {
                self.charge(packet.ip.len() + PACKET_COST);
                self.packet(packet, context);
            }
            Reading::Other => self.counts.drop_protocol += 1,
            Reading::Malformed => self.counts.drop_malformed += 1,
        }
    }

    fn packet(&mut self, packet: Arrived, context: &mut Context<'_>) {
        let segment = match packet::segment(self.device.bytes(&packet), packet.checked) {
            Ok(segment) => segment,
            Err(bad) => {
                match bad {
                    Bad::Malformed => self.counts.drop_malformed += 1,
                    Bad::Protocol => self.counts.drop_protocol += 1,
                    Bad::Checksum => self.counts.drop_checksum += 1,
                }
                return;
            }
        };
        if !packet.own && self.is_martian(&segment) {
            self.counts.drop_martian += 1;
            return;
        }
        self.counts.segments_received += 1;
        let key = (segment.destination, segment.source);
        if let Some(slot) = self.by_addresses.get(&key).copied() {
            // A new connection may take the place of one in TIME-WAIT, RFC 6191.
            if !segment.opens || !self.waits(slot) {
                return self.deliver(slot, &segment, packet, context.now);
            }
            self.remove(slot);
        }
        if segment.opens {
            self.opening(&segment, packet, context.now);
        } else {
            self.refuse(packet, context.now);
        }
    }

    fn is_martian(&self, segment: &Segment) -> bool {
        let (from, to) = (segment.source.addr, segment.destination.addr);
        let mine = |a: IpAddress| self.addresses.contains(&Some(a));
        let unicast = match from {
            IpAddress::Ipv4(a) => {
                !a.is_multicast() && !a.is_unspecified() && !a.is_broadcast() && !a.is_loopback()
            }
            IpAddress::Ipv6(a) => !a.is_multicast() && !a.is_unspecified() && !a.is_loopback(),
        };
        !mine(to) || mine(from) || !unicast
    }

    fn deliver(&mut self, slot: usize, segment: &Segment, packet: Arrived, now: Instant) {
        if let Some(connection) = &mut self.connections[slot] {
            connection.arrived(segment, packet, now, &mut self.interface, &mut self.device);
            self.enqueue(slot);
        }
    }

    /// A segment of no connection: smoltcp answers it by RST.
    fn refuse(&mut self, packet: Arrived, now: Instant) {
        self.device.offer(packet);
        let mut nobody = SocketSet::new(Vec::new());
        self.interface.poll_ingress_single(now, &mut self.device, &mut nobody);
    }

    /// A SYN of a connection that is not there yet.
    fn opening(&mut self, segment: &Segment, packet: Arrived, now: Instant) {
        let lot = self.by_addresses.hasher().hash_one(segment.source);
        let listener = self.ports.listener(segment.destination, lot);
        let Some((id, socket)) = listener.and_then(|id| Some((id, *self.sockets.get(&id)?))) else {
            return self.refuse(packet, now);
        };
        let Socket::Listener { backlog, pending, settings, .. } = socket else { return };
        if pending >= backlog && !self.make_place(id, now) {
            self.counts.drop_backlog += 1;
            return;
        }
        if self.connect.available(now) == 0 {
            self.counts.drop_rate += 1;
            return;
        }
        if !self.has_connection() {
            self.counts.drop_connections += 1;
            return;
        }
        let Some(settings) = self.afford(settings) else {
            self.counts.drop_memory += 1;
            return;
        };
        self.last_id += 1;
        let mut connection = Connection::new(self.last_id, id, settings, Phase::Arriving);
        connection.local = segment.destination;
        connection.remote = segment.source;
        if connection.socket_mut().listen(segment.destination).is_err() {
            self.counts.drop_malformed += 1;
            return;
        }
        self.connect.take(1);
        if let Some(Socket::Listener { pending, .. }) = self.sockets.get_mut(&id) {
            *pending += 1;
        }
        // A sequence number that nobody can predict: smoltcp's own generator can be.
        self.interface = interface(&mut self.device, self.addresses, now);
        let slot = self.insert(connection);
        self.note_handshake(id, backlog, (now, slot, self.last_id));
        self.deliver(slot, segment, packet, now);
    }

    fn note_handshake(&mut self, listener: u64, backlog: u32, new: (Instant, usize, u64)) {
        let mut all = self.handshakes.remove(&listener).unwrap_or_default();
        if all.len() > 2 * backlog as usize {
            all.retain(|(_, slot, id)| self.is_handshake(*slot, *id));
        }
        all.push_back(new);
        self.handshakes.insert(listener, all);
    }

    fn is_handshake(&self, slot: usize, id: u64) -> bool {
        let connection = self.connections.get(slot).and_then(Option::as_ref);
        connection.is_some_and(|c| c.id == id && matches!(c.phase, Phase::Arriving))
    }

    /// Drops the oldest handshake of a listener that is not over in time: whoever floods it with
    /// SYNs of nobody does not keep others out. Says whether there was one.
    fn make_place(&mut self, listener: u64, now: Instant) -> bool {
        while let Some(all) = self.handshakes.get_mut(&listener)
            && let Some((at, slot, id)) = all.front().copied()
        {
            let live = self.is_handshake(slot, id);
            if live && now < at + HANDSHAKE {
                return false;
            }
            if let Some(all) = self.handshakes.get_mut(&listener) {
                all.pop_front();
            }
            if live {
                self.remove(slot);
                return true;
            }
        }
        false
    }

    // Connections.

    fn serve(&mut self, slot: usize, budget: &mut Budget, context: &mut Context<'_>) {
        let Some(mut connection) = self.connections.get_mut(slot).and_then(Option::take) else {
            return;
        };
        connection.queued = false;
        let turn = connection.turn(context.now, &mut self.interface, &mut self.device, budget);
        let stays = self.note(slot, &mut connection, turn.change, context);
        if !stays {
            self.connections[slot] = Some(connection);
            self.remove(slot);
            return;
        }
        if turn.throttled {
            self.throttled.push(slot);
            self.refill.get_or_insert(context.now + REFILL);
        }
        let next = connection.next(context.now, &mut self.interface);
        let again = turn.more || next.is_some_and(|at| at <= context.now);
        if again && !self.device.out.ready() {
            self.blocked.push(slot);
        } else if again {
            connection.queued = true;
            self.ready.push_back(slot);
        } else if let Some(at) = next
            && connection.due.is_none_or(|due| at < due)
        {
            connection.due = Some(at);
            self.timers.push(Reverse((at, slot)));
        }
        self.connections[slot] = Some(connection);
    }

    /// Does what a change asks for. Says whether the connection stays.
    fn note(
        &mut self,
        slot: usize,
        connection: &mut Connection,
        change: Change,
        context: &mut Context<'_>,
    ) -> bool {
        match change {
            Change::None => return true,
            Change::Gone => return false,
            Change::Failed(asked, errno) => {
                self.counts.failed += 1;
                let pair = connection.take_pair();
                if let Some(pair) = &pair {
                    context.epoll.remove(pair.as_fd());
                }
                let answer = proto::plain_answer(&asked, Err(Errno(errno)));
                context.outbox.send(answer, pair.map(OwnedFd::from));
                return false;
            }
            Change::Connected(asked) => {
                self.counts.connected += 1;
                let head = proto::answer_to(&asked);
                let answer = stack_named { head, local: named(connection.local) };
                context.outbox.send(proto::bytes(&answer), None);
            }
            Change::Accepted => {
                self.counts.accepted += 1;
                if let Err(err) = self.accept(slot, connection, context) {
                    // No descriptors: as if the backlog were full.
                    self.counts.drop_connections += 1;
                    connection.abort(err.0);
                }
            }
            Change::Ended(errno) => {
                self.ended(connection, errno, context);
                if connection.waits() {
                    self.time_wait.push_back(slot);
                }
                return connection.waits();
            }
        }
        true
    }

    /// Makes the pair of an accepted connection.
    fn accept(
        &mut self,
        slot: usize,
        connection: &mut Connection,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let (program, own) = UnixStream::pair().map_err(|e| errno(&e))?;
        sys::set_send_buffer(&program, PAIR_BUFFER);
        sys::set_send_buffer(&own, PAIR_BUFFER);
        (&program).write_all(&[0]).map_err(|e| errno(&e))?;
        self.watch(slot, own, connection, context)?;
        connection.program = Some(program.into());
        announce(self.id, connection, context.outbox);
        Ok(())
    }

    /// A connection is over: tells the agent, then the program.
    fn ended(&mut self, connection: &mut Connection, errno: i32, context: &mut Context<'_>) {
        let head = stack_head {
            type_: STACK_ENDED,
            tenant: self.id,
            error: errno,
            ..stack_head::default()
        };
        let info = connection.info(head, self.mtu);
        self.counts.reset += u64::from(errno != 0);
        self.counts.bytes_sent += info.bytes_sent;
        self.counts.bytes_received += info.bytes_received;
        if connection.program.is_none() {
            context.outbox.tell(proto::bytes(&info), None);
        }
        self.not_pending(connection);
        connection.taken = true;
        drop(connection.take_pair());
        self.sockets.remove(&connection.id);
    }

    fn timers(&mut self, now: Instant) {
        while let Some(Reverse((at, slot))) = self.timers.peek().copied()
            && at <= now
        {
            self.timers.pop();
            if let Some(Some(connection)) = self.connections.get_mut(slot)
                && connection.due == Some(at)
            {
                connection.due = None;
                self.enqueue(slot);
            }
        }
        if self.refill.is_some_and(|at| at <= now) {
            self.refill = None;
            for slot in core::mem::take(&mut self.throttled) {
                self.enqueue(slot);
            }
        }
    }

    /// When it has to have a turn, though nothing happens.
    pub(crate) fn next(&self) -> Option<Instant> {
        let timer = self.timers.peek().map(|Reverse((at, _))| *at);
        match (timer, self.refill) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    /// What it has done, and has now.
    pub(crate) fn stats(&self) -> stack_stats {
        let mut s = self.counts;
        s.processor = self.processor;
        s.memory_reserved = self.reserved as u64;
        s.tenants = 1;
        s.sockets = self.ports.count() as u64;
        s.connections = self.live.into();
        s.segments_sent = self.device.out.sent;
        s.retransmits = self.device.out.retransmits;
        s.drop_device = self.device.out.dropped;
        for connection in self.connections.iter().flatten() {
            let info = connection.info(stack_head::default(), self.mtu);
            s.memory += connection.memory() + OVERHEAD as u64;
            s.half_open += u64::from(matches!(info.state, 2 | 3));
            if connection.waits() {
                s.time_wait += 1;
                continue; // what it carried is counted already
            }
            s.send_queued += u64::from(info.send_queue);
            s.receive_queued += u64::from(info.receive_queue);
            s.bytes_sent += info.bytes_sent;
            s.bytes_received += info.bytes_received;
        }
        s
    }

    /// For people.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }
}

/// Tells the agent of an accepted connection, if one is there to hear of it.
fn announce(tenant: u64, connection: &mut Connection, outbox: &mut Outbox) {
    if !outbox.live() || !matches!(connection.phase, Phase::Open) {
        return;
    }
    let Some(program) = connection.program.take() else { return };
    let head =
        stack_head { type_: STACK_ACCEPTED, tenant, id: connection.id, ..stack_head::default() };
    let accepted = stack_accepted {
        head,
        listener: connection.listener,
        local: named(connection.local),
        remote: named(connection.remote),
    };
    outbox.tell(proto::bytes(&accepted), Some(program));
}

pub(crate) fn errno(err: &std::io::Error) -> Errno {
    Errno(err.raw_os_error().unwrap_or(libc::EIO))
}

fn facts(m: &stack_tenant) -> Result<Facts, Errno> {
    let ethernet = match m.link {
        STACK_LINK_IP => false,
        STACK_LINK_ETHERNET => true,
        _ => return Err(Errno(libc::EINVAL)),
    };
    // IPv6 asks for 1280 at least, and no device of the kernel's has more.
    if !(1280..=65_535).contains(&m.mtu) {
        return Err(Errno(libc::EINVAL));
    }
    Ok(Facts {
        ethernet,
        mac: m.mac,
        gateway: m.gateway,
        mtu: m.mtu as usize,
        offloads: m.offloads == 1,
    })
}

fn addresses(m: &stack_tenant) -> Result<[Option<IpAddress>; 2], Errno> {
    let v4 = Ipv4Addr::from(m.address4);
    let v6 = Ipv6Addr::from(m.address6);
    let good4 = !v4.is_loopback() && !v4.is_multicast() && !v4.is_broadcast();
    let good6 = !v6.is_loopback() && !v6.is_multicast() && v6.to_ipv4_mapped().is_none();
    if !good4 || !good6 || (v4.is_unspecified() && v6.is_unspecified()) {
        return Err(Errno(libc::EINVAL));
    }
    Ok([
        (!v4.is_unspecified()).then_some(IpAddress::Ipv4(v4)),
        (!v6.is_unspecified()).then_some(IpAddress::Ipv6(v6)),
    ])
}

fn is_loopback(address: IpAddress) -> bool {
    match address {
        IpAddress::Ipv4(a) => a.is_loopback(),
        IpAddress::Ipv6(a) => a.is_loopback(),
    }
}

/// The addresses by which a tenant reaches itself.
fn own(addresses: [Option<IpAddress>; 2]) -> Vec<IpAddress> {
    let loopback = [IpAddress::Ipv4(Ipv4Addr::LOCALHOST), IpAddress::Ipv6(Ipv6Addr::LOCALHOST)];
    addresses.into_iter().flatten().chain(loopback).collect()
}

/// An interface with a new random state.
fn interface(device: &mut Device, addresses: [Option<IpAddress>; 2], now: Instant) -> Interface {
    let mut config = Config::new(HardwareAddress::Ip);
    config.random_seed = sys::random();
    let mut interface = Interface::new(config, device, now);
    interface.update_ip_addrs(|list| {
        for address in own(addresses) {
            let length = if matches!(address, IpAddress::Ipv4(_)) { 32 } else { 128 };
            // There is room for four: iface-max-addr-count-4.
            let _ = list.push(IpCidr::new(address, length));
        }
    });
    interface
}

/// Whom a connect really is for, or why nobody.
fn reachable(remote: IpEndpoint) -> Result<IpEndpoint, Errno> {
    let address = match remote.addr {
        IpAddress::Ipv4(a) if a.is_unspecified() => IpAddress::Ipv4(Ipv4Addr::LOCALHOST),
        IpAddress::Ipv6(a) if a.is_unspecified() => IpAddress::Ipv6(Ipv6Addr::LOCALHOST),
        IpAddress::Ipv4(a) if a.is_multicast() || a.is_broadcast() => {
            return Err(Errno(libc::ENETUNREACH));
        }
        IpAddress::Ipv4(a) if a.is_loopback() && a != Ipv4Addr::LOCALHOST => {
            return Err(Errno(libc::ENETUNREACH));
        }
        IpAddress::Ipv6(a) if a.is_multicast() => return Err(Errno(libc::ENETUNREACH)),
        a => a,
    };
    // Linux sends that SYN, and is refused.
    if remote.port == 0 {
        return Err(Errno(libc::ECONNREFUSED));
    }
    Ok(IpEndpoint::new(address, remote.port))
}

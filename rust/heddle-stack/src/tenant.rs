//! A tenant: an endpoint whose TCP the module runs. It finds the connection of each packet itself,
//! and has smoltcp see one connection at a time: smoltcp would ask all of them.
//!
//! | module | what it owns |
//! |---|---|
//! | `requests` | what the agent asks of sockets |
//! | `packets`, `handshakes` | what comes from outside |
//! | `connections` | the tables of connections, and what changes in them |
//! | `turns` | the tenant's share of the processor |
//! | `limits` | caps: rates, connections, sockets, memory |
//! | `addresses` | its own addresses, and whom it may reach |

mod addresses;
mod connections;
mod handshakes;
mod limits;
mod packets;
mod requests;
mod turns;

use core::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use smoltcp::iface::{Config, Interface};
use smoltcp::time::Instant;
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpEndpoint};

use crate::abi::*;
use crate::bucket::Bucket;
use crate::connection::{Budget, Connection};
use crate::device::{Device, Facts};
use crate::outbox::Outbox;
use crate::ports::Ports;
use crate::proto::{Errno, ID_OF_MODULE};
use crate::settings::Settings;
use crate::sys::{self, Epoll};

use addresses::{addresses, own};
use connections::OVERHEAD;
use turns::CONNECTION_QUANTUM;
pub(crate) use turns::PACKET_COST;

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
    /// Peers' handshakes, the oldest first: where and which. Some may be over.
    handshakes: VecDeque<(usize, u64)>,
    half_open: u32,
    /// What their connections will reserve beyond what they do.
    promised: usize,
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
            handshakes: VecDeque::new(),
            half_open: 0,
            promised: 0,
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

//! One connection: smoltcp's socket on one side, the program's pair on the other. The thread of the
//! host owns all of it.
//!
//! | module | what it owns |
//! |---|---|
//! | `bytes` | what goes between pair and socket |
//! | `ends` | how it ends, and what others have to know |
//! | `info` | what is told of it |

mod bytes;
mod ends;
mod info;

use core::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use smoltcp::iface::{Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{IpAddress, IpEndpoint};

use crate::abi::*;
use crate::device::{Arrived, Device, Track};
use crate::packet::Segment;
use crate::settings::Settings;
use crate::sys;

/// After that many packets of one connection it is others' turn.
const PACKETS_A_TURN: usize = 64;

/// How far a connection is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Phase {
    /// CONNECT is to be answered; so many bytes of the pair are not the program's.
    Connecting {
        asked: stack_head,
        skip: u32,
    },
    /// A SYN of a listener's came.
    Arriving,
    Open,
    /// The program has been told that it is over; smoltcp's socket may be in TIME-WAIT.
    Over,
}

/// What has happened in a turn that others have to know.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    None,
    /// The handshake that this CONNECT asked for is over.
    Connected(stack_head),
    /// It did not come to that; an errno.
    Failed(stack_head, i32),
    /// A peer's handshake is over.
    Accepted,
    /// It is over, with an errno or 0.
    Ended(i32),
    /// Nothing is left of it.
    Gone,
}

/// What a connection may use in a turn, and what is left of it afterwards.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) bytes: usize,
    pub(crate) send: usize,
    pub(crate) receive: usize,
}

/// What came of a turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    pub(crate) change: Change,
    /// There is more to do at once.
    pub(crate) more: bool,
    /// There would be, but for the tenant's rates.
    pub(crate) throttled: bool,
}

/// One connection.
#[expect(clippy::struct_excessive_bools, reason = "events and ends are independent of each other")]
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) id: u64,
    /// Which accepted it, or 0.
    pub(crate) listener: u64,
    pub(crate) local: IpEndpoint,
    pub(crate) remote: IpEndpoint,
    pub(crate) settings: Settings,
    /// Bytes that count against the tenant's limit.
    pub(crate) reserved: usize,
    pub(crate) phase: Phase,
    /// It is not, or no longer, in a listener's backlog: a program has it.
    pub(crate) taken: bool,
    /// The program's end, until the agent has it.
    pub(crate) program: Option<OwnedFd>,
    /// It is among those that have something to do.
    pub(crate) queued: bool,
    /// When its earliest timer in the tenant's heap is due.
    pub(crate) due: Option<Instant>,
    pub(crate) track: Track,
    set: SocketSet<'static>,
    handle: SocketHandle,
    pair: Option<UnixStream>,
    /// Bytes may wait in the pair; there may be room in it; its other end may have changed.
    readable: bool,
    writable: bool,
    changed: bool,
    /// The first byte in the pair has been sent on already.
    guard: bool,
    other: sys::OtherEnd,
    /// The program reads no more.
    deaf: bool,
    /// FIN has been asked for, and the peer's been shown.
    closed: bool,
    shown: bool,
    /// The errno with which it ends.
    reason: Option<i32>,
    /// smoltcp's state when it was last looked at.
    was: tcp::State,
    /// When it is given up in this state of smoltcp's.
    give_up: Option<(tcp::State, Instant)>,
    pulled: u64,
    pushed: u64,
}

impl Connection {
    pub(crate) fn new(id: u64, listener: u64, settings: Settings, phase: Phase) -> Self {
        let buffer = |size: u32| tcp::SocketBuffer::new(vec![0; size as usize]);
        let mut socket =
            tcp::Socket::new(buffer(settings.receive_buffer), buffer(settings.send_buffer));
        socket.set_congestion_control(settings.congestion);
        settings.apply(&mut socket);
        let mut set = SocketSet::new(Vec::new());
        let handle = set.add(socket);
        let nowhere = IpEndpoint::new(IpAddress::Ipv4(Ipv4Addr::UNSPECIFIED), 0);
        Self {
            id,
            listener,
            local: nowhere,
            remote: nowhere,
            settings,
            reserved: 0,
            phase,
            taken: true,
            program: None,
            queued: false,
            due: None,
            track: Track::default(),
            set,
            handle,
            pair: None,
            readable: true,
            writable: true,
            changed: true,
            guard: false,
            other: sys::OtherEnd::default(),
            deaf: false,
            closed: false,
            shown: false,
            reason: None,
            was: tcp::State::Closed,
            give_up: None,
            pulled: 0,
            pushed: 0,
        }
    }

    pub(crate) fn socket(&self) -> &tcp::Socket<'static> {
        self.set.get(self.handle)
    }

    pub(crate) fn socket_mut(&mut self) -> &mut tcp::Socket<'static> {
        self.set.get_mut(self.handle)
    }

    pub(crate) fn set_pair(&mut self, pair: UnixStream) {
        self.pair = Some(pair);
    }

    pub(crate) fn take_pair(&mut self) -> Option<UnixStream> {
        self.pair.take()
    }

    /// Events of the pair. They may be those of an earlier one: nothing is taken for granted here.
    pub(crate) fn event(&mut self, events: u32) {
        self.readable |= events & sys::READABLE != 0;
        self.writable |= events & sys::WRITABLE != 0;
        self.changed |= events & sys::GONE != 0;
    }

    /// Whether a peer's SYN has begun it, and the peer has not answered yet.
    pub(crate) fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Arriving)
    }

    /// Whether it is in TIME-WAIT, and nobody needs it any more.
    pub(crate) fn waits(&self) -> bool {
        matches!(self.phase, Phase::Over) && self.socket().state() == tcp::State::TimeWait
    }

    /// Has smoltcp read a segment that the device has.
    pub(crate) fn arrived(
        &mut self,
        segment: &Segment,
        packet: Arrived,
        now: Instant,
        interface: &mut Interface,
        device: &mut Device,
    ) {
        self.track.receiving(segment);
        let before = self.socket().state();
        // Several segments in one, say: what RFC 9293 would have acknowledged at once.
        let delay =
            if segment.end > segment.number + device.mtu() { 0 } else { self.settings.ack_delay };
        self.socket_mut().set_ack_delay(Some(Duration::from_millis(delay.into())));
        device.offer(packet);
        core::mem::swap(&mut self.track, &mut device.out.track);
        let read = interface.poll_ingress_single(now, device, &mut self.set);
        core::mem::swap(&mut self.track, &mut device.out.track);
        debug_assert_ne!(read, PollIngressSingleResult::None);
        let after = self.socket().state();
        if segment.resets && after == tcp::State::Closed && before != after {
            self.reason = Some(match before {
                tcp::State::SynSent => libc::ECONNREFUSED,
                _ => libc::ECONNRESET,
            });
        }
    }

    /// Ends it by RST, for this reason.
    pub(crate) fn abort(&mut self, errno: i32) {
        if self.socket().is_open() {
            self.socket_mut().abort();
            self.reason = Some(errno);
        }
    }

    /// `close()` by the agent, for a program that cannot say it by its end of the pair.
    pub(crate) fn close(&mut self) {
        if matches!(self.phase, Phase::Connecting { .. }) {
            return self.abort(libc::ECONNABORTED);
        }
        self.socket_mut().close();
        self.closed = true;
    }

    /// Lets the program, the peer and smoltcp have their way, as far as the budget goes.
    pub(crate) fn turn(
        &mut self,
        now: Instant,
        interface: &mut Interface,
        device: &mut Device,
        budget: &mut Budget,
    ) -> Turn {
        if core::mem::take(&mut self.changed)
            && let Some(pair) = &self.pair
        {
            self.other = sys::other_end(pair);
        }
        let mut more = false;
        let mut throttled = false;
        match self.phase {
            Phase::Connecting { .. } if self.other.gone => self.abort(libc::ECONNABORTED),
            Phase::Open => {
                throttled = self.push(budget);
                self.show_end();
                throttled |= self.pull(budget);
                self.without_program();
                self.watch_end(now);
                more = budget.bytes == 0;
            }
            _ => {}
        }
        self.be_patient();
        if !self.waits_for_program() {
            more |= self.egress(now, interface, device);
        }
        Turn { change: self.change(), more, throttled }
    }

    /// In TIME-WAIT, with data that the program has not read: smoltcp would drop it when that ends.
    fn waits_for_program(&self) -> bool {
        let socket = self.socket();
        socket.state() == tcp::State::TimeWait
            && self.was == tcp::State::TimeWait
            && socket.can_recv()
            && !self.deaf
    }

    /// smoltcp has one time-out for all that can go wrong; what it is depends on what is awaited.
    fn be_patient(&mut self) {
        let settings = self.settings;
        let socket = self.set.get_mut::<tcp::Socket>(self.handle);
        let wanted = settings.patience(socket.state(), socket.send_queue() > 0);
        if socket.timeout() != wanted {
            socket.set_timeout(wanted);
        }
    }

    fn egress(&mut self, now: Instant, interface: &mut Interface, device: &mut Device) -> bool {
        core::mem::swap(&mut self.track, &mut device.out.track);
        let mut sent = 0;
        while sent < PACKETS_A_TURN
            && interface.poll_egress(now, device, &mut self.set) == PollResult::SocketStateChanged
        {
            sent += 1;
        }
        device.out.send_joined();
        core::mem::swap(&mut self.track, &mut device.out.track);
        sent == PACKETS_A_TURN
    }

    /// When smoltcp wants to be asked again; `None` is never.
    pub(crate) fn next(&mut self, now: Instant, interface: &mut Interface) -> Option<Instant> {
        if self.waits_for_program() {
            return None;
        }
        let next = interface.poll_at(now, &self.set);
        match (next, self.give_up) {
            (Some(a), Some((_, b))) => Some(a.min(b)),
            (a, b) => a.or(b.map(|b| b.1)),
        }
    }
}

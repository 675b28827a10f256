//! One connection: smoltcp's socket on one side, the program's pair on the other. The thread of the
//! host owns all of it.

use core::net::Ipv4Addr;
use std::io::IoSliceMut;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use smoltcp::iface::{Interface, PollIngressSingleResult, PollResult, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{IpAddress, IpEndpoint};

use crate::abi::*;
use crate::device::{Arrived, Device, Track};
use crate::packet::Segment;
use crate::proto;
use crate::settings::Settings;
use crate::sys;

/// For how long a connection without a program waits for the peer's FIN: Linux's `tcp_fin_timeout`.
const ORPHAN: Duration = Duration::from_secs(60);
/// After that many packets of one connection it is others' turn.
const PACKETS_A_TURN: usize = 64;

/// As many reads empty a pair.
const PARTS: usize = 4096;

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

    /// Gives the program what has come. Says whether the tenant's rate is in the way.
    fn push(&mut self, budget: &mut Budget) -> bool {
        let Some(pair) = &self.pair else { return false };
        let socket = self.set.get_mut::<tcp::Socket>(self.handle);
        while socket.can_recv() {
            if self.deaf || self.other.gone {
                self.deaf = true;
                if self.other.gone {
                    return false; // without_program answers it by RST
                }
                let _ = socket.recv(|data| (data.len(), ()));
                continue;
            }
            if !self.writable || budget.bytes == 0 {
                return false;
            }
            if budget.receive == 0 {
                return true;
            }
            let most = budget.bytes.min(budget.receive);
            let mut stuck = None;
            let sent = socket.recv(|data| {
                let end = data.len().min(most);
                match sys::write(pair, &data[..end]) {
                    Ok(n) => (n, n),
                    Err(err) => {
                        stuck = Some(err);
                        (0, 0)
                    }
                }
            });
            let sent = sent.unwrap_or(0);
            budget.bytes -= sent;
            budget.receive = budget.receive.saturating_sub(sent);
            self.pushed += sent as u64;
            match stuck {
                Some(err) if sys::would_block(&err) => self.writable = false,
                Some(_) => self.deaf = true,
                None if sent == 0 => return false,
                None => {}
            }
        }
        false
    }

    /// Shows the program the peer's FIN, after the data.
    fn show_end(&mut self) {
        let socket = self.socket();
        let over = matches!(
            socket.state(),
            tcp::State::CloseWait
                | tcp::State::LastAck
                | tcp::State::Closing
                | tcp::State::TimeWait
        );
        if over && !self.shown && !socket.can_recv() {
            self.shown = true;
            if let Some(pair) = &self.pair {
                // The other end may be gone, which is as good.
                let _ = pair.shutdown(Shutdown::Write);
            }
        }
    }

    /// Sends on what the program wrote, and its FIN. The last byte stays in the pair.
    /// Says whether the tenant's rate is in the way.
    fn pull(&mut self, budget: &mut Budget) -> bool {
        let Some(pair) = &self.pair else { return false };
        let socket = self.set.get_mut::<tcp::Socket>(self.handle);
        let mut drained = false;
        while socket.may_send() && self.readable {
            let fresh = sys::waiting(pair).saturating_sub(usize::from(self.guard));
            if fresh == 0 {
                self.readable = false;
                drained = true;
                break;
            }
            if !socket.can_send() || budget.bytes == 0 {
                return false;
            }
            if budget.send == 0 {
                return true;
            }
            let most = budget.bytes.min(budget.send);
            let sent = pull_some(pair, socket, &mut self.guard, fresh, most);
            if sent == 0 {
                // Urgent data, say: what is counted cannot be read.
                self.readable = false;
                drained = true;
                break;
            }
            budget.bytes -= sent;
            budget.send = budget.send.saturating_sub(sent);
            self.pulled += sent as u64;
        }
        // What was written before the end is there once the end is.
        let end = self.other.silent && !self.readable && socket.may_send();
        if end && !self.closed && (drained || sys::waiting(pair) <= usize::from(self.guard)) {
            socket.close();
            self.closed = true;
        }
        false
    }

    /// What becomes of a connection whose program has closed it.
    fn without_program(&mut self) {
        let linger = self.settings.linger == Some(0);
        if self.other.gone && (self.other.unread || linger || self.socket().can_recv()) {
            self.abort(0);
        }
    }

    /// smoltcp waits for the answer to a FIN for ever, and for the peer's FIN.
    fn watch_end(&mut self, now: Instant) {
        let state = self.socket().state();
        let span = match state {
            tcp::State::FinWait1 | tcp::State::Closing | tcp::State::LastAck => {
                Duration::from_millis(self.settings.user_timeout.into())
            }
            tcp::State::FinWait2 if self.other.gone => ORPHAN,
            _ => {
                self.give_up = None;
                return;
            }
        };
        match self.give_up {
            Some((of, until)) if of == state => {
                if now >= until {
                    self.abort(libc::ETIMEDOUT);
                }
            }
            _ => self.give_up = Some((state, now + span)),
        }
    }

    /// What the turn has made of it.
    fn change(&mut self) -> Change {
        let state = self.socket().state();
        let before = core::mem::replace(&mut self.was, state);
        match self.phase {
            Phase::Connecting { asked, skip } => match state {
                tcp::State::Closed => Change::Failed(asked, self.reason.unwrap_or(libc::ETIMEDOUT)),
                tcp::State::SynSent | tcp::State::SynReceived => Change::None,
                _ => {
                    self.drop_filling(skip);
                    self.phase = Phase::Open;
                    Change::Connected(asked)
                }
            },
            Phase::Arriving => match state {
                // Back in LISTEN: the peer has reset it, or what came was no SYN.
                tcp::State::Closed | tcp::State::Listen => Change::Gone,
                tcp::State::SynReceived => Change::None,
                _ => {
                    self.phase = Phase::Open;
                    self.guard = true;
                    Change::Accepted
                }
            },
            Phase::Open => self.end(state, before),
            Phase::Over if state == tcp::State::Closed => Change::Gone,
            Phase::Over => Change::None,
        }
    }

    /// Whether an open connection is over, and the program has everything.
    fn end(&mut self, state: tcp::State, before: tcp::State) -> Change {
        if state != tcp::State::Closed && state != tcp::State::TimeWait {
            return Change::None;
        }
        if state == tcp::State::Closed && self.reason.is_none() {
            let orderly = matches!(before, tcp::State::LastAck | tcp::State::TimeWait);
            self.reason = Some(if orderly { 0 } else { libc::ETIMEDOUT });
        }
        if self.socket().can_recv() && !self.deaf && !self.other.gone {
            return Change::None;
        }
        let errno = if state == tcp::State::TimeWait { 0 } else { self.reason.unwrap_or(0) };
        if errno == 0
            && let Some(pair) = &self.pair
        {
            // With nothing unread the other end sees no reset.
            let mut rest = [0; 4096];
            // Not what it goes on writing meanwhile.
            for _ in 0..PARTS {
                if !matches!(sys::read(pair, &mut [IoSliceMut::new(&mut rest)]), Ok(1..)) {
                    break;
                }
            }
        }
        self.phase = Phase::Over;
        Change::Ended(errno)
    }

    /// Reads what lies in the pair before the program's bytes, but for the guard.
    fn drop_filling(&mut self, skip: u32) {
        let Some(pair) = &self.pair else { return };
        let mut left = skip as usize - 1;
        let mut rest = [0; 4096];
        while left > 0 {
            let most = left.min(rest.len());
            match sys::read(pair, &mut [IoSliceMut::new(&mut rest[..most])]) {
                Ok(n @ 1..) => left -= n,
                _ => break,
            }
        }
        self.guard = sys::waiting(pair) > 0;
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

    /// Bytes of its buffers that have been used: the kernel gives no memory for the others.
    pub(crate) fn memory(&self) -> u64 {
        let (sent, received) = (self.pulled, self.pushed + self.socket().recv_queue() as u64);
        sent.min(self.settings.send_buffer.into())
            + received.min(self.settings.receive_buffer.into())
    }

    pub(crate) fn info(&self, mut head: stack_head, mtu: usize) -> stack_info {
        head.id = self.id;
        let socket = self.socket();
        let ip_header = if matches!(self.local.addr, IpAddress::Ipv4(_)) { 20 } else { 40 };
        let short = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let queued = socket.send_queue() as u64;
        stack_info {
            head,
            kind: STACK_KIND_CONNECTION,
            state: state_number(socket.state()),
            listener: self.listener,
            local: proto::named(self.local),
            remote: proto::named(self.remote),
            options: self.settings.to_abi(),
            bytes_sent: self.pulled.saturating_sub(queued),
            bytes_received: self.pushed + socket.recv_queue() as u64,
            segments_sent: self.track.sent,
            segments_received: self.track.received,
            retransmits: self.track.retransmits,
            rtt: short(self.track.rtt),
            rtt_variation: short(self.track.variation),
            mss: short(mtu as u64 - ip_header - 20),
            send_queue: short(queued),
            receive_queue: short(socket.recv_queue() as u64),
            ..stack_info::default()
        }
    }
}

/// Moves up to `most` of the `fresh` bytes that wait. The last one that waits is copied, and stays.
fn pull_some(
    pair: &UnixStream,
    socket: &mut tcp::Socket<'_>,
    guard: &mut bool,
    fresh: usize,
    most: usize,
) -> usize {
    let mut last = false;
    let moved = socket.send(|room| {
        let want = fresh.min(most).min(room.len());
        // The last byte is not read but looked at.
        last = want == fresh;
        let read = want - usize::from(last);
        if read + usize::from(*guard) == 0 {
            return (0, 0);
        }
        let mut skipped = [0; 1];
        let got = if *guard {
            let mut parts = [IoSliceMut::new(&mut skipped), IoSliceMut::new(&mut room[..read])];
            sys::read(pair, &mut parts)
        } else {
            sys::read(pair, &mut [IoSliceMut::new(&mut room[..read])])
        };
        let got = got.unwrap_or(0);
        let data = got - usize::from(*guard && got > 0);
        *guard &= got == 0;
        last &= data == read;
        (data, data)
    });
    let moved = moved.unwrap_or(0);
    if last
        && !*guard
        && let Some(byte) = sys::peek(pair)
        && socket.send_slice(&[byte]) == Ok(1)
    {
        *guard = true;
        return moved + 1;
    }
    moved
}

/// The numbers that Linux has for states, `net/tcp_states.h`.
fn state_number(state: tcp::State) -> u32 {
    match state {
        tcp::State::Established => 1,
        tcp::State::SynSent => 2,
        tcp::State::SynReceived => 3,
        tcp::State::FinWait1 => 4,
        tcp::State::FinWait2 => 5,
        tcp::State::TimeWait => 6,
        tcp::State::Closed => 7,
        tcp::State::CloseWait => 8,
        tcp::State::LastAck => 9,
        tcp::State::Listen => 10,
        tcp::State::Closing => 11,
    }
}

//! A connection of a guest's: the byte rings on one side, a socket on the other.

use core::sync::atomic::Ordering;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::abi::*;
use super::memory::{View, arm, take_armed, take_waits};
use super::sockets;

/// What a system call, and a look at a stream, cost beside the bytes: processor time as bytes.
pub(super) const CALL: usize = 4096;
const LOOK: usize = 128;
/// What one system call moves at most: the socket is locked meanwhile.
const PIECE: u64 = 256 << 10;
/// So many looks at an empty out ring precede sleep, with a nap between them.
const LOOKS: u32 = 4;

/// SHUTDOWN or CLOSE, which wait for the bytes before them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Later {
    pub(super) offset: u64,
    pub(super) job: queues_nqe,
}

/// A connection that has a stream.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) number: u16,
    pub(super) generation: u32,
    /// The guest receives by the in ring, too.
    both: bool,
    /// Counters of this side, and of the guest's as they were seen last.
    out_consumed: u64,
    out_produced: u64,
    in_produced: u64,
    in_consumed: u64,
    /// The socket takes, or gives, nothing until epoll says so.
    pub(super) out_blocked: bool,
    in_blocked: bool,
    /// The socket gives nothing more.
    in_over: bool,
    pub(super) dead: bool,
    looks: u32,
    pub(super) shutdown: Option<Later>,
    pub(super) close: Option<Later>,
    /// When the socket took bytes last, or CLOSE came, in nanoseconds.
    pub(super) progress: u64,
}

/// What is to become of a connection after its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It has more to do.
    Again,
    /// It may have more to do soon.
    Soon,
    /// Somebody will say when it has.
    Wait,
}

/// What happened in a turn.
#[derive(Debug, Default)]
pub(super) struct Moved {
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) calls: u64,
    /// The guest is to be told.
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// It is to hear of an edge of its socket.
    pub(super) edge: bool,
    /// The connection has ended, with this errno.
    pub(super) ended: Option<i32>,
}

impl Stream {
    /// Begins a stream: nobody else uses its words now.
    pub(super) fn begin(view: &View, number: u16, generation: u32, both: bool) -> Self {
        for word in [view.out_produced(number), view.in_consumed(number)] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [view.out_consumed(number), view.in_produced(number)] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [view.out_waiting(number), view.in_waiting(number), view.in_asleep(number)] {
            word.store(0, Ordering::Relaxed);
        }
        view.error(number).store(0, Ordering::Relaxed);
        view.out_asleep(number).store(1, Ordering::Relaxed);
        view.generation(number).store(generation, Ordering::Relaxed);
        view.state(number).store(QUEUES_STREAM_USED, Ordering::Release);
        Self {
            number,
            generation,
            both,
            out_consumed: 0,
            out_produced: 0,
            in_produced: 0,
            in_consumed: 0,
            out_blocked: false,
            in_blocked: false,
            in_over: !both,
            dead: false,
            looks: 0,
            shutdown: None,
            close: None,
            progress: 0,
        }
    }

    /// Has nobody use it any more.
    pub(super) fn end(&self, view: &View) {
        view.state(self.number).store(0, Ordering::Release);
    }

    /// What epoll says of the socket.
    pub(super) fn event(&mut self, what: u32) {
        if what & unix_io::epoll::WRITABLE != 0 {
            self.out_blocked = false;
        }
        if what & !unix_io::epoll::WRITABLE != 0 {
            self.in_blocked = false;
        }
        let gone = (libc::EPOLLERR | libc::EPOLLHUP).cast_unsigned();
        if what & gone != 0 {
            self.out_blocked = false;
        }
    }

    /// The guest's counter of the out ring; `None` if it cannot be.
    fn look_out(&mut self, view: &View) -> Option<u64> {
        let value = view.out_produced(self.number).load(Ordering::Acquire);
        let most = self.out_consumed.wrapping_add(view.layout.capacity.into());
        if most.wrapping_sub(value) > most.wrapping_sub(self.out_produced) {
            return None;
        }
        self.out_produced = value;
        Some(value)
    }

    fn look_in(&mut self, view: &View) -> Option<u64> {
        let value = view.in_consumed(self.number).load(Ordering::Acquire);
        if self.in_produced.wrapping_sub(value) > self.in_produced.wrapping_sub(self.in_consumed) {
            return None;
        }
        self.in_consumed = value;
        Some(u64::from(view.layout.capacity) - self.in_produced.wrapping_sub(value))
    }

    /// Whether the guest left bytes that came for it.
    pub(super) fn is_unread(&mut self, view: &View) -> bool {
        self.both && self.look_in(view) != Some(view.layout.capacity.into())
    }

    /// The offset that a job may name: no further than what was produced.
    pub(super) fn may_wait_for(&mut self, view: &View, offset: u64) -> bool {
        let produced = self.look_out(view);
        produced.is_some_and(|p| p.wrapping_sub(offset) <= p.wrapping_sub(self.out_consumed))
    }

    /// All that was put into the out ring.
    pub(super) fn produced(&mut self, view: &View) -> u64 {
        self.look_out(view).unwrap_or(self.out_consumed)
    }

    /// Whether the socket has taken the bytes before this one, or never will.
    pub(super) fn has_sent(&self, offset: u64) -> bool {
        self.dead || offset.wrapping_sub(self.out_consumed).cast_signed() <= 0
    }

    /// The connection is over.
    pub(super) fn die(&mut self, view: &View, errno: i32, moved: &mut Moved) {
        if self.dead {
            return;
        }
        self.dead = true;
        self.in_over = true;
        view.error(self.number).store(errno, Ordering::Relaxed);
        view.state(self.number).fetch_or(QUEUES_STREAM_DEAD, Ordering::Release);
        moved.ended = Some(errno);
        self.tell(view, moved);
    }

    /// The guest does not keep to the rules.
    fn give_up(&mut self, view: &View, fd: BorrowedFd<'_>, moved: &mut Moved) {
        sockets::reset_at_close(fd);
        sockets::shutdown(fd, QUEUES_SHUT_BOTH);
        self.die(view, libc::ECONNRESET, moved);
    }

    /// Says of everything that there is something to be told.
    fn tell(&self, view: &View, moved: &mut Moved) {
        moved.readable |= take_armed(view.in_waiting(self.number));
        self.tell_writer(view, moved);
    }

    fn tell_writer(&self, view: &View, moved: &mut Moved) {
        let waits = take_waits(view.out_waiting(self.number));
        moved.writable |= waits & QUEUES_WAITS != 0;
        moved.edge |= waits & QUEUES_WAITS_EDGE != 0;
    }

    /// A turn, which takes what it costs of what is left of its owner's round.
    pub(super) fn turn(
        &mut self,
        view: &View,
        fd: &OwnedFd,
        left: &mut usize,
        moved: &mut Moved,
    ) -> Next {
        let fd = fd.as_fd();
        *left = left.saturating_sub(LOOK);
        let out = self.turn_out(view, fd, left, moved);
        let back = if self.both { self.turn_in(view, fd, left, moved) } else { Next::Wait };
        match (out, back) {
            (Next::Again, _) | (_, Next::Again) => Next::Again,
            (Next::Soon, _) => Next::Soon,
            _ => Next::Wait,
        }
    }

    fn turn_out(
        &mut self,
        view: &View,
        fd: BorrowedFd<'_>,
        left: &mut usize,
        moved: &mut Moved,
    ) -> Next {
        let mut sent = 0_u64;
        let next = loop {
            let Some(produced) = self.look_out(view) else {
                self.give_up(view, fd, moved);
                break Next::Wait;
            };
            if self.dead {
                // Nobody takes them, as those in the send buffer of a socket that was reset.
                self.out_consumed = produced;
                view.out_consumed(self.number).store(produced, Ordering::Release);
                break Next::Wait;
            }
            let end = self.close.map_or(produced, |c| c.offset);
            let n = end.wrapping_sub(self.out_consumed).min(PIECE);
            if n == 0 {
                break if sent > 0 { Next::Again } else { Next::Soon };
            }
            if self.out_blocked {
                break Next::Wait;
            }
            if *left == 0 {
                break Next::Again;
            }
            let n = usize::try_from(n).unwrap_or(0).min(*left);
            moved.calls += 1;
            *left = left.saturating_sub(CALL);
            match view.send(fd, self.number, self.out_consumed, n) {
                Ok(n) => {
                    self.out_consumed = self.out_consumed.wrapping_add(n as u64);
                    view.out_consumed(self.number).store(self.out_consumed, Ordering::Release);
                    sent += n as u64;
                    *left = left.saturating_sub(n);
                    self.wake_writer(view, moved);
                }
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => self.out_blocked = true,
                Err(err) if err.kind() == std::io::ErrorKind::Interrupted => {}
                Err(err) => self.die(view, sockets::errno(&err), moved),
            }
        };
        moved.sent += sent;
        if next == Next::Soon {
            self.sleep(view)
        } else {
            self.looks = 0;
            next
        }
    }

    /// A writer that waits is told once there is room to speak of.
    fn wake_writer(&self, view: &View, moved: &mut Moved) {
        let used = self.out_produced.wrapping_sub(self.out_consumed);
        if used <= u64::from(view.layout.capacity) / 2 {
            self.tell_writer(view, moved);
        }
    }

    /// The out ring is empty. A program that sends has more soon; the others say when.
    fn sleep(&mut self, view: &View) -> Next {
        self.looks += 1;
        if !self.both && self.looks < LOOKS {
            return Next::Soon;
        }
        self.looks = 0;
        arm(view.out_asleep(self.number));
        let before = self.out_produced;
        match self.look_out(view) {
            Some(now) if now == before => Next::Wait,
            _ => {
                view.out_asleep(self.number).store(0, Ordering::Relaxed);
                Next::Again
            }
        }
    }

    fn turn_in(
        &mut self,
        view: &View,
        fd: BorrowedFd<'_>,
        left: &mut usize,
        moved: &mut Moved,
    ) -> Next {
        let mut got = 0_u64;
        let next = loop {
            if self.in_over || self.in_blocked {
                break Next::Wait;
            }
            if *left == 0 {
                break Next::Again;
            }
            let Some(room) = self.look_in(view) else {
                self.give_up(view, fd, moved);
                break Next::Wait;
            };
            if room == 0 {
                arm(view.in_asleep(self.number));
                if self.look_in(view) == Some(0) {
                    break Next::Wait;
                }
                view.in_asleep(self.number).store(0, Ordering::Relaxed);
                continue;
            }
            let n = usize::try_from(room.min(PIECE)).unwrap_or(0).min(*left);
            moved.calls += 1;
            *left = left.saturating_sub(CALL);
            match view.receive(fd, self.number, self.in_produced, n) {
                Ok(0) => {
                    self.in_over = true;
                    view.state(self.number).fetch_or(QUEUES_STREAM_END, Ordering::Release);
                    self.tell(view, moved);
                }
                Ok(n) => {
                    self.in_produced = self.in_produced.wrapping_add(n as u64);
                    view.in_produced(self.number).store(self.in_produced, Ordering::Release);
                    got += n as u64;
                    *left = left.saturating_sub(n);
                }
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => self.in_blocked = true,
                Err(err) if err.kind() == std::io::ErrorKind::Interrupted => {}
                Err(err) => self.die(view, sockets::errno(&err), moved),
            }
        };
        moved.received += got;
        if got > 0 {
            moved.readable |= take_armed(view.in_waiting(self.number));
        }
        next
    }

    /// `SHUT_RD`: what comes is nobody's any more.
    pub(super) fn stop_reading(&mut self) {
        self.in_over = true;
    }

    /// How far this side is, for events.
    pub(super) fn in_produced(&self) -> u64 {
        self.in_produced
    }

    /// How far the socket is, and the room that there is.
    pub(super) fn out_state(&self, view: &View) -> (u64, u32) {
        let used = self.out_produced.wrapping_sub(self.out_consumed);
        let room = u64::from(view.layout.capacity).saturating_sub(used);
        (self.out_consumed, u32::try_from(room).unwrap_or(u32::MAX))
    }
}

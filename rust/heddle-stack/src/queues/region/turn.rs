//! A region's turns: what there is to do, and when there is.

use core::sync::atomic::Ordering;
use std::os::fd::AsFd;

use shared_ring::Slot;
use unix_io::epoll::WRITABLE;

use super::jobs::{ENDED_EVENT, READABLE_EVENT, WRITABLE_EVENT};
use super::{BELL, Context, JOBS, Kind, LIFE, Region, SOCKETS, Socket, end_stream};
use crate::queues::abi::*;
use crate::queues::memory::{HeaderWord, View};
use crate::queues::proto;
use crate::queues::sockets;
use crate::queues::stream::{CALL, Moved, Next};

/// A connection that was closed is given up if its socket takes nothing for so long, in ns.
const FLUSH: u64 = 60_000_000_000;
/// A polled guest is given up when it has not beaten for so long.
const GUEST: u64 = 10_000_000_000;

impl Region {
    /// What epoll says of a descriptor of the region's.
    pub(in crate::queues) fn event(&mut self, what: u32, events: u32, context: &Context<'_>) {
        match what {
            LIFE => self.guest_gone(context),
            BELL => {
                if let Some(bells) = &mut self.bells {
                    // Takes the ring, of which there may be more: the guest's turn comes anyway.
                    let _ = bells.jobs.take_ring();
                    bells.jobs.disarm();
                    bells.armed = false;
                }
            }
            n => {
                let index = (n - SOCKETS) as usize;
                if let Some(Some(socket)) = self.sockets.get_mut(index)
                    && let Kind::Connection(stream) = &mut socket.kind
                {
                    stream.event(events);
                    let bad = (libc::EPOLLERR | libc::EPOLLHUP).cast_unsigned();
                    let ours = self.flags & QUEUES_CONTROL == 0;
                    if ours
                        && events & WRITABLE != 0
                        && let Some(fd) = &socket.fd
                    {
                        context.watch_room(fd.as_fd(), false, index);
                    }
                    // The kernel has told this side alone of nothing yet: the program's next call
                    // is to hear of it.
                    if ours
                        && events & bad != 0
                        && socket.fd.as_ref().is_some_and(|fd| sockets::is_over(fd.as_fd()))
                    {
                        end_stream(stream, &self.view, 0);
                    }
                }
                self.activate(index);
            }
        }
    }

    /// A turn, as far as its owner's round has something left. Says whether there is more to do; an
    /// error ends the region.
    pub(in crate::queues) fn turn(
        &mut self,
        context: &Context<'_>,
        left: &mut usize,
    ) -> Result<Next, shared_ring::PeerBroken> {
        let mut next = Next::Wait;
        let mut popped = 0;
        let mut said = self.flush()?;
        if self.waiting.is_empty() && !self.gone {
            let mut slots = [Slot::default(); JOBS];
            popped = self.jobs.pop(&mut slots)?;
            for slot in &slots[..popped] {
                self.stats.jobs += 1;
                *left = left.saturating_sub(CALL);
                self.serve(&proto::nqe(slot), context);
            }
            if popped == JOBS {
                next = Next::Again;
            }
        }
        for _ in 0..self.active.len() {
            if *left == 0 {
                // The next round goes on here.
                next = Next::Again;
                break;
            }
            let Some(index) = self.active.pop_front() else { break };
            match self.run(index, left, context) {
                Next::Wait => {}
                one => {
                    self.activate(index);
                    if next != Next::Again {
                        next = one;
                    }
                }
            }
        }
        said |= self.flush()?;
        if (said || popped > 0)
            && let Some(bells) = &mut self.bells
        {
            // Who cannot be rung looks by itself, or not at all.
            let _ = bells.completions.ring();
        }
        Ok(next)
    }

    /// Before the service sleeps: has the guest ring. True: there is something to do after all.
    pub(in crate::queues) fn arm(&mut self) -> bool {
        let Some(bells) = &mut self.bells else { return false };
        if bells.armed || self.gone {
            return false;
        }
        bells.jobs.arm();
        // Of completions that wait, room is what there is to do.
        let ready = if self.waiting.is_empty() {
            self.jobs.is_ready()
        } else {
            self.completions.is_ready()
        };
        if ready {
            bells.jobs.disarm();
            return true;
        }
        bells.armed = true;
        false
    }

    /// Each second: the beat, connections that nobody takes the rest of, guests that beat no more.
    pub(in crate::queues) fn tick(&mut self, beat: u32, context: &Context<'_>) {
        self.view.header(HeaderWord::Beat).store(beat, Ordering::Relaxed);
        for index in 0..self.sockets.len() {
            let Some(Some(socket)) = self.sockets.get_mut(index) else { continue };
            if let (Kind::Connection(stream), Some(fd)) = (&mut socket.kind, &socket.fd)
                && stream.close.is_some()
                && context.now.saturating_sub(stream.progress) > FLUSH
            {
                sockets::reset_at_close(fd.as_fd());
                sockets::shutdown(fd.as_fd(), QUEUES_SHUT_BOTH);
                end_stream(stream, &self.view, libc::ETIMEDOUT);
                self.activate(index);
            }
        }
        if self.bells.is_some() || self.gone {
            return;
        }
        let now = self.view.header(HeaderWord::GuestBeat).load(Ordering::Relaxed);
        if now != self.guest_beat.0 {
            self.guest_beat = (now, context.now);
        } else if self.guest_beat.1 != 0 && context.now - self.guest_beat.1 > GUEST {
            self.renew(context);
        }
    }

    fn run(&mut self, index: usize, left: &mut usize, context: &Context<'_>) -> Next {
        let Some(Some(socket)) = self.sockets.get_mut(index) else { return Next::Wait };
        socket.queued = false;
        match &socket.kind {
            Kind::Connection(_) => self.move_bytes(index, left, context),
            Kind::Listener(_) => self.accept(index, context),
            Kind::Connecting(..) => {
                self.connected(index, context);
                Next::Wait
            }
            _ => Next::Wait,
        }
    }

    fn move_bytes(&mut self, index: usize, left: &mut usize, context: &Context<'_>) -> Next {
        let view = &self.view;
        let Some(Some(Socket { number, fd: Some(fd), kind: Kind::Connection(stream), .. })) =
            self.sockets.get_mut(index)
        else {
            return Next::Wait;
        };
        let mut moved = Moved::default();
        let blocked = stream.out_blocked;
        let next = stream.turn(view, fd, left, &mut moved);
        if self.flags & QUEUES_CONTROL == 0 && stream.out_blocked && !blocked {
            context.watch_room(fd.as_fd(), true, index);
        }
        if self.flags & QUEUES_CONTROL == 0 && moved.edge {
            sockets::tell_of_room(fd.as_fd());
        }
        if moved.sent > 0 {
            stream.progress = context.now;
        }
        self.stats.bytes_sent += moved.sent;
        self.stats.bytes_received += moved.received;
        self.stats.calls += moved.calls;
        let event = queues_nqe {
            socket: *number,
            stream: stream.number,
            generation: stream.generation,
            ..Default::default()
        };
        let mut said = Vec::new();
        if let Some(later) = stream.shutdown
            && stream.has_sent(later.offset)
        {
            sockets::shutdown(fd.as_fd(), later.job.length);
            stream.shutdown = None;
            said.push(later.job);
        }
        let closes = stream.close.filter(|c| stream.has_sent(c.offset));
        if closes.is_some() && stream.is_unread(view) {
            sockets::reset_at_close(fd.as_fd());
        }
        let (in_produced, (out_consumed, room)) = (stream.in_produced(), stream.out_state(view));
        if self.controls() {
            if moved.readable {
                self.push(queues_nqe { operation: READABLE_EVENT, offset: in_produced, ..event });
            }
            if moved.writable {
                self.push(queues_nqe {
                    operation: WRITABLE_EVENT,
                    offset: out_consumed,
                    credit: room,
                    ..event
                });
            }
            if let Some(error) = moved.ended {
                self.push(queues_nqe { operation: ENDED_EVENT, error, ..event });
            }
        } else if moved.writable || moved.ended.is_some() {
            View::wake(view.out_waiting(event.stream));
        }
        for job in said {
            self.complete(&job, Ok(()));
        }
        if let Some(later) = closes {
            self.remove(index, context);
            self.complete(&later.job, Ok(()));
            return Next::Wait;
        }
        next
    }
}

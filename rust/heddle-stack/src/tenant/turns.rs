//! When a tenant runs, what its turn costs, and when it wants the next.

use core::cmp::Reverse;
use std::os::fd::AsFd;

use smoltcp::time::{Duration, Instant};

use super::{Context, Tenant};
use crate::connection::Budget;
use crate::device::Reading;
use crate::sys::{self, Epoll};

/// What a packet costs beside its bytes, in the scheduler's units: processor time as bytes.
pub(crate) const PACKET_COST: usize = 2048;
/// Bytes that a connection may move in its turn.
pub(super) const CONNECTION_QUANTUM: usize = 256 << 10;
/// Packets that are read before connections have their turns.
const PACKETS: usize = 64;
/// How soon tenants that wait for their rates are looked at again.
pub(super) const REFILL: Duration = Duration::from_millis(2);

impl Tenant {
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

    pub(crate) fn weight(&self) -> isize {
        isize::try_from(self.limits.weight).unwrap_or(1)
    }

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

    pub(super) fn charge(&mut self, cost: usize) {
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

    pub(super) fn enqueue(&mut self, slot: usize) {
        if let Some(Some(connection)) = self.connections.get_mut(slot)
            && !connection.queued
        {
            connection.queued = true;
            self.ready.push_back(slot);
        }
    }

    pub(super) fn unblock(&mut self) {
        for slot in core::mem::take(&mut self.blocked) {
            self.enqueue(slot);
        }
    }
}

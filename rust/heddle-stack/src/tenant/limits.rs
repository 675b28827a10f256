//! What a tenant may have: caps of its rates, connections, sockets and memory.

use shared_ring::protection::protects;
use smoltcp::time::Instant;

use super::Tenant;
use super::connections::{HALF_OPEN, OVERHEAD};
use crate::abi::stack_tenant;
use crate::bucket::Bucket;
use crate::proto::Errno;
use crate::settings::{BUFFER_MIN, Settings};

/// The least a buffer gets when memory is short.
const BUFFER_SHORT: u32 = 16 << 10;

/// Which part of a tenant's memory its half-open connections may have, and how many there may be.
const HALF_OPEN_SHARE: u64 = 16;
const HALF_OPEN_LEAST: u32 = 16;
const HALF_OPEN_MOST: u32 = 1024;

const MEMORY: u64 = 512 << 20;
const CONNECTIONS: u32 = 16_384;
const SOCKETS: u32 = 4096;

impl Tenant {
    pub(super) fn update(&mut self, message: &stack_tenant, settings: Settings, now: Instant) {
        let mut limits = message.limits;
        if !protects("caps") {
            (limits.send_rate, limits.receive_rate) = (0, 0);
        }
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

    pub(super) fn has_place(&mut self) -> Result<(), Errno> {
        if self.ports.count() >= self.limits.sockets as usize {
            self.counts.refuse_sockets += 1;
            return Err(Errno(libc::EMFILE));
        }
        Ok(())
    }

    /// Whether there may be one more connection; one in TIME-WAIT goes if need be.
    pub(super) fn has_connection(&mut self) -> bool {
        self.established() < self.limits.connections || self.evict()
    }

    /// Connections beside those whose peers have not answered yet.
    pub(super) fn established(&self) -> u32 {
        self.live - self.half_open
    }

    /// How many handshakes of peers' may be under way.
    pub(super) fn half_open_most(&self) -> u32 {
        let share = self.limits.memory / HALF_OPEN_SHARE / HALF_OPEN as u64;
        u32::try_from(share).unwrap_or(u32::MAX).clamp(HALF_OPEN_LEAST, HALF_OPEN_MOST)
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

    /// The settings with such buffers as the memory that is left allows, if there is enough of it.
    pub(super) fn afford(&mut self, mut settings: Settings) -> Option<Settings> {
        if !self.make_room(2 * BUFFER_SHORT as usize + OVERHEAD) {
            return None;
        }
        // All handshakes may end well.
        let left = self.left().saturating_sub(self.promised);
        let share = u32::try_from(left / 128).unwrap_or(u32::MAX).max(BUFFER_SHORT);
        settings.send_buffer = settings.send_buffer.min(share).max(BUFFER_MIN);
        settings.receive_buffer = settings.receive_buffer.min(share).max(BUFFER_MIN);
        Some(settings)
    }

    /// Whether so much memory is left, for which connections in TIME-WAIT go if need be, and
    /// handshakes of peers', the oldest first.
    pub(super) fn make_room(&mut self, bytes: usize) -> bool {
        while self.left() < bytes {
            if !self.evict() && !self.give_way() {
                return false;
            }
        }
        true
    }

    fn left(&self) -> usize {
        let limit = usize::try_from(self.limits.memory).unwrap_or(usize::MAX);
        limit.saturating_sub(self.reserved)
    }
}

//! What a tenant may have: caps of its rates, connections, sockets and memory.

use smoltcp::time::Instant;

use super::Tenant;
use super::connections::OVERHEAD;
use crate::abi::stack_tenant;
use crate::bucket::Bucket;
use crate::proto::Errno;
use crate::settings::{BUFFER_MIN, Settings};

/// The least a buffer gets when memory is short.
const BUFFER_SHORT: u32 = 16 << 10;

const MEMORY: u64 = 512 << 20;
const CONNECTIONS: u32 = 16_384;
const SOCKETS: u32 = 4096;

impl Tenant {
    pub(super) fn update(&mut self, message: &stack_tenant, settings: Settings, now: Instant) {
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

    pub(super) fn has_place(&mut self) -> Result<(), Errno> {
        if self.ports.count() >= self.limits.sockets as usize {
            self.counts.refuse_sockets += 1;
            return Err(Errno(libc::EMFILE));
        }
        Ok(())
    }

    /// Whether there may be one more connection; one in TIME-WAIT goes if need be.
    pub(super) fn has_connection(&mut self) -> bool {
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

    /// The settings with such buffers as the memory that is left allows, if there is enough of it.
    pub(super) fn afford(&mut self, mut settings: Settings) -> Option<Settings> {
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
}

//! Connections that come from outside, from their first SYN on.

use core::hash::BuildHasher;

use smoltcp::time::Instant;

use super::{Socket, Tenant, interface};
use crate::connection::{Connection, Phase};
use crate::device::Arrived;
use crate::packet::Segment;

impl Tenant {
    /// A SYN of a connection that is not there yet.
    pub(super) fn opening(&mut self, segment: &Segment, packet: Arrived, now: Instant) {
        let lot = self.by_addresses.hasher().hash_one(segment.source);
        let listener = self.ports.listener(segment.destination, lot);
        let Some((id, socket)) = listener.and_then(|id| Some((id, *self.sockets.get(&id)?))) else {
            return self.refuse(packet, now);
        };
        let Socket::Listener { backlog, pending, settings, .. } = socket else { return };
        if pending >= backlog {
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
        if self.half_open >= self.half_open_most() {
            self.give_way();
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
        // A sequence number that nobody can predict: smoltcp's own generator can be.
        self.interface = interface(&mut self.device, self.addresses, now);
        let slot = self.insert(connection);
        self.note_handshake(slot, self.last_id);
        self.deliver(slot, segment, packet, now);
    }

    fn note_handshake(&mut self, slot: usize, id: u64) {
        if self.handshakes.len() > 2 * self.half_open as usize + 16 {
            let mut all = core::mem::take(&mut self.handshakes);
            all.retain(|(slot, id)| self.is_handshake(*slot, *id));
            self.handshakes = all;
        }
        self.handshakes.push_back((slot, id));
    }

    fn is_handshake(&self, slot: usize, id: u64) -> bool {
        let connection = self.connections.get(slot).and_then(Option::as_ref);
        connection.is_some_and(|c| c.id == id && c.is_half_open())
    }

    /// Drops the oldest handshake that is not over: whoever floods listeners with SYNs of nobody
    /// keeps those out that answer more slowly than the flood takes all places, and no others.
    /// The peer hears nothing, as it may not be the one that has asked. Says whether there was one.
    pub(super) fn give_way(&mut self) -> bool {
        while let Some((slot, id)) = self.handshakes.pop_front() {
            if self.is_handshake(slot, id) {
                self.remove(slot);
                self.counts.drop_backlog += 1;
                return true;
            }
        }
        false
    }
}

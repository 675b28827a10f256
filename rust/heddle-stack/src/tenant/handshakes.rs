//! Connections that come from outside, from their first SYN on.

use core::hash::BuildHasher;

use smoltcp::time::{Duration, Instant};

use super::{Socket, Tenant, interface};
use crate::connection::{Connection, Phase};
use crate::device::Arrived;
use crate::packet::Segment;

/// For how long a handshake holds its place in a full backlog: until its SYN-ACK is sent again.
const HANDSHAKE: Duration = Duration::from_secs(1);

impl Tenant {
    /// A SYN of a connection that is not there yet.
    pub(super) fn opening(&mut self, segment: &Segment, packet: Arrived, now: Instant) {
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
}

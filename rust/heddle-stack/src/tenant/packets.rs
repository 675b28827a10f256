//! Packets that arrive: which connection each is of.

use smoltcp::iface::SocketSet;
use smoltcp::time::Instant;

use super::turns::PACKET_COST;
use super::{Context, Tenant};
use crate::device::{Arrived, Reading};
use crate::packet::{self, Bad, Segment};

impl Tenant {
    pub(super) fn read(&mut self, context: &mut Context<'_>) {
        match self.device.read() {
            Reading::Empty => self.readable = false,
            Reading::Packet(packet) => {
                self.charge(packet.ip.len() + PACKET_COST);
                self.packet(packet, context);
            }
            Reading::Other => self.counts.drop_protocol += 1,
            Reading::Malformed => self.counts.drop_malformed += 1,
        }
    }

    pub(super) fn packet(&mut self, packet: Arrived, context: &mut Context<'_>) {
        let segment = match packet::segment(self.device.bytes(&packet), packet.checked) {
            Ok(segment) => segment,
            Err(bad) => {
                match bad {
                    Bad::Malformed => self.counts.drop_malformed += 1,
                    Bad::Protocol => self.counts.drop_protocol += 1,
                    Bad::Checksum => self.counts.drop_checksum += 1,
                }
                return;
            }
        };
        if !packet.own && self.is_martian(&segment) {
            self.counts.drop_martian += 1;
            return;
        }
        self.counts.segments_received += 1;
        let key = (segment.destination, segment.source);
        if let Some(slot) = self.by_addresses.get(&key).copied() {
            // A new connection may take the place of one in TIME-WAIT, RFC 6191.
            if !segment.opens || !self.waits(slot) {
                return self.deliver(slot, &segment, packet, context.now);
            }
            self.remove(slot);
        }
        if segment.opens {
            self.opening(&segment, packet, context.now);
        } else {
            self.refuse(packet, context.now);
        }
    }

    pub(super) fn deliver(
        &mut self,
        slot: usize,
        segment: &Segment,
        packet: Arrived,
        now: Instant,
    ) {
        if let Some(connection) = &mut self.connections[slot] {
            connection.arrived(segment, packet, now, &mut self.interface, &mut self.device);
            self.enqueue(slot);
        }
    }

    /// A segment of no connection: smoltcp answers it by RST.
    pub(super) fn refuse(&mut self, packet: Arrived, now: Instant) {
        self.device.offer(packet);
        let mut nobody = SocketSet::new(Vec::new());
        self.interface.poll_ingress_single(now, &mut self.device, &mut nobody);
    }
}

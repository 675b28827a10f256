//! What is told of a connection.

use smoltcp::socket::tcp;
use smoltcp::wire::IpAddress;

use super::Connection;
use crate::abi::*;
use crate::proto;

impl Connection {
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

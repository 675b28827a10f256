//! A tenant's device: packets with a `struct virtio_net_hdr` before them, and the way back to the
//! tenant itself.

use core::num::NonZeroUsize;
use core::ops::Range;
use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};

use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium, PacketMeta};
use smoltcp::time::Instant;
use smoltcp::wire::{IpAddress, TcpSeqNumber};

use crate::packet::{self, Segment};
use crate::sys;

const VNET: usize = 10;
const ETHERNET: usize = 14;
const PACKET_MAX: usize = 65_535;
/// Packets of a tenant to itself that wait at most, in bytes.
const LOOPBACK_MAX: usize = 4 << 20;

// Of struct virtio_net_hdr, <linux/virtio_net.h>.
const NEEDS_CSUM: u8 = 1;
const DATA_VALID: u8 = 2;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const IPV6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
// Flags of TCP.
const ACK: u8 = 0x10;
const PSH: u8 = 0x08;
/// Where a TCP header has its checksum.
const CHECKSUM_OFFSET: u16 = 16;

/// What the agent said of a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) ethernet: bool,
    pub(crate) mac: [u8; 6],
    pub(crate) gateway: [u8; 6],
    /// Of IP packets.
    pub(crate) mtu: usize,
    pub(crate) offloads: bool,
}

/// A packet that has come, as a part of the device's buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrived {
    pub(crate) ip: Range<usize>,
    /// Nobody has to look at its TCP checksum.
    pub(crate) checked: bool,
    /// It is the tenant's own, to itself.
    pub(crate) own: bool,
}

/// What reading gave.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    Empty,
    Packet(Arrived),
    /// No IP packet.
    Other,
    Malformed,
}

/// How far the sending of one connection has got, and how long answers take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Track {
    next: Option<TcpSeqNumber>,
    /// A segment whose acknowledgement is timed, and when it was sent.
    sample: Option<(TcpSeqNumber, u64)>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) retransmits: u64,
    /// Microseconds, RFC 6298; 0 before the first sample.
    pub(crate) rtt: u64,
    pub(crate) variation: u64,
}

impl Track {
    fn sending(&mut self, s: &Segment) {
        self.sent += 1;
        if s.number == s.end {
            return;
        }
        match self.next {
            Some(next) if s.end <= next => {
                self.retransmits += 1;
                self.sample = None; // Karn: which one is answered, nobody knows
            }
            _ => {
                self.next = Some(s.end);
                self.sample.get_or_insert_with(|| (s.end, sys::monotonic()));
            }
        }
    }

    pub(crate) fn receiving(&mut self, s: &Segment) {
        self.received += 1;
        let Some((end, sent)) = self.sample else { return };
        if !s.acknowledges.is_some_and(|a| a >= end) {
            return;
        }
        self.sample = None;
        let took = (sys::monotonic().saturating_sub(sent) / 1000).max(1);
        if self.rtt == 0 {
            (self.rtt, self.variation) = (took, took / 2);
        } else {
            self.variation = (3 * self.variation + self.rtt.abs_diff(took)) / 4;
            self.rtt = (7 * self.rtt + took) / 8;
        }
    }
}

/// An IPv6 packet in the output's buffer to which more of its connection's data may be added.
#[derive(Clone, Copy, Debug)]
struct Joined {
    length: usize,
    /// Bytes of data in each segment.
    size: usize,
    end: TcpSeqNumber,
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Output {
    file: File,
    facts: Facts,
    own: Vec<IpAddress>,
    buffer: Vec<u8>,
    /// smoltcp 0.14 makes large segments for IPv4 only: those of IPv6 are joined here.
    joined: Option<Joined>,
    /// Where the next packet is made while there is one.
    next: Vec<u8>,
    /// A packet that the device did not take yet.
    held: Option<Vec<u8>>,
    loopback: VecDeque<Vec<u8>>,
    loopback_bytes: usize,
    /// Of the connection that is served now.
    pub(crate) track: Track,
    pub(crate) sent: u64,
    pub(crate) retransmits: u64,
    pub(crate) resets: u64,
    pub(crate) dropped: u64,
    /// What its packets cost, in the units of the scheduler.
    pub(crate) cost: usize,
}

#[derive(Debug)]
pub(crate) struct Device {
    input: Vec<u8>,
    /// The packet that smoltcp is to read next.
    pending: Option<Range<usize>>,
    pub(crate) out: Output,
}

impl Device {
    /// `own` are the addresses that packets to the tenant itself have, loopback ones included.
    pub(crate) fn new(file: File, facts: Facts, own: Vec<IpAddress>) -> Self {
        let size = VNET + ETHERNET + PACKET_MAX + 1;
        let out = Output {
            file,
            facts,
            own,
            buffer: vec![0; size],
            joined: None,
            next: vec![0; size],
            held: None,
            loopback: VecDeque::new(),
            loopback_bytes: 0,
            track: Track::default(),
            sent: 0,
            retransmits: 0,
            resets: 0,
            dropped: 0,
            cost: 0,
        };
        Self { input: vec![0; size], pending: None, out }
    }

    pub(crate) fn file(&self) -> &File {
        &self.out.file
    }

    /// Of IP packets that are not segmented by the device.
    pub(crate) fn mtu(&self) -> usize {
        self.out.facts.mtu
    }

    /// Whether a packet waits for the device to take it.
    pub(crate) fn holds(&self) -> bool {
        self.out.held.is_some()
    }

    pub(crate) fn has_own(&self) -> bool {
        !self.out.loopback.is_empty()
    }

    /// A packet of the tenant's to itself.
    pub(crate) fn read_own(&mut self) -> Reading {
        let Some(packet) = self.out.loopback.pop_front() else { return Reading::Empty };
        self.out.loopback_bytes -= packet.len();
        self.input[..packet.len()].copy_from_slice(&packet);
        Reading::Packet(Arrived { ip: 0..packet.len(), checked: true, own: true })
    }

    /// A packet that the device gives.
    pub(crate) fn read(&mut self) -> Reading {
        let length = match self.out.file.read(&mut self.input) {
            Ok(0) => return Reading::Empty,
            Ok(n) => n,
            Err(err) if sys::would_block(&err) => return Reading::Empty,
            Err(_) => {
                self.out.dropped += 1;
                return Reading::Empty;
            }
        };
        let facts = self.out.facts;
        let start = if facts.ethernet { VNET + ETHERNET } else { VNET };
        if length < start {
            return Reading::Malformed;
        }
        if facts.ethernet {
            let frame = &self.input[VNET..start];
            let ip = matches!(frame[12..14], [0x08, 0x00] | [0x86, 0xdd]);
            if !ip || frame[..6] != facts.mac {
                return Reading::Other;
            }
        }
        let checked = self.input[0] & (NEEDS_CSUM | DATA_VALID) != 0;
        Reading::Packet(Arrived { ip: start..length, checked, own: false })
    }

    pub(crate) fn bytes(&self, packet: &Arrived) -> &[u8] {
        &self.input[packet.ip.clone()]
    }

    /// Has smoltcp read this packet next.
    pub(crate) fn offer(&mut self, packet: Arrived) {
        self.pending = Some(packet.ip);
    }

    /// Tries again to send what the device did not take. Says whether it is gone.
    pub(crate) fn flush(&mut self) -> bool {
        self.out.write_held();
        self.out.held.is_none()
    }
}

impl Output {
    /// Whether smoltcp may send.
    pub(crate) fn ready(&self) -> bool {
        self.held.is_none() && self.loopback_bytes < LOOPBACK_MAX
    }

    /// Writes the frame that lies there in the buffer.
    fn write(&mut self, begin: usize, end: usize) {
        let frame = &self.buffer[begin..end];
        match (&self.file).write(frame) {
            Ok(_) => {}
            Err(err) if sys::would_block(&err) && self.held.is_none() => {
                self.held = Some(frame.to_vec());
            }
            Err(_) => self.dropped += 1,
        }
    }

    fn write_held(&mut self) {
        let Some(frame) = self.held.take() else { return };
        match (&self.file).write(&frame) {
            Ok(_) => {}
            Err(err) if sys::would_block(&err) => self.held = Some(frame),
            Err(_) => self.dropped += 1,
        }
    }

    /// Sends the IP packet that lies in the buffer.
    fn finish(&mut self, length: usize, segment_size: Option<u16>) {
        let start = VNET + ETHERNET;
        let Ok(s) = packet::segment(&self.buffer[start..start + length], true) else {
            self.dropped += 1;
            return;
        };
        self.count(&s, length);
        if self.own.contains(&s.destination.addr) {
            self.loopback_bytes += length;
            self.loopback.push_back(self.buffer[start..start + length].to_vec());
            return;
        }
        let data = s.end - s.number;
        let tcp = start + IPV6_HEADER;
        if self.facts.offloads
            && matches!(s.destination.addr, IpAddress::Ipv6(_))
            && data > 0
            && length == IPV6_HEADER + TCP_HEADER + data
            && self.buffer[tcp + 13] == ACK
        {
            self.joined = Some(Joined { length, size: data, end: s.end });
            return;
        }
        self.emit(&s, length, segment_size);
    }

    fn count(&mut self, s: &Segment, length: usize) {
        let before = self.track.retransmits;
        self.track.sending(s);
        self.sent += 1;
        self.cost += length + crate::tenant::PACKET_COST;
        self.resets += u64::from(s.resets);
        self.retransmits += self.track.retransmits - before;
    }

    /// Adds the packet in `next` to the one that is being joined, or sends that and makes it the
    /// packet in the buffer.
    fn join(&mut self, length: usize, segment_size: Option<u16>) {
        let Some(mut joined) = self.joined else { return };
        let start = VNET + ETHERNET;
        let Ok(s) = packet::segment(&self.next[..length], true) else {
            self.dropped += 1;
            return;
        };
        let (old, new) = (&self.buffer[start..], &self.next[..]);
        let tcp = IPV6_HEADER;
        let data = s.end - s.number;
        let flags = new.get(tcp + 13).copied().unwrap_or(0);
        let same = s.number == joined.end
            && length == IPV6_HEADER + TCP_HEADER + data
            && (1..=joined.size).contains(&data)
            && flags & !PSH == ACK
            // Addresses; ports; what is acknowledged and the header's length; the window.
            && old[8..tcp + 4] == new[8..tcp + 4]
            && old[tcp + 8..tcp + 13] == new[tcp + 8..tcp + 13]
            && old[tcp + 14..tcp + 16] == new[tcp + 14..tcp + 16];
        if !same || joined.length + data > PACKET_MAX - 64 {
            self.send_joined();
            self.buffer[start..start + length].copy_from_slice(&self.next[..length]);
            return self.finish(length, segment_size);
        }
        self.count(&s, length);
        let at = start + joined.length;
        let from = IPV6_HEADER + TCP_HEADER;
        self.buffer[at..at + data].copy_from_slice(&self.next[from..from + data]);
        self.buffer[start + tcp + 13] = flags;
        joined = Joined { length: joined.length + data, end: s.end, ..joined };
        self.joined = Some(joined);
        // A segment that is not full is the last.
        if data < joined.size || flags & PSH != 0 {
            self.send_joined();
        }
    }

    /// Sends what has been joined.
    pub(crate) fn send_joined(&mut self) {
        let Some(joined) = self.joined.take() else { return };
        let start = VNET + ETHERNET;
        let payload = u16::try_from(joined.length - IPV6_HEADER).unwrap_or(u16::MAX);
        self.buffer[start + 4..start + 6].copy_from_slice(&payload.to_be_bytes());
        let Ok(s) = packet::segment(&self.buffer[start..start + joined.length], true) else {
            self.dropped += 1;
            return;
        };
        let one = joined.length <= IPV6_HEADER + TCP_HEADER + joined.size;
        let size = u16::try_from(joined.size).ok().filter(|_| !one);
        self.emit(&s, joined.length, size);
    }

    /// Writes the IP packet that lies in the buffer, with its headers before it.
    fn emit(&mut self, s: &Segment, length: usize, segment_size: Option<u16>) {
        let start = VNET + ETHERNET;
        let ip_header = if matches!(s.destination.addr, IpAddress::Ipv4(_)) { 20 } else { 40 };
        let mut head = [0; VNET];
        let before_ip = if self.facts.ethernet { ETHERNET } else { 0 };
        if self.facts.offloads {
            let tcp = start + ip_header;
            let sum = packet::pseudo_sum(s.source.addr, s.destination.addr, length - ip_header);
            self.buffer[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
            let short = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_ne_bytes();
            head[0] = NEEDS_CSUM;
            head[6..8].copy_from_slice(&short(before_ip + ip_header));
            head[8..10].copy_from_slice(&CHECKSUM_OFFSET.to_ne_bytes());
            if let Some(size) = segment_size {
                head[1] = if ip_header == 20 { GSO_TCPV4 } else { GSO_TCPV6 };
                let tcp_header = usize::from(self.buffer[tcp + 12] >> 4) * 4;
                head[2..4].copy_from_slice(&short(before_ip + ip_header + tcp_header));
                head[4..6].copy_from_slice(&size.to_ne_bytes());
            }
        }
        // The headers belong right before the packet.
        let begin = start - before_ip - VNET;
        self.buffer[begin..begin + VNET].copy_from_slice(&head);
        if self.facts.ethernet {
            let frame = &mut self.buffer[VNET..start];
            frame[..6].copy_from_slice(&self.facts.gateway);
            frame[6..12].copy_from_slice(&self.facts.mac);
            let kind = if ip_header == 20 { [0x08, 0x00] } else { [0x86, 0xdd] };
            frame[12..].copy_from_slice(&kind);
        }
        self.write(begin, start + length);
    }
}

/// A packet for smoltcp.
#[derive(Debug)]
pub(crate) struct RxToken<'a>(&'a [u8]);

impl phy::RxToken for RxToken<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

/// Room for a packet of smoltcp's.
#[derive(Debug)]
pub(crate) struct TxToken<'a> {
    out: &'a mut Output,
    segment_size: Option<u16>,
}

impl phy::TxToken for TxToken<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        if self.out.joined.is_some() {
            let result = f(&mut self.out.next[..length]);
            packet::narrow_window(&mut self.out.next[..length]);
            self.out.join(length, self.segment_size);
            return result;
        }
        let start = VNET + ETHERNET;
        let result = f(&mut self.out.buffer[start..start + length]);
        packet::narrow_window(&mut self.out.buffer[start..start + length]);
        self.out.finish(length, self.segment_size);
        result
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        self.segment_size = meta.segmentation_offload_size.map(core::num::NonZero::get);
    }
}

impl phy::Device for Device {
    type RxToken<'a> = RxToken<'a>;
    type TxToken<'a> = TxToken<'a>;

    fn receive(&mut self, _now: Instant) -> Option<(RxToken<'_>, TxToken<'_>)> {
        let ip = self.pending.take()?;
        Some((RxToken(&self.input[ip]), TxToken { out: &mut self.out, segment_size: None }))
    }

    fn transmit(&mut self, _now: Instant) -> Option<TxToken<'_>> {
        self.out.ready().then_some(TxToken { out: &mut self.out, segment_size: None })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let facts = self.out.facts;
        let mut c = DeviceCapabilities::default();
        c.medium = Medium::Ip;
        c.max_transmission_unit = facts.mtu;
        // What comes is checked before smoltcp gets it.
        c.checksum.tcp = Checksum::Tx;
        if facts.offloads {
            c.checksum.tcp = Checksum::None;
            // smoltcp 0.14 does not say the size of segments of IPv6 packets.
            c.segmentation.tcpv4 = NonZeroUsize::new(PACKET_MAX - 64);
        }
        c
    }
}

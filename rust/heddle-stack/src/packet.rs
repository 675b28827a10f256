//! Which connection a packet is of, and whether its checksums are right. Packets are from anybody.

use smoltcp::wire::{
    IpAddress, IpEndpoint, IpProtocol, Ipv4Packet, Ipv6Packet, TcpPacket, TcpSeqNumber,
};

/// What the module has to know of a TCP segment before smoltcp reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Who sent it.
    pub source: IpEndpoint,
    /// Whom it is for.
    pub destination: IpEndpoint,
    /// It opens a connection: SYN without ACK.
    pub opens: bool,
    /// RST.
    pub resets: bool,
    /// Its first byte, or SYN or FIN.
    pub number: TcpSeqNumber,
    /// What comes after it.
    pub end: TcpSeqNumber,
    /// What it acknowledges.
    pub acknowledges: Option<TcpSeqNumber>,
}

/// Why a packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bad {
    /// Lengths or versions that cannot be.
    Malformed,
    /// No TCP, or a fragment of it.
    Protocol,
    /// A wrong checksum.
    Checksum,
}

/// Reads an IP packet; `checked` says that its TCP checksum need not be looked at.
///
/// # Errors
///
/// Why it is to be dropped.
pub fn segment(ip: &[u8], checked: bool) -> Result<Segment, Bad> {
    match ip.first().map(|b| b >> 4) {
        Some(4) => {
            let packet = Ipv4Packet::new_checked(ip).map_err(|_| Bad::Malformed)?;
            if packet.next_header() != IpProtocol::Tcp
                || packet.more_frags()
                || packet.frag_offset() != 0
            {
                return Err(Bad::Protocol);
            }
            if !packet.verify_checksum() {
                return Err(Bad::Checksum);
            }
            let (from, to) = (packet.src_addr().into(), packet.dst_addr().into());
            tcp(packet.payload(), from, to, checked)
        }
        Some(6) => {
            let packet = Ipv6Packet::new_checked(ip).map_err(|_| Bad::Malformed)?;
            if packet.next_header() != IpProtocol::Tcp {
                return Err(Bad::Protocol);
            }
            let (from, to) = (packet.src_addr().into(), packet.dst_addr().into());
            tcp(packet.payload(), from, to, checked)
        }
        _ => Err(Bad::Malformed),
    }
}

fn tcp(payload: &[u8], from: IpAddress, to: IpAddress, checked: bool) -> Result<Segment, Bad> {
    let packet = TcpPacket::new_checked(payload).map_err(|_| Bad::Malformed)?;
    if packet.src_port() == 0 || packet.dst_port() == 0 {
        return Err(Bad::Malformed);
    }
    if !checked && !packet.verify_checksum(&from, &to) {
        return Err(Bad::Checksum);
    }
    let data = payload.len().saturating_sub(packet.header_len().into());
    let length = data + usize::from(packet.syn()) + usize::from(packet.fin());
    Ok(Segment {
        source: IpEndpoint::new(from, packet.src_port()),
        destination: IpEndpoint::new(to, packet.dst_port()),
        opens: packet.syn() && !packet.ack() && !packet.rst(),
        resets: packet.rst(),
        number: packet.seq_number(),
        end: packet.seq_number() + length,
        acknowledges: packet.ack().then(|| packet.ack_number()),
    })
}

/// Tells the peer a window that is one unit smaller than smoltcp wrote. What a window's scale cuts
/// off is another number of bytes each time, so the right edge moves back by up to a unit; smoltcp
/// 0.14 cuts off what a peer has sent up to the edge that it was told before: that is then lost.
/// What is told here lies below each edge that smoltcp has. Its packets have no IP options.
pub(crate) fn narrow_window(ip: &mut [u8]) {
    const SYN_OR_RST: u8 = 0x06;
    let header = if ip[0] >> 4 == 4 { 20 } else { 40 };
    let tcp = &mut ip[header..];
    let window = u16::from_be_bytes([tcp[14], tcp[15]]);
    // A SYN's window is not scaled.
    if tcp[13] & SYN_OR_RST != 0 || window == 0 {
        return;
    }
    tcp[14..16].copy_from_slice(&(window - 1).to_be_bytes());
    // RFC 1624; a device that completes checksums has its own written there.
    let (sum, carry) = u16::from_be_bytes([tcp[16], tcp[17]]).overflowing_add(1);
    tcp[16..18].copy_from_slice(&(sum + u16::from(carry)).to_be_bytes());
}

/// The sum of the pseudo header, as the checksum field of a segment has it whose checksum the
/// device is to complete.
pub(crate) fn pseudo_sum(from: IpAddress, to: IpAddress, length: usize) -> u16 {
    let words = |bytes: &[u8]| -> u64 {
        bytes.chunks_exact(2).map(|w| u64::from(u16::from_be_bytes([w[0], w[1]]))).sum()
    };
    let addresses = match (from, to) {
        (IpAddress::Ipv4(a), IpAddress::Ipv4(b)) => words(&a.octets()) + words(&b.octets()),
        (IpAddress::Ipv6(a), IpAddress::Ipv6(b)) => words(&a.octets()) + words(&b.octets()),
        _ => 0,
    };
    let mut sum = addresses + u64::from(u8::from(IpProtocol::Tcp)) + length as u64;
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(u16::MAX)
}

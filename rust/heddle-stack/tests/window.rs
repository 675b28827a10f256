//! A window that fills up. smoltcp cuts off what lies beyond the window that it told last, which
//! may end before the one that it told earlier by what its scale cuts off: that was lost, and each
//! window that filled up cost a time-out of a second.

mod support;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use heddle_stack::abi::*;
use heddle_stack::client::Client;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, Ipv4Address, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};
use support::{Module, WAIT_TIMEOUT, at, tenant};

const OWN: Ipv4Address = Ipv4Address::new(10, 9, 0, 1);
const PEER: Ipv4Address = Ipv4Address::new(10, 9, 0, 2);
const BUFFER: u32 = 1 << 19;
/// Not a multiple of what a scale cuts off. It is more than a packet, so acknowledged at once.
const SEGMENT: usize = 3001;

/// A peer by hand, which keeps to the furthest edge that it was told.
struct Peer {
    link: UnixStream,
    scale: u8,
    next: TcpSeqNumber,
    acknowledged: TcpSeqNumber,
    edge: TcpSeqNumber,
    /// What the module sends next.
    theirs: Option<TcpSeqNumber>,
}

impl Peer {
    fn send(&mut self, control: TcpControl, payload: &[u8]) {
        let tcp = TcpRepr {
            src_port: 5000,
            dst_port: 80,
            control,
            seq_number: self.next,
            ack_number: self.theirs,
            window_len: 1000,
            window_scale: (control == TcpControl::Syn).then_some(0),
            max_seg_size: None,
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload,
        };
        let ip = Ipv4Repr {
            src_addr: PEER,
            dst_addr: OWN,
            next_header: IpProtocol::Tcp,
            payload_len: tcp.buffer_len(),
            hop_limit: 64,
        };
        let mut frame = vec![0; 10 + 20 + tcp.buffer_len()];
        let caps = ChecksumCapabilities::default();
        ip.emit(&mut Ipv4Packet::new_unchecked(&mut frame[10..]), &caps);
        let mut packet = TcpPacket::new_unchecked(&mut frame[30..]);
        tcp.emit(&mut packet, &IpAddress::Ipv4(PEER), &IpAddress::Ipv4(OWN), &caps);
        self.link.write_all(&frame).unwrap();
        self.next += payload.len() + usize::from(control == TcpControl::Syn);
    }

    /// Reads until all that was sent is acknowledged.
    fn acknowledged(&mut self) {
        let mut frame = vec![0; 2000];
        while self.acknowledged < self.next {
            let length = self.link.read(&mut frame).expect("an acknowledgement of all");
            let packet = TcpPacket::new_checked(&frame[30..length]).unwrap();
            let checked = packet.verify_checksum(&IpAddress::Ipv4(OWN), &IpAddress::Ipv4(PEER));
            assert!(checked && packet.ack(), "{packet}");
            let mut window = usize::from(packet.window_len());
            if packet.syn() {
                self.theirs = Some(packet.seq_number() + 1);
                self.scale = TcpRepr::parse(
                    &packet,
                    &IpAddress::Ipv4(OWN),
                    &IpAddress::Ipv4(PEER),
                    &ChecksumCapabilities::default(),
                )
                .unwrap()
                .window_scale
                .unwrap();
            } else {
                window <<= self.scale;
            }
            self.acknowledged = packet.ack_number();
            self.edge = self.edge.max(self.acknowledged + window);
        }
    }
}

#[test]
fn what_was_sent_up_to_a_window_s_edge_is_taken() {
    let mut module = Module::start();
    let (link, device) = Client::packet_pair().unwrap();
    let mut one = tenant(1);
    one.options.mask = STACK_SET_RECEIVE_BUFFER;
    one.options.receive_buffer = BUFFER;
    module.tenant(one, device);
    let (listener, _) = module.client.listen(1, at("10.9.0.1", 80), 0, 16).unwrap().unwrap();
    let link = UnixStream::from(link);
    link.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let start = TcpSeqNumber(1);
    let mut peer =
        Peer { link, scale: 0, next: start, acknowledged: start, edge: start, theirs: None };
    peer.send(TcpControl::Syn, &[]);
    peer.acknowledged();
    assert!(peer.scale > 0);
    peer.send(TcpControl::None, &[7; SEGMENT]);
    let (_, program) = module.client.accept(listener).unwrap();
    // Nobody reads: the pair fills up, then the buffer.
    while peer.edge - peer.next >= SEGMENT {
        peer.send(TcpControl::None, &[7; SEGMENT]);
        peer.acknowledged();
    }
    let rest = peer.edge - peer.next;
    peer.send(TcpControl::None, &vec![7; rest]);
    peer.acknowledged();
    // And it goes on when somebody does.
    let sent = peer.next - start - 1;
    program.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    (&program).read_exact(&mut vec![0; sent]).unwrap();
    peer.send(TcpControl::None, &[7; SEGMENT]);
    peer.acknowledged();
}

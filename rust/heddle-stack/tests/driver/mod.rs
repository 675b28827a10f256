//! A host that gets packets, messages of its agent's, bytes of programs and ends of all of them as
//! the given bytes say: the fuzz target chooses them, and `random.rs` makes them of seeds. No bytes
//! may make it panic, and nothing may be left when the tenant is gone.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use heddle_stack::Host;
use heddle_stack::abi::*;
use heddle_stack::packet;
use heddle_stack::proto;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpEndpoint, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};

/// What came of the bytes, so that a run can show that it reached all of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) connected: u64,
    pub(crate) accepted: u64,
    pub(crate) failed: u64,
    pub(crate) reset: u64,
    pub(crate) bytes: u64,
    pub(crate) retransmits: u64,
    pub(crate) dropped: u64,
    pub(crate) agents: u64,
}

const TENANT: u64 = 1;
const OWN: IpAddress = IpAddress::v4(10, 9, 0, 1);
const PEER: IpAddress = IpAddress::v4(10, 9, 0, 2);
const LISTENS: u16 = 80;

struct Driver<'a> {
    host: Host,
    agent: OwnedFd,
    device: File,
    pairs: Vec<UnixStream>,
    /// By its own and the peer's port: what the module expects next, and what it has sent.
    flows: HashMap<(u16, u16), (TcpSeqNumber, TcpSeqNumber)>,
    last_id: u64,
    outcomes: &'a mut Outcomes,
}

/// Bytes that decide, one after the other; zeros follow the last.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn short(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn take(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.byte()).collect()
    }
}

/// Does what the bytes say.
pub(crate) fn drive(data: &[u8], outcomes: &mut Outcomes) {
    let mut choices = Choices(data);
    let mut driver = Driver::new(outcomes);
    driver.listen();
    driver.connect();
    while !choices.0.is_empty() {
        match choices.byte() % 16 {
            0 => {
                let length = usize::from(choices.byte());
                let packet = choices.take(length);
                driver.packet(choices.byte(), &packet);
            }
            1..=6 => driver.segment(&mut choices),
            7 => driver.message(&mut choices),
            8 => driver.connect(),
            9 | 10 => driver.write(&mut choices),
            11 | 12 => driver.read(choices.byte()),
            13 => driver.end_pair(choices.byte()),
            14 => driver.host.skip(Duration::from_millis(u64::from(choices.byte()) * 50)),
            _ => driver.plain(STACK_STATS, TENANT, 0),
        }
        driver.settle();
    }
    driver.finish();
}

impl<'a> Driver<'a> {
    fn new(outcomes: &'a mut Outcomes) -> Self {
        let (agent, theirs) = heddle_stack::client::Client::packet_pair().unwrap();
        let (device, module) = heddle_stack::client::Client::packet_pair().unwrap();
        let mut host = Host::new().unwrap();
        host.connect(theirs).unwrap();
        let mut driver = Self {
            host,
            agent,
            device: File::from(device),
            pairs: Vec::new(),
            flows: HashMap::new(),
            last_id: 0,
            outcomes,
        };
        driver.nonblocking();
        driver.greet(Some(&module));
        drop(module);
        driver
    }

    fn nonblocking(&self) {
        use std::os::fd::AsRawFd;
        for fd in [self.agent.as_raw_fd(), self.device.as_raw_fd()] {
            // SAFETY: F_SETFL takes a number.
            assert_eq!(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        }
    }

    fn send(&self, bytes: &[u8], descriptor: Option<&OwnedFd>) {
        // The module may have ended the connection, or not read it yet.
        let _ = heddle_stack::client::send(&self.agent, bytes, descriptor);
    }

    fn plain(&self, kind: u32, tenant: u64, id: u64) {
        let head = stack_head { type_: kind, tenant, id, ..stack_head::default() };
        self.send(&proto::bytes(&stack_plain { head }), None);
    }

    fn greet(&mut self, device: Option<&OwnedFd>) {
        let head = stack_head { type_: STACK_HELLO, ..stack_head::default() };
        let hello = stack_hello { head, version: STACK_VERSION, ..stack_hello::default() };
        self.send(&proto::bytes(&hello), None);
        self.plain(STACK_BEGIN, 0, 0);
        let head = stack_head { type_: STACK_TENANT, tenant: TENANT, ..stack_head::default() };
        let mut tenant = stack_tenant {
            head,
            generation: 1,
            address4: [10, 9, 0, 1],
            mtu: 1500,
            offloads: 1,
            ..stack_tenant::default()
        };
        tenant.options.mask = STACK_SET_SEND_BUFFER | STACK_SET_RECEIVE_BUFFER;
        (tenant.options.send_buffer, tenant.options.receive_buffer) = (16_384, 16_384);
        (tenant.limits.connections, tenant.limits.sockets) = (12, 8);
        self.send(&proto::bytes(&tenant), device);
        self.plain(STACK_END, 0, 0);
        self.settle();
    }

    fn listen(&mut self) {
        self.last_id += 1;
        let head = stack_head {
            type_: STACK_LISTEN,
            tenant: TENANT,
            id: self.last_id,
            ..stack_head::default()
        };
        let address = proto::named(IpEndpoint::new(OWN, LISTENS));
        let options = stack_options::default();
        let request = stack_listen { head, address, flags: 0, backlog: 4, options };
        self.send(&proto::bytes(&request), None);
        self.settle();
    }

    fn connect(&mut self) {
        let (mut program, module) = UnixStream::pair().unwrap();
        program.write_all(&[0]).unwrap();
        program.set_nonblocking(true).unwrap();
        self.last_id += 1;
        let head = stack_head {
            type_: STACK_CONNECT,
            tenant: TENANT,
            id: self.last_id,
            ..stack_head::default()
        };
        let remote = proto::named(IpEndpoint::new(PEER, 7));
        let options = stack_options::default();
        let request = stack_connect { head, remote, skip: 1, reserved: 0, options };
        self.send(&proto::bytes(&request), Some(&module.into()));
        if self.pairs.len() < 32 {
            self.pairs.push(program);
        }
    }

    /// A packet with any content.
    fn packet(&mut self, flags: u8, ip: &[u8]) {
        let mut frame = vec![0; 10];
        frame[0] = flags;
        frame.extend_from_slice(ip);
        let _ = self.device.write(&frame);
    }

    /// A segment that is about right for a connection that there is, or nearly.
    fn segment(&mut self, choices: &mut Choices<'_>) {
        let shape = choices.byte();
        let mut known: Vec<(u16, u16)> = self.flows.keys().copied().collect();
        known.sort_unstable();
        let fresh = (LISTENS, 1000 + u16::from(choices.byte() % 8));
        let which = usize::from(choices.byte());
        let ports =
            if shape & 1 == 0 || known.is_empty() { fresh } else { known[which % known.len()] };
        let (next, sent) = self.flows.get(&ports).copied().unwrap_or_default();
        let near = |n: TcpSeqNumber, off: u16| {
            TcpSeqNumber(n.0.wrapping_add(i32::from(off.cast_signed())))
        };
        let exact = shape & 6 != 0;
        let (seq_off, ack_off) = (choices.short(), choices.short());
        let control = match choices.byte() % 8 {
            0 | 1 => TcpControl::Syn,
            2 => TcpControl::Fin,
            3 => TcpControl::Rst,
            4 => TcpControl::Psh,
            _ => TcpControl::None,
        };
        let length = match shape >> 6 {
            0 => 0,
            1 => usize::from(choices.byte()),
            _ => usize::from(choices.short()) % 20_000,
        };
        let payload = vec![shape; length];
        let repr = TcpRepr {
            src_port: ports.1,
            dst_port: ports.0,
            control,
            seq_number: if exact { next } else { near(next, seq_off) },
            ack_number: (shape & 0x30 != 0).then(|| if exact { sent } else { near(sent, ack_off) }),
            window_len: choices.short(),
            window_scale: (control == TcpControl::Syn).then(|| choices.byte() % 16),
            max_seg_size: (control == TcpControl::Syn).then(|| choices.short()),
            sack_permitted: shape & 8 != 0,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &payload,
        };
        let (IpAddress::Ipv4(from), IpAddress::Ipv4(to)) = (PEER, OWN) else { return };
        let ip = Ipv4Repr {
            src_addr: from,
            dst_addr: to,
            next_header: IpProtocol::Tcp,
            payload_len: repr.buffer_len(),
            hop_limit: 64,
        };
        let mut bytes = vec![0; ip.buffer_len() + repr.buffer_len()];
        let caps = ChecksumCapabilities::default();
        ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes), &caps);
        let mut tcp = TcpPacket::new_unchecked(&mut bytes[20..]);
        repr.emit(&mut tcp, &PEER, &OWN, &caps);
        self.packet(2, &bytes);
    }

    /// A message of the agent's with a length that is right, and members that are nearly.
    fn message(&mut self, choices: &mut Choices<'_>) {
        let lengths = [32, 72, 224, 64, 128, 96, 40];
        let length = lengths[usize::from(choices.byte()) % lengths.len()];
        let mut bytes = vec![0; length];
        bytes[0] = choices.byte() % 36;
        bytes[8] = choices.byte() % 3;
        bytes[16] = choices.byte() % 16;
        bytes[23] = choices.byte() & 0x80;
        for _ in 0..choices.byte() % 8 {
            let at = usize::from(choices.byte()) % length;
            bytes[at] = choices.byte();
        }
        let some: OwnedFd = UnixStream::pair().unwrap().0.into();
        let with = choices.byte().is_multiple_of(4);
        self.send(&bytes, with.then_some(&some));
    }

    fn pair(&self, which: u8) -> Option<&UnixStream> {
        (!self.pairs.is_empty()).then(|| &self.pairs[usize::from(which) % self.pairs.len()])
    }

    fn write(&self, choices: &mut Choices<'_>) {
        if let Some(mut pair) = self.pair(choices.byte()) {
            let bytes = vec![7; usize::from(choices.short())];
            let _ = pair.write(&bytes);
        }
    }

    fn read(&mut self, which: u8) {
        let mut bytes = vec![0; 30_000];
        let got = self.pair(which).map_or(0, |mut pair| pair.read(&mut bytes).unwrap_or(0));
        self.outcomes.bytes += got as u64;
    }

    fn end_pair(&mut self, which: u8) {
        if self.pairs.is_empty() {
            return;
        }
        let at = usize::from(which) % self.pairs.len();
        match which >> 6 {
            0 => drop(self.pairs.swap_remove(at)),
            1 => drop(self.pairs[at].shutdown(Shutdown::Read)),
            _ => drop(self.pairs[at].shutdown(Shutdown::Write)),
        }
    }

    /// Lets the host do what there is to do, and looks at what it says.
    fn settle(&mut self) {
        for _ in 0..3 {
            self.host.step(Some(Duration::ZERO)).unwrap();
            self.look_at_packets();
            self.look_at_messages();
        }
        if !self.host.has_agent() {
            // What was said was malformed: another agent comes, and takes everything over.
            let (agent, theirs) = heddle_stack::client::Client::packet_pair().unwrap();
            self.agent = agent;
            self.nonblocking();
            self.host.connect(theirs).unwrap();
            self.outcomes.agents += 1;
            self.greet(None);
        }
    }

    fn look_at_packets(&mut self) {
        let mut frame = vec![0; 70_000];
        while let Ok(n @ 1..) = self.device.read(&mut frame) {
            let s = packet::segment(&frame[10..n], true).expect("the module sends what it reads");
            let flow = self.flows.entry((s.source.port, s.destination.port)).or_default();
            if let Some(next) = s.acknowledges {
                flow.0 = next;
            }
            flow.1 = s.end;
            if self.flows.len() > 24 {
                self.flows.clear();
            }
        }
    }

    fn look_at_messages(&mut self) {
        while let Some(heard) = heddle_stack::client::receive(&self.agent) {
            match heard.head.type_ {
                STACK_ACCEPTED => {
                    let program = UnixStream::from(heard.descriptor.expect("the program's end"));
                    program.set_nonblocking(true).unwrap();
                    self.plain(STACK_TAKEN, TENANT, heard.head.id);
                    if self.pairs.len() < 32 {
                        self.pairs.push(program);
                    }
                }
                kind if kind == STACK_STATS | STACK_ANSWER && heard.head.error == 0 => {
                    self.note(&heard.read());
                }
                _ => {}
            }
        }
    }

    fn note(&mut self, s: &stack_stats) {
        if s.head.tenant != TENANT {
            return;
        }
        let o = &mut *self.outcomes;
        (o.connected, o.accepted) = (o.connected.max(s.connected), o.accepted.max(s.accepted));
        (o.failed, o.reset) = (o.failed.max(s.failed), o.reset.max(s.reset));
        o.retransmits = o.retransmits.max(s.retransmits);
        let dropped = s.drop_malformed + s.drop_martian + s.drop_protocol + s.drop_checksum;
        o.dropped = o.dropped.max(dropped);
        assert!(s.connections - s.half_open <= 12 && s.sockets <= 8, "{s:?}");
        assert!(s.memory <= s.memory_reserved, "{s:?}");
    }

    fn finish(mut self) {
        self.plain(STACK_STATS, TENANT, 0);
        self.settle();
        for tenant in 0..3 {
            self.plain(STACK_TENANT_GONE, tenant, 0);
            self.settle();
        }
        for pair in &self.pairs {
            // Nothing is left: every program is told.
            let mut end = vec![0; 65_536];
            pair.set_nonblocking(true).unwrap();
            while let Ok(1..) = (&*pair).read(&mut end) {}
            let last = (&*pair).read(&mut end);
            assert!(!matches!(&last, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock));
        }
    }
}

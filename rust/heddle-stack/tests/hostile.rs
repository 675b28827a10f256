//! Packets and messages that break rules: each is dropped or refused by its name.

mod support;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use heddle_stack::abi::*;
use heddle_stack::client::Client;
use heddle_stack::{packet, proto};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    IpAddress, IpProtocol, Ipv4Address, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber,
};
use support::{Module, WAIT_TIMEOUT, at, eventually, tenant};

/// A SYN to port 80, with a virtio header that says nothing.
fn syn(from: [u8; 4], to: [u8; 4]) -> Vec<u8> {
    let (from, to) = (Ipv4Address::from(from), Ipv4Address::from(to));
    let tcp = TcpRepr {
        src_port: 5000,
        dst_port: 80,
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1),
        ack_number: None,
        window_len: 1000,
        window_scale: None,
        max_seg_size: Some(1000),
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let ip = Ipv4Repr {
        src_addr: from,
        dst_addr: to,
        next_header: IpProtocol::Tcp,
        payload_len: tcp.buffer_len(),
        hop_limit: 64,
    };
    let mut bytes = vec![0; 10 + 20 + tcp.buffer_len()];
    let caps = ChecksumCapabilities::default();
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes[10..]), &caps);
    let mut packet = TcpPacket::new_unchecked(&mut bytes[30..]);
    tcp.emit(&mut packet, &IpAddress::Ipv4(from), &IpAddress::Ipv4(to), &caps);
    bytes
}

/// Fills in the checksum of the IP header.
fn with_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    Ipv4Packet::new_unchecked(&mut frame[10..]).fill_checksum();
    frame
}

fn module() -> (Module, UnixStream) {
    let mut module = Module::start();
    let (link, device) = Client::packet_pair().unwrap();
    module.tenant(tenant(1), device);
    module.client.listen(1, at("10.9.0.1", 80), 0, 16).unwrap().unwrap();
    // Of packets, but read and written alike.
    let link = UnixStream::from(link);
    link.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    (module, link)
}

const OWN: [u8; 4] = [10, 9, 0, 1];
const PEER: [u8; 4] = [10, 9, 0, 2];

#[test]
fn packets_are_dropped_by_name() {
    let (mut module, mut link) = module();
    let good = syn(PEER, OWN);
    let mut wrong_sum = good.clone();
    wrong_sum[46] ^= 1;
    let mut short = good.clone();
    short.truncate(40);
    let mut udp = good.clone();
    udp[19] = 17;
    let mut fragment = good.clone();
    fragment[16] = 0x20;
    let mut offset = good.clone();
    offset[42] = 0xf0;
    let martians =
        [syn([127, 0, 0, 1], OWN), syn(OWN, OWN), syn([224, 0, 0, 1], OWN), syn(PEER, PEER)];
    for (frame, reason) in [
        (wrong_sum, "checksum"),
        (short, "malformed"),
        (offset, "malformed"),
        (vec![0; 3], "malformed"),
        (with_checksum(udp), "protocol"),
        (with_checksum(fragment), "protocol"),
    ]
    .into_iter()
    .chain(martians.map(|frame| (frame, "martian")))
    {
        let count = |s: &stack_stats| match reason {
            "checksum" => s.drop_checksum,
            "malformed" => s.drop_malformed,
            "protocol" => s.drop_protocol,
            _ => s.drop_martian,
        };
        let before = module.client.stats(1).unwrap();
        link.write_all(&frame).unwrap();
        let after = eventually(reason, || {
            let s = module.client.stats(1).unwrap();
            (count(&s) != count(&before)).then_some(s)
        });
        assert_eq!((after.segments_received, after.half_open), (before.segments_received, 0));
    }
    // The same one is taken when nothing is wrong with it.
    link.write_all(&good).unwrap();
    let mut answer = vec![0; 2000];
    let length = link.read(&mut answer).unwrap();
    let segment = packet::segment(&answer[10..length], false).unwrap();
    assert_eq!(segment.acknowledges, Some(TcpSeqNumber(2)));
    assert_eq!(module.client.stats(1).unwrap().half_open, 1);
}

/// How many handshakes of peers' a tenant may have under way.
const HALF_OPEN_MOST: u64 = 1024;

/// A frame of a flood: the nth forged address and port, and no checksum that anybody would look at.
fn forged(n: u32) -> Vec<u8> {
    let [_, a, b, c] = n.to_be_bytes();
    let mut frame = syn([172, 16 + a, b, c], OWN);
    frame[0] = 2;
    frame
}

#[test]
fn half_open_connections_take_little_and_the_oldest_gives_way() {
    let (mut module, mut link) = module();
    let many = HALF_OPEN_MOST + 500;
    let mut nobody = link.try_clone().unwrap();
    let answers = std::thread::spawn(move || {
        let mut bytes = vec![0; 2000];
        while nobody.read(&mut bytes).is_ok_and(|n| n > 0) {}
    });
    let before = module.client.stats(1).unwrap();
    for n in 0..many {
        link.write_all(&forged(u32::try_from(n).unwrap())).unwrap();
    }
    let stats = eventually("the end of the flood", || {
        let s = module.client.stats(1).unwrap();
        (s.segments_received == many && s.half_open + s.drop_backlog == many).then_some(s)
    });
    assert_eq!((stats.half_open, stats.drop_backlog), (HALF_OPEN_MOST, 500));
    assert!(stats.memory_reserved <= 32 << 20, "{stats:?}");
    assert!(stats.memory - before.memory <= stats.memory_reserved, "{before:?} {stats:?}");
    drop(module);
    answers.join().unwrap();
}

/// Two tenants' links, with a wire between them that passes on frames and drops what is for nobody.
struct Wire {
    server: UnixStream,
    client: UnixStream,
    frame: Vec<u8>,
}

impl Wire {
    /// Passes on what is there.
    fn pump(&mut self) {
        for to_client in [true, false] {
            let (mut from, mut to) =
                if to_client { (&self.server, &self.client) } else { (&self.client, &self.server) };
            while let Ok(length @ 1..) = from.read(&mut self.frame) {
                let frame = &self.frame[..length];
                if frame[26..30] == if to_client { PEER } else { OWN } {
                    // A link that is full loses frames.
                    let _ = to.write(frame);
                }
            }
        }
    }
}

/// A program's connection, and whether what it writes comes back.
fn echoes(one: &UnixStream, other: &UnixStream, mut pump: impl FnMut()) -> bool {
    let mut byte = [0];
    let mut moved = |mut from: &UnixStream, mut to: &UnixStream| {
        if from.write_all(b"x").is_err() {
            return false;
        }
        let start = std::time::Instant::now();
        to.set_nonblocking(true).unwrap();
        while start.elapsed() < WAIT_TIMEOUT {
            pump();
            match to.read(&mut byte) {
                Ok(n) => return n == 1,
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => return false,
            }
        }
        false
    };
    moved(one, other) && moved(other, one)
}

#[test]
fn a_flood_of_syns_keeps_nobody_out() {
    let (mut server, mut client) = (Module::start(), Module::start());
    let (to_server, device) = Client::packet_pair().unwrap();
    server.tenant(tenant(1), device);
    let (to_client, device) = Client::packet_pair().unwrap();
    client.tenant(tenant(2), device);
    let wire = Wire { server: to_server.into(), client: to_client.into(), frame: vec![0; 70_000] };
    let wire = std::cell::RefCell::new(wire);
    for link in [&wire.borrow().server, &wire.borrow().client] {
        link.set_nonblocking(true).unwrap();
    }
    // As many as fit: a listener's backlog is no protection.
    let (listener, address) = server.client.listen(1, at("::", 0), 0, 4096).unwrap().unwrap();
    let port = address.port.to_be_bytes();
    let mut sent = 0;
    let mut flood = |most: u32| {
        let mut wire = wire.borrow_mut();
        for _ in 0..most {
            let mut frame = forged(sent);
            frame[32..34].copy_from_slice(&port);
            sent += u32::from(wire.server.write(&frame).is_ok());
        }
        wire.pump();
        sent
    };
    let (to, options) = (at("10.9.0.1", address.port), stack_options::default());
    let mut connect = |server: &mut Module, flood: &mut dyn FnMut()| {
        let (id, program) = client.client.begin(2, to, options).unwrap();
        let accepted = eventually("a connection", || {
            flood();
            // The module answers in the order in which it is asked, so it has read what was sent.
            server.client.stats(1).unwrap();
            server.client.accept_now(listener).unwrap()
        });
        assert_eq!(client.client.answer(STACK_CONNECT, id).unwrap().head.error, 0);
        (program, accepted)
    };
    let (program, accepted) = connect(&mut server, &mut || _ = flood(0));
    assert!(echoes(&program, &accepted, || _ = flood(0)));

    while flood(16) < 10_000 {
        server.client.stats(1).unwrap();
    }
    // It goes on while the old connection is used, and a new one is made. No faster than the module
    // reads: what finds no room on the way is lost, whoever sent it.
    macro_rules! flooded {
        () => {
            || {
                flood(4);
                server.client.stats(1).unwrap();
            }
        };
    }
    assert!(echoes(&program, &accepted, flooded!()));
    let (another, its) = connect(&mut server, &mut || _ = flood(4));
    assert!(echoes(&another, &its, flooded!()));
    assert!(echoes(&program, &accepted, flooded!()));
    let stats = server.client.stats(1).unwrap();
    assert!(stats.half_open <= HALF_OPEN_MOST && stats.drop_backlog > 8000, "{stats:?}");
    assert_eq!((stats.accepted, stats.connections - stats.half_open), (2, 2), "{stats:?}");
}

#[test]
fn malformed_messages_end_the_agents_connection_and_nothing_else() {
    let mut module = Module::start();
    let (_link, device) = Client::packet_pair().unwrap();
    module.tenant(tenant(1), device);
    let plain = |kind, tenant, id| {
        let head = stack_head { type_: kind, tenant, id, ..stack_head::default() };
        proto::bytes(&stack_plain { head })
    };
    let mut reserved = plain(STACK_STATS, 1, 0);
    reserved[28] = 1;
    let mut unknown_flag = proto::bytes(&stack_bind {
        head: stack_head { type_: STACK_BIND, tenant: 1, id: 1, ..stack_head::default() },
        ..stack_bind::default()
    });
    unknown_flag[56] = 0x80;
    let descriptor: OwnedFd = UnixStream::pair().unwrap().0.into();
    let connect = proto::bytes(&stack_connect {
        head: stack_head { type_: STACK_CONNECT, tenant: 1, id: 5, ..stack_head::default() },
        skip: 1,
        ..stack_connect::default()
    });
    for (what, bytes, descriptor) in [
        ("a head that is too short", vec![0; 31], None),
        ("an unknown type", plain(99, 1, 0), None),
        ("another length", [plain(STACK_STATS, 1, 0), vec![0]].concat(), None),
        ("longer than any", vec![0; 600], None),
        ("a reserved field", reserved, None),
        ("an unknown flag", unknown_flag, None),
        ("an id of the module's", plain(STACK_LIST, 1, 1 << 63), None),
        ("a descriptor too many", plain(STACK_STATS, 1, 0), Some(&descriptor)),
        ("a descriptor too few", connect, None),
    ] {
        let mut client = Client::open(&module.path).unwrap();
        client.send(&bytes, descriptor).unwrap();
        assert!(client.is_closed(), "{what}");
    }
    let mut client = Client::open(&module.path).unwrap();
    assert_eq!(client.stats(0).unwrap().tenants, 1);
    // What is well formed and cannot be is answered.
    for (change, errno) in [
        (stack_tenant { mtu: 100, ..tenant(2) }, libc::EINVAL),
        (stack_tenant { link: 7, ..tenant(2) }, libc::EINVAL),
        (stack_tenant { address4: [127, 0, 0, 1], ..tenant(2) }, libc::EINVAL),
        (stack_tenant { address4: [0; 4], address6: [0; 16], ..tenant(2) }, libc::EINVAL),
    ] {
        let (_link, device) = Client::packet_pair().unwrap();
        assert_eq!(client.tenant(change, Some(&device)).unwrap(), errno);
    }
    assert_eq!(client.tenant(tenant(3), None).unwrap(), libc::ENODEV);
    let (_link, device) = Client::packet_pair().unwrap();
    assert_eq!(client.tenant(tenant(1), Some(&device)).unwrap(), libc::EEXIST);
    let mut options = stack_options { mask: STACK_SET_CONGESTION, ..stack_options::default() };
    for (congestion, errno) in [(STACK_CONGESTION_BBR, libc::ENOENT), (9, libc::EINVAL)] {
        options.congestion = congestion;
        let refused = client.connect(1, at("10.9.0.2", 80), options).unwrap();
        assert_eq!(refused.unwrap_err(), errno);
    }
}

#[test]
fn the_first_message_is_a_hello_of_a_known_version() {
    let hello = |version| {
        let head = stack_head { type_: STACK_HELLO, tag: 4, ..stack_head::default() };
        proto::bytes(&stack_hello { head, version, ..stack_hello::default() })
    };
    let head = stack_head { type_: STACK_STATS, tag: 4, ..stack_head::default() };
    let stats = proto::bytes(&stack_plain { head });
    for (messages, errno) in [
        (vec![hello(2)], libc::EPROTONOSUPPORT),
        (vec![stats], libc::EPROTO),
        (vec![hello(1), hello(1)], libc::EPROTO),
    ] {
        let module = Module::start();
        let mut client = Client::dial(&module.path).unwrap();
        for message in &messages {
            client.send(message, None).unwrap();
        }
        let last = client.wait(|h| h.head.error != 0).unwrap();
        assert_eq!((last.head.error, last.head.tag), (errno, 4));
        assert!(client.is_closed());
    }
}

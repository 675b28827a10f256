//! Stands in for the agent where heddled does not run: for two routers on two machines with one
//! endpoint each. `make test-rdma-card` uses it. No policy, no limits of TCP, no overlay.
//!
//! `agent ROUTER CONTROL GID NODE PEER`: the router's socket, where the endpoint's control socket
//! is to be, the endpoint's address, its node's, and the other node's. Its input has lines: `cap N`
//! sets a cap of N kbit/s, `card ADDRESS` says where the other node's card is, `outside N` lets the
//! endpoint have peers without Heddle (1) or not, `policy N` says whether they may be spoken to (0)
//! or why not, `cut` ends all connections, and `stats FILE` writes what the endpoint has done.

use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use verbs_protocol::Gid;
use verbs_protocol::agent::{Limits, Marks, Message, VERSION};
use verbs_protocol::statistics::{self, Endpoint};

#[path = "../tests/support/wire.rs"]
#[allow(dead_code, reason = "tests use more of it")]
mod wire;

const PORT: u16 = 14791;
const ENDPOINT: u64 = 1;

struct Agent {
    router: OwnedFd,
    connections: Mutex<Vec<TcpStream>>,
    /// The address of the other node's card.
    card: Mutex<Ipv4Addr>,
    /// What is answered of peers without Heddle: an errno.
    policy: AtomicU32,
}

impl Agent {
    fn say(&self, message: &Message, fds: &[i32]) {
        wire::send(&self.router, &message.encode(), fds).expect("the router");
    }

    /// Passes a connection to the router, and keeps it in order to cut it.
    fn pass(&self, message: &Message, connection: TcpStream) {
        let gids = vec![self.card.lock().expect("the card").to_ipv6_mapped().octets()];
        // Held so that the two messages come one after the other.
        let mut connections = self.connections.lock().expect("connections");
        self.say(&Message::Card { endpoint: ENDPOINT, lid: 0, gids }, &[]);
        self.say(message, &[connection.as_raw_fd()]);
        connections.push(connection);
    }

    fn accept(&self, listener: &TcpListener) {
        for connection in listener.incoming() {
            let mut connection = connection.expect("a connection");
            let mut gids = [0; 32];
            if connection.read_exact(&mut gids).is_ok() {
                let (source, destination) = (part(&gids, 0), part(&gids, 16));
                let accepted = Message::Accepted { endpoint: ENDPOINT, source, destination };
                self.pass(&accepted, connection);
            }
        }
    }

    fn connect(&self, peer: Ipv4Addr, tag: u32, gids: [Gid; 2]) {
        let connected = |errno: i32| {
            let errno = errno.unsigned_abs();
            Message::Connected { tag, endpoint: ENDPOINT, errno }
        };
        let made = TcpStream::connect((peer, PORT)).and_then(|mut connection| {
            connection.write_all(&gids.concat())?;
            Ok(connection)
        });
        match made {
            Ok(connection) => self.pass(&connected(0), connection),
            Err(err) => self.say(&connected(err.raw_os_error().unwrap_or(libc::EIO)), &[]),
        }
    }

    fn hear(&self, peer: Ipv4Addr, file: &Mutex<String>) {
        loop {
            let (bytes, _) = wire::receive(&self.router).unwrap_or_default();
            if bytes.is_empty() {
                return; // it has ended
            }
            match Message::parse(&bytes) {
                Ok(Message::Connect { tag, source, destination, .. }) => {
                    self.connect(peer, tag, [source, destination]);
                }
                Ok(Message::Ask { tag, endpoint, destination, .. }) => {
                    let errno = self.policy.load(Ordering::SeqCst);
                    let marks = Marks::default();
                    self.say(&Message::Answer { tag, endpoint, destination, errno, marks }, &[]);
                }
                Ok(Message::Statistics { records, .. }) => {
                    let record = Endpoint::parse(&records).expect("a record");
                    std::fs::write(&*file.lock().expect("the file"), table(&record))
                        .expect("the file");
                }
                Ok(Message::Hello { .. } | Message::Released { .. } | Message::Groups { .. }) => {}
                other => panic!("the router says {other:?}"),
            }
        }
    }
}

fn part(gids: &[u8; 32], at: usize) -> Gid {
    let mut gid = [0; 16];
    gid.copy_from_slice(&gids[at..at + 16]);
    gid
}

/// What an endpoint has done, as lines of a shell.
fn table(record: &Endpoint) -> String {
    let ways = ["memory", "tcp", "card"].iter().zip(&record.traffic);
    let ways = ways.map(|(way, t)| format!("{way}_bytes={}\n", t.sent + t.received));
    let reasons = record.reasons.iter().enumerate();
    ways.chain(reasons.map(|(i, times)| format!("reason_{i}={times}\n"))).collect()
}

fn main() {
    let all: Vec<String> = std::env::args().collect();
    let [_, router, control, gid, node, peer] = &all[..] else {
        panic!("usage: agent ROUTER CONTROL GID NODE PEER");
    };
    let address = |text: &String| text.parse::<Ipv4Addr>().expect("an address");
    let gids = [address(gid).to_ipv6_mapped().octets(), [0; 16]];
    let router = loop {
        if let Some(router) = wire::connect(Path::new(router)) {
            break router;
        }
        std::thread::yield_now();
    };
    let peer = address(peer);
    let (connections, policy) = (Mutex::default(), AtomicU32::new(0));
    let agent = Agent { router, connections, card: Mutex::new(peer), policy };
    let agent = Arc::new(agent);
    let listener = TcpListener::bind((address(node), PORT)).expect("the node's port");
    let _ = std::fs::remove_file(control);
    let socket = wire::listen(Path::new(control));
    let endpoint =
        |limits| Message::Endpoint { endpoint: ENDPOINT, gids, limits, name: "c".into() };
    agent.say(&Message::Hello { version: VERSION }, &[]);
    agent.say(&Message::Begin, &[]);
    agent.say(&endpoint(Limits::default()), &[socket.as_raw_fd()]);
    agent.say(&Message::End, &[]);
    let file = Arc::new(Mutex::new(String::new()));
    let (accepting, hearing, wanted) = (Arc::clone(&agent), Arc::clone(&agent), Arc::clone(&file));
    std::thread::spawn(move || accepting.accept(&listener));
    std::thread::spawn(move || hearing.hear(peer, &wanted));
    let mut limits = Limits::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("input");
        match line.split_once(' ') {
            Some(("stats", path)) => {
                path.clone_into(&mut file.lock().expect("the file"));
                let (endpoint, kind) = (ENDPOINT, statistics::KIND_ENDPOINTS);
                agent.say(&Message::Stats { tag: 1, endpoint, kind, cursor: 0 }, &[]);
            }
            Some(("cap", kbit)) => {
                let kbit = kbit.parse().expect("kbit/s");
                (limits.egress_kbit, limits.ingress_kbit) = (kbit, kbit);
                agent.say(&endpoint(limits), &[]);
            }
            Some(("card", card)) => {
                *agent.card.lock().expect("the card") = card.parse().expect("an address");
            }
            Some(("outside", allowed)) => {
                limits.outside = u32::from(allowed == "1");
                agent.say(&endpoint(limits), &[]);
            }
            Some(("policy", errno)) => {
                agent.policy.store(errno.parse().expect("an errno"), Ordering::SeqCst);
                agent.say(&Message::AskAnew, &[]);
            }
            _ if line == "cut" => {
                for connection in agent.connections.lock().expect("connections").drain(..) {
                    let _ = connection.shutdown(Shutdown::Both);
                }
            }
            _ => panic!("{line}: want cap N, card ADDRESS, outside N, policy N, cut, stats FILE"),
        }
    }
}

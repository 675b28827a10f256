//! A container that wants more of peers without Heddle than it may have, for `make test-rdma-card`:
//! `hostile ATTACK CONTROL PEER PORT` speaks to the router itself, and to an `ibv_rc_pingpong` that
//! waits at the port of the peer's node address, as its client. It prints `reached` if it gets
//! through and `refused` if the router keeps it from that.
//!
//! `outside`: a queue pair that names the card's GID, which the container does not have. `peers`:
//! one that passes for another one at the peer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;

use support::{Cq, Device, Qp, inline, receiving, request};
use verbs_protocol::{Gid, abi, ibv};

#[allow(dead_code, reason = "tests use more of it")]
mod support;

/// The place behind the container's addresses in the table of GIDs.
const OUTSIDE: u8 = 1;
const PSN: u32 = 0x1234;

/// A queue pair of a pingpong.
struct Peer {
    number: u32,
    psn: u32,
    gid: Gid,
    /// As long as this is open it waits.
    _connection: TcpStream,
}

/// Tells a pingpong that a queue pair is its client, and learns of its own.
fn meet(address: &str, port: &str, number: u32) -> Peer {
    let address = format!("{address}:{port}");
    let mut connection = loop {
        match TcpStream::connect(&address) {
            Ok(connection) => break connection,
            Err(_) => std::thread::yield_now(),
        }
    };
    // Its client's GID is the card's, as the peer sees it.
    let own = std::fs::read_to_string("/run/card-gid").expect("the card's GID");
    let mut said = format!("0000:{number:06x}:{PSN:06x}:{}", own.trim()).into_bytes();
    said.push(0);
    connection.write_all(&said).expect("the pingpong");
    let mut heard = vec![0; said.len()];
    connection.read_exact(&mut heard).expect("its answer");
    connection.write_all(b"done\0").expect("the pingpong");
    let text = String::from_utf8_lossy(&heard).trim_end_matches('\0').to_owned();
    let fields: Vec<&str> = text.split(':').collect();
    let hex = |text: &str| u32::from_str_radix(text, 16).expect("a number");
    let mut gid = [0; 16];
    for (i, byte) in gid.iter_mut().enumerate() {
        *byte = u8::try_from(hex(&fields[3][2 * i..2 * i + 2])).expect("a byte");
    }
    Peer { number: hex(fields[1]), psn: hex(fields[2]), gid, _connection: connection }
}

/// Brings a queue pair to RTS, with the peer; false if it is refused.
fn connect(device: &mut Device, qp: u32, peer: &Peer) -> bool {
    let mut attr = abi::verbs_qp_attr {
        qp_state: 1,
        port: 1,
        access: 1,
        path_mtu: 3,
        dest_qp_num: peer.number,
        rq_psn: peer.psn,
        sq_psn: PSN,
        address: abi::verbs_address {
            gid: peer.gid,
            sgid_index: OUTSIDE,
            hop_limit: 64,
            is_global: 1,
            port: 1,
            ..Default::default()
        },
        max_rd_atomic: 1,
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        ..Default::default()
    };
    let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_ACCESS_FLAGS;
    let path = ibv::QP_AV | ibv::QP_PATH_MTU | ibv::QP_DEST_QPN | ibv::QP_RQ_PSN;
    let receive = path | ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER;
    let retry = ibv::QP_TIMEOUT | ibv::QP_RETRY_CNT | ibv::QP_RNR_RETRY;
    let send = retry | ibv::QP_MAX_QP_RD_ATOMIC | ibv::QP_SQ_PSN;
    for (state, mask) in [(1, init), (2, receive), (3, send)] {
        attr.qp_state = state;
        if device.modify(qp, ibv::QP_STATE | mask, attr).is_err() {
            return false;
        }
    }
    true
}

struct End {
    device: Device,
    pd: u32,
    cq: Cq,
}

impl End {
    fn qp(&mut self) -> Qp {
        self.device.qp(ibv::QPT_RC, self.pd, &self.cq, &self.cq, 0)
    }

    /// The next completion of a queue pair, if it was successful.
    fn completes(&mut self, qp: &Qp) -> bool {
        loop {
            let completion = self.cq.next();
            if completion.qp_num == qp.number {
                return completion.status == ibv::WC_SUCCESS;
            }
        }
    }
}

fn outside(end: &mut End, address: &str, port: &str) -> bool {
    let mut qp = end.qp();
    let peer = meet(address, port, qp.number);
    if !connect(&mut end.device, qp.number, &peer) {
        return false;
    }
    end.device.post(&mut qp.send, &inline(request(ibv::WR_SEND, 1), b"let me out"));
    end.completes(&qp)
}

fn peers(end: &mut End, address: &str, port: &str) -> bool {
    let mut own = end.qp();
    let peer = meet(address, port, own.number);
    let mut memory = vec![0; 8192];
    let key = end.device.register(end.pd, &mut memory, 1).expect("a region");
    let buffer = [(memory.as_ptr() as u64, 8192, key)];
    let receives = own.receive.as_mut().expect("a ring");
    end.device.post(receives, &receiving(2, &buffer));
    assert!(connect(&mut end.device, own.number, &peer), "the pair that may be");
    // What this one sends the peer takes for the other one's, whose answer comes there.
    let mut other = end.qp();
    if !connect(&mut end.device, other.number, &peer) {
        return false;
    }
    let forged = inline(request(ibv::WR_SEND, 3), b"I am the other one");
    end.device.post(&mut other.send, &forged);
    loop {
        let completion = end.cq.next();
        if completion.qp_num == own.number {
            return completion.status == ibv::WC_SUCCESS;
        }
        if completion.status == ibv::WC_WR_FLUSH_ERR {
            return false;
        }
    }
}

fn main() {
    let all: Vec<String> = std::env::args().collect();
    let [_, attack, control, address, port] = &all[..] else {
        panic!("usage: hostile ATTACK CONTROL PEER PORT");
    };
    let socket = support::wire::connect(Path::new(control)).expect("the router");
    let mut device = Device::open(socket, 2);
    let (pd, cq) = (device.pd(), device.cq(16, 0));
    let mut end = End { device, pd, cq };
    let reached = match &attack[..] {
        "outside" => outside(&mut end, address, port),
        "peers" => peers(&mut end, address, port),
        _ => panic!("{attack}: want outside or peers"),
    };
    println!("{}", if reached { "reached" } else { "refused" });
}

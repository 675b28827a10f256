//! Accounts: what endpoints and queue pairs have moved, and what was refused them, for the agent.
//! `docs/protocols/verbs-agent.md`.

use verbs_protocol::agent::Message;
use verbs_protocol::cm::Address;
use verbs_protocol::ibv;
use verbs_protocol::slots::Send;
use verbs_protocol::statistics::{self, Path, REASONS, Reason, Traffic};

use crate::cm::Id;
use crate::endpoint::Endpoint;
use crate::objects::{Objects, Qp};
use crate::remote::is_atomic;

/// What an endpoint has done since it is there.
pub(crate) struct Account {
    traffic: [Traffic; 3],
    errors: u64,
    reasons: [u64; REASONS],
}

impl Default for Account {
    fn default() -> Self {
        Self { traffic: <[Traffic; 3]>::default(), errors: 0, reasons: [0; REASONS] }
    }
}

impl Account {
    pub(crate) fn note(&mut self, reason: Reason) {
        self.reasons[reason as usize] += 1;
    }
}

/// What a queue pair has done since it is there.
#[derive(Default)]
pub(crate) struct QpAccount {
    traffic: Traffic,
    path: Path,
    errors: u64,
    last_error: u8,
}

/// The most bytes of a message's records: what is left of it beside its heads.
const RECORDS_MAX: usize = statistics::MESSAGE_MAX - 32;

impl Objects {
    /// Something was refused, dropped or held up.
    pub(crate) fn note(&mut self, endpoint: u32, reason: Reason) {
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.account.note(reason);
        }
    }

    /// The same of a queue pair's.
    pub(crate) fn note_of(&mut self, qp: u32, reason: Reason) {
        if let Some(endpoint) = self.qps.get(qp).map(|q| q.endpoint) {
            self.note(endpoint, reason);
        }
    }

    pub(crate) fn account(&mut self, number: u32, path: Path, moved: &Traffic) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        qp.account.path = path;
        qp.account.traffic.add(moved);
        let Some(endpoint) = self.endpoints.get_mut(qp.endpoint) else { return };
        if let Some(traffic) = endpoint.account.traffic.get_mut((path as usize).wrapping_sub(1)) {
            traffic.add(moved);
        }
    }

    /// The way that the bytes of a connected queue pair take.
    fn path(&self, number: u32) -> Path {
        match self.is_remote(number) {
            _ if self.is_native(number) => Path::Card,
            true if self.is_by_card(number) => Path::Card,
            true => Path::Tcp,
            false => Path::Memory,
        }
    }

    /// A request of a connected queue pair is done.
    pub(crate) fn account_request(&mut self, number: u32, done: &Send) {
        let opcode = done.head.opcode;
        let bytes = done.length();
        let returns = opcode == ibv::WR_RDMA_READ || is_atomic(opcode);
        let (sent, received) = if returns { (0, bytes) } else { (bytes, 0) };
        let moved = Traffic { requests: 1, sent, received, ..Traffic::default() };
        self.account(number, self.path(number), &moved);
    }

    /// A request of the peer of a connected queue pair is done.
    pub(crate) fn account_served(&mut self, number: u32, sent: u64, received: u64) {
        let moved = Traffic { served: 1, sent, received, ..Traffic::default() };
        self.account(number, self.path(number), &moved);
    }

    /// A request was completed with an error.
    pub(crate) fn account_error(&mut self, number: u32, status: u32) {
        if matches!(status, ibv::WC_SUCCESS | ibv::WC_WR_FLUSH_ERR) {
            return;
        }
        let Some(qp) = self.qps.get_mut(number) else { return };
        qp.account.errors += 1;
        qp.account.last_error = u8::try_from(status).unwrap_or(u8::MAX);
        if let Some(endpoint) = self.endpoints.get_mut(qp.endpoint) {
            endpoint.account.errors += 1;
        }
    }

    /// Answers a STATS.
    pub(crate) fn statistics(&self, tag: u32, endpoint: u64, kind: u32, cursor: u32) -> Message {
        let mut records = Vec::new();
        let is_one = |e: &Endpoint| endpoint == 0 || e.number == endpoint;
        let (size, cursor) = match kind {
            statistics::KIND_ENDPOINTS => {
                let size = statistics::ENDPOINT;
                let all = self.endpoints.iter_from(cursor).filter(|(_, _, e)| is_one(e));
                (size, fill(all, size, &mut records, |_, e, out| e.record().encode(out)))
            }
            statistics::KIND_QPS => {
                let size = statistics::QP;
                let all = self.qps.iter_from(cursor);
                let all =
                    all.filter(|(_, _, q)| self.endpoints.get(q.endpoint).is_some_and(is_one));
                let encode = |number, qp: &Qp, out: &mut Vec<u8>| {
                    self.record(number, qp).encode(out);
                };
                (size, fill(all, size, &mut records, encode))
            }
            statistics::KIND_IDS => {
                let size = statistics::ID;
                let all = self.cm.table.iter_from(cursor);
                let all =
                    all.filter(|(_, _, i)| self.endpoints.get(i.endpoint).is_some_and(is_one));
                let encode = |_, id: &Id, out: &mut Vec<u8>| self.id_record(id).encode(out);
                (size, fill(all, size, &mut records, encode))
            }
            _ => (1, 0),
        };
        let size = u32::try_from(size).unwrap_or(1);
        Message::Statistics { tag, endpoint, kind, cursor, size, records }
    }

    fn id_record(&self, id: &Id) -> statistics::Id {
        let end = |a: Option<Address>| a.map_or(([0; 16], 0), |a| (a.gid, a.port));
        let ((source, source_port), (destination, destination_port)) =
            (end(id.source), end(id.destination));
        let process = self.contexts.get(id.context).map(|c| c.process.pid());
        statistics::Id {
            endpoint: self.endpoints.get(id.endpoint).map_or(0, |e| e.number),
            number: id.number,
            pid: process.map_or(0, i32::unsigned_abs),
            source,
            destination,
            source_port,
            destination_port,
            space: id.space,
            state: id.state as u8,
            reserved: 0,
            qp: id.own.qp,
            peer_qp: id.peer.qp,
        }
    }

    fn record(&self, number: u32, qp: &Qp) -> statistics::Qp {
        let endpoint = self.endpoints.get(qp.endpoint);
        let process = self.contexts.get(qp.context).map(|c| c.process.pid());
        let is_connected = qp.service.is_connected();
        let path = match qp.account.path {
            Path::None if self.is_remote(number) || self.is_native(number) => self.path(number),
            Path::None if self.is_established(number) => Path::Memory,
            path => path,
        };
        statistics::Qp {
            endpoint: endpoint.map_or(0, |e| e.number),
            number,
            peer: if is_connected { qp.attr.dest_qp_num } else { 0 },
            gid: if self.is_native(number) {
                self.outside_gid(qp.endpoint).unwrap_or_default()
            } else {
                endpoint.map_or([0; 16], |e| e.gid(qp.attr.address.sgid_index))
            },
            peer_gid: if is_connected { qp.attr.address.gid } else { [0; 16] },
            pid: process.map_or(0, i32::unsigned_abs),
            service: u8::try_from(qp.service.number()).unwrap_or(0),
            state: u8::try_from(qp.state.number()).unwrap_or(0),
            path: path as u8,
            last_error: qp.account.last_error,
            traffic: qp.account.traffic,
            errors: qp.account.errors,
        }
    }
}

impl Endpoint {
    fn record(&self) -> statistics::Endpoint {
        statistics::Endpoint {
            endpoint: self.number,
            used: self.used(),
            limits: self.limits(),
            traffic: self.account.traffic,
            errors: self.account.errors,
            reasons: self.account.reasons,
        }
    }
}

/// Adds as many records as a message has room for, and says where to go on: 0 at the end.
fn fill<'a, T: 'a>(
    all: impl Iterator<Item = (u32, u32, &'a T)>,
    size: usize,
    records: &mut Vec<u8>,
    encode: impl Fn(u32, &T, &mut Vec<u8>),
) -> u32 {
    for (place, handle, object) in all {
        if records.len() + size > RECORDS_MAX {
            return place;
        }
        encode(handle, object, records);
    }
    0
}

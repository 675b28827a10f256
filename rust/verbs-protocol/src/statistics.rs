//! Records of a STATISTICS message: what endpoints and queue pairs have done.
//! `docs/protocols/verbs-agent.md`.

use crate::Gid;

/// Bytes of a STATISTICS message at most.
pub const MESSAGE_MAX: usize = 16 * 1024;
/// Bytes of an endpoint's record.
pub const ENDPOINT: usize = 784;
/// Bytes of a queue pair's record.
pub const QP: usize = 96;
/// The kinds of STATS: endpoints.
pub const KIND_ENDPOINTS: u32 = 1;
/// The kinds of STATS: queue pairs.
pub const KIND_QPS: u32 = 2;
/// Bytes of the record of an id of RDMA-CM.
pub const ID: usize = 64;
/// The kinds of STATS: ids of RDMA-CM.
pub const KIND_IDS: u32 = 3;
/// Quotas of an endpoint.
pub const QUOTAS: usize = 10;
/// Numbers of reasons.
pub const REASONS: usize = 64;

/// Why something was refused, dropped or held up. The page has their meanings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes them")]
pub enum Reason {
    QuotaContexts,
    QuotaObjects,
    QuotaMemory,
    RouterFull,
    ControlMalformed,
    RingBroken,
    CqOverrun,
    RateRequests,
    RateBytes,
    ConnectRefused,
    LinkBroken,
    LinkUnmatched,
    LinkCut,
    DatagramUnwanted,
    DatagramNoReceive,
    DatagramNoRoom,
    MessageDropped,
    NotReady,
    MemorySlow,
    CardMissing,
    CardCapped,
    CardFull,
    CardRefused,
    CardFailed,
    CardGone,
    RegionUnmapped,
    NoUserfaultfd,
    CardElsewhere,
    OutsideRefused,
    OutsideCut,
    OutsideUnmapped,
    CardWrong,
}

/// The way that bytes take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes them")]
pub enum Path {
    #[default]
    None,
    Memory,
    Tcp,
    Card,
}

/// What was moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests that were done for queue pairs.
    pub requests: u64,
    /// Requests of peers that were done at queue pairs.
    pub served: u64,
    /// Bytes that left the endpoint's memory.
    pub sent: u64,
    /// Bytes that came into it.
    pub received: u64,
}

impl Traffic {
    fn numbers(&self) -> [u64; 4] {
        [self.requests, self.served, self.sent, self.received]
    }

    /// Adds what was moved more.
    pub fn add(&mut self, more: &Self) {
        self.requests += more.requests;
        self.served += more.served;
        self.sent += more.sent;
        self.received += more.received;
    }
}

/// The record of an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Endpoint {
    pub endpoint: u64,
    pub used: [u64; QUOTAS],
    pub limits: [u64; QUOTAS],
    /// By memory, TCP, card.
    pub traffic: [Traffic; 3],
    pub errors: u64,
    pub reasons: [u64; REASONS],
}

impl Endpoint {
    /// Adds the record to a message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let traffic = self.traffic.iter().flat_map(Traffic::numbers);
        let numbers = [self.endpoint]
            .into_iter()
            .chain(self.used)
            .chain(self.limits)
            .chain(traffic)
            .chain([self.errors])
            .chain(self.reasons);
        for number in numbers {
            out.extend_from_slice(&number.to_ne_bytes());
        }
    }

    /// Reads a record, which may be longer than this version knows. `None` if it is shorter.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut numbers = Numbers(bytes.get(..ENDPOINT)?);
        Some(Self {
            endpoint: numbers.long()?,
            used: numbers.longs()?,
            limits: numbers.longs()?,
            traffic: [numbers.traffic()?, numbers.traffic()?, numbers.traffic()?],
            errors: numbers.long()?,
            reasons: numbers.longs()?,
        })
    }
}

/// The record of a queue pair.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Qp {
    pub endpoint: u64,
    pub number: u32,
    pub peer: u32,
    pub gid: Gid,
    pub peer_gid: Gid,
    pub pid: u32,
    pub service: u8,
    pub state: u8,
    pub path: u8,
    pub last_error: u8,
    pub traffic: Traffic,
    pub errors: u64,
}

impl Qp {
    /// Adds the record to a message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.endpoint.to_ne_bytes());
        out.extend_from_slice(&self.number.to_ne_bytes());
        out.extend_from_slice(&self.peer.to_ne_bytes());
        out.extend_from_slice(&self.gid);
        out.extend_from_slice(&self.peer_gid);
        out.extend_from_slice(&self.pid.to_ne_bytes());
        out.extend_from_slice(&[self.service, self.state, self.path, self.last_error]);
        for number in self.traffic.numbers().into_iter().chain([self.errors]) {
            out.extend_from_slice(&number.to_ne_bytes());
        }
    }

    /// Reads a record, which may be longer than this version knows. `None` if it is shorter.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut numbers = Numbers(bytes.get(..QP)?);
        let endpoint = numbers.long()?;
        let (number, peer) = (numbers.word()?, numbers.word()?);
        let (gid, peer_gid) = (numbers.take()?, numbers.take()?);
        let pid = numbers.word()?;
        let [service, state, path, last_error] = numbers.take()?;
        let (traffic, errors) = (numbers.traffic()?, numbers.long()?);
        #[rustfmt::skip]
        let record = Self {
            endpoint, number, peer, gid, peer_gid, pid, service, state, path, last_error, traffic, errors,
        };
        Some(record)
    }
}

/// The record of an id of RDMA-CM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Id {
    pub endpoint: u64,
    pub number: u32,
    pub pid: u32,
    pub source: Gid,
    pub destination: Gid,
    pub source_port: u16,
    pub destination_port: u16,
    pub space: u16,
    pub state: u8,
    pub qp: u32,
    pub peer_qp: u32,
}

impl Id {
    /// Adds the record to a message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.endpoint.to_ne_bytes());
        out.extend_from_slice(&self.number.to_ne_bytes());
        out.extend_from_slice(&self.pid.to_ne_bytes());
        out.extend_from_slice(&self.source);
        out.extend_from_slice(&self.destination);
        for number in [self.source_port, self.destination_port, self.space] {
            out.extend_from_slice(&number.to_ne_bytes());
        }
        out.extend_from_slice(&[self.state, 0]);
        out.extend_from_slice(&self.qp.to_ne_bytes());
        out.extend_from_slice(&self.peer_qp.to_ne_bytes());
    }

    /// Reads a record, which may be longer than this version knows. `None` if it is shorter.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut numbers = Numbers(bytes.get(..ID)?);
        let endpoint = numbers.long()?;
        let (number, pid) = (numbers.word()?, numbers.word()?);
        let (source, destination) = (numbers.take()?, numbers.take()?);
        let mut short = || numbers.take().map(u16::from_ne_bytes);
        let (source_port, destination_port, space) = (short()?, short()?, short()?);
        let [state, _] = numbers.take()?;
        let (qp, peer_qp) = (numbers.word()?, numbers.word()?);
        #[rustfmt::skip]
        let record = Self {
            endpoint, number, pid, source, destination, source_port, destination_port, space, state, qp, peer_qp,
        };
        Some(record)
    }
}

struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    fn longs<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut all = [0; N];
        for number in &mut all {
            *number = self.long()?;
        }
        Some(all)
    }

    fn traffic(&mut self) -> Option<Traffic> {
        let [requests, served, sent, received] = self.longs()?;
        Some(Traffic { requests, served, sent, received })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_and_have_the_length_of_the_page() {
        let traffic = Traffic { requests: 1, served: 2, sent: 3, received: 4 };
        let endpoint = Endpoint {
            endpoint: 9,
            used: [5; QUOTAS],
            limits: [6; QUOTAS],
            traffic: [traffic; 3],
            errors: 7,
            reasons: core::array::from_fn(|i| i as u64),
        };
        let mut bytes = Vec::new();
        endpoint.encode(&mut bytes);
        assert_eq!((bytes.len(), Endpoint::parse(&bytes)), (ENDPOINT, Some(endpoint)));
        assert_eq!(Endpoint::parse(&bytes[1..]), None);
        let id = Id {
            endpoint: 9,
            number: 1,
            pid: 2,
            source: [3; 16],
            destination: [4; 16],
            source_port: 5,
            destination_port: 6,
            space: 7,
            state: 8,
            qp: 10,
            peer_qp: 11,
        };
        let mut bytes = Vec::new();
        id.encode(&mut bytes);
        assert_eq!((bytes.len(), Id::parse(&bytes)), (ID, Some(id)));
        assert_eq!(Id::parse(&bytes[1..]), None);
        let qp = Qp {
            endpoint: 9,
            number: 1,
            peer: 2,
            gid: [3; 16],
            peer_gid: [4; 16],
            pid: 5,
            service: 2,
            state: 3,
            path: 1,
            last_error: 0,
            traffic,
            errors: 8,
        };
        let mut bytes = Vec::new();
        qp.encode(&mut bytes);
        assert_eq!(bytes.len(), QP);
        bytes.push(1);
        assert_eq!(Qp::parse(&bytes), Some(qp));
    }
}

//! Records of a STATISTICS message: what endpoints and queue pairs have done.
//! `docs/protocols/verbs-agent.md`.

use crate::agent_abi::{VERBS_AGENT_QUOTAS, VERBS_AGENT_REASONS, VERBS_AGENT_STATISTICS_MAX};
use crate::plain::{bytes, read};

/// Bytes of a STATISTICS message at most.
pub const MESSAGE_MAX: usize = VERBS_AGENT_STATISTICS_MAX as usize;
/// The kinds of STATS: endpoints, queue pairs, ids of RDMA-CM.
pub use crate::agent_abi::{
    VERBS_AGENT_ENDPOINTS as KIND_ENDPOINTS, VERBS_AGENT_IDS as KIND_IDS,
    VERBS_AGENT_QPS as KIND_QPS,
};
/// The records of an endpoint, a queue pair and an id of RDMA-CM, and what was moved.
pub use crate::agent_abi::{
    verbs_agent_endpoint_record as Endpoint, verbs_agent_id_record as Id,
    verbs_agent_qp_record as Qp, verbs_agent_traffic as Traffic,
};
/// Bytes of an endpoint's record.
pub const ENDPOINT: usize = size_of::<Endpoint>();
/// Bytes of a queue pair's record.
pub const QP: usize = size_of::<Qp>();
/// Bytes of the record of an id of RDMA-CM.
pub const ID: usize = size_of::<Id>();
/// Quotas of an endpoint.
pub const QUOTAS: usize = VERBS_AGENT_QUOTAS as usize;
/// Numbers of reasons.
pub const REASONS: usize = VERBS_AGENT_REASONS as usize;

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

impl Traffic {
    /// Adds what was moved more.
    pub fn add(&mut self, more: &Self) {
        self.requests += more.requests;
        self.served += more.served;
        self.sent += more.sent;
        self.received += more.received;
    }
}

macro_rules! record {
    ($($name:ident)*) => {
        $(impl $name {
            /// Adds the record to a message.
            pub fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(bytes(self));
            }

            /// Reads a record, which may be longer than this version knows. `None` if it is
            /// shorter.
            #[must_use]
            pub fn parse(bytes: &[u8]) -> Option<Self> {
                read(bytes.get(..size_of::<Self>())?)
            }
        })*
    };
}

record!(Endpoint Qp Id);

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
            reserved: 0,
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

    /// Records are on the wire as they were.
    #[test]
    fn the_wire_is_as_fixed() {
        let record = |name: &str| {
            let mut lines = include_str!("../tests/agent-messages.txt").lines();
            let hex = lines.find_map(|l| l.strip_prefix(name)).unwrap().trim();
            let octet = |i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
            (64..hex.len()).step_by(2).map(octet).collect::<Vec<u8>>()
        };
        let (gid, peer_gid) = (
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 244, 0, 2],
            [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3],
        );
        let counted = |first: u64| Traffic {
            requests: first,
            served: first + 1,
            sent: first + 2,
            received: first + 3,
        };
        let endpoint = 0x0102_0304_0506_0708;
        let from = |first: u64| move |i: usize| first + i as u64;
        let want = Endpoint {
            endpoint,
            used: core::array::from_fn(from(100)),
            limits: core::array::from_fn(from(200)),
            traffic: [counted(300), counted(304), counted(308)],
            errors: 400,
            reasons: core::array::from_fn(from(500)),
        };
        assert_eq!(Endpoint::parse(&record("statistics-endpoints")), Some(want));
        let want = Qp {
            endpoint,
            number: 7,
            peer: 8,
            gid,
            peer_gid,
            pid: 9,
            service: 2,
            state: 3,
            path: 2,
            last_error: 12,
            traffic: counted(31),
            errors: 35,
        };
        assert_eq!(Qp::parse(&record("statistics-qps")), Some(want));
        let want = Id {
            endpoint,
            number: 7,
            pid: 8,
            source: gid,
            destination: peer_gid,
            source_port: 18515,
            destination_port: 18516,
            space: 0x106,
            state: 9,
            reserved: 0,
            qp: 41,
            peer_qp: 42,
        };
        assert_eq!(Id::parse(&record("statistics-ids")), Some(want));
    }
}

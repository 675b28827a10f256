//! RDMA-CM as a program without librdmacm would use it.

use std::os::fd::OwnedFd;

use verbs_protocol::{abi, cm, plain};

use super::device::{ask, hello};
use super::router::Router;
use super::wire::{readable, receive};
use super::{WAIT_TIMEOUT, gid};

pub(crate) const ADDR_RESOLVED: u32 = 0;
pub(crate) const ROUTE_RESOLVED: u32 = 2;
pub(crate) const CONNECT_REQUEST: u32 = 4;
pub(crate) const CONNECT_RESPONSE: u32 = 5;
pub(crate) const UNREACHABLE: u32 = 7;
pub(crate) const REJECTED: u32 = 8;
pub(crate) const ESTABLISHED: u32 = 9;
pub(crate) const DISCONNECTED: u32 = 10;

/// An event channel, as a program without librdmacm would use it.
pub(crate) struct Channel {
    pub(crate) socket: OwnedFd,
    pub(crate) events: OwnedFd,
}

/// An event: uid, id, kind, status, and the parameters as they are.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) uid: u64,
    pub(crate) id: u32,
    pub(crate) kind: u32,
    pub(crate) status: i32,
    pub(crate) param: Vec<u8>,
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(crate) fn v4(n: u8, port: u16) -> [u8; 28] {
    let mut out = [0; 28];
    out[0] = 2;
    out[2..4].copy_from_slice(&port.to_be_bytes());
    if n > 0 {
        out[4..8].copy_from_slice(&[10, 9, 0, n]);
    }
    out
}

/// `struct rdma_ucm_conn_param`.
pub(crate) fn param(qp: u32, private: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 272];
    out[..4].copy_from_slice(&qp.to_ne_bytes());
    out[8..8 + private.len()].copy_from_slice(private);
    out[264] = u8::try_from(private.len()).unwrap();
    // responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, valid
    out[266..272].copy_from_slice(&[3, 5, 1, 6, 4, 1]);
    out
}

impl Channel {
    pub(crate) fn open(router: &Router, n: u8) -> Self {
        let socket = router.connect(n);
        let (bytes, mut fds) = ask(&socket, plain::bytes(&hello(1, 1))).unwrap();
        let reply: abi::verbs_hello_reply = plain::read(&bytes).unwrap();
        assert_eq!((reply.version, reply.gid[0], fds.len()), (1, gid(n), 1));
        Self { socket, events: fds.pop().unwrap() }
    }

    pub(crate) fn raw(&self, bytes: &[u8], response_max: u32) -> Result<Vec<u8>, i32> {
        let head = abi::verbs_request { command: abi::VERBS_RDMA_CM, tag: 3 };
        let length = u32::try_from(bytes.len()).unwrap();
        let request = abi::verbs_rdma_cm_request { head, length, response_max };
        let (reply, fds) = ask(&self.socket, &[plain::bytes(&request), bytes].concat())?;
        assert!(fds.is_empty());
        let head: abi::verbs_rdma_cm_reply = plain::read(&reply[..24]).unwrap();
        assert_eq!(head.length as usize + 24, reply.len());
        if head.drained & 1 != 0 {
            assert!(readable(&self.events, WAIT_TIMEOUT), "the last event had its message");
            assert_eq!(receive(&self.events).unwrap().0, [0; 16]);
        }
        Ok(reply[24..].to_vec())
    }

    pub(crate) fn command(&self, number: u32, fields: &[u8]) -> Result<Vec<u8>, i32> {
        let mut bytes = number.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&u16::try_from(fields.len()).unwrap().to_ne_bytes());
        bytes.extend_from_slice(&336_u16.to_ne_bytes());
        bytes.extend_from_slice(fields);
        self.raw(&bytes, 336)
    }

    pub(crate) fn create(&self, uid: u64, space: u16) -> Result<u32, i32> {
        let mut fields = uid.to_ne_bytes().to_vec();
        fields.extend_from_slice(&[0; 8]);
        fields.extend_from_slice(&space.to_ne_bytes());
        fields.extend_from_slice(&[0; 6]);
        self.command(0, &fields).map(|r| word(&r, 0))
    }

    pub(crate) fn destroy(&self, id: u32) -> u32 {
        let fields = [&[0; 8], &id.to_ne_bytes()[..], &[0; 4]].concat();
        word(&self.command(1, &fields).unwrap(), 0)
    }

    pub(crate) fn bind(&self, id: u32, address: [u8; 28]) -> Result<(), i32> {
        let fields = [&[0; 8], &address[..], &id.to_ne_bytes()].concat();
        self.command(2, &fields).map(drop)
    }

    pub(crate) fn listen(&self, uid: u64, space: u16, port: u16, backlog: u32) -> u32 {
        let id = self.create(uid, space).unwrap();
        self.bind(id, v4(0, port)).unwrap();
        let fields = [id.to_ne_bytes(), backlog.to_ne_bytes()].concat();
        self.command(7, &fields).unwrap();
        id
    }

    pub(crate) fn resolve(&self, id: u32, to: [u8; 28]) -> Result<(), i32> {
        let fields = [&[0; 28], &to[..], &id.to_ne_bytes(), &[0; 4]].concat();
        self.command(3, &fields).map(drop)
    }

    /// An id that knows its way.
    pub(crate) fn resolved(&self, uid: u64, space: u16, n: u8, port: u16) -> u32 {
        self.resolved_to(uid, space, v4(n, port))
    }

    /// The same, to an address.
    pub(crate) fn resolved_to(&self, uid: u64, space: u16, to: [u8; 28]) -> u32 {
        let id = self.create(uid, space).unwrap();
        self.resolve(id, to).unwrap();
        assert_eq!(self.expect(ADDR_RESOLVED).uid, uid);
        self.command(4, &[id.to_ne_bytes(), [0; 4]].concat()).unwrap();
        assert_eq!(self.expect(ROUTE_RESOLVED).uid, uid);
        id
    }

    pub(crate) fn connect(&self, id: u32, param: &[u8]) -> Result<(), i32> {
        let fields = [param, &id.to_ne_bytes(), &[0; 12]].concat();
        self.command(6, &fields).map(drop)
    }

    pub(crate) fn accept(&self, id: u32, uid: u64, param: &[u8]) -> Result<(), i32> {
        let fields = [&uid.to_ne_bytes(), param, &id.to_ne_bytes(), &[0; 12]].concat();
        self.command(8, &fields).map(drop)
    }

    pub(crate) fn reject(&self, id: u32, private: &[u8]) -> Result<(), i32> {
        let mut fields = vec![0; 264];
        fields[..4].copy_from_slice(&id.to_ne_bytes());
        fields[4] = u8::try_from(private.len()).unwrap();
        fields[8..8 + private.len()].copy_from_slice(private);
        self.command(9, &fields).map(drop)
    }

    pub(crate) fn disconnect(&self, id: u32) -> Result<(), i32> {
        self.command(10, &id.to_ne_bytes()).map(drop)
    }

    /// Attributes for a state: mask, peer's queue pair, peer's GID.
    pub(crate) fn attributes(&self, id: u32, state: u32) -> Result<(u32, u32, Vec<u8>), i32> {
        let fields = [&[0; 8], &id.to_ne_bytes()[..], &state.to_ne_bytes()].concat();
        let bytes = self.command(11, &fields)?;
        assert_eq!(bytes.len(), 144);
        Ok((word(&bytes, 0), word(&bytes, 32), bytes[40..56].to_vec()))
    }

    pub(crate) fn is_readable(&self) -> bool {
        readable(&self.events, std::time::Duration::ZERO)
    }

    pub(crate) fn event(&self) -> Event {
        assert!(readable(&self.events, WAIT_TIMEOUT), "no event");
        let bytes = self.command(12, &[0; 8]).unwrap();
        assert_eq!(bytes.len(), cm::EVENT);
        Event {
            uid: u64::from_ne_bytes(bytes[..8].try_into().unwrap()),
            id: word(&bytes, 8),
            kind: word(&bytes, 12),
            status: word(&bytes, 16).cast_signed(),
            param: bytes[20..].to_vec(),
        }
    }

    pub(crate) fn expect(&self, kind: u32) -> Event {
        let event = self.event();
        assert_eq!(event.kind, kind, "{event:?}");
        event
    }
}

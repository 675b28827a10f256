//! Commands that a program writes to `/dev/infiniband/rdma_cm`, and what it gets for them: the
//! interface of Linux's `rdma/rdma_user_cm.h`, version 4. `docs/protocols/verbs-control.md`.

use crate::Gid;
use crate::control::{EINVAL, EOPNOTSUPP, Errno};

/// The most bytes of private data that the interface has room for.
pub const PRIVATE_MAX: usize = 256;
/// Bytes of an event with all that this version has.
pub const EVENT: usize = 336;
/// Bytes of an event in front of what version 4 got later.
pub const EVENT_LEAST: usize = 324;
/// Bytes of the response to `QUERY_ROUTE`, and those in front of what version 4 got later.
pub const ROUTE: usize = 208;
/// The bytes of it in front of what version 4 got later.
pub const ROUTE_LEAST: usize = 200;
/// Bytes of the response to `INIT_QP_ATTR`.
pub const QP_ATTR: usize = 144;

/// `RDMA_PS_TCP`.
pub const PS_TCP: u16 = 0x0106;
/// `RDMA_PS_UDP`.
pub const PS_UDP: u16 = 0x0111;

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const HEAD: usize = 8;
const SOCKADDR: usize = 28;
/// The most bytes of an option's value.
const OPTION_MAX: usize = 4;

/// `enum rdma_cm_event_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[expect(missing_docs, reason = "the names are librdmacm's, without RDMA_CM_EVENT_")]
pub enum EventKind {
    AddrResolved = 0,
    RouteResolved = 2,
    ConnectRequest = 4,
    ConnectResponse = 5,
    Unreachable = 7,
    Rejected = 8,
    Established = 9,
    Disconnected = 10,
    MulticastJoin = 12,
}

/// An address of IPv4 or IPv6 and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address as a GID.
    pub gid: Gid,
    /// The port, in the machine's byte order.
    pub port: u16,
    /// It was given as one of IPv6.
    pub is_ipv6: bool,
}

impl Address {
    /// Reads a `struct sockaddr_in6`, or the `sockaddr_in` at its beginning; none of no family.
    fn parse(bytes: &[u8; SOCKADDR]) -> Result<Option<Self>, Errno> {
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        match u16::from_ne_bytes([bytes[0], bytes[1]]) {
            0 => Ok(None),
            AF_INET => {
                let mut gid = [0; 16];
                gid[10..12].fill(0xff);
                gid[12..].copy_from_slice(&bytes[4..8]);
                Ok(Some(Self { gid, port, is_ipv6: false }))
            }
            AF_INET6 => {
                let mut gid = [0; 16];
                gid.copy_from_slice(&bytes[8..24]);
                Ok(Some(Self { gid, port, is_ipv6: true }))
            }
            _ => Err(EINVAL),
        }
    }

    fn encode(&self, out: &mut [u8]) {
        out[2..4].copy_from_slice(&self.port.to_be_bytes());
        if self.is_ipv6 {
            out[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            out[8..24].copy_from_slice(&self.gid);
        } else {
            out[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            out[4..8].copy_from_slice(&self.gid[12..]);
        }
    }

    /// Whether it stands for all addresses of the endpoint.
    #[must_use]
    pub fn is_wildcard(&self) -> bool {
        if self.is_ipv6 { self.gid == [0; 16] } else { self.gid[12..] == [0; 4] }
    }

    /// Whether it is one of loopback.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        let one = self.gid[..15] == [0; 15] && self.gid[15] == 1;
        is_ipv4(&self.gid) && self.gid[12] == 127 || one
    }

    /// The address of a GID and a port.
    #[must_use]
    pub fn of(gid: Gid, port: u16) -> Self {
        Self { gid, port, is_ipv6: !is_ipv4(&gid) }
    }
}

/// Whether a GID is an address of IPv4.
#[must_use]
pub fn is_ipv4(gid: &Gid) -> bool {
    gid[..10] == [0; 10] && gid[10..12] == [0xff; 2]
}

/// Private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    length: u8,
    bytes: [u8; PRIVATE_MAX],
}

impl Default for Private {
    fn default() -> Self {
        Self { length: 0, bytes: [0; PRIVATE_MAX] }
    }
}

impl Private {
    /// Takes bytes over; none if there are too many.
    #[must_use]
    pub fn new(from: &[u8]) -> Option<Self> {
        let mut bytes = [0; PRIVATE_MAX];
        bytes.get_mut(..from.len())?.copy_from_slice(from);
        Some(Self { length: u8::try_from(from.len()).ok()?, bytes })
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }

    /// The same with this length: what is missing is 0.
    #[must_use]
    pub fn padded(mut self, length: u8) -> Self {
        self.length = length;
        self
    }
}

/// `struct rdma_ucm_conn_param`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are librdmacm's")]
pub struct Param {
    pub qp: u32,
    pub qkey: u32,
    pub private: Private,
    pub srq: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

/// What is asked for. Numbers in it are not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are librdmacm's")]
pub enum Command {
    CreateId { uid: u64, space: u16 },
    DestroyId(u32),
    Bind { id: u32, address: Address },
    Resolve { id: u32, source: Option<Address>, destination: Address },
    ResolveRoute(u32),
    QueryRoute(u32),
    Connect { id: u32, param: Param },
    Listen { id: u32, backlog: u32 },
    Accept { id: u32, uid: u64, param: Option<Param> },
    Reject { id: u32, private: Private },
    Disconnect(u32),
    InitQpAttr { id: u32, state: u32 },
    GetEvent,
    SetOption { id: u32, level: u32, name: u32, value: u32 },
    Notify { id: u32, event: u32 },
    MigrateId(u32),
    Join { id: u32, uid: u64, address: Address },
    Leave(u32),
}

impl Command {
    /// Reads a command.
    ///
    /// # Errors
    ///
    /// EINVAL for one that is malformed, EOPNOTSUPP for one that is not there.
    pub fn parse(bytes: &[u8]) -> Result<Self, Errno> {
        let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or(EINVAL)?;
        let length = usize::from(u16::from_ne_bytes([head[4], head[5]]));
        let fields = Fields(rest.get(..length).ok_or(EINVAL)?);
        let option = &rest[length..];
        Ok(match u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) {
            0 => Self::CreateId { uid: fields.long(0)?, space: fields.short(16)? },
            1 => Self::DestroyId(fields.word(8)?),
            2 => Self::Bind { address: fields.address(8)?.ok_or(EINVAL)?, id: fields.word(36)? },
            3 => Self::Resolve {
                source: fields.address(0)?,
                destination: fields.address(28)?.ok_or(EINVAL)?,
                id: fields.word(56)?,
            },
            4 => Self::ResolveRoute(fields.word(0)?),
            5 => Self::QueryRoute(fields.word(8)?),
            6 => Self::Connect { param: fields.param(0)?.ok_or(EINVAL)?, id: fields.word(272)? },
            7 => Self::Listen { id: fields.word(0)?, backlog: fields.word(4)? },
            8 => Self::Accept {
                uid: fields.long(0)?,
                param: fields.param(8)?,
                id: fields.word(280)?,
            },
            9 => {
                let private = fields.private(8, 4)?;
                Self::Reject { id: fields.word(0)?, private }
            }
            10 => Self::Disconnect(fields.word(0)?),
            11 => Self::InitQpAttr { id: fields.word(8)?, state: fields.word(12)? },
            12 => Self::GetEvent,
            14 => {
                let (id, level, name) = (fields.word(8)?, fields.word(12)?, fields.word(16)?);
                // A number of the machine's own order, of one to four bytes.
                let given = fields.word(20)? as usize == option.len();
                if !given || option.len() > OPTION_MAX {
                    return Err(EINVAL);
                }
                let mut value = [0; OPTION_MAX];
                value[..option.len()].copy_from_slice(option);
                Self::SetOption { id, level, name, value: u32::from_le_bytes(value) }
            }
            15 => Self::Notify { id: fields.word(0)?, event: fields.word(4)? },
            16 => Self::Join {
                uid: fields.long(8)?,
                address: fields.address(16)?.ok_or(EINVAL)?,
                id: fields.word(44)?,
            },
            17 => Self::Leave(fields.word(8)?),
            18 => Self::MigrateId(fields.word(8)?),
            13 | 19..=22 => return Err(EOPNOTSUPP),
            _ => return Err(EINVAL),
        })
    }
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&self, at: usize) -> Result<[u8; N], Errno> {
        self.0.get(at..).and_then(|b| b.first_chunk::<N>()).copied().ok_or(EINVAL)
    }

    fn short(&self, at: usize) -> Result<u16, Errno> {
        self.take(at).map(u16::from_ne_bytes)
    }

    fn word(&self, at: usize) -> Result<u32, Errno> {
        self.take(at).map(u32::from_ne_bytes)
    }

    fn long(&self, at: usize) -> Result<u64, Errno> {
        self.take(at).map(u64::from_ne_bytes)
    }

    fn address(&self, at: usize) -> Result<Option<Address>, Errno> {
        Address::parse(&self.take(at)?)
    }

    fn private(&self, at: usize, length_at: usize) -> Result<Private, Errno> {
        let bytes: [u8; PRIVATE_MAX] = self.take(at)?;
        let [length] = self.take::<1>(length_at)?;
        Private::new(&bytes[..usize::from(length)]).ok_or(EINVAL)
    }

    /// A `struct rdma_ucm_conn_param`; none if it says that it is not valid.
    fn param(&self, at: usize) -> Result<Option<Param>, Errno> {
        let [
            _,
            srq,
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
            valid,
        ] = self.take(at + 264)?;
        if valid == 0 {
            return Ok(None);
        }
        Ok(Some(Param {
            qp: self.word(at)?,
            qkey: self.word(at + 4)?,
            private: self.private(at + 8, at + 264)?,
            srq,
            responder_resources,
            initiator_depth,
            flow_control,
            retry_count,
            rnr_retry_count,
        }))
    }
}

/// The two ends of an id's path, as its device has them.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// The endpoint's own GID, and its index.
    pub own: (Gid, u8),
    /// The GID of the peer.
    pub peer: Gid,
}

impl Path {
    /// `struct ib_uverbs_ah_attr`.
    fn encode_address(&self, out: &mut [u8]) {
        out[..16].copy_from_slice(&self.peer);
        out[20] = self.own.1;
        out[21] = HOP_LIMIT;
        out[29] = 1; // is_global
        out[30] = 1; // port
    }
}

const HOP_LIMIT: u8 = 64;

/// An event, as `GET_EVENT` answers it.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the names are librdmacm's")]
pub struct Event {
    pub uid: u64,
    pub id: u32,
    pub kind: EventKind,
    pub status: i32,
    pub param: Param,
    /// Of `RDMA_PS_UDP` the parameters are other ones, with the peer's address if it is known.
    pub datagrams: bool,
    pub path: Option<Path>,
}

impl Event {
    /// `struct rdma_ucm_event_resp`.
    #[must_use]
    pub fn encode(&self) -> [u8; EVENT] {
        let mut out = [0; EVENT];
        out[..8].copy_from_slice(&self.uid.to_ne_bytes());
        out[8..12].copy_from_slice(&self.id.to_ne_bytes());
        out[12..16].copy_from_slice(&(self.kind as u32).to_ne_bytes());
        out[16..20].copy_from_slice(&self.status.to_ne_bytes());
        let (p, union) = (&self.param, &mut out[20..]);
        union[..4].copy_from_slice(&p.qp.to_ne_bytes());
        union[4..8].copy_from_slice(&p.qkey.to_ne_bytes());
        if self.datagrams {
            if let Some(path) = &self.path {
                path.encode_address(&mut union[8..40]);
            }
            union[40..296].copy_from_slice(&p.private.bytes);
            union[296] = p.private.length;
        } else {
            union[8..264].copy_from_slice(&p.private.bytes);
            union[264..272].copy_from_slice(&[
                p.private.length,
                p.srq,
                p.responder_resources,
                p.initiator_depth,
                p.flow_control,
                p.retry_count,
                p.rnr_retry_count,
                0,
            ]);
        }
        out
    }
}

/// What `QUERY_ROUTE` answers.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// In network byte order.
    pub node_guid: u64,
    /// None as long as the id has no device.
    pub path: Option<Path>,
    /// Where it is bound.
    pub source: Option<Address>,
    /// Where it goes.
    pub destination: Option<Address>,
}

impl Route {
    /// `struct rdma_ucm_query_route_resp`.
    #[must_use]
    pub fn encode(&self) -> [u8; ROUTE] {
        let mut out = [0; ROUTE];
        if let Some(source) = &self.source {
            source.encode(&mut out[136..164]);
        }
        if let Some(destination) = &self.destination {
            destination.encode(&mut out[164..192]);
        }
        // ibdev_index: the device has none, and is found by its GUID.
        out[200..204].fill(0xff);
        let Some(path) = &self.path else { return out };
        out[..8].copy_from_slice(&self.node_guid.to_ne_bytes());
        // struct ib_user_path_rec
        let record = &mut out[8..72];
        record[..16].copy_from_slice(&path.peer);
        record[16..32].copy_from_slice(&path.own.0);
        record[44..48].copy_from_slice(&1_u32.to_ne_bytes()); // reversible
        record[48..52].copy_from_slice(&u32::from(MTU).to_ne_bytes());
        record[52..54].fill(0xff); // the default partition
        record[54] = HOP_LIMIT;
        // One path, exactly this MTU, rate (25 Gb/s) and packet life time.
        record[56..64].copy_from_slice(&[1, 0, EXACTLY, EXACTLY, 15, EXACTLY, LIFE_TIME, 0]);
        out[192..196].copy_from_slice(&u32::from(self.destination.is_some()).to_ne_bytes());
        out[196] = 1; // port
        out
    }
}

/// `IBV_MTU_4096`.
const MTU: u8 = 5;
const EXACTLY: u8 = 2;
/// 4.096 us * 2^16, and twice of it: what the kernel has for RoCE.
const LIFE_TIME: u8 = 16;
const TIMEOUT: u8 = LIFE_TIME + 1;

/// Attributes that `INIT_QP_ATTR` answers. What a state does not need is 0.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the names are those of struct ib_uverbs_qp_attr")]
pub struct QpAttr {
    pub mask: u32,
    pub state: u32,
    pub qkey: u32,
    pub dest_qp_num: u32,
    pub access: u32,
    pub path: Option<Path>,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

impl QpAttr {
    /// `struct ib_uverbs_qp_attr`.
    #[must_use]
    pub fn encode(&self) -> [u8; QP_ATTR] {
        let mut out = [0; QP_ATTR];
        let words =
            [(0, self.mask), (4, self.state), (8, self.state), (12, MTU.into()), (20, self.qkey)];
        for (at, word) in words.into_iter().chain([(32, self.dest_qp_num), (36, self.access)]) {
            out[at..at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        if let Some(path) = &self.path {
            path.encode_address(&mut out[40..72]);
        }
        out[130] = self.max_rd_atomic;
        out[131] = self.max_dest_rd_atomic;
        out[133] = 1; // port
        out[134] = TIMEOUT;
        out[135] = self.retry_count;
        out[136] = self.rnr_retry_count;
        out
    }
}

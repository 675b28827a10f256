//! What a program's library asks for: the layouts of `clib/machine/protocol.h`, which has their
//! comments. Programs are of the same machine, whose kernel keeps them apart; a request that is
//! malformed is not answered.

#![expect(unsafe_code, reason = "layouts that C shares, as bytes")]

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use unix_io::plain::Plain;

pub(crate) const SOCKET: u32 = 1;
pub(crate) const BIND: u32 = 2;
pub(crate) const LISTEN: u32 = 3;
pub(crate) const CONNECT: u32 = 4;
pub(crate) const NAMES: u32 = 5;
pub(crate) const SET: u32 = 6;
pub(crate) const GET: u32 = 7;
pub(crate) const NO_WAIT: u32 = 1;
pub(crate) const ERROR: u16 = 0;

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Request {
    pub(crate) kind: u32,
    pub(crate) flags: u32,
    pub(crate) family: u32,
    pub(crate) value: u32,
    pub(crate) address: [u8; 16],
    pub(crate) port: u16,
    pub(crate) option: u16,
    pub(crate) reserved: u32,
}

// SAFETY: integers without padding.
unsafe impl Plain for Request {}

impl Request {
    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.address).into(), self.port)
    }
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Answer {
    pub(crate) error: i32,
    pub(crate) state: u32,
    pub(crate) family: u32,
    pub(crate) value: u32,
    pub(crate) local: [u8; 16],
    pub(crate) remote: [u8; 16],
    pub(crate) local_port: u16,
    pub(crate) remote_port: u16,
    pub(crate) reserved: u32,
}

// SAFETY: integers without padding.
unsafe impl Plain for Answer {}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Accepted {
    pub(crate) remote: [u8; 16],
    pub(crate) remote_port: u16,
    pub(crate) reserved: [u8; 6],
}

// SAFETY: integers without padding.
unsafe impl Plain for Accepted {}

const _: () = {
    assert!(size_of::<Request>() == 40);
    assert!(size_of::<Answer>() == 56);
    assert!(size_of::<Accepted>() == 24);
};

/// An address as it goes over the socket.
pub(crate) fn octets(at: SocketAddr) -> [u8; 16] {
    match at.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

//! What is in nqes, beside what `heddle_stack::queues::proto` knows of them.

use heddle_stack::queues::abi::*;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The operation of an nqe.
#[must_use]
pub fn operation(nqe: &queues_nqe) -> u32 {
    u32::from(nqe.operation)
}

/// A job.
#[must_use]
pub fn job(operation: u32, socket: u32) -> queues_nqe {
    let operation = u8::try_from(operation).unwrap_or(0);
    queues_nqe { operation, socket, ..queues_nqe::default() }
}

/// An nqe with this address.
#[must_use]
pub fn named(nqe: queues_nqe, at: SocketAddr) -> queues_nqe {
    let address = match at.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    queues_nqe { address: address.octets(), port: at.port(), ..nqe }
}

/// The address of an nqe, as a socket of family 4 or 6 has it; `None` if one of 4 cannot.
#[must_use]
pub fn address(nqe: &queues_nqe, family: u32) -> Option<SocketAddr> {
    let v6 = Ipv6Addr::from(nqe.address);
    if family == 6 {
        return Some(SocketAddr::new(v6.into(), nqe.port));
    }
    // The unspecified address is that of either family.
    let v4 = if v6.is_unspecified() { Some(Ipv4Addr::UNSPECIFIED) } else { v6.to_ipv4_mapped() };
    v4.map(|v4| SocketAddr::new(v4.into(), nqe.port))
}

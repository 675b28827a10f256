//! The addresses of a tenant: which are its own, and whom it may reach or hear.

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{IpAddress, IpEndpoint};

use super::Tenant;
use crate::abi::stack_tenant;
use crate::packet::Segment;
use crate::proto::Errno;

impl Tenant {
    pub(super) fn is_own(&self, address: IpAddress) -> Result<(), Errno> {
        let own = address.is_unspecified() || own(self.addresses).contains(&address);
        if own { Ok(()) } else { Err(Errno(libc::EADDRNOTAVAIL)) }
    }

    /// The address and port that a connection to `remote` comes from.
    pub(super) fn local_for(
        &mut self,
        bound: Option<IpEndpoint>,
        remote: IpEndpoint,
    ) -> Result<IpEndpoint, Errno> {
        let natural = match remote.addr {
            a if is_loopback(a) => Some(a),
            IpAddress::Ipv4(_) => self.addresses[0],
            IpAddress::Ipv6(_) => self.addresses[1],
        };
        let address = match bound.map(|b| b.addr).filter(|a| !a.is_unspecified()) {
            Some(a) if a.version() != remote.addr.version() => {
                return Err(Errno(libc::EAFNOSUPPORT));
            }
            // Nothing comes back from out there to a loopback address.
            Some(a) if is_loopback(a) && !own(self.addresses).contains(&remote.addr) => {
                return Err(Errno(libc::EINVAL));
            }
            Some(a) => a,
            None => natural.ok_or(Errno(libc::ENETUNREACH))?,
        };
        if let Some(port) = bound.map(|b| b.port).filter(|p| *p != 0) {
            let local = IpEndpoint::new(address, port);
            let taken = self.by_addresses.contains_key(&(local, remote));
            return if taken { Err(Errno(libc::EADDRNOTAVAIL)) } else { Ok(local) };
        }
        let free = |port: u16| {
            let local = IpEndpoint::new(address, port);
            local != remote && !self.by_addresses.contains_key(&(local, remote))
        };
        match self.ports.choose(remote, free) {
            Ok(port) => Ok(IpEndpoint::new(address, port)),
            Err(err) => {
                self.counts.refuse_ports += 1;
                Err(err)
            }
        }
    }

    pub(super) fn is_martian(&self, segment: &Segment) -> bool {
        let (from, to) = (segment.source.addr, segment.destination.addr);
        let mine = |a: IpAddress| self.addresses.contains(&Some(a));
        let unicast = match from {
            IpAddress::Ipv4(a) => {
                !a.is_multicast() && !a.is_unspecified() && !a.is_broadcast() && !a.is_loopback()
            }
            IpAddress::Ipv6(a) => !a.is_multicast() && !a.is_unspecified() && !a.is_loopback(),
        };
        !mine(to) || mine(from) || !unicast
    }
}

pub(super) fn addresses(m: &stack_tenant) -> Result<[Option<IpAddress>; 2], Errno> {
    let v4 = Ipv4Addr::from(m.address4);
    let v6 = Ipv6Addr::from(m.address6);
    let good4 = !v4.is_loopback() && !v4.is_multicast() && !v4.is_broadcast();
    let good6 = !v6.is_loopback() && !v6.is_multicast() && v6.to_ipv4_mapped().is_none();
    if !good4 || !good6 || (v4.is_unspecified() && v6.is_unspecified()) {
        return Err(Errno(libc::EINVAL));
    }
    Ok([
        (!v4.is_unspecified()).then_some(IpAddress::Ipv4(v4)),
        (!v6.is_unspecified()).then_some(IpAddress::Ipv6(v6)),
    ])
}

fn is_loopback(address: IpAddress) -> bool {
    match address {
        IpAddress::Ipv4(a) => a.is_loopback(),
        IpAddress::Ipv6(a) => a.is_loopback(),
    }
}

/// The addresses by which a tenant reaches itself.
pub(super) fn own(addresses: [Option<IpAddress>; 2]) -> Vec<IpAddress> {
    let loopback = [IpAddress::Ipv4(Ipv4Addr::LOCALHOST), IpAddress::Ipv6(Ipv6Addr::LOCALHOST)];
    addresses.into_iter().flatten().chain(loopback).collect()
}

/// Whom a connect really is for, or why nobody.
pub(super) fn reachable(remote: IpEndpoint) -> Result<IpEndpoint, Errno> {
    let address = match remote.addr {
        IpAddress::Ipv4(a) if a.is_unspecified() => IpAddress::Ipv4(Ipv4Addr::LOCALHOST),
        IpAddress::Ipv6(a) if a.is_unspecified() => IpAddress::Ipv6(Ipv6Addr::LOCALHOST),
        IpAddress::Ipv4(a) if a.is_multicast() || a.is_broadcast() => {
            return Err(Errno(libc::ENETUNREACH));
        }
        IpAddress::Ipv4(a) if a.is_loopback() && a != Ipv4Addr::LOCALHOST => {
            return Err(Errno(libc::ENETUNREACH));
        }
        IpAddress::Ipv6(a) if a.is_multicast() => return Err(Errno(libc::ENETUNREACH)),
        a => a,
    };
    // Linux sends that SYN, and is refused.
    if remote.port == 0 {
        return Err(Errno(libc::ECONNREFUSED));
    }
    Ok(IpEndpoint::new(address, remote.port))
}

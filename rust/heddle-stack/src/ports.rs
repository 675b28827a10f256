//! Which ports of a tenant are in use, by Linux's rules for `bind()`.

use core::hash::BuildHasher;
use std::collections::HashMap;

use smoltcp::wire::{IpAddress, IpEndpoint};

use crate::abi::*;
use crate::proto::Errno;
use crate::sys;

/// Ports that are chosen for programs: of Linux's `ip_local_port_range` those that the container's
/// own stack does not choose.
#[expect(clippy::cast_possible_truncation, reason = "it is a port")]
const EPHEMERAL: core::ops::Range<u16> = 32_768..STACK_FIRST_OWN_PORT as u16;

/// A bound socket or listener.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) id: u64,
    pub(crate) local: IpEndpoint,
    flags: u32,
    pub(crate) listens: bool,
}

impl Bound {
    /// Whether it takes packets to this address; the more exact it is, the larger is the number.
    fn takes(&self, address: IpAddress) -> Option<u8> {
        if self.local.addr == address {
            return Some(2);
        }
        let any = match (self.local.addr, address) {
            (IpAddress::Ipv4(own), IpAddress::Ipv4(_)) => own.is_unspecified(),
            (IpAddress::Ipv6(own), IpAddress::Ipv6(_)) => own.is_unspecified(),
            (IpAddress::Ipv6(own), IpAddress::Ipv4(_)) => own.is_unspecified() && self.dual(),
            _ => false,
        };
        any.then_some(u8::from(!self.dual()))
    }

    /// Whether it is the unspecified address of both families.
    fn dual(&self) -> bool {
        let v6 = matches!(self.local.addr, IpAddress::Ipv6(a) if a.is_unspecified());
        v6 && self.flags & STACK_V6_ONLY == 0
    }

    fn overlaps(&self, other: &Self) -> bool {
        let same = matches!(
            (self.local.addr, other.local.addr),
            (IpAddress::Ipv4(_), IpAddress::Ipv4(_)) | (IpAddress::Ipv6(_), IpAddress::Ipv6(_))
        );
        if !same && !self.dual() && !other.dual() {
            return false;
        }
        self.local.addr == other.local.addr
            || self.local.addr.is_unspecified()
            || other.local.addr.is_unspecified()
    }

    fn both(&self, other: &Self, flag: u32) -> bool {
        self.flags & other.flags & flag != 0
    }
}

/// The ports of a tenant.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    bound: HashMap<u16, Vec<Bound>>,
    /// Connections by local port.
    used: HashMap<u16, usize>,
    count: usize,
    /// How many have been chosen.
    chosen: u64,
}

impl Ports {
    /// Reserves an address and port, or any port for 0.
    pub(crate) fn bind(
        &mut self,
        id: u64,
        at: IpEndpoint,
        flags: u32,
    ) -> Result<IpEndpoint, Errno> {
        let mut bound = Bound { id, local: at, flags, listens: false };
        if at.port == 0 {
            let free = |port: &u16| !self.bound.contains_key(port) && !self.used.contains_key(port);
            bound.local.port =
                ports_from(sys::random()).find(free).ok_or(Errno(libc::EADDRINUSE))?;
        } else if self.conflicts(&bound) {
            return Err(Errno(libc::EADDRINUSE));
        }
        self.bound.entry(bound.local.port).or_default().push(bound);
        self.count += 1;
        Ok(bound.local)
    }

    fn conflicts(&self, new: &Bound) -> bool {
        let port = new.local.port;
        let reuses = new.flags & (STACK_REUSE_ADDRESS | STACK_REUSE_PORT) != 0;
        if !reuses && self.used.contains_key(&port) {
            return true;
        }
        self.bound.get(&port).is_some_and(|others| {
            others.iter().any(|other| {
                let shared = new.both(other, STACK_REUSE_PORT)
                    || (new.both(other, STACK_REUSE_ADDRESS) && !other.listens);
                new.overlaps(other) && !shared
            })
        })
    }

    /// Bound sockets and listeners.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Makes a bound socket a listener.
    pub(crate) fn listen(&mut self, id: u64, port: u16) -> Result<(), Errno> {
        let all = self.bound.get_mut(&port).ok_or(Errno(libc::ENOENT))?;
        let at = all.iter().position(|b| b.id == id).ok_or(Errno(libc::ENOENT))?;
        let own = all[at];
        let taken = all.iter().any(|other| {
            other.id != id
                && other.listens
                && own.overlaps(other)
                && !own.both(other, STACK_REUSE_PORT)
        });
        if taken {
            return Err(Errno(libc::EADDRINUSE));
        }
        all[at].listens = true;
        Ok(())
    }

    /// Gives back what a bound socket or listener has.
    pub(crate) fn release(&mut self, id: u64, port: u16) {
        if let Some(all) = self.bound.get_mut(&port) {
            let before = all.len();
            all.retain(|b| b.id != id);
            self.count -= before - all.len();
            if all.is_empty() {
                self.bound.remove(&port);
            }
        }
    }

    /// Which listener takes a SYN. Those that share a port have a part each of all peers.
    pub(crate) fn listener(&self, to: IpEndpoint, lot: u64) -> Option<u64> {
        let all = self.bound.get(&to.port)?;
        let score = |b: &Bound| b.listens.then(|| b.takes(to.addr)).flatten();
        let best = all.iter().filter_map(score).max()?;
        let equal: Vec<u64> = all.iter().filter(|b| score(b) == Some(best)).map(|b| b.id).collect();
        let which = usize::try_from(lot % equal.len() as u64).unwrap_or(0);
        Some(equal[which])
    }

    /// A port for a connection to `remote` that `free` allows: RFC 6056, algorithm 3. One is taken
    /// again when all others were, or the peer may have it in TIME-WAIT.
    pub(crate) fn choose(
        &mut self,
        remote: IpEndpoint,
        free: impl Fn(u16) -> bool,
    ) -> Result<u16, Errno> {
        let offset = self.bound.hasher().hash_one(remote);
        let found = ports_from(offset.wrapping_add(self.chosen))
            .position(|port| !self.bound.contains_key(&port) && free(port))
            .ok_or(Errno(libc::EADDRNOTAVAIL))?;
        self.chosen = self.chosen.wrapping_add(found as u64);
        let port = ports_from(offset.wrapping_add(self.chosen)).next();
        self.chosen = self.chosen.wrapping_add(1);
        port.ok_or(Errno(libc::EADDRNOTAVAIL))
    }

    pub(crate) fn connected(&mut self, port: u16) {
        *self.used.entry(port).or_default() += 1;
    }

    pub(crate) fn disconnected(&mut self, port: u16) {
        if let Some(count) = self.used.get_mut(&port) {
            *count -= 1;
            if *count == 0 {
                self.used.remove(&port);
            }
        }
    }
}

/// All ports that are chosen, from one of them on.
fn ports_from(number: u64) -> impl Iterator<Item = u16> {
    let count = EPHEMERAL.end - EPHEMERAL.start;
    let start = u16::try_from(number % u64::from(count)).unwrap_or(0);
    (0..count).map(move |i| {
        let at = (u32::from(start) + u32::from(i)) % u32::from(count);
        EPHEMERAL.start + u16::try_from(at).unwrap_or(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str, port: u16) -> IpEndpoint {
        IpEndpoint::new(address.parse::<core::net::IpAddr>().unwrap().into(), port)
    }

    #[test]
    fn conflicts_are_those_of_linux() {
        let cases = [
            ("0.0.0.0", 0, "0.0.0.0", 0, true),
            ("0.0.0.0", 0, "10.0.0.1", 0, true),
            ("10.0.0.1", 0, "127.0.0.1", 0, false),
            ("::", 0, "0.0.0.0", 0, true),
            ("::", STACK_V6_ONLY, "0.0.0.0", 0, false),
            ("::", STACK_V6_ONLY, "fd00::1", 0, true),
            ("fd00::1", 0, "10.0.0.1", 0, false),
            ("::", 0, "10.0.0.1", 0, true),
            ("0.0.0.0", STACK_REUSE_ADDRESS, "0.0.0.0", STACK_REUSE_ADDRESS, false),
            ("0.0.0.0", STACK_REUSE_ADDRESS, "0.0.0.0", 0, true),
            ("0.0.0.0", STACK_REUSE_PORT, "0.0.0.0", STACK_REUSE_PORT, false),
        ];
        for (a, a_flags, b, b_flags, conflict) in cases {
            let mut ports = Ports::default();
            ports.bind(1, at(a, 80), a_flags).unwrap();
            let got = ports.bind(2, at(b, 80), b_flags);
            assert_eq!(got.is_err(), conflict, "{a} {a_flags}, {b} {b_flags}");
        }
    }

    #[test]
    fn the_most_exact_listener_takes_a_syn() {
        let mut ports = Ports::default();
        ports.bind(1, at("::", 80), STACK_REUSE_PORT).unwrap();
        ports.bind(2, at("10.0.0.1", 80), STACK_REUSE_PORT).unwrap();
        assert_eq!(ports.listener(at("10.0.0.1", 80), 0), None);
        ports.listen(1, 80).unwrap();
        assert_eq!(ports.listener(at("10.0.0.1", 80), 0), Some(1));
        ports.listen(2, 80).unwrap();
        assert_eq!(ports.listener(at("10.0.0.1", 80), 0), Some(2));
        assert_eq!(ports.listener(at("127.0.0.1", 80), 0), Some(1));
        ports.bind(3, at("10.0.0.1", 80), STACK_REUSE_PORT).unwrap();
        ports.listen(3, 80).unwrap();
        assert_eq!(ports.listener(at("10.0.0.1", 80), 0), Some(2));
        assert_eq!(ports.listener(at("10.0.0.1", 80), 1), Some(3));
        ports.release(2, 80);
        assert_eq!(ports.listener(at("10.0.0.1", 80), 0), Some(3));
    }

    #[test]
    fn chosen_ports_come_again_after_all_others() {
        let mut ports = Ports::default();
        let all = usize::from(EPHEMERAL.end - EPHEMERAL.start);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..all {
            assert!(seen.insert(ports.choose(at("10.0.0.2", 80), |_| true).unwrap()));
        }
        assert!(!seen.insert(ports.choose(at("10.0.0.2", 80), |_| true).unwrap()));
        let none = ports.choose(at("10.0.0.2", 80), |_| false);
        assert_eq!(none, Err(Errno(libc::EADDRNOTAVAIL)));
    }

    #[test]
    fn listeners_that_share_no_port_exclude_each_other() {
        let mut ports = Ports::default();
        ports.bind(1, at("0.0.0.0", 80), STACK_REUSE_ADDRESS).unwrap();
        ports.bind(2, at("0.0.0.0", 80), STACK_REUSE_ADDRESS).unwrap();
        ports.listen(1, 80).unwrap();
        assert_eq!(ports.listen(2, 80), Err(Errno(libc::EADDRINUSE)));
        let chosen = ports.bind(3, at("0.0.0.0", 0), 0).unwrap();
        assert!(EPHEMERAL.contains(&chosen.port));
        ports.connected(90);
        assert_eq!(ports.bind(4, at("0.0.0.0", 90), 0), Err(Errno(libc::EADDRINUSE)));
        ports.disconnected(90);
        assert!(ports.bind(4, at("0.0.0.0", 90), 0).is_ok());
    }
}

//! Whom of its own container a guest may reach. The service is a process beside the machine's
//! monitor: what listens there at a loopback address, a console or a monitor's socket, is not for
//! the guest, which reaches those listeners only that are its own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The address as which another one is reached: IPv4 in IPv6 is IPv4's.
fn plain(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Whether an address leads back into the container that has these addresses.
pub(super) fn is_own(to: IpAddr, own: &[IpAddr]) -> bool {
    let to = plain(to);
    to.is_loopback() || to.is_unspecified() || own.contains(&to)
}

/// Whether a listener at an address takes connections to another one.
pub(super) fn takes(listener: SocketAddr, to: SocketAddr) -> bool {
    let (at, ip) = (plain(listener.ip()), plain(to.ip()));
    let any = match at {
        IpAddr::V4(Ipv4Addr::UNSPECIFIED) => ip.is_ipv4(),
        // It may be for IPv6 alone; then nobody is there, and the kernel refuses.
        IpAddr::V6(Ipv6Addr::UNSPECIFIED) => true,
        _ => false,
    };
    // An unspecified destination is a loopback one.
    listener.port() == to.port() && (any || at == ip || (ip.is_unspecified() && at.is_loopback()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_reaches_its_own_listeners_alone() {
        let own: Vec<IpAddr> = vec!["127.0.0.1".parse().unwrap(), "10.0.0.5".parse().unwrap()];
        for (to, is) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("0.0.0.0", true),
            ("::", true),
            ("::1", true),
            ("::ffff:127.0.0.1", true),
            ("::ffff:10.0.0.5", true),
            ("10.0.0.5", true),
            ("10.0.0.6", false),
            ("fd00::1", false),
        ] {
            assert_eq!(is_own(to.parse().unwrap(), &own), is, "{to}");
        }
        for (listener, to, takes_it) in [
            ("0.0.0.0:80", "127.0.0.1:80", true),
            ("0.0.0.0:80", "127.0.0.1:81", false),
            ("0.0.0.0:80", "[::ffff:10.0.0.5]:80", true),
            ("10.0.0.5:80", "127.0.0.1:80", false),
            ("10.0.0.5:80", "10.0.0.5:80", true),
            ("127.0.0.1:80", "10.0.0.5:80", false),
            ("127.0.0.1:80", "0.0.0.0:80", true),
            ("[::]:80", "10.0.0.5:80", true),
            ("[::1]:80", "10.0.0.5:80", false),
        ] {
            assert_eq!(
                takes(listener.parse().unwrap(), to.parse().unwrap()),
                takes_it,
                "{listener} {to}"
            );
        }
    }
}

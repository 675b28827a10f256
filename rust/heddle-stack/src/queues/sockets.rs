//! System calls on the kernel's TCP sockets, each as a safe function.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::c_int;
use core::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use unix_io::{check, length};

use super::abi::*;
use super::proto::Errno;

/// The errno of an error of the kernel's.
pub(crate) fn errno(err: &io::Error) -> i32 {
    err.raw_os_error().unwrap_or(libc::EIO)
}

fn size_of_length<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

/// Room for an address of either family.
#[derive(Clone, Copy)]
#[repr(C)]
union Address {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

fn nowhere() -> Address {
    // SAFETY: the structs consist of integers, for which zero is a value.
    unsafe { core::mem::zeroed() }
}

/// The address in the form that a socket of this family takes.
fn address_of(at: SocketAddr, v6: bool) -> Result<(Address, libc::socklen_t), Errno> {
    let mut to = nowhere();
    match (at.ip(), v6) {
        (IpAddr::V4(ip), false) => {
            to.v4 = libc::sockaddr_in {
                sin_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or(0),
                sin_port: at.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from(ip).to_be() },
                sin_zero: [0; 8],
            };
            Ok((to, size_of_length::<libc::sockaddr_in>()))
        }
        (ip, true) => {
            let ip = match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            to.v6 = libc::sockaddr_in6 {
                sin6_family: libc::sa_family_t::try_from(libc::AF_INET6).unwrap_or(0),
                sin6_port: at.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                sin6_scope_id: 0,
            };
            Ok((to, size_of_length::<libc::sockaddr_in6>()))
        }
        (IpAddr::V6(ip), false) if ip == Ipv6Addr::UNSPECIFIED => {
            address_of(SocketAddr::new(IpAddr::V4([0; 4].into()), at.port()), false)
        }
        (IpAddr::V6(_), false) => Err(Errno(libc::EAFNOSUPPORT)),
    }
}

fn name_of(a: &Address) -> SocketAddr {
    // SAFETY: all members begin with the family, and all bytes were initialised.
    if c_int::from(unsafe { a.family }) == libc::AF_INET {
        // SAFETY: the family says which member it is.
        let v4 = unsafe { a.v4 };
        return SocketAddr::new(
            IpAddr::V4(u32::from_be(v4.sin_addr.s_addr).into()),
            u16::from_be(v4.sin_port),
        );
    }
    // SAFETY: any bytes are a value of it.
    let v6 = unsafe { a.v6 };
    let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr).to_canonical();
    SocketAddr::new(ip, u16::from_be(v6.sin6_port))
}

fn result(returned: c_int) -> Result<(), Errno> {
    check(returned).map(drop).map_err(|err| Errno(errno(&err)))
}

/// Binds a socket.
pub(crate) fn bind(fd: BorrowedFd<'_>, v6: bool, at: SocketAddr) -> Result<(), Errno> {
    let (address, size) = address_of(at, v6)?;
    // SAFETY: the kernel reads `size` bytes of `address`, which has them.
    result(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size) })
}

/// Begins to connect: EINPROGRESS, as a rule.
pub(crate) fn connect(fd: BorrowedFd<'_>, v6: bool, to: SocketAddr) -> Result<(), Errno> {
    let (address, size) = address_of(to, v6)?;
    // SAFETY: as in `bind`.
    result(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), size) })
}

/// Has a socket listen.
pub(crate) fn listen(fd: BorrowedFd<'_>, backlog: u32) -> Result<(), Errno> {
    let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
    // SAFETY: listen takes numbers.
    result(unsafe { libc::listen(fd.as_raw_fd(), backlog) })
}

/// A connection that waits, with its peer's name.
pub(crate) fn accept(fd: BorrowedFd<'_>) -> Result<(OwnedFd, SocketAddr), Errno> {
    let (mut from, mut size) = (nowhere(), size_of_length::<Address>());
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes at most `size` bytes, which `from` has.
    let got =
        unsafe { libc::accept4(fd.as_raw_fd(), (&raw mut from).cast(), &raw mut size, flags) };
    result(got.min(0))?;
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    Ok((unsafe { OwnedFd::from_raw_fd(got) }, name_of(&from)))
}

/// The name of a socket, or of its peer.
pub(crate) fn name(fd: BorrowedFd<'_>, peer: bool) -> Result<SocketAddr, Errno> {
    let (mut at, mut size) = (nowhere(), size_of_length::<Address>());
    let ask = if peer { libc::getpeername } else { libc::getsockname };
    // SAFETY: the kernel writes at most `size` bytes, which `at` has.
    result(unsafe { ask(fd.as_raw_fd(), (&raw mut at).cast(), &raw mut size) })?;
    Ok(name_of(&at))
}

/// Shuts a direction down: `QUEUES_SHUT_...`.
pub(crate) fn shutdown(fd: BorrowedFd<'_>, how: u32) {
    // SAFETY: shutdown takes numbers. A connection that has ended is no error of the caller's.
    unsafe { libc::shutdown(fd.as_raw_fd(), c_int::try_from(how).unwrap_or(libc::SHUT_RDWR)) };
}

fn get<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &mut T) -> Result<(), Errno> {
    let mut size = size_of_length::<T>();
    let at = core::ptr::from_mut(value).cast();
    // SAFETY: the kernel writes at most `size` bytes, which `value` has; callers give structs of
    // integers.
    result(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, at, &raw mut size) })
}

fn set<T>(fd: BorrowedFd<'_>, level: c_int, name: c_int, value: &T) -> Result<(), Errno> {
    let at = core::ptr::from_ref(value).cast();
    // SAFETY: the kernel reads `size_of::<T>` bytes, which `value` has.
    result(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size_of_length::<T>()) })
}

/// Whether a connection is over, and nothing of it is left but what the kernel says of it.
pub(crate) fn is_over(fd: BorrowedFd<'_>) -> bool {
    const CLOSE: u8 = 7;
    let mut state = [0_u8; 8]; // the beginning of a tcp_info
    match get(fd, libc::IPPROTO_TCP, libc::TCP_INFO, &mut state) {
        Ok(()) => state[0] == CLOSE,
        // A pair: its other end is closed, or somebody has shut both directions down.
        Err(_) => true,
    }
}

/// Has the kernel tell whoever waits at a socket that there is room (`EPOLLOUT`), now or as soon as
/// there is. It does so when one of these options is set, to whatever value.
pub(crate) fn tell_of_room(fd: BorrowedFd<'_>) {
    let again = |level, name, set_name, of: fn(c_int) -> c_int| {
        let mut value: c_int = 0;
        get(fd, level, name, &mut value).and_then(|()| set(fd, level, set_name, &of(value)))
    };
    // The kernel's TCP tells of room that comes later only whom it has told that there is none.
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one.
    unsafe { libc::poll(&raw mut poll, 1, 0) };
    let lowat = libc::TCP_NOTSENT_LOWAT;
    if again(libc::IPPROTO_TCP, lowat, lowat, |n| n).is_err() {
        // A pair. What it says of its buffer is twice what is set.
        let (level, size) = (libc::SOL_SOCKET, libc::SO_SNDBUF);
        let _ = again(level, size, libc::SO_SNDBUFFORCE, |n| n / 2)
            .or_else(|_| again(level, size, size, |n| n / 2));
    }
}

/// Whether a socket is of the kernel's TCP, or an end of a pair.
pub(crate) fn is_stream(fd: BorrowedFd<'_>) -> bool {
    let ask = |name| {
        let mut value: c_int = 0;
        get(fd, libc::SOL_SOCKET, name, &mut value).map(|()| value)
    };
    let families = [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX];
    ask(libc::SO_TYPE) == Ok(libc::SOCK_STREAM)
        && ask(libc::SO_DOMAIN).is_ok_and(|d| families.contains(&d))
}

/// Has the last close of a socket reset its connection.
pub(crate) fn reset_at_close(fd: BorrowedFd<'_>) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    // The last word on a pair is not this one's.
    let _ = set(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
}

fn place_of(option: u16) -> Option<(c_int, c_int)> {
    Some(match u32::from(option) {
        QUEUES_OPTION_REUSE_ADDRESS => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
        QUEUES_OPTION_REUSE_PORT => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        QUEUES_OPTION_V6_ONLY => (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        QUEUES_OPTION_NO_DELAY => (libc::IPPROTO_TCP, libc::TCP_NODELAY),
        QUEUES_OPTION_KEEPALIVE => (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
        QUEUES_OPTION_KEEPALIVE_IDLE => (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        QUEUES_OPTION_KEEPALIVE_INTERVAL => (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
        QUEUES_OPTION_KEEPALIVE_COUNT => (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
        QUEUES_OPTION_USER_TIMEOUT => (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
        QUEUES_OPTION_SEND_BUFFER => (libc::SOL_SOCKET, libc::SO_SNDBUF),
        QUEUES_OPTION_RECEIVE_BUFFER => (libc::SOL_SOCKET, libc::SO_RCVBUF),
        _ => return None,
    })
}

/// Sets an option.
pub(crate) fn set_option(fd: BorrowedFd<'_>, option: u16, value: u32) -> Result<(), Errno> {
    if u32::from(option) == QUEUES_OPTION_LINGER {
        let on = value != QUEUES_LINGER_OFF;
        let seconds = if on { c_int::try_from(value).unwrap_or(c_int::MAX) } else { 0 };
        let linger = libc::linger { l_onoff: on.into(), l_linger: seconds };
        return set(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    }
    let (level, name) = place_of(option).ok_or(Errno(libc::EPROTO))?;
    set(fd, level, name, &c_int::try_from(value).unwrap_or(c_int::MAX))
}

/// The value of an option.
pub(crate) fn get_option(fd: BorrowedFd<'_>, option: u16) -> Result<u32, Errno> {
    if u32::from(option) == QUEUES_OPTION_LINGER {
        let mut linger = libc::linger { l_onoff: 0, l_linger: 0 };
        get(fd, libc::SOL_SOCKET, libc::SO_LINGER, &mut linger)?;
        return Ok(if linger.l_onoff == 0 {
            QUEUES_LINGER_OFF
        } else {
            linger.l_linger.cast_unsigned()
        });
    }
    let mut value: c_int = 0;
    if u32::from(option) == QUEUES_OPTION_SEND_QUEUE {
        // SAFETY: SIOCOUTQ writes one int, and `value` is one.
        result(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut value) })?;
    } else {
        let (level, name) = place_of(option).ok_or(Errno(libc::EPROTO))?;
        get(fd, level, name, &mut value)?;
    }
    Ok(value.cast_unsigned())
}

/// Has the kernel wake this thread when it says, not up to 50 us later.
pub(crate) fn wake_in_time() {
    // SAFETY: prctl takes numbers here.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_u64) };
}

/// Sleeps until a set of descriptors has an event, or for so long.
pub(crate) fn nap(set: BorrowedFd<'_>, nanoseconds: i64) {
    let mut poll = libc::pollfd { fd: set.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let time = libc::timespec { tv_sec: 0, tv_nsec: nanoseconds };
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one; there is no signal mask.
    let _ = length(
        unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, core::ptr::null()) } as isize
    );
}

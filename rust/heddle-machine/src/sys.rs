//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::c_int;
use core::ptr::NonNull;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use unix_io::{check, length};

fn own(result: c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn size_of_int<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0)
}

/// A TCP socket of family 4 or 6 that does not block.
pub(crate) fn socket(family: u32) -> io::Result<OwnedFd> {
    let domain = if family == 6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes numbers and touches no memory of ours.
    own(unsafe { libc::socket(domain, kind, 0) })
}

/// A pair of stream sockets of `AF_UNIX` that is closed on exec.
pub(crate) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors, and `fds` has room for two.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    let [a, b] = fds.map(own);
    Ok((a?, b?))
}

/// An address as the kernel has it.
struct Name {
    storage: libc::sockaddr_storage,
    length: libc::socklen_t,
}

impl Name {
    fn empty() -> Self {
        // SAFETY: sockaddr_storage consists of integers, for which zero is a value.
        let storage: libc::sockaddr_storage = unsafe { MaybeUninit::zeroed().assume_init() };
        Self { storage, length: size_of_int::<libc::sockaddr_storage>() }
    }

    fn of(at: SocketAddr) -> Self {
        let mut name = Self::empty();
        match at {
            SocketAddr::V4(v4) => {
                let s_addr = u32::from_ne_bytes(v4.ip().octets());
                let raw = libc::sockaddr_in {
                    sin_family: 2,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr },
                    sin_zero: [0; 8],
                };
                name.length = size_of_int::<libc::sockaddr_in>();
                // SAFETY: a sockaddr_storage has room for any address.
                unsafe { (&raw mut name.storage).cast::<libc::sockaddr_in>().write(raw) };
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: 10,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: 0,
                };
                name.length = size_of_int::<libc::sockaddr_in6>();
                // SAFETY: as above.
                unsafe { (&raw mut name.storage).cast::<libc::sockaddr_in6>().write(raw) };
            }
        }
        name
    }

    fn read(&self) -> io::Result<SocketAddr> {
        of_storage(&self.storage).ok_or(io::Error::from(io::ErrorKind::InvalidData))
    }

    fn raw(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    fn raw_mut(&mut self) -> (*mut libc::sockaddr, *mut libc::socklen_t) {
        ((&raw mut self.storage).cast(), &raw mut self.length)
    }
}

fn of_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = core::ptr::from_ref(storage);
    match c_int::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: a sockaddr_storage has room for it, and any bytes are one.
            let v4 = unsafe { at.cast::<libc::sockaddr_in>().read() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { at.cast::<libc::sockaddr_in6>().read() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, 0).into())
        }
        _ => None,
    }
}

pub(crate) fn bind(fd: &OwnedFd, at: SocketAddr) -> io::Result<()> {
    let name = Name::of(at);
    // SAFETY: the kernel reads `length` bytes of a name.
    check(unsafe { libc::bind(fd.as_raw_fd(), name.raw(), name.length) }).map(drop)
}

pub(crate) fn listen(fd: &OwnedFd, backlog: u32) -> io::Result<()> {
    let backlog = c_int::try_from(backlog).unwrap_or(c_int::MAX);
    // SAFETY: listen takes numbers.
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) }).map(drop)
}

/// Begins to connect.
pub(crate) fn connect(fd: &OwnedFd, to: SocketAddr) -> io::Result<()> {
    let name = Name::of(to);
    // SAFETY: the kernel reads `length` bytes of a name.
    check(unsafe { libc::connect(fd.as_raw_fd(), name.raw(), name.length) }).map(drop)
}

/// The next connection of a listener.
pub(crate) fn accept(fd: &OwnedFd) -> io::Result<(OwnedFd, SocketAddr)> {
    let mut name = Name::empty();
    let (at, length) = name.raw_mut();
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the kernel writes at most `length` bytes of a name.
    let got = own(unsafe { libc::accept4(fd.as_raw_fd(), at, length, flags) })?;
    Ok((got, name.read()?))
}

/// The name of a socket, or of the other end.
pub(crate) fn name(fd: &OwnedFd, peer: bool) -> io::Result<SocketAddr> {
    let mut name = Name::empty();
    let (at, length) = name.raw_mut();
    let ask = if peer { libc::getpeername } else { libc::getsockname };
    // SAFETY: the kernel writes at most `length` bytes of a name.
    check(unsafe { ask(fd.as_raw_fd(), at, length) })?;
    name.read()
}

pub(crate) fn set_option(fd: &OwnedFd, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
    let at = (&raw const value).cast();
    // SAFETY: the kernel reads one int, and `value` is one.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, at, size_of_int::<c_int>()) })
        .map(drop)
}

pub(crate) fn option(fd: &OwnedFd, level: c_int, name: c_int) -> io::Result<c_int> {
    let mut value: c_int = 0;
    let mut size = size_of_int::<c_int>();
    let at = (&raw mut value).cast();
    // SAFETY: the kernel writes one int, and `value` is one.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, at, &raw mut size) })?;
    Ok(value)
}

/// A socket's own error, which is told once.
pub(crate) fn take_error(fd: &OwnedFd) -> c_int {
    option(fd, libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(libc::EIO)
}

/// Has the last close reset the connection (0), or end it in order (none).
pub(crate) fn set_linger(fd: &OwnedFd, seconds: Option<c_int>) {
    let linger = libc::linger { l_onoff: seconds.is_some().into(), l_linger: seconds.unwrap_or(0) };
    let at = (&raw const linger).cast();
    // SAFETY: the kernel reads one linger, and `linger` is one. That it cannot be is no harm: the
    // kernel closes in order then.
    unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            at,
            size_of_int::<libc::linger>(),
        )
    };
}

/// A number that no other socket of the machine has, as long as it lives.
pub(crate) fn cookie(fd: &OwnedFd) -> io::Result<u64> {
    let mut value: u64 = 0;
    let mut size = size_of_int::<u64>();
    let at = (&raw mut value).cast();
    // SAFETY: the kernel writes eight bytes, and `value` has them.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_COOKIE, at, &raw mut size)
    })?;
    Ok(value)
}

pub(crate) fn shutdown(fd: &OwnedFd, how: c_int) -> io::Result<()> {
    // SAFETY: shutdown takes numbers.
    check(unsafe { libc::shutdown(fd.as_raw_fd(), how) }).map(drop)
}

/// Sends bytes of a ring, never waiting. The memory's peer may change them meanwhile, which is its
/// own business: nobody in here looks at them.
pub(crate) fn send(fd: &OwnedFd, at: NonNull<u8>, count: usize) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `at` is of a ring that has so many bytes, which the kernel only reads.
    length(unsafe { libc::send(fd.as_raw_fd(), at.as_ptr().cast(), count, flags) })
}

/// Receives bytes into a ring, never waiting; as [`send`].
pub(crate) fn receive(fd: &OwnedFd, at: NonNull<u8>, room: usize) -> io::Result<usize> {
    // SAFETY: `at` is of a ring that has so much room, which nobody in here has a reference to.
    length(unsafe { libc::recv(fd.as_raw_fd(), at.as_ptr().cast(), room, libc::MSG_DONTWAIT) })
}

/// The same, of bytes that stay in the socket.
pub(crate) fn peek(fd: &OwnedFd, at: NonNull<u8>) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_PEEK;
    // SAFETY: as in `receive`.
    length(unsafe { libc::recv(fd.as_raw_fd(), at.as_ptr().cast(), 1, flags) })
}

/// Drops bytes that wait, so many at most.
pub(crate) fn skip(fd: &OwnedFd, count: usize) -> usize {
    let mut bytes = [0_u8; 4096];
    let mut left = count;
    while left > 0 {
        let want = left.min(bytes.len());
        // SAFETY: the kernel writes at most as many bytes as `bytes` has.
        let got = length(unsafe {
            libc::recv(fd.as_raw_fd(), bytes.as_mut_ptr().cast(), want, libc::MSG_DONTWAIT)
        });
        match got {
            Ok(n @ 1..) => left -= n,
            _ => break,
        }
    }
    count - left
}

/// Bytes that wait to be read.
pub(crate) fn waiting(fd: &OwnedFd) -> usize {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one int, and `count` is one.
    let got = unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    if got < 0 { 0 } else { usize::try_from(count).unwrap_or(0) }
}

/// Bytes that the peer has not acknowledged.
pub(crate) fn unsent(fd: &OwnedFd) -> io::Result<u32> {
    let mut count: c_int = 0;
    // SAFETY: TIOCOUTQ writes one int, and `count` is one.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// What has become of the other end of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OtherEnd {
    /// It sends no more.
    pub(crate) silent: bool,
    /// Nobody has it open.
    pub(crate) gone: bool,
    /// It was closed with bytes in it that nobody read.
    pub(crate) unread: bool,
}

pub(crate) fn other_end(fd: &OwnedFd) -> OtherEnd {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one.
    unsafe { libc::poll(&raw mut poll, 1, 0) };
    OtherEnd {
        silent: poll.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0,
        gone: poll.revents & libc::POLLHUP != 0,
        unread: poll.revents & libc::POLLERR != 0,
    }
}

/// The addresses of this network namespace.
pub(crate) fn own_addresses() -> Vec<IpAddr> {
    let mut list: *mut libc::ifaddrs = core::ptr::null_mut();
    // SAFETY: the C library writes one pointer, and `list` is one.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut addresses = Vec::new();
    let mut next = list;
    // SAFETY: the list consists of such structs, and is there until it is freed.
    while let Some(one) = unsafe { next.as_ref() } {
        next = one.ifa_next;
        // SAFETY: an address that is there has at least its family.
        let family = unsafe { one.ifa_addr.as_ref() }.map(|a| c_int::from(a.sa_family));
        let size = match family {
            Some(libc::AF_INET) => size_of::<libc::sockaddr_in>(),
            Some(libc::AF_INET6) => size_of::<libc::sockaddr_in6>(),
            _ => continue,
        };
        let mut name = Name::empty();
        let to = (&raw mut name.storage).cast::<u8>();
        // SAFETY: an address of this family has so many bytes, for which a name has room.
        unsafe { core::ptr::copy_nonoverlapping(one.ifa_addr.cast::<u8>(), to, size) };
        addresses.extend(of_storage(&name.storage).map(|a| a.ip()));
    }
    // SAFETY: it is the list of above, and nobody uses it any more.
    unsafe { libc::freeifaddrs(list) };
    addresses
}

/// Sends bytes with a descriptor over a stream socket, never waiting.
pub(crate) fn pass(to: &OwnedFd, bytes: &[u8], fd: BorrowedFd<'_>) -> io::Result<()> {
    unix_io::packets::send(to, bytes, &[fd])
}

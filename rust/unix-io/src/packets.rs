//! SEQPACKET sockets: messages with descriptors between processes.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::{check, length, own};

/// Descriptors that come with one message at most; more are closed by the kernel.
pub const DESCRIPTORS_MAX: usize = 4;

fn unix_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_bytes();
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        // Signed on amd64, not on arm64.
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_un>()).unwrap_or(0);
    Ok((address, size))
}

/// Listens for SEQPACKET connections at a path, which only this user can reach.
pub fn listen_packets(path: &Path) -> io::Result<OwnedFd> {
    let (address, size) = unix_address(path)?;
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes numbers and touches no memory of ours.
    let socket = own(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: fchmod takes numbers. Before bind(), it is the mode that the path will have.
    check(unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) })?;
    // SAFETY: the kernel reads one sockaddr_un, and `address` is one.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    // SAFETY: listen takes numbers and touches no memory of ours.
    check(unsafe { libc::listen(socket.as_raw_fd(), 16) })?;
    Ok(socket)
}

/// Connects to a SEQPACKET socket, waiting for it.
pub fn connect_packets(path: &Path) -> io::Result<OwnedFd> {
    let (address, size) = unix_address(path)?;
    // SAFETY: socket takes numbers and touches no memory of ours.
    let socket =
        own(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the kernel reads one sockaddr_un, and `address` is one.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    Ok(socket)
}

/// A connected pair of SEQPACKET sockets.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors, and `fds` has room for two.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    let [a, b] = fds.map(own);
    Ok((a?, b?))
}

/// A connection that waits, non-blocking.
pub fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: without an address the kernel writes nothing.
    own(unsafe {
        libc::accept4(listener.as_raw_fd(), core::ptr::null_mut(), core::ptr::null_mut(), flags)
    })
}

/// Room for the descriptors of one message, as the kernel lays them out.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    head: libc::cmsghdr,
    fds: [c_int; DESCRIPTORS_MAX],
}

impl Default for Control {
    fn default() -> Self {
        let head = libc::cmsghdr { cmsg_len: 0, cmsg_level: 0, cmsg_type: 0 };
        Self { head, fds: [0; DESCRIPTORS_MAX] }
    }
}

/// Sends one message with descriptors, never waiting.
pub fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut io = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: msghdr consists of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let header = size_of::<libc::cmsghdr>();
        let used = header + fds.len().min(DESCRIPTORS_MAX) * size_of::<c_int>();
        control.head = libc::cmsghdr {
            cmsg_len: used,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        };
        for (to, fd) in control.fds.iter_mut().zip(fds) {
            *to = fd.as_raw_fd();
        }
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = used.next_multiple_of(8);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` names `bytes`, which the kernel only reads, and `control`; both outlive the
    // call.
    length(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }).map(drop)
}

/// Receives one message into `bytes`, and its descriptors, never waiting. Says how long it is: 0 at
/// the end, more than `bytes` has if it was cut off.
pub fn receive(socket: &OwnedFd, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut io = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: msghdr consists of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = size_of::<Control>();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC | libc::MSG_TRUNC;
    // SAFETY: `message` names `bytes` and `control`, which outlive the call.
    let got = length(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) })?;
    let header = size_of::<libc::cmsghdr>();
    if message.msg_controllen >= header
        && control.head.cmsg_level == libc::SOL_SOCKET
        && control.head.cmsg_type == libc::SCM_RIGHTS
    {
        let count = control.head.cmsg_len.saturating_sub(header) / size_of::<c_int>();
        for fd in control.fds.iter().take(count) {
            // SAFETY: the kernel has just made these descriptors for this process.
            fds.push(unsafe { OwnedFd::from_raw_fd(*fd) });
        }
    }
    Ok(got)
}

/// An option of a socket.
///
/// # Safety
///
/// The option's type is `T`, or consists of fewer integers.
unsafe fn option<T>(fd: BorrowedFd<'_>, name: c_int, mut value: T) -> io::Result<T> {
    let mut size = libc::socklen_t::try_from(size_of::<T>()).unwrap_or(0);
    let at = (&raw mut value).cast();
    // SAFETY: the kernel writes at most `size` bytes, which `value` has.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, at, &raw mut size) })?;
    Ok(value)
}

/// The process that made a connection: its number, which may be another one's by now, and itself,
/// which a kernel before 6.5 does not tell.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<(libc::pid_t, Option<OwnedFd>)> {
    let nobody = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // SAFETY: the type of this option.
    let who = unsafe { option(socket, libc::SO_PEERCRED, nobody) }?;
    if who.pid <= 0 {
        // Of a PID namespace that this process cannot see.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // SAFETY: the type of this option, which is a descriptor that the kernel has just made.
    let process = unsafe { option(socket, libc::SO_PEERPIDFD, -1_i32) };
    if process.as_ref().is_err_and(|err| err.raw_os_error() == Some(libc::ENOPROTOOPT)) {
        return Ok((who.pid, None));
    }
    Ok((who.pid, Some(own(process?)?)))
}

/// Whether the descriptor is a SEQPACKET socket of Unix's that does not listen.
#[must_use]
pub fn is_connection(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: all are ints.
    let is = |name, value: c_int| unsafe { option(fd, name, 0) }.is_ok_and(|v| v == value);
    is(libc::SO_DOMAIN, libc::AF_UNIX)
        && is(libc::SO_TYPE, libc::SOCK_SEQPACKET)
        && is(libc::SO_ACCEPTCONN, 0)
}

/// The file that a Unix socket is bound to, as a descriptor that can be looked at: of a connection
/// that was accepted, its listener's. It takes `CAP_NET_ADMIN`.
pub fn bound_file(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// `linux/un.h`.
    const SIOCUNIXFILE: libc::Ioctl = 0x89e0;
    // SAFETY: of a Unix socket this takes nothing, and gives a descriptor that the kernel has made.
    own(unsafe { libc::ioctl(fd.as_raw_fd(), SIOCUNIXFILE) })
}

/// Whether the descriptor is an `AF_UNIX` stream socket.
#[must_use]
pub fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: both are ints.
    let is = |name, value: c_int| unsafe { option(fd, name, 0) }.is_ok_and(|v| v == value);
    is(libc::SO_DOMAIN, libc::AF_UNIX) && is(libc::SO_TYPE, libc::SOCK_STREAM)
}

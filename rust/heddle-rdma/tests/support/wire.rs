//! Sockets that carry messages and descriptors, and connections between nodes.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use unix_io::{epoll, packets};

pub(crate) fn connect(path: &Path) -> Option<OwnedFd> {
    packets::connect_packets(path).ok()
}

pub(super) fn listen(path: &Path) -> OwnedFd {
    packets::listen_packets(path).unwrap()
}

/// Sends a message with descriptors.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[i32]) -> io::Result<()> {
    let mut io = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 8];
    // SAFETY: integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let used = 16 + 4 * fds.len();
        control[0] = used as u64;
        control[1] = u64::from(1_u32) | u64::from(1_u32) << 32; // SOL_SOCKET, SCM_RIGHTS
        for (i, fd) in fds.iter().enumerate() {
            control[2 + i / 2] |= u64::from(fd.cast_unsigned()) << (32 * (i % 2));
        }
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = used.next_multiple_of(8);
    }
    // SAFETY: the message names bytes that outlive the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a message and its descriptors; none at the end.
pub(crate) fn receive(socket: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 1 << 15];
    let mut control = [0_u64; 8];
    let mut io = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message names memory that outlives the call.
    let got =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    bytes.truncate(got.cast_unsigned());
    let mut fds = Vec::new();
    if message.msg_controllen > 16 {
        for i in 0..(usize::try_from(control[0]).unwrap() - 16) / 4 {
            let fd = u32::try_from(control[2 + i / 2] >> (32 * (i % 2)) & 0xffff_ffff).unwrap();
            // SAFETY: the kernel has just made it for this process.
            fds.push(unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) });
        }
    }
    Ok((bytes, fds))
}

/// Waits until a descriptor is readable; false if it is not in time.
pub(crate) fn readable(fd: &OwnedFd, timeout: Duration) -> bool {
    epoll::wait_readable(fd.as_fd(), timeout)
}

/// A connection over loopback.
pub(crate) fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

/// Makes a hole of the first bytes of a file: whether it could, or the errno.
pub(crate) fn punch(file: impl AsFd, length: usize) -> Result<(), i32> {
    const MODE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (fd, length) = (file.as_fd().as_raw_fd(), libc::off_t::try_from(length).unwrap());
    // SAFETY: this takes numbers.
    let punched = unsafe { libc::fallocate(fd, MODE, 0, length) };
    if punched == 0 { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap()) }
}

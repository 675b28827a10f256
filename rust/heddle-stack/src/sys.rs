//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use unix_io::{clock, length};

pub(crate) use unix_io::epoll::{EDGE, GONE, HALF_CLOSED, READABLE, WRITABLE};
pub(crate) use unix_io::packets::{accept, is_unix_stream, listen_packets, receive, send};
pub(crate) use unix_io::{
    Epoll, monotonic, raise_descriptors, random, set_nonblocking, would_block,
};

/// Reads what is there. Never waits, whatever the file's flags are: a program may have the file,
/// too (`MSG_PEEK`), and change them.
pub(crate) fn read(stream: &UnixStream, parts: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
    // SAFETY: msghdr consists of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    // IoSliceMut is an iovec by definition.
    message.msg_iov = parts.as_mut_ptr().cast();
    message.msg_iovlen = parts.len();
    // SAFETY: `message` names `parts`, which outlive the call, and nothing else.
    length(unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
}

/// Writes what there is room for, and never waits, as `read`.
pub(crate) fn write(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the kernel only reads `bytes`, which outlive the call.
    length(unsafe { libc::send(stream.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
}

/// Bytes that wait to be read.
pub(crate) fn waiting(stream: &UnixStream) -> usize {
    let mut count: c_int = 0;
    // SAFETY: FIONREAD writes one int, and `count` is one.
    let got = unsafe { libc::ioctl(stream.as_raw_fd(), libc::FIONREAD, &raw mut count) };
    if got < 0 { 0 } else { usize::try_from(count).unwrap_or(0) }
}

/// The first byte that waits, which stays there.
pub(crate) fn peek(stream: &UnixStream) -> Option<u8> {
    let mut byte = 0_u8;
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the kernel writes at most one byte, which `byte` has.
    let got = unsafe { libc::recv(stream.as_raw_fd(), (&raw mut byte).cast(), 1, flags) };
    (got == 1).then_some(byte)
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

pub(crate) fn other_end(stream: &UnixStream) -> OtherEnd {
    let mut poll = libc::pollfd { fd: stream.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one.
    unsafe { libc::poll(&raw mut poll, 1, 0) };
    OtherEnd {
        silent: poll.revents & (libc::POLLRDHUP | libc::POLLHUP) != 0,
        gone: poll.revents & libc::POLLHUP != 0,
        unread: poll.revents & libc::POLLERR != 0,
    }
}

/// Bytes that may lie in a socket before a writer has to wait; the kernel's limit counts.
pub(crate) fn set_send_buffer(stream: &UnixStream, bytes: u32) {
    let value = c_int::try_from(bytes).unwrap_or(c_int::MAX);
    let size = libc::socklen_t::try_from(size_of::<c_int>()).unwrap_or(0);
    // SAFETY: the kernel reads one int, and `value` is one. That there is less room is no error.
    unsafe {
        libc::setsockopt(
            stream.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_SNDBUF,
            (&raw const value).cast(),
            size,
        )
    };
}

/// Nanoseconds of processor that the thread has used.
pub(crate) fn thread_time() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of processor that the process has used.
pub(crate) fn process_time() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Has large buffers be mappings of their own for ever: fresh ones are zero pages that cost nothing
/// until they are used, and old ones go back to the kernel. glibc would move the threshold.
pub(crate) fn map_large_buffers() {
    // SAFETY: mallopt takes numbers; no other thread runs yet.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_guard_byte_makes_the_other_end_see_a_reset() {
        let (mut program, mut ours) = UnixStream::pair().unwrap();
        program.write_all(b"gdata").unwrap();
        assert_eq!(waiting(&ours), 5);
        let mut some = [0; 4];
        ours.read_exact(&mut some).unwrap();
        assert_eq!(peek(&ours), Some(b'a'));
        drop(ours);
        let err = program.read(&mut some).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn who_makes_a_file_blocking_keeps_nobody() {
        let (program, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(false).unwrap(); // as a program can that has the file
        let mut some = [0; 4];
        let err = read(&ours, &mut [io::IoSliceMut::new(&mut some)]).unwrap_err();
        assert!(would_block(&err));
        let err = loop {
            if let Err(err) = write(&ours, &[0; 4096]) {
                break err;
            }
        };
        assert!(would_block(&err));
        drop(program);
    }

    #[test]
    fn the_other_end_is_told_apart() {
        let (program, ours) = UnixStream::pair().unwrap();
        assert_eq!(other_end(&ours), OtherEnd::default());
        program.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(other_end(&ours), OtherEnd { silent: true, gone: false, unread: false });
        (&ours).write_all(b"x").unwrap();
        drop(program);
        assert_eq!(other_end(&ours), OtherEnd { silent: true, gone: true, unread: true });
    }
}

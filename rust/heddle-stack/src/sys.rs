//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

use core::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Descriptors that come with one message at most; more are closed by the kernel.
const DESCRIPTORS_MAX: usize = 2;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn own(result: c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn length(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

pub(crate) fn would_block(err: &io::Error) -> bool {
    matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A set of descriptors to wait for, each with a number of the caller's.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

pub(crate) const READABLE: u32 = libc::EPOLLIN.cast_unsigned();
pub(crate) const WRITABLE: u32 = libc::EPOLLOUT.cast_unsigned();
pub(crate) const EDGE: u32 = libc::EPOLLET.cast_unsigned();
pub(crate) const HALF_CLOSED: u32 = libc::EPOLLRDHUP.cast_unsigned();
/// The peer has shut something down, or is gone.
pub(crate) const GONE: u32 = HALF_CLOSED | (libc::EPOLLHUP | libc::EPOLLERR).cast_unsigned();

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1 takes a number and touches no memory of ours.
        own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    fn control(&self, what: c_int, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: id };
        // SAFETY: the kernel reads one epoll_event, and `event` is one.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd.as_raw_fd(), &raw mut event) })
            .map(drop)
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, events, id)
    }

    pub(crate) fn modify(&self, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, events, id)
    }

    /// A descriptor that others have open, too, stays in the set when it is closed here.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // It is in the set, or this says that it is not: both are what the caller wants.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Waits for events; a signal is no event. Times are rounded up to milliseconds.
    pub(crate) fn wait(
        &self,
        events: &mut Vec<(u64, u32)>,
        timeout: Option<Duration>,
    ) -> io::Result<()> {
        const MOST: usize = 256;
        let milliseconds = match timeout {
            None => -1,
            Some(t) => c_int::try_from(t.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX),
        };
        let mut raw = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: the kernel writes at most as many events as `raw` has.
        let got = check(unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), raw.as_mut_ptr(), 256, milliseconds)
        });
        events.clear();
        match got {
            Ok(n) => {
                let n = usize::try_from(n).unwrap_or(0).min(MOST);
                events.extend(raw[..n].iter().map(|e| (e.u64, e.events)));
                Ok(())
            }
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(err) => Err(err),
        }
    }
}

fn unix_address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    let bytes = path.as_os_str().as_bytes();
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_un>()).unwrap_or(0);
    Ok((address, size))
}

/// Listens for SEQPACKET connections at a path, which only this user can reach.
pub(crate) fn listen_packets(path: &Path) -> io::Result<OwnedFd> {
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
pub(crate) fn connect_packets(path: &Path) -> io::Result<OwnedFd> {
    let (address, size) = unix_address(path)?;
    // SAFETY: socket takes numbers and touches no memory of ours.
    let socket =
        own(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the kernel reads one sockaddr_un, and `address` is one.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    Ok(socket)
}

/// A connected pair of SEQPACKET sockets.
pub(crate) fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors, and `fds` has room for two.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    let [a, b] = fds.map(own);
    Ok((a?, b?))
}

/// Waits until there is something to read, so long at most. Says whether there is.
pub(crate) fn wait_readable(fd: BorrowedFd<'_>, most: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let milliseconds = c_int::try_from(most.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one.
    unsafe { libc::poll(&raw mut poll, 1, milliseconds) > 0 }
}

/// A connection that waits, non-blocking.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
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

/// Sends one message, with a descriptor or without, never waiting.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut io = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control::default();
    // SAFETY: msghdr consists of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    if let Some(fd) = fd {
        let used = size_of::<libc::cmsghdr>() + size_of::<c_int>();
        control.head = libc::cmsghdr {
            cmsg_len: used,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        };
        control.fds[0] = fd.as_raw_fd();
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = used.next_multiple_of(8);
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` names `bytes`, which the kernel only reads, and `control`. Both outlive it.
    length(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }).map(drop)
}

/// Receives one message into `bytes`, and its descriptors, never waiting. Says how long it is: 0 at
/// the end, more than `bytes` has if it was cut off.
pub(crate) fn receive(
    socket: &OwnedFd,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
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

/// Whether the descriptor is an `AF_UNIX` stream socket.
pub(crate) fn is_unix_stream(fd: BorrowedFd<'_>) -> bool {
    let option = |name| {
        let mut value: c_int = 0;
        let mut size = libc::socklen_t::try_from(size_of::<c_int>()).unwrap_or(0);
        // SAFETY: the kernel writes at most `size` bytes, which `value` has.
        let got = unsafe {
            libc::getsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                (&raw mut value).cast(),
                &raw mut size,
            )
        };
        (got == 0).then_some(value)
    };
    option(libc::SO_DOMAIN) == Some(libc::AF_UNIX)
        && option(libc::SO_TYPE) == Some(libc::SOCK_STREAM)
}

pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: F_SETFL takes a number and touches no memory of ours.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }).map(drop)
}

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

/// Random bits of the kernel's.
pub(crate) fn random() -> u64 {
    let mut bits = 0_u64;
    // SAFETY: the kernel writes eight bytes, which `bits` has; so few come whole, or not at all.
    let got = unsafe { libc::getrandom((&raw mut bits).cast(), 8, 0) };
    assert!(got == 8, "no random bits: {}", io::Error::last_os_error());
    bits
}

fn clock(which: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, and `now` is one. These clocks are always there.
    unsafe { libc::clock_gettime(which, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Nanoseconds of processor that the thread has used.
pub(crate) fn thread_time() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Nanoseconds of processor that the process has used.
pub(crate) fn process_time() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn monotonic() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// Has large buffers be mappings of their own for ever: fresh ones are zero pages that cost nothing
/// until they are used, and old ones go back to the kernel. glibc would move the threshold.
pub(crate) fn map_large_buffers() {
    // SAFETY: mallopt takes numbers; no other thread runs yet.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10) };
}

/// Lets the process have as many descriptors as it may: each connection takes one.
pub(crate) fn raise_descriptor_limit() -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit, and `limit` is one.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one rlimit, and `limit` is one.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }).map(drop)
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

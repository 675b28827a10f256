//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Descriptors that come with one message at most; more are closed by the kernel.
pub(crate) const DESCRIPTORS_MAX: usize = 4;

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

/// Whether there are no more descriptors, of this process or of the machine.
pub(crate) fn no_descriptors(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Lets this process have as many descriptors as the machine allows, or as it may ask for.
pub(crate) fn raise_descriptors() {
    let most = std::fs::read_to_string("/proc/sys/fs/nr_open").ok();
    let most = most.and_then(|n| n.trim().parse().ok()).unwrap_or(1 << 20);
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one rlimit, and `limit` is one.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    for wanted in [most, limit.rlim_max] {
        let new = libc::rlimit { rlim_cur: wanted, rlim_max: wanted.max(limit.rlim_max) };
        if wanted >= limit.rlim_cur
            // SAFETY: the kernel reads one rlimit. Without CAP_SYS_RESOURCE the second one will do.
            && unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new) } == 0
        {
            return;
        }
    }
}

/// The number of this thread.
pub(crate) fn thread() -> i32 {
    // SAFETY: gettid takes nothing.
    unsafe { libc::gettid() }
}

/// Whether a thread of this process waits for something, and not just for a processor.
pub(crate) fn waits(thread: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
    // The state follows the name, which ends with the last bracket.
    let state =
        stat.ok().and_then(|s| s.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    state.is_some_and(|state| state != 'R')
}

/// Bytes of memory that the machine has.
pub(crate) fn machine_memory() -> u64 {
    // SAFETY: sysconf takes numbers.
    let [pages, size] =
        [libc::_SC_PHYS_PAGES, libc::_SC_PAGESIZE].map(|n| unsafe { libc::sysconf(n) });
    u64::try_from(pages).unwrap_or(0) * u64::try_from(size).unwrap_or(0)
}

/// A set of descriptors to wait for, each with a number of the caller's.
pub(crate) struct Epoll(OwnedFd);

pub(crate) const READABLE: u32 = libc::EPOLLIN.cast_unsigned();
pub(crate) const WRITABLE: u32 = libc::EPOLLOUT.cast_unsigned();
pub(crate) const EDGE: u32 = libc::EPOLLET.cast_unsigned();

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
        const MOST: usize = 64;
        let milliseconds = match timeout {
            None => -1,
            Some(t) => c_int::try_from(t.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX),
        };
        let mut raw = [libc::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: the kernel writes at most as many events as `raw` has.
        let got = check(unsafe {
            libc::epoll_wait(self.0.as_raw_fd(), raw.as_mut_ptr(), 64, milliseconds)
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

pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: eventfd takes numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Adds one to an eventfd. One that is full has been rung.
pub(crate) fn ring(eventfd: &OwnedFd) {
    let one = 1_u64;
    // SAFETY: the kernel reads eight bytes, which `one` has.
    let _ = unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// A connected pair of SEQPACKET sockets, of which the first does not block.
pub(crate) fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors, and `fds` has room for two.
    check(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, fds.as_mut_ptr()) })?;
    let [a, b] = fds.map(own);
    let (a, b) = (a?, b?);
    set_nonblocking(&a)?;
    Ok((a, b))
}

/// A connected pair of STREAM sockets.
pub(crate) fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = std::os::unix::net::UnixStream::pair()?;
    Ok((a.into(), b.into()))
}

pub(crate) fn set_nonblocking(fd: &OwnedFd) -> io::Result<()> {
    // SAFETY: F_SETFL takes a number and touches no memory of ours.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }).map(drop)
}

/// Listens for SEQPACKET connections at a path, which only this user can reach.
pub(crate) fn listen_packets(path: &Path) -> io::Result<OwnedFd> {
    let bytes = path.as_os_str().as_bytes();
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: socket takes numbers and touches no memory of ours.
    let socket = own(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    let size = libc::socklen_t::try_from(size_of::<libc::sockaddr_un>()).unwrap_or(0);
    // SAFETY: fchmod takes numbers. Before bind(), it is the mode that the path will have.
    check(unsafe { libc::fchmod(socket.as_raw_fd(), 0o600) })?;
    // SAFETY: the kernel reads one sockaddr_un, and `address` is one.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) })?;
    // SAFETY: listen takes numbers and touches no memory of ours.
    check(unsafe { libc::listen(socket.as_raw_fd(), 16) })?;
    Ok(socket)
}

/// A connection that waits, non-blocking.
pub(crate) fn accept(listener: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: without an address the kernel writes nothing.
    own(unsafe {
        libc::accept4(listener.as_raw_fd(), core::ptr::null_mut(), core::ptr::null_mut(), flags)
    })
}

/// Sends one message with descriptors, never waiting.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
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

/// The process that made a connection: its number, and its memory as it is now.
pub(crate) fn peer(socket: &OwnedFd) -> io::Result<(libc::pid_t, OwnedFd)> {
    let mut who = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `size` bytes, which `who` has.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut who).cast(),
            &raw mut size,
        )
    })?;
    if who.pid <= 0 {
        // Of a PID namespace that this process cannot see.
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // Of the socket, and not by the number: that may belong to another process by now.
    let mut fd: c_int = -1;
    let mut size = libc::socklen_t::try_from(size_of::<c_int>()).unwrap_or(0);
    // SAFETY: the kernel writes at most `size` bytes, which `fd` has.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut size,
        )
    })?;
    let pidfd = own(fd)?;
    let memory = open_memory(who.pid)?;
    // Looked for last: the number was this process's all the time until now.
    if !is_alive(&pidfd) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok((who.pid, memory))
}

/// The memory that a process has now. It stays that one, whatever the process executes.
pub(crate) fn open_memory(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    Ok(memory.into())
}

/// Whether the process of a pidfd has not ended.
fn is_alive(pidfd: &OwnedFd) -> bool {
    // SAFETY: signal 0 is none, and without siginfo the kernel reads nothing.
    let sent = unsafe {
        let none = core::ptr::null::<c_void>();
        libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), 0, none, 0)
    };
    sent == 0
}

/// Reads bytes of another process into one's own, or writes them: as many as `local` has, from
/// `there` on or to it. Says whether all of it was done.
///
/// # Safety
///
/// `local` is memory of this process, valid for writes. Others may write to it meanwhile, if nobody
/// reads it as anything but bytes that may be anything.
pub(crate) unsafe fn memory_copy(
    memory: &OwnedFd,
    local: (*mut u8, usize),
    there: u64,
    write: bool,
) -> bool {
    let Ok(at) = libc::off_t::try_from(there) else { return false };
    let done = if write {
        // SAFETY: the kernel reads `local`, which the caller vouches for.
        unsafe { libc::pwrite(memory.as_raw_fd(), local.0.cast(), local.1, at) }
    } else {
        // SAFETY: as above, and writes it.
        unsafe { libc::pread(memory.as_raw_fd(), local.0.cast(), local.1, at) }
    };
    usize::try_from(done) == Ok(local.1)
}

/// Random bits.
pub(crate) fn random() -> u32 {
    let mut bits = MaybeUninit::<u32>::zeroed();
    // SAFETY: the kernel writes four bytes. Without entropy they stay zero, which is a value as
    // well.
    unsafe { libc::getrandom(bits.as_mut_ptr().cast(), 4, libc::GRND_NONBLOCK) };
    // SAFETY: zeroed, and any bytes are a number.
    unsafe { bits.assume_init() }
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, and `now` is one. This clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

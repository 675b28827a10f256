//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's; callers say what they were doing.

use core::ffi::c_void;
use core::sync::atomic::AtomicU32;
use std::fs::OpenOptions;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use unix_io::packets;

pub(crate) use unix_io::epoll::{EDGE, READABLE, WRITABLE};
pub(crate) use unix_io::packets::{accept, listen_packets, packet_pair, receive, send};
pub(crate) use unix_io::{
    Epoll, eventfd, monotonic, raise_descriptors, random, ring, set_nonblocking, would_block,
};

/// Whether there are no more descriptors, of this process or of the machine.
pub(crate) fn no_descriptors(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// The number of this thread.
pub(crate) fn thread() -> i32 {
    // SAFETY: gettid takes nothing.
    unsafe { libc::gettid() }
}

/// Wakes all threads, of any process, that wait for a word of shared memory to change.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel takes the address as a name, and writes nothing.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
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

/// A connected pair of STREAM sockets.
pub(crate) fn stream_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (a, b) = std::os::unix::net::UnixStream::pair()?;
    Ok((a.into(), b.into()))
}

/// The process that made a connection: its number, and its memory as it is now.
pub(crate) fn peer(socket: &OwnedFd) -> io::Result<(libc::pid_t, OwnedFd)> {
    let (pid, pidfd) = packets::peer(socket.as_fd())?;
    let memory = open_memory(pid)?;
    // Looked for last: the number was this process's all the time until now. Where the kernel does
    // not tell, the memory is not used before the program has shown that it is its.
    if pidfd.is_some_and(|pidfd| !is_alive(&pidfd)) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok((pid, memory))
}

/// The memory that a process has now. It stays that one, whatever the process executes.
pub(crate) fn open_memory(pid: libc::pid_t) -> io::Result<OwnedFd> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    Ok(memory.into())
}

/// Sends bytes that are in several places, as many as there is room for.
///
/// # Safety
///
/// The parts are mapped. Others may write to them meanwhile.
pub(crate) unsafe fn send_parts(
    stream: &TcpStream,
    parts: &[(*const u8, usize)],
) -> io::Result<usize> {
    const MOST: usize = 40;
    let mut vectors = [libc::iovec { iov_base: core::ptr::null_mut(), iov_len: 0 }; MOST];
    for (vector, (at, length)) in vectors.iter_mut().zip(parts) {
        *vector = libc::iovec { iov_base: at.cast_mut().cast(), iov_len: *length };
    }
    // SAFETY: a msghdr of zeros is a message of nothing.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = vectors.as_mut_ptr();
    message.msg_iovlen = parts.len().min(MOST);
    // SAFETY: the kernel reads the parts, which the caller vouches for.
    unix_io::length(unsafe {
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    })
}

/// The device by which whoever has it makes a userfaultfd of its own memory that the kernel's
/// accesses wait for, too.
pub(crate) fn open_userfaultfd() -> io::Result<OwnedFd> {
    Ok(OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?.into())
}

/// Something that tells of the end of files. It counts for a user of its own, taken by chance: root
/// of a container may be the router's root, and use up what the kernel allows that one.
pub(crate) fn watches() -> io::Result<OwnedFd> {
    // SAFETY: geteuid takes nothing.
    let own = unsafe { libc::geteuid() };
    // Not root, it has what its user has.
    let changed = become_user(1 << 30 | u32::try_from(random() >> 34).unwrap_or(0));
    // SAFETY: inotify_init1 takes a number.
    let made = unix_io::check(unsafe { libc::inotify_init1(libc::IN_CLOEXEC | libc::IN_NONBLOCK) });
    if changed && !become_user(own) {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    made.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has this thread be another user to the kernel, and nothing else change. Says whether it is.
fn become_user(user: u32) -> bool {
    // SAFETY: prctl takes numbers.
    let dumpable = unsafe { libc::prctl(libc::PR_GET_DUMPABLE) };
    // SAFETY: setresuid takes numbers. Called by its number, it is of this thread only.
    let changed = unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) } == 0;
    // SAFETY: as above.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, dumpable) };
    changed
}

/// Has the end of a file told that has no name: when nobody has it open, mapped, or under way in a
/// message any more. The number by which it is told.
pub(crate) fn watch_end(watches: &OwnedFd, file: BorrowedFd<'_>) -> io::Result<i32> {
    let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    // SAFETY: the path ends with a 0.
    unix_io::check(unsafe {
        libc::inotify_add_watch(watches.as_raw_fd(), path.as_ptr().cast(), libc::IN_DELETE_SELF)
    })
}

/// What has been told: the numbers of files that have ended; -1 if something was lost.
pub(crate) fn ended(watches: &OwnedFd) -> io::Result<Vec<i32>> {
    const EVENT: usize = size_of::<libc::inotify_event>();
    let mut bytes = [0_u8; 64 * EVENT];
    // SAFETY: the kernel writes at most as many bytes as there are.
    let got = unix_io::length(unsafe {
        libc::read(watches.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len())
    })?;
    // Events of a file itself have no name behind them.
    let events = bytes[..got].chunks_exact(EVENT);
    Ok(events.filter_map(|e| e.first_chunk().copied().map(i32::from_ne_bytes)).collect())
}

/// The numbers of all files whose end is still to be told.
pub(crate) fn watched(watches: &OwnedFd) -> io::Result<Vec<i32>> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", watches.as_raw_fd()))?;
    let words = info.lines().filter_map(|line| line.strip_prefix("inotify wd:"));
    Ok(words.filter_map(|rest| rest.split(' ').next()?.parse().ok()).collect())
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

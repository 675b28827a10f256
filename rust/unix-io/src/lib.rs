//! Messages of C structs with descriptors between processes of a node, and waiting for them: the
//! system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Callers say what they were doing.
//!
//! | module | what it owns |
//! |---|---|
//! | [`epoll`] | sets of descriptors to wait for |
//! | [`packets`] | SEQPACKET sockets, and descriptors in messages |
//! | [`plain`] | values out of bytes, and as bytes |
//! | this one | what both services ask of their process: clocks, random bits, descriptors |

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]
#![allow(clippy::missing_errors_doc, reason = "all errors are the kernel's")]

pub mod epoll;
pub mod packets;
pub mod plain;

use core::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

pub use epoll::Epoll;

/// What a system call says that returns a number below 0 for an error.
pub fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// As [`check`], of a call that returns a size.
pub fn length(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// As [`check`], of a call that makes a descriptor.
fn own(result: c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether a call would have waited, or a signal came: it can be tried again.
#[must_use]
pub fn would_block(err: &io::Error) -> bool {
    matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Has calls on a descriptor never wait.
pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    // SAFETY: F_SETFL takes a number and touches no memory of ours.
    check(unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }).map(drop)
}

/// A counter that can be waited for, at 0, which never blocks.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: eventfd takes numbers.
    own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Adds one to an eventfd. One that is full has been rung.
pub fn ring(eventfd: &OwnedFd) {
    let one = 1_u64;
    // SAFETY: the kernel reads eight bytes, which `one` has.
    let _ = unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Lets this process have as many descriptors as the machine allows, or as it may ask for.
pub fn raise_descriptors() {
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

/// Random bits of the kernel's.
///
/// # Panics
///
/// If the kernel has none.
#[must_use]
pub fn random() -> u64 {
    let mut bits = 0_u64;
    // SAFETY: the kernel writes eight bytes, which `bits` has; so few come whole, or not at all.
    let got = unsafe { libc::getrandom((&raw mut bits).cast(), 8, 0) };
    assert!(got == 8, "no random bits: {}", io::Error::last_os_error());
    bits
}

/// Nanoseconds of a clock that is always there: `CLOCK_MONOTONIC`, say.
#[must_use]
pub fn clock(which: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, and `now` is one.
    unsafe { libc::clock_gettime(which, &raw mut now) };
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
#[must_use]
pub fn monotonic() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

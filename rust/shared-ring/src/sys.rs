//! The system calls that the standard library does not have, each as a safe function over owned
//! descriptors. Errors are the kernel's, as [`io::Error`]; callers say what they were doing.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::{CStr, c_int, c_uint};
use core::ptr::{self, NonNull};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// The seals with which a memfd's size can never change.
pub(crate) const SIZE_SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// The seals with which nobody can make a hole in a memfd, nor map it for writing, but who has it
/// mapped so goes on; and its seals can never change.
pub(crate) const HOLE_SEALS: c_int = libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// The seals with which a memfd cannot be mapped for writing.
pub(crate) const WRITE_SEALS: c_int = libc::F_SEAL_WRITE | libc::F_SEAL_FUTURE_WRITE;

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn own(result: c_int) -> io::Result<OwnedFd> {
    let fd = check(result)?;
    // SAFETY: the kernel has just made this descriptor, so that nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes an empty memfd that can be sealed, is closed on exec, and can never be executed on kernels
/// that know `MFD_NOEXEC_SEAL` (6.3); older ones answer EINVAL to it.
pub(crate) fn memfd_create(name: &CStr) -> io::Result<OwnedFd> {
    let create = |flags: c_uint| {
        // SAFETY: `name` is a C string that outlives the call.
        own(unsafe { libc::memfd_create(name.as_ptr(), flags) })
    };
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    match create(flags | libc::MFD_NOEXEC_SEAL) {
        Err(err) if err.raw_os_error() == Some(libc::EINVAL) => create(flags),
        result => result,
    }
}

/// Adds seals to a memfd.
pub(crate) fn add_seals(fd: BorrowedFd<'_>, seals: c_int) -> io::Result<()> {
    // SAFETY: F_ADD_SEALS takes a number and touches no memory of ours.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) }).map(drop)
}

/// The seals of a memfd; EINVAL for a file that is none.
pub(crate) fn seals(fd: BorrowedFd<'_>) -> io::Result<c_int> {
    // SAFETY: F_GET_SEALS takes no argument and touches no memory of ours.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })
}

/// Whether the file lies in tmpfs, as memfds without huge pages do.
pub(crate) fn is_tmpfs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    file_system(fd).map(|magic| magic == libc::TMPFS_MAGIC)
}

/// Whether the file lies in sysfs.
pub(crate) fn is_sysfs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    file_system(fd).map(|magic| magic == libc::SYSFS_MAGIC)
}

/// The number of the file system that a file lies in.
fn file_system(fd: BorrowedFd<'_>) -> io::Result<libc::c_long> {
    // SAFETY: statfs consists of integers, for which zero is a value.
    let mut answer: libc::statfs = unsafe { core::mem::zeroed() };
    // SAFETY: the kernel writes one statfs, and `answer` is one.
    check(unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut answer) })?;
    Ok(answer.f_type)
}

/// Maps the first `len` bytes of a file, shared, for reading and writing.
pub(crate) fn map(fd: BorrowedFd<'_>, len: usize) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: without MAP_FIXED the kernel picks addresses that nothing uses.
    let address = unsafe {
        libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Takes a mapping away.
///
/// # Safety
///
/// `address` and `len` are of a mapping that [`map`] made, and nobody uses it any more.
pub(crate) unsafe fn unmap(address: NonNull<u8>, len: usize) {
    // SAFETY: the caller promises it. The call fails only for addresses that are none of a mapping.
    unsafe { libc::munmap(address.as_ptr().cast(), len) };
}

/// Makes an eventfd with the counter at 0 that does not block and is closed on exec.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: eventfd takes two numbers and touches no memory of ours.
    own(unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) })
}

/// Makes an epoll set that has one file in it, edge-triggered for reading.
pub(crate) fn epoll_of(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: epoll_create1 takes a number and touches no memory of ours.
    let set = own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    let events = (libc::EPOLLIN | libc::EPOLLET).cast_unsigned();
    let mut event = libc::epoll_event { events, u64: 0 };
    // SAFETY: the kernel reads one epoll_event, and `event` is one.
    check(unsafe {
        libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)
    })?;
    Ok(set)
}

/// Waits until one file of the set has an event and takes it: `false` if time ran out before.
/// Without a time it waits for ever. Times are rounded up to milliseconds.
pub(crate) fn epoll_wait(set: BorrowedFd<'_>, timeout: Option<Duration>) -> io::Result<bool> {
    let milliseconds = match timeout {
        None => -1,
        Some(t) => c_int::try_from(t.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX),
    };
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: the kernel writes at most one epoll_event, and `event` is one.
    let got = check(unsafe { libc::epoll_wait(set.as_raw_fd(), &raw mut event, 1, milliseconds) })?;
    Ok(got > 0)
}

//! Sets of descriptors to wait for.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use core::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use crate::{check, own};

/// There is something to read, or the end.
pub const READABLE: u32 = libc::EPOLLIN.cast_unsigned();
/// There is room to write.
pub const WRITABLE: u32 = libc::EPOLLOUT.cast_unsigned();
/// Tells of changes alone.
pub const EDGE: u32 = libc::EPOLLET.cast_unsigned();
/// The peer writes no more.
pub const HALF_CLOSED: u32 = libc::EPOLLRDHUP.cast_unsigned();
/// The peer has shut something down, or is gone.
pub const GONE: u32 = HALF_CLOSED | (libc::EPOLLHUP | libc::EPOLLERR).cast_unsigned();

/// A set of descriptors to wait for, each with a number of the caller's.
#[derive(Debug)]
pub struct Epoll(OwnedFd);

impl Epoll {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        // SAFETY: epoll_create1 takes a number and touches no memory of ours.
        own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) }).map(Self)
    }

    fn control(&self, what: c_int, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: id };
        // SAFETY: the kernel reads one epoll_event, and `event` is one.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), what, fd.as_raw_fd(), &raw mut event) })
            .map(drop)
    }

    /// Adds a descriptor.
    pub fn add(&self, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, events, id)
    }

    /// Waits for other events of a descriptor.
    pub fn modify(&self, fd: BorrowedFd<'_>, events: u32, id: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, events, id)
    }

    /// A descriptor that others have open, too, stays in the set when it is closed here.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        // It is in the set, or this says that it is not: both are what the caller wants.
        let _ = self.control(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Waits for events; a signal is no event. Times are rounded up to milliseconds.
    pub fn wait(&self, events: &mut Vec<(u64, u32)>, timeout: Option<Duration>) -> io::Result<()> {
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

impl AsFd for Epoll {
    /// Readable when a descriptor in it has an event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until there is something to read, so long at most. Says whether there is.
#[must_use]
pub fn wait_readable(fd: BorrowedFd<'_>, most: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let milliseconds = c_int::try_from(most.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the kernel reads and writes one pollfd, and `poll` is one.
    unsafe { libc::poll(&raw mut poll, 1, milliseconds) > 0 }
}

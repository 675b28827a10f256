//! Doorbells: how one side sleeps until the other has something for it, and the other makes a
//! system call only then.
//!
//! A doorbell is a word in shared memory and two descriptors. The [`Sleeper`] sets the word, looks
//! once more whether there is work, and waits; the [`Ringer`] publishes work, looks at the word,
//! and rings if it is set. Each of them has a full fence between its write and its read, so that at
//! least one sees the other. One doorbell can serve any number of rings of the same two sides.
//!
//! **Why two descriptors and not one eventfd.** A ring of an eventfd that the peer holds, too, can
//! block for ever: the peer takes `O_NONBLOCK` from the file that both share and fills the counter.
//! So only the ringer has the eventfd, and nobody ever reads it; the sleeper has an epoll set that
//! holds it edge-triggered, and gives one event for each ring. The side that trusts the other less
//! makes both ([`descriptors`]), keeps its own, and passes the peer's on.
//!
//! A set forgets a file that nobody has open any more, and with it a ring that was not taken yet.
//! So the [`WaitEnd`] of the maker keeps the eventfd open: what a ringer rang before it ended
//! arrives.

#[cfg(not(loom))]
use std::fs::File;
use std::io;
#[cfg(not(loom))]
use std::io::Write;
#[cfg(not(loom))]
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
#[cfg(not(loom))]
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(not(loom))]
use crate::memory::SharedMemory;
#[cfg(loom)]
use crate::models::{RingEnd, WaitEnd};
#[cfg(not(loom))]
use crate::ring::AttachError;
use crate::storage::DoorbellStorage;
#[cfg(not(loom))]
use crate::sys;

/// The two descriptors of a doorbell, both closed on exec.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct Descriptors {
    /// For the [`Ringer`]: an eventfd. The peer of a hostile sleeper keeps it for itself.
    pub ring: OwnedFd,
    /// For the [`Sleeper`]: an epoll set, which can be waited for like any descriptor.
    pub wait: WaitEnd,
}

/// Makes the two descriptors of a doorbell.
///
/// # Errors
///
/// The kernel's, such as EMFILE.
#[cfg(not(loom))]
pub fn descriptors() -> io::Result<Descriptors> {
    let ring = sys::eventfd()?;
    let set = sys::epoll_of(ring.as_fd())?;
    let kept = Some(ring.try_clone()?);
    Ok(Descriptors { ring, wait: WaitEnd { set, kept } })
}

/// The side of a doorbell that rings.
#[derive(Debug)]
pub struct Ringer {
    storage: DoorbellStorage,
    end: RingEnd,
    rings: u64,
}

impl Ringer {
    /// Takes the ringing side of the doorbell at `offset`. `ring` is the eventfd of
    /// [`descriptors`], made here or by a peer that this side trusts not to block it.
    ///
    /// # Errors
    ///
    /// [`AttachError::BadOffset`].
    #[cfg(not(loom))]
    pub fn attach(
        memory: &Arc<SharedMemory>,
        offset: usize,
        ring: OwnedFd,
    ) -> Result<Self, AttachError> {
        Ok(Self::over(DoorbellStorage::find(memory, offset)?, RingEnd(File::from(ring))))
    }

    pub(crate) fn over(storage: DoorbellStorage, end: RingEnd) -> Self {
        Self { storage, end, rings: 0 }
    }

    /// Wakes the other side if it sleeps: called after pushing or popping, once for a batch. A full
    /// fence and a read if it does not sleep, one system call if it does. Says whether it rang.
    ///
    /// A hostile sleeper can have a system call made each time, by a word that is always set;
    /// [`Self::rings`] counts them for whoever has to account for it.
    ///
    /// # Errors
    ///
    /// The kernel's, for a descriptor that is no doorbell's.
    #[inline]
    pub fn ring(&mut self) -> io::Result<bool> {
        self.storage.separate();
        if !self.storage.is_asleep() || !self.storage.take_asleep() {
            return Ok(false);
        }
        self.rings += 1;
        self.end.ring()?;
        Ok(true)
    }

    /// System calls made so far to wake the other side.
    #[must_use]
    pub fn rings(&self) -> u64 {
        self.rings
    }
}

/// Why [`Sleeper::wait`] came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    /// There was work before it slept.
    Ready,
    /// It was rung, or a signal came. There may be no work: a ring may be old, or the peer's joke.
    Rung,
    /// Time ran out.
    TimedOut,
}

/// The side of a doorbell that sleeps.
#[derive(Debug)]
pub struct Sleeper {
    storage: DoorbellStorage,
    end: WaitEnd,
    spin: Duration,
}

impl Sleeper {
    /// Takes the sleeping side of the doorbell at `offset`. `wait` is that of [`descriptors`], or
    /// the descriptor that the peer has made and passed on. `spin` is for how long [`Self::wait`]
    /// looks for work before it sleeps: zero unless there is a processor to spare.
    ///
    /// # Errors
    ///
    /// [`AttachError::BadOffset`].
    #[cfg(not(loom))]
    pub fn attach(
        memory: &Arc<SharedMemory>,
        offset: usize,
        wait: impl Into<WaitEnd>,
        spin: Duration,
    ) -> Result<Self, AttachError> {
        Ok(Self::over(DoorbellStorage::find(memory, offset)?, wait.into(), spin))
    }

    pub(crate) fn over(storage: DoorbellStorage, end: WaitEnd, spin: Duration) -> Self {
        Self { storage, end, spin }
    }

    /// Waits until there is work: `ready` says so ([`crate::Consumer::is_ready`] of each ring that
    /// the doorbell serves, or [`crate::Producer::is_ready`] for room). It is asked while spinning,
    /// and once after the peer was told to ring. Takes one event at most, so that a peer that rings
    /// for ever costs no more than the calls that are made. Without a time it waits for ever, also
    /// for a peer that never rings: whoever cannot afford that gives a time.
    ///
    /// # Errors
    ///
    /// The kernel's, for a descriptor that is no doorbell's.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        mut ready: impl FnMut() -> bool,
    ) -> io::Result<Wake> {
        if !self.spin.is_zero() && spin(self.spin, &mut ready) {
            return Ok(Wake::Ready);
        }
        self.arm();
        if ready() {
            self.disarm();
            return Ok(Wake::Ready);
        }
        let result = self.end.wait(timeout);
        self.disarm();
        result
    }

    /// Has the peer ring from now on. The first half of [`Self::wait`], for loops that wait for
    /// many descriptors: arm each doorbell, look for work at each, and only then wait for all of
    /// them.
    pub fn arm(&self) {
        self.storage.fall_asleep();
        self.storage.separate();
    }

    /// Has the peer ring no longer. The second half of [`Self::wait`]. A ring that is under way
    /// still comes.
    pub fn disarm(&self) {
        self.storage.wake_up();
    }

    /// Takes a ring that has come, without waiting; false if there was none. For loops in which
    /// [`Self::as_fd`] is level-triggered.
    ///
    /// # Errors
    ///
    /// The kernel's, for a descriptor that is no doorbell's.
    pub fn take_ring(&self) -> io::Result<bool> {
        Ok(self.end.wait(Some(Duration::ZERO))? == Wake::Rung)
    }
}

#[cfg(not(loom))]
impl AsFd for Sleeper {
    /// The epoll set: readable once the doorbell was rung, until the ring is taken.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

/// Asks `ready` again and again for a time. The clock is read once for 16 questions.
fn spin(time: Duration, ready: &mut impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            core::hint::spin_loop();
        }
        if start.elapsed() >= time {
            return false;
        }
    }
}

/// The eventfd that only this side has.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct RingEnd(File);

#[cfg(not(loom))]
impl RingEnd {
    fn ring(&mut self) -> io::Result<()> {
        match self.0.write(&1_u64.to_ne_bytes()) {
            // A full counter: 2^64 rings, or one by a peer that has the descriptor against the
            // rules. The sleeper has events enough.
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(()),
            result => result.map(drop),
        }
    }
}

/// The epoll set that holds the ringer's eventfd.
#[cfg(not(loom))]
#[derive(Debug)]
pub struct WaitEnd {
    set: OwnedFd,
    /// The eventfd, of the maker only, which never reads or writes it: while it is open, the set
    /// keeps what a ringer rang before it ended.
    #[expect(dead_code, reason = "it is only kept open")]
    kept: Option<OwnedFd>,
}

#[cfg(not(loom))]
impl From<OwnedFd> for WaitEnd {
    /// The end that a peer has made and passed on.
    fn from(set: OwnedFd) -> Self {
        Self { set, kept: None }
    }
}

#[cfg(not(loom))]
impl AsFd for WaitEnd {
    /// The epoll set, to be passed on to a peer that is the sleeper.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}

#[cfg(not(loom))]
impl WaitEnd {
    fn wait(&self, timeout: Option<Duration>) -> io::Result<Wake> {
        match sys::epoll_wait(self.set.as_fd(), timeout) {
            Ok(true) => Ok(Wake::Rung),
            Ok(false) => Ok(Wake::TimedOut),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => Ok(Wake::Rung),
            Err(err) => Err(err),
        }
    }
}

//! The guest's side, for tests and measurements: what a guest library does, with nothing around it.

use core::sync::atomic::Ordering;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use shared_ring::{Consumer, Producer, Ringer, SharedMemory, Sleeper, Slot};
use unix_io::epoll::wait_readable;
use unix_io::{packets, plain};

use super::abi::*;
use super::memory::{COMPLETION_BELL, JOB_BELL, Layout, View, Way, arm, take_armed};
use super::proto;

/// A guest of one thread.
#[derive(Debug)]
pub struct Guest {
    /// The region's memory.
    pub view: View,
    /// Of the job ring.
    pub jobs: Producer,
    /// Of the completion ring.
    pub completions: Consumer,
    bells: Option<(Ringer, Sleeper)>,
    kept: Vec<queues_nqe>,
    sequence: u32,
}

/// A connection, as the guest counts it.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "as in an nqe")]
pub struct Connection {
    pub socket: u32,
    pub stream: u16,
    pub generation: u32,
    pub sent: u64,
    pub received: u64,
}

fn bad(what: impl std::fmt::Display) -> io::Error {
    io::Error::other(what.to_string())
}

impl Guest {
    /// Takes the region that comes on this socket.
    ///
    /// # Errors
    ///
    /// The kernel's, and what is wrong with the region.
    pub fn open(life: &OwnedFd) -> io::Result<Self> {
        if !wait_readable(life.as_fd(), Duration::from_secs(10)) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (mut bytes, mut fds) = ([0; proto::MESSAGE_MAX], Vec::new());
        let n = packets::receive(life, &mut bytes, &mut fds)?;
        let made: queues_made = bytes.get(..n).and_then(plain::read).ok_or_else(|| bad("MADE"))?;
        let mut fds = fds.into_iter();
        let memory = fds.next().ok_or_else(|| bad("no memory"))?;
        let size = usize::try_from(made.size).map_err(bad)?;
        let memory = SharedMemory::open(memory, size).map_err(bad)?;
        let claim = View::claim(&memory).ok_or_else(|| bad("no region"))?;
        let layout = Layout::claimed(&claim, size).ok_or_else(|| bad("a wrong header"))?;
        let bells = match (fds.next(), fds.next()) {
            (Some(ring), Some(wait)) => {
                let ringer = Ringer::attach(&memory, JOB_BELL, ring).map_err(bad)?;
                let sleeper = Sleeper::attach(&memory, COMPLETION_BELL, wait, Duration::ZERO);
                Some((ringer, sleeper.map_err(bad)?))
            }
            _ => None,
        };
        Ok(Self {
            jobs: Producer::attach(&memory, layout.jobs, layout.slots).map_err(bad)?,
            completions: Consumer::attach(&memory, layout.completions, layout.slots)
                .map_err(bad)?,
            view: View::new(memory, layout),
            bells,
            kept: Vec::new(),
            sequence: 0,
        })
    }

    /// Pushes a job, which there is room for, and rings. Gives its sequence.
    ///
    /// # Errors
    ///
    /// The service does not keep to the rules, or the ring is full.
    pub fn push(&mut self, mut job: queues_nqe) -> io::Result<u32> {
        job.sequence = self.sequence + 1;
        if self.jobs.push(&[proto::slot(&job)]).map_err(bad)? != 1 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.sequence += 1;
        if let Some((ringer, _)) = &mut self.bells {
            ringer.ring()?;
        }
        Ok(self.sequence)
    }

    /// Waits for a completion or an event that `wanted` likes; others are kept for later.
    ///
    /// # Errors
    ///
    /// After ten seconds, or if the service does not keep to the rules.
    pub fn wait(&mut self, wanted: impl Fn(&queues_nqe) -> bool) -> io::Result<queues_nqe> {
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(at) = self.kept.iter().position(&wanted) {
                return Ok(self.kept.remove(at));
            }
            let mut slots = [Slot::default(); 16];
            let n = self.completions.pop(&mut slots).map_err(bad)?;
            self.kept.extend(slots[..n].iter().map(proto::nqe));
            if n > 0 {
                // There may be room for more.
                if let Some((ringer, _)) = &mut self.bells {
                    ringer.ring()?;
                }
                continue;
            }
            if std::time::Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let completions = &mut self.completions;
            match &mut self.bells {
                Some((_, sleeper)) => {
                    sleeper.wait(Some(Duration::from_secs(1)), || completions.is_ready())?;
                }
                None => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    }

    /// Drops what the completion ring has.
    ///
    /// # Errors
    ///
    /// As of [`Self::push`].
    pub fn drop_completions(&mut self) -> io::Result<()> {
        let got = self.completions.pop(&mut [Slot::default(); 64]).map_err(bad)?;
        if got > 0
            && let Some((ringer, _)) = &mut self.bells
        {
            ringer.ring()?;
        }
        Ok(())
    }

    /// Pushes a job and waits for its completion.
    ///
    /// # Errors
    ///
    /// As of both, and the errno that the completion has.
    pub fn call(&mut self, job: queues_nqe) -> io::Result<queues_nqe> {
        let sequence = self.push(job)?;
        let done = self.wait(|n| n.sequence == sequence && n.operation & proto::DONE != 0)?;
        match done.error {
            0 => Ok(done),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Puts bytes into the out ring, and says how many there was room for.
    ///
    /// # Errors
    ///
    /// As of [`Self::push`].
    pub fn put(&mut self, c: &mut Connection, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.room(c));
        let mut copy = bytes[..n].to_vec();
        self.view.copy(c.stream, Way::Out, c.sent, &mut copy);
        self.show(c, n)?;
        Ok(n)
    }

    /// Bytes that the out ring has room for.
    #[must_use]
    pub fn room(&self, c: &Connection) -> usize {
        let consumed = self.view.out_consumed(c.stream).load(Ordering::Acquire);
        let used = c.sent.wrapping_sub(consumed);
        usize::try_from(u64::from(self.view.layout.capacity).saturating_sub(used)).unwrap_or(0)
    }

    /// Waits for room in the out ring of a connection that was given.
    pub fn wait_for_room(&self, c: &Connection) {
        let word = self.view.out_waiting(c.stream);
        arm(word);
        if self.room(c) == 0 {
            View::wait(word);
        }
    }

    /// Shows bytes that were copied into the out ring.
    ///
    /// # Errors
    ///
    /// As of [`Self::push`].
    pub fn show(&mut self, c: &mut Connection, n: usize) -> io::Result<()> {
        c.sent += n as u64;
        self.view.out_produced(c.stream).store(c.sent, Ordering::Release);
        if take_armed(self.view.out_asleep(c.stream)) {
            self.say(c, QUEUES_SEND, c.sent)?;
        }
        Ok(())
    }

    /// Takes what is in the in ring.
    ///
    /// # Errors
    ///
    /// As of [`Self::push`].
    pub fn take(&mut self, c: &mut Connection) -> io::Result<Vec<u8>> {
        let produced = self.view.in_produced(c.stream).load(Ordering::Acquire);
        let mut bytes = vec![0; usize::try_from(produced - c.received).map_err(bad)?];
        self.view.copy(c.stream, Way::In, c.received, &mut bytes);
        c.received = produced;
        self.view.in_consumed(c.stream).store(produced, Ordering::Release);
        if take_armed(self.view.in_asleep(c.stream)) {
            self.say(c, QUEUES_RECEIVE, c.received)?;
        }
        Ok(bytes)
    }

    fn say(&mut self, c: &Connection, operation: u32, offset: u64) -> io::Result<()> {
        let operation = u8::try_from(operation).map_err(bad)?;
        let (socket, generation) = (c.socket, c.generation);
        self.push(queues_nqe { operation, socket, generation, offset, ..Default::default() })?;
        Ok(())
    }

    /// Sends all of some bytes.
    ///
    /// # Errors
    ///
    /// As of [`Self::wait`]; ECONNRESET when the connection is over.
    pub fn send(&mut self, c: &mut Connection, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let n = self.put(c, bytes)?;
            bytes = &bytes[n..];
            if n > 0 {
                continue;
            }
            arm(self.view.out_waiting(c.stream));
            let used = c.sent - self.view.out_consumed(c.stream).load(Ordering::Acquire);
            let state = self.view.state(c.stream).load(Ordering::Acquire);
            if state & QUEUES_STREAM_DEAD != 0 {
                return Err(io::ErrorKind::ConnectionReset.into());
            }
            if used == u64::from(self.view.layout.capacity) {
                let (s, g) = (c.stream, c.generation);
                self.wait(|n| is_event(n, QUEUES_WRITABLE, s, g))?;
            }
        }
        Ok(())
    }

    /// Receives at least one byte; none at the end.
    ///
    /// # Errors
    ///
    /// As of [`Self::send`].
    pub fn receive(&mut self, c: &mut Connection) -> io::Result<Vec<u8>> {
        loop {
            // Before the bytes: what the service says last comes after them.
            let state = self.view.state(c.stream).load(Ordering::Acquire);
            let bytes = self.take(c)?;
            if !bytes.is_empty() {
                return Ok(bytes);
            }
            if state & QUEUES_STREAM_DEAD != 0 {
                let errno = self.view.error(c.stream).load(Ordering::Relaxed);
                return Err(io::Error::from_raw_os_error(errno));
            }
            if state & QUEUES_STREAM_END != 0 {
                return Ok(bytes);
            }
            arm(self.view.in_waiting(c.stream));
            let more = self.view.in_produced(c.stream).load(Ordering::Acquire) != c.received;
            let over = self.view.state(c.stream).load(Ordering::Acquire) != QUEUES_STREAM_USED;
            if !more && !over {
                let (s, g) = (c.stream, c.generation);
                self.wait(|n| is_event(n, QUEUES_READABLE, s, g))?;
            }
        }
    }
}

fn is_event(n: &queues_nqe, what: u32, stream: u16, generation: u32) -> bool {
    u32::from(n.operation) == what && n.stream == stream && n.generation == generation
}

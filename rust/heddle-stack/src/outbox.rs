//! Messages to the agent that its socket has not taken yet.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::sys;

/// Messages that wait at most; an agent that leaves more is cut off.
const MOST: usize = 65_536;

/// What waits for the agent.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    queue: VecDeque<(Vec<u8>, Option<OwnedFd>)>,
    /// An agent is connected.
    connected: bool,
    /// And has named its tenants.
    live: bool,
    /// It wants to hear when a descriptor that it was given is its own.
    tells_sent: bool,
}

impl Outbox {
    /// Another agent, or none.
    pub(crate) fn reset(&mut self, connected: bool) {
        self.queue.clear();
        self.connected = connected;
        self.live = false;
        self.tells_sent = false;
    }

    pub(crate) fn tell_sent(&mut self) {
        self.tells_sent = self.connected;
    }

    pub(crate) fn tells_sent(&self) -> bool {
        self.tells_sent
    }

    pub(crate) fn go_live(&mut self) {
        self.live = self.connected;
    }

    pub(crate) fn live(&self) -> bool {
        self.live
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// An answer. Whom nobody is there to hear, nobody needs.
    pub(crate) fn send(&mut self, message: Vec<u8>, descriptor: Option<OwnedFd>) {
        if self.connected {
            self.queue.push_back((message, descriptor));
        }
    }

    /// A message of the module's own accord.
    pub(crate) fn tell(&mut self, message: Vec<u8>, descriptor: Option<OwnedFd>) {
        if self.live {
            self.queue.push_back((message, descriptor));
        }
    }

    /// Sends what the socket takes.
    ///
    /// # Errors
    ///
    /// The agent is gone, or does not read.
    pub(crate) fn flush(&mut self, socket: &OwnedFd) -> io::Result<()> {
        while let Some((message, descriptor)) = self.queue.front() {
            match sys::send(socket, message, descriptor.as_ref().map(AsFd::as_fd).as_slice()) {
                Ok(()) => drop(self.queue.pop_front()),
                Err(err) if sys::would_block(&err) => break,
                Err(err) => return Err(err),
            }
        }
        if self.queue.len() > MOST {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        Ok(())
    }
}

//! How a connection ends, and what of that others have to know.

use std::io::IoSliceMut;

use smoltcp::socket::tcp;
use smoltcp::time::{Duration, Instant};

use super::{Change, Connection, Phase};
use crate::sys;

/// For how long a connection without a program waits for the peer's FIN: Linux's `tcp_fin_timeout`.
const ORPHAN: Duration = Duration::from_secs(60);

/// As many reads empty a pair.
const PARTS: usize = 4096;

impl Connection {
    /// What becomes of a connection whose program has closed it.
    pub(super) fn without_program(&mut self) {
        let linger = self.settings.linger == Some(0);
        if self.other.gone && (self.other.unread || linger || self.socket().can_recv()) {
            self.abort(0);
        }
    }

    /// smoltcp waits for the answer to a FIN for ever, and for the peer's FIN.
    pub(super) fn watch_end(&mut self, now: Instant) {
        let state = self.socket().state();
        let span = match state {
            tcp::State::FinWait1 | tcp::State::Closing | tcp::State::LastAck => {
                Duration::from_millis(self.settings.user_timeout.into())
            }
            tcp::State::FinWait2 if self.other.gone => ORPHAN,
            _ => {
                self.give_up = None;
                return;
            }
        };
        match self.give_up {
            Some((of, until)) if of == state => {
                if now >= until {
                    self.abort(libc::ETIMEDOUT);
                }
            }
            _ => self.give_up = Some((state, now + span)),
        }
    }

    /// What the turn has made of it.
    pub(super) fn change(&mut self) -> Change {
        let state = self.socket().state();
        let before = core::mem::replace(&mut self.was, state);
        match self.phase {
            Phase::Connecting { asked, skip } => match state {
                tcp::State::Closed => Change::Failed(asked, self.reason.unwrap_or(libc::ETIMEDOUT)),
                tcp::State::SynSent | tcp::State::SynReceived => Change::None,
                _ => {
                    self.drop_filling(skip);
                    self.phase = Phase::Open;
                    Change::Connected(asked)
                }
            },
            Phase::Arriving => match state {
                // Back in LISTEN: the peer has reset it, or what came was no SYN.
                tcp::State::Closed | tcp::State::Listen => Change::Gone,
                tcp::State::SynReceived => Change::None,
                _ => {
                    self.phase = Phase::Open;
                    self.guard = true;
                    Change::Accepted
                }
            },
            Phase::Open => self.end(state, before),
            Phase::Over if state == tcp::State::Closed => Change::Gone,
            Phase::Over => Change::None,
        }
    }

    /// Whether an open connection is over, and the program has everything.
    fn end(&mut self, state: tcp::State, before: tcp::State) -> Change {
        if state != tcp::State::Closed && state != tcp::State::TimeWait {
            return Change::None;
        }
        if state == tcp::State::Closed && self.reason.is_none() {
            let orderly = matches!(before, tcp::State::LastAck | tcp::State::TimeWait);
            self.reason = Some(if orderly { 0 } else { libc::ETIMEDOUT });
        }
        if self.socket().can_recv() && !self.deaf && !self.other.gone {
            return Change::None;
        }
        let errno = if state == tcp::State::TimeWait { 0 } else { self.reason.unwrap_or(0) };
        if errno == 0
            && let Some(pair) = &self.pair
        {
            // With nothing unread the other end sees no reset.
            let mut rest = [0; 4096];
            // Not what it goes on writing meanwhile.
            for _ in 0..PARTS {
                if !matches!(sys::read(pair, &mut [IoSliceMut::new(&mut rest)]), Ok(1..)) {
                    break;
                }
            }
        }
        self.phase = Phase::Over;
        Change::Ended(errno)
    }
}

//! A connection of a program's: the other end of its pair on one side, a stream on the other.

use std::os::fd::OwnedFd;

use heddle_stack::queues::abi::*;
use unix_io::would_block;

use crate::stream::{Broken, Reader, Stream, Writer};
use crate::sys;

/// Pieces that a connection moves each way before it is others' turn.
const PIECES: usize = 8;

/// What a turn asks the guest for.
#[derive(Clone, Copy, Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is for itself")]
pub(super) struct Turn {
    /// To say SEND, and RECEIVE.
    pub(super) send: bool,
    pub(super) receive: bool,
    /// To say SHUTDOWN, as the program has sent its last byte.
    pub(super) shut: bool,
    /// The program has closed its socket; whether the connection is to be reset.
    pub(super) closed: Option<bool>,
    /// It is over: the program is to see a reset.
    pub(super) over: bool,
    pub(super) moved: bool,
}

/// What has happened at the pair since the last turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) readable: bool,
    pub(super) writable: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "ends of both directions")]
pub(super) struct Flow {
    pub(super) generation: u32,
    stream: Stream,
    out: Writer,
    back: Reader,
    /// The first byte in the pair has been sent on already: as long as it lies there, the program
    /// sees a reset if this process dies.
    guard: bool,
    /// SHUTDOWN was said; the peer's FIN was shown.
    shut: bool,
    shown: bool,
    /// The program reads no more.
    deaf: bool,
}

impl Flow {
    /// A connection's, in whose pair lie `skip` bytes that are not the program's.
    pub(super) fn new(stream: Stream, generation: u32, pair: &OwnedFd, skip: usize) -> Self {
        sys::skip(pair, skip.saturating_sub(1));
        Self {
            generation,
            out: Writer::of_guest(stream.clone()),
            back: Reader::of_guest(stream.clone()),
            stream,
            guard: skip > 0,
            shut: false,
            shown: false,
            deaf: false,
        }
    }

    /// How many bytes the program has sent.
    pub(super) fn produced(&self) -> u64 {
        self.out.produced()
    }

    pub(super) fn turn(&mut self, pair: &OwnedFd, seen: &mut Seen) -> Result<Turn, Broken> {
        let mut turn = Turn::default();
        if self.stream.generation() != self.generation {
            return Err(Broken);
        }
        let other = sys::other_end(pair);
        self.push(pair, seen, &mut turn)?;
        let drained = self.pull(pair, &mut turn)?;
        if other.gone {
            let unread = other.unread || self.back.bytes()?.1 > 0;
            if unread || drained {
                turn.closed = Some(unread);
            }
        } else if other.silent && drained && !self.shut {
            self.shut = true;
            turn.shut = true;
        }
        if self.shut && self.shown && self.guard {
            // Both ends are done: nothing is to look like a reset any more.
            sys::skip(pair, 1);
            self.guard = false;
        }
        Ok(turn)
    }

    /// Gives the program what has come, and the peer's end.
    fn push(&mut self, pair: &OwnedFd, seen: &mut Seen, turn: &mut Turn) -> Result<(), Broken> {
        for _ in 0..PIECES {
            // Before the bytes: what the service says of the end comes after them.
            let state = self.stream.state();
            let (at, count) = self.back.bytes()?;
            if count == 0 {
                if state & QUEUES_STREAM_DEAD != 0 {
                    turn.over = true;
                    return Ok(());
                }
                if state & QUEUES_STREAM_END != 0 {
                    if !self.shown {
                        self.shown = true;
                        // The other end may be gone, which is as good.
                        let _ = sys::shutdown(pair, libc::SHUT_WR);
                    }
                    return self.back.ask().map(drop); // it may be dead yet
                }
                if self.back.ask()? || self.stream.state() != state {
                    continue;
                }
                return Ok(());
            }
            let taken = if self.deaf {
                count
            } else {
                if !seen.writable {
                    return Ok(());
                }
                match sys::send(pair, at, count) {
                    Ok(n) => n,
                    Err(err) if would_block(&err) => {
                        seen.writable = false;
                        return Ok(());
                    }
                    Err(_) => {
                        self.deaf = true;
                        continue;
                    }
                }
            };
            turn.moved = true;
            turn.receive |= self.back.take(taken);
        }
        turn.moved = true;
        Ok(())
    }

    /// Sends what the program wrote; the last byte stays in the pair. Says whether that was all.
    fn pull(&mut self, pair: &OwnedFd, turn: &mut Turn) -> Result<bool, Broken> {
        for _ in 0..PIECES {
            let fresh = sys::waiting(pair).saturating_sub(usize::from(self.guard));
            if fresh == 0 {
                return Ok(true);
            }
            let (at, room) = self.out.room()?;
            if room == 0 {
                if self.out.ask()? {
                    continue;
                }
                return Ok(false);
            }
            if self.guard && sys::skip(pair, 1) == 1 {
                self.guard = false;
            }
            let want = fresh.min(room);
            let last = want == fresh;
            let mut got = 0;
            if want > usize::from(last) {
                match sys::receive(pair, at, want - usize::from(last)) {
                    Ok(n) => got = n,
                    Err(err) if would_block(&err) => return Ok(false),
                    Err(_) => return Ok(true), // it was reset: its program has closed it
                }
            }
            if last && got + 1 == want {
                let Some(next) = core::ptr::NonNull::new(at.as_ptr().wrapping_add(got)) else {
                    return Err(Broken);
                };
                if sys::peek(pair, next).is_ok_and(|n| n == 1) {
                    self.guard = true;
                    got += 1;
                }
            }
            if got == 0 {
                return Ok(true);
            }
            turn.moved = true;
            turn.send |= self.out.put(got);
        }
        turn.moved = true;
        Ok(false)
    }
}

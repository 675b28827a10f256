//! What goes between the program's pair and smoltcp's socket.

use std::io::IoSliceMut;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use smoltcp::socket::tcp;

use super::{Budget, Connection};
use crate::sys;

impl Connection {
    /// Gives the program what has come. Says whether the tenant's rate is in the way.
    pub(super) fn push(&mut self, budget: &mut Budget) -> bool {
        let Some(pair) = &self.pair else { return false };
        let socket = self.set.get_mut::<tcp::Socket>(self.handle);
        while socket.can_recv() {
            if self.deaf || self.other.gone {
                self.deaf = true;
                if self.other.gone {
                    return false; // without_program answers it by RST
                }
                let _ = socket.recv(|data| (data.len(), ()));
                continue;
            }
            if !self.writable || budget.bytes == 0 {
                return false;
            }
            if budget.receive == 0 {
                return true;
            }
            let most = budget.bytes.min(budget.receive);
            let mut stuck = None;
            let sent = socket.recv(|data| {
                let end = data.len().min(most);
                match sys::write(pair, &data[..end]) {
                    Ok(n) => (n, n),
                    Err(err) => {
                        stuck = Some(err);
                        (0, 0)
                    }
                }
            });
            let sent = sent.unwrap_or(0);
            budget.bytes -= sent;
            budget.receive = budget.receive.saturating_sub(sent);
            self.pushed += sent as u64;
            match stuck {
                Some(err) if sys::would_block(&err) => self.writable = false,
                Some(_) => self.deaf = true,
                None if sent == 0 => return false,
                None => {}
            }
        }
        false
    }

    /// Shows the program the peer's FIN, after the data.
    pub(super) fn show_end(&mut self) {
        let socket = self.socket();
        let over = matches!(
            socket.state(),
            tcp::State::CloseWait
                | tcp::State::LastAck
                | tcp::State::Closing
                | tcp::State::TimeWait
        );
        if over && !self.shown && !socket.can_recv() {
            self.shown = true;
            if let Some(pair) = &self.pair {
                // The other end may be gone, which is as good.
                let _ = pair.shutdown(Shutdown::Write);
            }
        }
    }

    /// Sends on what the program wrote, and its FIN. The last byte stays in the pair.
    /// Says whether the tenant's rate is in the way.
    pub(super) fn pull(&mut self, budget: &mut Budget) -> bool {
        let Some(pair) = &self.pair else { return false };
        let socket = self.set.get_mut::<tcp::Socket>(self.handle);
        let mut drained = false;
        while socket.may_send() && self.readable {
            let fresh = sys::waiting(pair).saturating_sub(usize::from(self.guard));
            if fresh == 0 {
                self.readable = false;
                drained = true;
                break;
            }
            if !socket.can_send() || budget.bytes == 0 {
                return false;
            }
            if budget.send == 0 {
                return true;
            }
            let most = budget.bytes.min(budget.send);
            let sent = pull_some(pair, socket, &mut self.guard, fresh, most);
            if sent == 0 {
                // Urgent data, say: what is counted cannot be read.
                self.readable = false;
                drained = true;
                break;
            }
            budget.bytes -= sent;
            budget.send = budget.send.saturating_sub(sent);
            self.pulled += sent as u64;
        }
        // What was written before the end is there once the end is.
        let end = self.other.silent && !self.readable && socket.may_send();
        if end && !self.closed && (drained || sys::waiting(pair) <= usize::from(self.guard)) {
            socket.close();
            self.closed = true;
        }
        false
    }

    /// Reads what lies in the pair before the program's bytes, but for the guard.
    pub(super) fn drop_filling(&mut self, skip: u32) {
        let Some(pair) = &self.pair else { return };
        let mut left = skip as usize - 1;
        let mut rest = [0; 4096];
        while left > 0 {
            let most = left.min(rest.len());
            match sys::read(pair, &mut [IoSliceMut::new(&mut rest[..most])]) {
                Ok(n @ 1..) => left -= n,
                _ => break,
            }
        }
        self.guard = sys::waiting(pair) > 0;
    }
}

/// Moves up to `most` of the `fresh` bytes that wait. The last one that waits is copied, and stays.
fn pull_some(
    pair: &UnixStream,
    socket: &mut tcp::Socket<'_>,
    guard: &mut bool,
    fresh: usize,
    most: usize,
) -> usize {
    let mut last = false;
    let moved = socket.send(|room| {
        let want = fresh.min(most).min(room.len());
        // The last byte is not read but looked at.
        last = want == fresh;
        let read = want - usize::from(last);
        if read + usize::from(*guard) == 0 {
            return (0, 0);
        }
        let mut skipped = [0; 1];
        let got = if *guard {
            let mut parts = [IoSliceMut::new(&mut skipped), IoSliceMut::new(&mut room[..read])];
            sys::read(pair, &mut parts)
        } else {
            sys::read(pair, &mut [IoSliceMut::new(&mut room[..read])])
        };
        let got = got.unwrap_or(0);
        let data = got - usize::from(*guard && got > 0);
        *guard &= got == 0;
        last &= data == read;
        (data, data)
    });
    let moved = moved.unwrap_or(0);
    if last
        && !*guard
        && let Some(byte) = sys::peek(pair)
        && socket.send_slice(&[byte]) == Ok(1)
    {
        *guard = true;
        return moved + 1;
    }
    moved
}

//! Frames whose bytes are in memory that the router has mapped: a connection takes them from there.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Instant;

use verbs_protocol::wire::{HEADER, Header};

use crate::link::Link;
use crate::memory::{Fault, PARTS_MAX, mapped_parts, rest_of};
use crate::objects::Objects;
use crate::sys;

/// Frames with fewer bytes are gathered, and written many at a time.
const DIRECT_LEAST: usize = 4096;

impl Link {
    /// Whether no more is to be added: what a connection had no room for is a copy.
    pub(crate) fn is_full(&self) -> bool {
        self.direct.is_short && !self.unsent.is_empty()
    }
}

/// What was written to a connection without a copy.
#[derive(Default)]
pub(crate) struct Direct {
    /// Bytes.
    pub(crate) written: usize,
    /// There was no room for all of the last frame.
    is_short: bool,
    /// A thread writes to it without the baton, which has all that was to be sent before.
    pub(crate) is_busy: bool,
}

impl Objects {
    /// Says a frame with `length` bytes: those of [`Objects::from`], which is empty afterwards.
    pub(crate) fn say_pieces(
        self: &mut Box<Self>,
        handle: u32,
        header: &Header,
        length: usize,
    ) -> Result<(), Fault> {
        let is_direct = length >= DIRECT_LEAST
            && self.links.get(handle).is_some_and(|l| l.card.as_ref().is_none_or(|c| !c.active));
        let header = header.encode();
        if is_direct && self.write_mapped(handle, &header) {
            return Ok(());
        }
        self.load_own(length, |objects, bytes| {
            if let Some(link) = objects.links.get_mut(handle) {
                link.unsent.extend(header);
                link.unsent.extend(bytes);
            }
        })
    }

    /// Writes what waits to be sent, a header and the bytes, if all of them are mapped. What there
    /// is no room for is copied to what waits. The baton is others' meanwhile, as when it copies.
    fn write_mapped(self: &mut Box<Self>, handle: u32, header: &[u8; HEADER]) -> bool {
        let mut room = [const { (core::ptr::null(), 0) }; PARTS_MAX];
        let Some((owner, pieces)) = mapped_parts(&self.from, &mut room) else { return false };
        let Some(link) = self.links.get_mut(handle).filter(|l| !l.direct.is_busy) else {
            return false;
        };
        link.direct.is_busy = true;
        let stream = Arc::clone(&link.stream);
        let mut unsent = std::mem::take(&mut link.unsent);
        let mut from = std::mem::take(&mut self.from);
        let (first, second) = unsent.as_slices();
        let waiting = unsent.len();
        let mut parts = [const { (core::ptr::null(), 0) }; PARTS_MAX + 3];
        for (part, bytes) in parts.iter_mut().zip([first, second, header]) {
            *part = (bytes.as_ptr(), bytes.len());
        }
        parts[3..3 + pieces.len()].copy_from_slice(pieces);
        let parts = &parts[..3 + pieces.len()];
        let all: usize = parts.iter().map(|(_, length)| length).sum();
        let (written, rest) = self.without_baton(|worker| {
            worker.touches(owner);
            // SAFETY: the parts are of this function's own and of memory that `from` keeps mapped.
            let written = match unsafe { sys::send_parts(&stream, parts) } {
                Ok(n) => n,
                Err(err) if sys::would_block(&err) => 0,
                Err(_) => {
                    // The reader finds the end. It is one also if memory was at fault: the other
                    // end must not take later frames for the rest of this one.
                    let _: io::Result<()> = stream.shutdown(Shutdown::Both);
                    all
                }
            };
            (written, rest_of(worker, &from, written.saturating_sub(waiting + HEADER)))
        });
        from.clear();
        self.from = from;
        let Some(link) = self.links.get_mut(handle) else { return true };
        if written > 0 {
            link.heard = Instant::now();
        }
        link.direct.is_busy = false;
        link.direct.written += written;
        link.direct.is_short = written < all;
        unsent.drain(..written.min(waiting));
        unsent.extend(&header[written.saturating_sub(waiting).min(HEADER)..]);
        unsent.extend(rest);
        // What was said meanwhile comes after it.
        unsent.append(&mut link.unsent);
        link.unsent = unsent;
        true
    }
}

//! Frames whose bytes are in memory that the router has mapped: a connection takes them from there.

use verbs_protocol::wire::{HEADER, Header};

use crate::link::Link;
use crate::memory::{Fault, PARTS_MAX};
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
    /// is no room for is copied to what waits.
    fn write_mapped(self: &mut Box<Self>, handle: u32, header: &[u8; HEADER]) -> bool {
        let mut room = [const { (core::ptr::null(), 0) }; PARTS_MAX];
        let Some(pieces) = self.mapped_parts(&mut room) else { return false };
        let Some(link) = self.links.get_mut(handle) else { return false };
        let (first, second) = link.unsent.as_slices();
        let waiting = link.unsent.len();
        let mut parts = [const { (core::ptr::null(), 0) }; PARTS_MAX + 3];
        for (part, bytes) in parts.iter_mut().zip([first, second, header]) {
            *part = (bytes.as_ptr(), bytes.len());
        }
        parts[3..3 + pieces.len()].copy_from_slice(pieces);
        let all: usize = parts.iter().map(|(_, length)| length).sum();
        // SAFETY: the parts are of this function's own and of memory that [`Objects::from`] keeps
        // mapped.
        let written = unsafe { sys::send_parts(&link.stream, &parts[..3 + pieces.len()]) };
        let written = match written {
            Ok(n) => n,
            Err(err) if sys::would_block(&err) => 0,
            // The reader finds the end.
            Err(_) => all,
        };
        link.unsent.drain(..written.min(waiting));
        if written > 0 {
            link.heard = std::time::Instant::now();
        }
        link.direct.written += written;
        link.direct.is_short = written < all;
        let mut skip = written.saturating_sub(waiting);
        link.unsent.extend(&header[skip.min(HEADER)..]);
        skip = skip.saturating_sub(HEADER);
        self.load_rest(skip, |objects, bytes| {
            if let Some(link) = objects.links.get_mut(handle) {
                link.unsent.extend(bytes);
            }
        });
        true
    }
}

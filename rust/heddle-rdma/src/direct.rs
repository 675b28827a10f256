//! Frames whose bytes are in memory that the router has mapped: a connection takes them from there,
//! several at a time.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Instant;

use verbs_protocol::wire::{HEADER, Header};

use crate::link::Response;
use crate::memory::{self, Fault, Regions, Use};
use crate::objects::Objects;
use crate::pieces::{Piece, rest_of};
use crate::remote::{frame_length, returns};
use crate::requests::gather;
use crate::responder::read_header;
use crate::sys;

/// Frames with fewer bytes are gathered, and written many at a time.
const DIRECT_LEAST: usize = 4096;
/// Frames that one system call takes: what is written by itself ends with a short packet, and has
/// the other end look.
const FRAMES_MAX: usize = 8;
/// Pieces of which it takes bytes.
const PIECES_MAX: usize = 24;

/// A frame whose bytes are the next `pieces` of [`Objects::from`].
struct Frame {
    header: [u8; HEADER],
    pieces: usize,
    length: usize,
}

/// The first frame of which not all bytes are among those that were written, and how many are.
fn reached(frames: &[Frame], mut written: usize) -> (usize, usize) {
    for (i, frame) in frames.iter().enumerate() {
        let whole = HEADER + frame.length;
        if written < whole {
            return (i, written);
        }
        written -= whole;
    }
    (frames.len(), 0)
}

/// What was written to a connection without a copy.
#[derive(Default)]
pub(crate) struct Direct {
    /// Bytes.
    pub(crate) written: usize,
    /// There was no room for all of the last frames, and nothing has come of the connection since.
    pub(crate) is_full: bool,
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
        if is_direct {
            let frame = Frame { header, pieces: self.from.len(), length };
            if self.write_mapped(handle, &[frame], true).is_some() {
                return Ok(());
            }
        }
        self.load_own(length, |objects, bytes| {
            if let Some(link) = objects.links.get_mut(handle) {
                link.unsent.extend(header);
                link.unsent.extend(bytes);
            }
        })
    }

    /// Says the next frames of a reliable queue pair's requests, at most `most`, out of mapped
    /// memory. How many that were; none if the first one has to be said by itself.
    pub(crate) fn send_mapped(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        most: usize,
    ) -> Option<usize> {
        let link = self.links.get(handle)?;
        if link.direct.is_busy || link.card.as_ref().is_some_and(|c| c.active) {
            return None;
        }
        let usage = self.local(number, 0);
        self.from.clear();
        let (mut next, mut offset) = (link.next, link.offset);
        let mut frames = Vec::with_capacity(FRAMES_MAX);
        while frames.len() < most.min(FRAMES_MAX) {
            if self.links.get(handle)?.sent.len() == next && !self.begin(number, handle) {
                break;
            }
            let Some(request) = self.links.get(handle)?.sent.get(next) else { break };
            let send = &request.send;
            let n = frame_length(send.length() - offset);
            let skips = request.failed.is_some() || returns(send.head.opcode) || send.is_inline();
            if skips || n < DIRECT_LEAST {
                break;
            }
            let pieces = self.from.len();
            let (entries, entry) = (send.entries(), |i| send.entry(i));
            let found = gather(&self.regions, entries, entry, offset, n, usage, &mut self.from);
            if found.is_err() || !are_mapped(&self.from) {
                self.from.truncate(pieces);
                break;
            }
            let header = request.header(offset, n);
            let pieces = self.from.len() - pieces;
            frames.push(Frame { header: header.encode(), pieces, length: n });
            (next, offset) = request.after(next, offset, n);
        }
        // A request that was wrong in itself has ended it.
        let goes_on = self.links.get(handle).is_some_and(|l| l.qp == number);
        if frames.is_empty() || !goes_on {
            return None;
        }
        let said = self.write_mapped(handle, &frames, false)?;
        let link = self.links.get_mut(handle)?;
        for frame in frames.iter().take(said) {
            let Some(sent) = link.sent.get(link.next) else { break };
            (link.next, link.offset) = sent.after(link.next, link.offset, frame.length);
        }
        Some(said)
    }

    /// Says the next frames of READs of the peer, out of mapped memory. False if the next one has
    /// to be said by itself.
    pub(crate) fn answer_mapped(self: &mut Box<Self>, handle: u32, qp: u32, usage: Use) -> bool {
        let Some(link) = self.links.get(handle) else { return false };
        if link.card.as_ref().is_some_and(|c| c.active) {
            return false;
        }
        self.from.clear();
        let mut frames = Vec::with_capacity(FRAMES_MAX);
        for response in &link.responses {
            let whole = add_read(&self.regions, response, usage, &mut frames, &mut self.from);
            if !whole {
                break;
            }
        }
        if frames.is_empty() {
            return false;
        }
        let Some(said) = self.write_mapped(handle, &frames, false) else { return false };
        for frame in frames.iter().take(said) {
            self.has_responded(handle, qp, frame.length);
        }
        true
    }

    /// Writes what waits to be sent, and frames whose bytes are all mapped. What there is no room
    /// for of a frame that was begun, or of any if `all` are to be said, is copied to what waits.
    /// How many frames are said then. The baton is others' meanwhile, as when it copies.
    fn write_mapped(
        self: &mut Box<Self>,
        handle: u32,
        frames: &[Frame],
        all: bool,
    ) -> Option<usize> {
        if !are_mapped(&self.from) {
            return None;
        }
        let link = self.links.get_mut(handle).filter(|l| !l.direct.is_busy)?;
        link.direct.is_busy = true;
        let stream = Arc::clone(&link.stream);
        let mut unsent = std::mem::take(&mut link.unsent);
        let mut from = std::mem::take(&mut self.from);
        let waiting = unsent.len();
        let (parts, owner) = parts_of(&unsent, frames, &from);
        let length: usize = parts.iter().map(|(_, length)| length).sum();
        let copy = self.begin_copy(&from, &[]);
        let (written, (begun, within), rest) = self.without_baton(|worker| {
            worker.touches(owner);
            #[expect(unsafe_code, reason = "memory of programs, sent from where it is")]
            // SAFETY: the parts are of `unsent`, `frames` and memory that `from` keeps mapped.
            let written = match unsafe { sys::send_parts(&stream, &parts) } {
                Ok(n) => n,
                Err(err) if sys::would_block(&err) => 0,
                Err(_) => {
                    // The reader finds the end. It is one also if memory was at fault: the other
                    // end must not take later frames for the rest of this one.
                    let _: io::Result<()> = stream.shutdown(Shutdown::Both);
                    length
                }
            };
            let (begun, within) = reached(frames, written.saturating_sub(waiting));
            let rest = frames.get(begun).filter(|_| within > 0 || all).map(|frame| {
                let before: usize = frames[..begun].iter().map(|f| f.pieces).sum();
                let its = &from[before..before + frame.pieces];
                rest_of(worker, its, within.saturating_sub(HEADER))
            });
            (written, (begun, within), rest)
        });
        self.end_copy(copy);
        from.clear();
        self.from = from;
        let said = begun + usize::from(rest.is_some());
        let Some(link) = self.links.get_mut(handle) else { return Some(said) };
        if written > 0 {
            link.heard = Instant::now();
        }
        link.direct.is_busy = false;
        link.direct.written += written;
        link.direct.is_full = written < length;
        unsent.drain(..written.min(waiting));
        if let Some((frame, rest)) = frames.get(begun).zip(rest) {
            unsent.extend(&frame.header[within.min(HEADER)..]);
            unsent.extend(rest);
        }
        // What was said meanwhile comes after it.
        unsent.append(&mut link.unsent);
        link.unsent = unsent;
        Some(said)
    }
}

/// Adds the next frames of a READ, if that is what is owed, as long as their bytes are mapped.
/// Whether these are all that are left of it.
fn add_read(
    regions: &Regions,
    response: &Response,
    usage: Use,
    frames: &mut Vec<Frame>,
    from: &mut Vec<Piece>,
) -> bool {
    let Response::Read { number, key, address, total, mut done } = *response else { return false };
    while frames.len() < FRAMES_MAX {
        let (n, pieces) = (frame_length(total - done), from.len());
        if n < DIRECT_LEAST {
            return false;
        }
        let found = address.checked_add(done).ok_or(Fault);
        let found = found.and_then(|at| memory::find(regions, key, at, n, usage, from));
        if found.is_err() || !are_mapped(from) {
            from.truncate(pieces);
            return false;
        }
        let header = read_header(number, (done, total), n).encode();
        frames.push(Frame { header, pieces: from.len() - pieces, length: n });
        done += n as u64;
        if done == total {
            return true;
        }
    }
    false
}

/// What waits, and frames with their bytes, as a system call takes them: address and length of each
/// part. And whose memory the last one is.
fn parts_of(
    unsent: &VecDeque<u8>,
    frames: &[Frame],
    from: &[Piece],
) -> (Vec<(*const u8, usize)>, u32) {
    let (first, second) = unsent.as_slices();
    let mut parts = Vec::with_capacity(2 + FRAMES_MAX + PIECES_MAX);
    parts.extend([first, second].map(|bytes| (bytes.as_ptr(), bytes.len())));
    let mut pieces = from.iter().filter_map(Piece::mapped);
    let mut owner = 0;
    for frame in frames {
        parts.push((frame.header.as_ptr(), HEADER));
        for (endpoint, part) in pieces.by_ref().take(frame.pieces) {
            owner = endpoint;
            parts.push(part);
        }
    }
    (parts, owner)
}

/// Whether all pieces are mapped, and not too many.
fn are_mapped(pieces: &[Piece]) -> bool {
    pieces.len() <= PIECES_MAX && pieces.iter().all(|piece| piece.mapped().is_some())
}

//! Pieces of one side are copied to those of the other, through memory of the router where neither
//! is mapped. Nothing here allocates after it was made.

use std::sync::atomic::{Ordering, fence};

use crate::baton::Worker;
use crate::memory::Fault;
use crate::objects::Objects;
use crate::pieces::{Piece, User, transfer};
use crate::protection::{Protection, protects};
use crate::together::{Batch, Span};

/// How many bytes are copied at a time when they go through memory of the router: they stay in the
/// processor's cache between the two copies.
pub(crate) const CHUNK: usize = 64 * 1024;

/// How many bytes are copied at a time when all of them are mapped. What is done for each copy
/// costs as much as 30 KiB of bytes that are in the caches.
pub(crate) const MAPPED_CHUNK: usize = 4 * CHUNK;

/// Which side of a copy is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

/// Copies bytes through memory of its own, [`CHUNK`] at a time.
pub(crate) struct Copier {
    buffer: Box<[u8; CHUNK]>,
}

impl Copier {
    pub(crate) fn new() -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice().try_into();
        Self { buffer: buffer.expect("as long as a chunk") }
    }

    /// Copies the bytes of one side to those of the other: the same number, at most a chunk of what
    /// is not mapped.
    fn copy<'a>(
        &mut self,
        worker: &Worker,
        mut from: impl Iterator<Item = Bytes<'a>>,
        mut to: impl Iterator<Item = (&'a Piece, usize, usize)>,
    ) -> Result<(), Side> {
        let (mut source, mut target) = (from.next(), to.next());
        while let (Some(here), Some((piece, skip, room))) = (source, target) {
            // What polls memory sees bytes in the order of the requests: a flag after the payload
            // that was written in front of it. Between requests that are done one by one there is
            // the baton's mutex. It costs nothing on x86, and orders READs among each other, too.
            fence(Ordering::AcqRel);
            let n = here.length().min(room);
            self.copy_part(worker, here, (piece, skip), n)?;
            source = here.behind(n).or_else(|| from.next());
            target = if n < room { Some((piece, skip + n, room - n)) } else { to.next() };
        }
        debug_assert!(source.is_none() && target.is_none());
        Ok(())
    }

    /// One copy where one side is memory that the router has mapped, else two.
    fn copy_part(
        &mut self,
        worker: &Worker,
        from: Bytes<'_>,
        (to, written): (&Piece, usize),
        length: usize,
    ) -> Result<(), Side> {
        let (from, read) = match from {
            Bytes::Of(piece, skip, _) => (piece, skip),
            Bytes::Own(bytes) => {
                // They are only read.
                let own = (bytes.as_ptr().cast_mut(), length);
                return to.transfer(worker, written, own, true).map_err(|Fault| Side::Destination);
            }
        };
        if let Some(place) = from.place(read, length) {
            from.fetch(worker, place);
            return to.transfer(worker, written, place, true).map_err(|Fault| Side::Destination);
        }
        let own = if let Some(place) = to.place(written, length) {
            to.fetch(worker, place);
            place
        } else {
            let own = self.buffer.get_mut(..length).ok_or(Side::Source)?;
            (own.as_mut_ptr(), length)
        };
        from.transfer(worker, read, own, false).map_err(|Fault| Side::Source)?;
        if own.0 == self.buffer.as_mut_ptr() {
            to.transfer(worker, written, own, true).map_err(|Fault| Side::Destination)?;
        }
        Ok(())
    }
}

/// Bytes that are copied: of a piece from one of its bytes on so many, or of the router's own.
#[derive(Clone, Copy)]
enum Bytes<'a> {
    Of(&'a Piece, usize, usize),
    Own(&'a [u8]),
}

impl Bytes<'_> {
    fn length(self) -> usize {
        match self {
            Self::Of(_, _, length) => length,
            Self::Own(bytes) => bytes.len(),
        }
    }

    /// Those behind the first `n`, if there are some.
    fn behind(self, n: usize) -> Option<Self> {
        if n >= self.length() {
            return None;
        }
        Some(match self {
            Self::Of(piece, skip, length) => Self::Of(piece, skip + n, length - n),
            Self::Own(bytes) => Self::Own(&bytes[n..]),
        })
    }
}

/// Copies with the pieces in [`Objects::from`] and [`Objects::to`], which are empty afterwards.
/// Memory of programs is copied without the baton, also what the router has mapped: a page of it
/// that is swapped out does not come at once either.
impl Objects {
    fn with_pieces<R>(
        self: &mut Box<Self>,
        copy: impl FnOnce(&Worker, &mut Copier, &[Piece], &[Piece]) -> R,
    ) -> R {
        let (mut from, mut to) = (std::mem::take(&mut self.from), std::mem::take(&mut self.to));
        // None if another thread is stuck with it.
        let mut copier = self.copier.take().unwrap_or_else(Copier::new);
        let result = self.touching(&from, &to, |w| copy(w, &mut copier, &from, &to));
        from.clear();
        to.clear();
        (self.from, self.to, self.copier) = (from, to, Some(copier));
        result
    }

    /// Does something without the baton that touches these pieces.
    fn touching<R>(
        self: &mut Box<Self>,
        from: &[Piece],
        to: &[Piece],
        work: impl FnOnce(&Worker) -> R,
    ) -> R {
        if from.is_empty() && to.is_empty() {
            return work(&self.worker);
        }
        let number = self.begin_copy(from, to);
        let result = self.without_baton(work);
        self.end_copy(number);
        result
    }

    /// Copies all of one side to the other: the same number of bytes, at most a chunk.
    pub(crate) fn copy(self: &mut Box<Self>) -> Result<(), Side> {
        if self.are_strangers() && protects(Protection::UnderWay) {
            return self.copy_apart();
        }
        self.with_pieces(|worker, copier, from, to| {
            let from = from.iter().map(|piece| Bytes::Of(piece, 0, piece.length()));
            copier.copy(worker, from, to.iter().map(|piece| (piece, 0, piece.length())))
        })
    }

    /// Copies the bytes of a batch, of [`Objects::from`] to [`Objects::to`]: all are mapped.
    pub(crate) fn copy_batch(self: &mut Box<Self>, batch: &Batch) -> Result<(), Side> {
        self.with_pieces(|worker, copier, from, to| {
            let from = batch.from.iter().map(|Span { piece, skip, length }| match piece {
                Some(piece) => Bytes::Of(&from[*piece], *skip, *length),
                None => Bytes::Own(&batch.own[*skip..skip + length]),
            });
            let to = batch.to.iter().filter_map(|s| Some((&to[s.piece?], s.skip, s.length)));
            copier.copy(worker, from, to)
        })
    }

    /// Whether the region and the queue pair are still there.
    fn may_touch(&self, user: User) -> bool {
        let region = self.regions.get(user.key);
        region.is_some_and(|r| r.number == user.region) && self.still(user.qp, user.epoch) != 0
    }

    /// Whether one side is memory of a program's own, whose pages come when it likes, and the other
    /// one is another endpoint's.
    fn are_strangers(&self) -> bool {
        let (from, to) = (&self.from, &self.to);
        let own = from.iter().chain(to).any(|piece| !piece.is_mapped());
        let endpoint = from.first().map(Piece::endpoint);
        own && !from.iter().chain(to).all(|piece| Some(piece.endpoint()) == endpoint)
    }

    /// The same in two steps, each of which touches one side only: what waits for a page of one
    /// program has nothing of the other's, which may deregister it meanwhile.
    fn copy_apart(self: &mut Box<Self>) -> Result<(), Side> {
        let (mut from, mut to) = (std::mem::take(&mut self.from), std::mem::take(&mut self.to));
        let mut copier = self.copier.take().unwrap_or_else(Copier::new);
        let length = from.iter().map(Piece::length).sum();
        let result = copier.buffer.get_mut(..length).ok_or(Side::Source).and_then(|own| {
            let own = (own.as_mut_ptr(), length);
            self.touching(&from, &[], |w| transfer(w, own, &from, false))
                .map_err(|Fault| Side::Source)?;
            if !to.iter().all(|piece| self.may_touch(piece.user())) {
                return Err(Side::Destination);
            }
            self.touching(&[], &to, |w| transfer(w, own, &to, true))
                .map_err(|Fault| Side::Destination)
        });
        from.clear();
        to.clear();
        (self.from, self.to, self.copier) = (from, to, Some(copier));
        result
    }

    /// Reads all of [`Objects::from`] into memory of the router.
    pub(crate) fn load(self: &mut Box<Self>, to: &mut [u8]) -> Result<(), Fault> {
        self.with_pieces(|worker, _, from, _| {
            transfer(worker, (to.as_mut_ptr(), to.len()), from, false)
        })
    }

    /// The same, `length` bytes and at most a chunk, and gives them to a function.
    pub(crate) fn load_own(
        self: &mut Box<Self>,
        length: usize,
        take: impl FnOnce(&mut Self, &[u8]),
    ) -> Result<(), Fault> {
        let loaded = self.with_pieces(|worker, copier, from, _| {
            let own = copier.buffer.get_mut(..length).ok_or(Fault)?;
            transfer(worker, (own.as_mut_ptr(), length), from, false)
        });
        if let Some(copier) = self.copier.take() {
            if loaded.is_ok() {
                take(self, &copier.buffer[..length]);
            }
            self.copier = Some(copier);
        }
        loaded
    }

    /// Writes bytes to all of [`Objects::to`].
    pub(crate) fn store(self: &mut Box<Self>, from: &[u8]) -> Result<(), Fault> {
        self.with_pieces(|worker, _, _, to| {
            // The bytes are only read.
            transfer(worker, (from.as_ptr().cast_mut(), from.len()), to, true)
        })
    }
}

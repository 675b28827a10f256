//! Bytes that a key has named: in a program, or in memory that the router has mapped.
//!
//! Programs write to them at any time. So they are copied from one place to another and never
//! looked at; a place that is not there any more is a [`Fault`].

#![expect(unsafe_code, reason = "memory that a peer writes to")]

use std::sync::Arc;

use shared_ring::SharedMemory;

use crate::baton::Worker;
use crate::memory::Fault;
use crate::process::Process;

/// Bytes of a page, or of a part of one.
const PAGE: usize = 4096;

/// Where bytes are.
pub(crate) enum Backing {
    /// In a program, at this address.
    Process(Arc<Process>, u64),
    /// In memory of this endpoint that the router has mapped, from this offset.
    Shared(u32, Arc<SharedMemory>, u64),
}

/// By what bytes are touched: both have to be there for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct User {
    /// The key of the region, and the region's number.
    pub(crate) key: u32,
    pub(crate) region: u64,
    pub(crate) qp: u32,
    pub(crate) epoch: u64,
}

/// Bytes somewhere, found and checked.
pub(crate) struct Piece {
    user: User,
    backing: Backing,
    length: usize,
}

impl Piece {
    pub(crate) fn new(user: User, backing: Backing, length: usize) -> Self {
        Self { user, backing, length }
    }

    /// Whether the router has it mapped.
    pub(crate) fn is_mapped(&self) -> bool {
        matches!(self.backing, Backing::Shared(..))
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn user(&self) -> User {
        self.user
    }

    /// Whose it is.
    pub(crate) fn endpoint(&self) -> u32 {
        match &self.backing {
            Backing::Process(process, _) => process.endpoint(),
            Backing::Shared(endpoint, ..) => *endpoint,
        }
    }

    /// Where its bytes are, and whose, if the router has them mapped.
    pub(crate) fn mapped(&self) -> Option<(u32, (*const u8, usize))> {
        let Backing::Shared(endpoint, ..) = self.backing else { return None };
        let (at, length) = self.place(0, self.length)?;
        Some((endpoint, (at.cast_const(), length)))
    }

    /// The address of `length` bytes from `skip` on, if the router has them mapped.
    pub(crate) fn place(&self, skip: usize, length: usize) -> Option<(*mut u8, usize)> {
        let Backing::Shared(_, memory, at) = &self.backing else { return None };
        let at = usize::try_from(*at).ok()?.checked_add(skip)?;
        if at.checked_add(length)? > memory.len() {
            return None;
        }
        // SAFETY: the check above says that the range lies in the mapping.
        Some((unsafe { memory.as_ptr().byte_add(at) }.as_ptr(), length))
    }

    /// Waits for the pages of bytes of it that are mapped here: a copy that has two sides would not
    /// tell whose page it waits for.
    pub(crate) fn fetch(&self, worker: &Worker, (at, length): (*mut u8, usize)) {
        let Backing::Shared(endpoint, ..) = &self.backing else { return };
        worker.touches(*endpoint);
        let Some(last) = length.checked_sub(1) else { return };
        for skip in 0..=last.div_ceil(PAGE) {
            // SAFETY: this is less than `length`, and that many bytes are mapped.
            let byte = unsafe { at.add(last.min(skip * PAGE)) };
            // SAFETY: as above. It may change meanwhile: nobody looks at what is read.
            let _ = unsafe { byte.read_volatile() };
        }
    }

    /// Copies between `own`, which is mapped here, and as many bytes from `skip` on; `write` is to
    /// the piece.
    pub(crate) fn transfer(
        &self,
        worker: &Worker,
        skip: usize,
        (own, length): (*mut u8, usize),
        write: bool,
    ) -> Result<(), Fault> {
        match &self.backing {
            Backing::Shared(endpoint, ..) => {
                worker.touches(*endpoint);
                let (there, _) = self.place(skip, length).ok_or(Fault)?;
                let (from, to) = if write { (own, there) } else { (there, own) };
                // SAFETY: both ranges are mapped. The program may write to one meanwhile: what is
                // copied then is any mixture of bytes, which nobody looks at. They may be the same
                // memory, therefore not `copy_nonoverlapping`.
                unsafe { core::ptr::copy(from, to, length) };
                Ok(())
            }
            Backing::Process(process, at) => {
                let at = at.checked_add(skip as u64).ok_or(Fault)?;
                // SAFETY: `own` is the caller's, and has these bytes.
                let copied = unsafe { process.copy(worker, (own, length), at, write) };
                if copied { Ok(()) } else { Err(Fault) }
            }
        }
    }
}

/// Copies what pieces have from `skip` on, at most a chunk of it.
pub(crate) fn rest_of(worker: &Worker, pieces: &[Piece], mut skip: usize) -> Vec<u8> {
    let mut rest = Vec::new();
    for piece in pieces {
        let passed = skip.min(piece.length);
        skip -= passed;
        let (begin, length) = (rest.len(), piece.length - passed);
        rest.resize(begin + length, 0);
        let own = (rest[begin..].as_mut_ptr(), length);
        if piece.transfer(worker, passed, own, false).is_err() {
            rest.truncate(begin);
        }
    }
    rest
}

/// Copies between `own`, which is mapped here, and pieces with as many bytes; `write` is to the
/// pieces.
pub(crate) fn transfer(
    worker: &Worker,
    own: (*mut u8, usize),
    pieces: &[Piece],
    write: bool,
) -> Result<(), Fault> {
    let mut done = 0;
    for piece in pieces {
        // SAFETY: the pieces have as many bytes as `own` together.
        let here = unsafe { own.0.add(done) };
        piece.transfer(worker, 0, (here, piece.length), write)?;
        done += piece.length;
    }
    Ok(())
}

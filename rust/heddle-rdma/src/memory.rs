//! Memory of programs: which bytes a key names, and how they are copied.
//!
//! The memory of a program belongs to the program, which may write to it, unmap it or end at any
//! time. Bytes are copied from one place to another and never looked at; a place that is not there
//! any more is a [`Fault`]. Nothing here allocates after it was made.

#![expect(unsafe_code, reason = "memory that a peer writes to")]

use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::{abi, ibv};

use crate::baton::Worker;
use crate::ibverbs;
use crate::objects::Objects;
use crate::protection::{Protection, protects};
use crate::sys;
use crate::table::Table;

/// How many bytes are copied at a time when they go through memory of the router: they stay in the
/// processor's cache between the two copies.
pub(crate) const CHUNK: usize = 64 * 1024;

/// Bytes of a page, or of a part of one.
const PAGE: usize = 4096;

/// The process whose memory a context names, or rather: the memory that it had when it connected.
/// Should it execute another program, this memory is gone, and the other program's is not to be
/// had.
pub(crate) struct Process {
    /// Handle of the endpoint that it is of.
    endpoint: u32,
    pid: libc::pid_t,
    memory: OwnedFd,
}

/// How often a page is compared: each time with other random bytes.
const LOOKS: u32 = 16;

impl Process {
    pub(crate) fn new(endpoint: u32, (pid, memory): (libc::pid_t, OwnedFd)) -> Self {
        Self { endpoint, pid, memory }
    }

    /// Its number, for people to read.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Whether the process has this shared memory mapped at an address: the router changes the word
    /// of it that is for this, and finds it changed there at once; then the other way round.
    /// Nothing of what was mapped outlives the execution of another program, and nobody but the
    /// program itself maps. So it is the program that was given the memory.
    pub(crate) fn maps(&self, worker: &Worker, shared: &SharedMemory, address: u64) -> bool {
        let at = abi::VERBS_CONTEXT_PROOF as usize;
        if !address.is_multiple_of(4096) || at + 8 > shared.len() {
            return false;
        }
        let Some(there) = address.checked_add(at as u64) else { return false };
        // SAFETY: the check above says that the word lies in the mapping, whose pages are aligned.
        let word = unsafe { shared.as_ptr().byte_add(at) }.cast::<AtomicU64>();
        // SAFETY: any bytes are a value of an atomic, and `shared` keeps them mapped.
        let word = unsafe { word.as_ref() };
        let random = || sys::random();
        let seen = (0..LOOKS).all(|_| {
            let (wanted, mut found) = (random(), 0_u64);
            word.store(wanted, Ordering::SeqCst);
            // SAFETY: `found` is eight bytes of this function's own.
            let read = unsafe { self.copy(worker, ((&raw mut found).cast(), 8), there, false) };
            read && found == wanted
        });
        let mut written = random();
        // SAFETY: `written` is eight bytes of this function's own.
        seen && unsafe { self.copy(worker, ((&raw mut written).cast(), 8), there, true) }
            && word.load(Ordering::SeqCst) == written
    }

    /// Whether the first and the last byte of a range can be read.
    pub(crate) fn has(&self, worker: &Worker, address: u64, length: u64) -> bool {
        let mut byte = 0_u8;
        [address, address + (length - 1)].into_iter().all(|at| {
            // SAFETY: `byte` is one byte of this function's own.
            unsafe { self.copy(worker, (&raw mut byte, 1), at, false) }
        })
    }

    /// Copies bytes of the process to `local` or back.
    ///
    /// # Safety
    ///
    /// That of [`sys::memory_copy`].
    unsafe fn copy(
        &self,
        worker: &Worker,
        local: (*mut u8, usize),
        there: u64,
        write: bool,
    ) -> bool {
        worker.touches(self.endpoint);
        if !protects(Protection::AddressSpace) {
            let Ok(memory) = sys::open_memory(self.pid) else { return false };
            // SAFETY: the caller vouches for it.
            return unsafe { sys::memory_copy(&memory, local, there, write) };
        }
        // SAFETY: the caller vouches for it.
        unsafe { sys::memory_copy(&self.memory, local, there, write) }
    }
}

/// Where bytes are.
enum Backing {
    /// In a program, at this address.
    Process(Arc<Process>, u64),
    /// In memory of this endpoint that the router has mapped, from this offset.
    Shared(u32, Arc<SharedMemory>, u64),
}

/// The bytes of a region that are in memory that the router has mapped.
pub(crate) struct Mapped {
    /// Handle of the endpoint that it is of.
    endpoint: u32,
    shared: Arc<SharedMemory>,
    /// The first of them, and how many there are.
    first: u64,
    length: u64,
    /// Where the first one lies in the memory.
    at: u64,
}

impl Mapped {
    /// Those of a region of this length whose first byte would lie at `offset` (modulo 2^64) of the
    /// memory of an endpoint. None if it has none of them.
    pub(crate) fn of(
        endpoint: u32,
        shared: &Arc<SharedMemory>,
        offset: u64,
        length: u64,
    ) -> Option<Self> {
        let all = shared.len() as u64;
        // Regions and memory are shorter than 2^63 bytes, so that one of the two is meant.
        let (first, at) = if offset < all { (0, offset) } else { (offset.wrapping_neg(), 0) };
        let length = length.checked_sub(first)?.min(all - at);
        (length > 0).then(|| Self { endpoint, shared: Arc::clone(shared), first, length, at })
    }

    /// What a card is to register for it: memory, offset and length, and how many bytes of the
    /// region come before.
    pub(crate) fn part(&self) -> (Arc<SharedMemory>, (u64, u64), u64) {
        (Arc::clone(&self.shared), (self.at, self.length), self.first)
    }

    /// Whether it is all of a region of this length.
    pub(crate) fn is_all(&self, length: u64) -> bool {
        self.first == 0 && self.length == length
    }
}

/// A memory region.
pub(crate) struct Region {
    /// No other one has had it, as it may have had the key.
    pub(crate) number: u64,
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
    /// Handle of the memory that has the mapped part, 0 if there is none.
    pub(crate) memory: u32,
    pub(crate) mapped: Option<Mapped>,
    /// Where all other bytes are: the program, and the address of the first byte of the region. Not
    /// there if all are mapped.
    pub(crate) process: Option<(Arc<Process>, u64)>,
    /// The mapped part as the card knows it, once a pair of its PD goes by that.
    pub(crate) card: Option<Arc<ibverbs::Region>>,
}

impl Region {
    /// Adds the pieces that bytes of it consist of.
    fn pieces(
        &self,
        user: User,
        from: u64,
        length: usize,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), Fault> {
        let end = from + length as u64;
        let Some(mapped) = &self.mapped else { return self.of_program(user, from, end, pieces) };
        let (first, last) = (mapped.first, mapped.first + mapped.length);
        self.of_program(user, from, end.min(first), pieces)?;
        let (begin, stop) = (from.max(first), end.min(last));
        if begin < stop {
            let (shared, at) = (Arc::clone(&mapped.shared), mapped.at + (begin - first));
            let backing = Backing::Shared(mapped.endpoint, shared, at);
            pieces.push(Piece { user, backing, length: size(stop - begin)? });
        }
        self.of_program(user, from.max(last), end, pieces)
    }

    fn of_program(
        &self,
        user: User,
        begin: u64,
        end: u64,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), Fault> {
        if begin >= end {
            return Ok(());
        }
        let (process, address) = self.process.as_ref().ok_or(Fault)?;
        let at = address.checked_add(begin).ok_or(Fault)?;
        let backing = Backing::Process(Arc::clone(process), at);
        pieces.push(Piece { user, backing, length: size(end - begin)? });
        Ok(())
    }
}

fn size(length: u64) -> Result<usize, Fault> {
    usize::try_from(length).map_err(|_| Fault)
}

/// What a key is to be used for.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    /// The queue pair that names it, or whose peer does.
    pub(crate) qp: u32,
    pub(crate) pd: u32,
    /// `enum ibv_access_flags`; 0: reading by the owner.
    pub(crate) access: u32,
}

/// By what bytes are touched: both have to be there for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct User {
    /// The key of the region, and the region's number.
    key: u32,
    pub(crate) region: u64,
    pub(crate) qp: u32,
}

/// Bytes somewhere, found and checked.
pub(crate) struct Piece {
    user: User,
    backing: Backing,
    length: usize,
}

/// The key, the range or the right is wrong, or the memory is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault;

/// Which side of a copy is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

pub(crate) type Regions = Table<Region>;

/// Looks whether a key may be used for bytes at an address; the region, and where in it they begin.
fn look(
    regions: &Regions,
    key: u32,
    address: u64,
    length: usize,
    usage: Use,
) -> Result<(&Region, u64), Fault> {
    let region = regions.get(key).ok_or(Fault)?;
    let offset = address.checked_sub(region.iova).ok_or(Fault)?;
    let end = offset.checked_add(length as u64).ok_or(Fault)?;
    let is_outside = end > region.length && protects(Protection::Ranges);
    let is_foreign = region.pd != usage.pd && protects(Protection::Keys);
    if is_outside || is_foreign || region.access & usage.access != usage.access {
        return Err(Fault);
    }
    Ok((region, offset))
}

/// Whether a key may be used for bytes at an address.
pub(crate) fn check(
    regions: &Regions,
    key: u32,
    address: u64,
    length: usize,
    usage: Use,
) -> Result<(), Fault> {
    look(regions, key, address, length, usage).map(drop)
}

/// Finds the bytes that a key and an address name, and adds their pieces.
pub(crate) fn find(
    regions: &Regions,
    key: u32,
    address: u64,
    length: usize,
    usage: Use,
    pieces: &mut Vec<Piece>,
) -> Result<(), Fault> {
    let (region, offset) = look(regions, key, address, length, usage)?;
    let user = User { key, region: region.number, qp: usage.qp };
    region.pieces(user, offset, length, pieces)
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

    /// Copies the pieces of one side to those of the other: the same number of bytes, at most a
    /// chunk.
    fn copy(&mut self, worker: &Worker, from: &[Piece], to: &[Piece]) -> Result<(), Side> {
        let (mut sources, mut targets) = (from.iter(), to.iter());
        let (mut source, mut target) = (sources.next(), targets.next());
        let (mut read, mut written) = (0, 0);
        while let (Some(from), Some(to)) = (source, target) {
            let n = (from.length - read).min(to.length - written);
            self.copy_part(worker, (from, read), (to, written), n)?;
            read += n;
            written += n;
            if read == from.length {
                (source, read) = (sources.next(), 0);
            }
            if written == to.length {
                (target, written) = (targets.next(), 0);
            }
        }
        debug_assert!(source.is_none() && target.is_none());
        Ok(())
    }

    /// One copy where one side is memory that the router has mapped, else two.
    fn copy_part(
        &mut self,
        worker: &Worker,
        (from, read): (&Piece, usize),
        (to, written): (&Piece, usize),
        length: usize,
    ) -> Result<(), Side> {
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
        self.with_pieces(|worker, copier, from, to| copier.copy(worker, from, to))
    }

    /// Whether the region and the queue pair are still there.
    fn may_touch(&self, user: User) -> bool {
        let region = self.regions.get(user.key);
        region.is_some_and(|r| r.number == user.region) && self.qps.get(user.qp).is_some()
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
            if !to.iter().all(|piece| self.may_touch(piece.user)) {
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

impl Piece {
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
    fn endpoint(&self) -> u32 {
        match &self.backing {
            Backing::Process(process, _) => process.endpoint,
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
    fn place(&self, skip: usize, length: usize) -> Option<(*mut u8, usize)> {
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
    fn fetch(&self, worker: &Worker, (at, length): (*mut u8, usize)) {
        let Backing::Shared(endpoint, ..) = &self.backing else { return };
        worker.touches(*endpoint);
        for skip in (0..length).step_by(PAGE).chain(length.checked_sub(1)) {
            // SAFETY: `skip` is less than `length`, and that many bytes are mapped.
            let byte = unsafe { at.add(skip) };
            // SAFETY: as above. It may change meanwhile: nobody looks at what is read.
            let _ = unsafe { byte.read_volatile() };
        }
    }

    /// Copies between `own`, which is mapped here, and as many bytes from `skip` on; `write` is to
    /// the piece.
    fn transfer(
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
fn transfer(
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

/// The rights that a region may ask for, without what is only a hint.
pub(crate) const ACCESS_KNOWN: u32 = ibv::ACCESS_LOCAL_WRITE
    | ibv::ACCESS_REMOTE_WRITE
    | ibv::ACCESS_REMOTE_READ
    | ibv::ACCESS_REMOTE_ATOMIC;

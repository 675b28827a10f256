//! Memory regions: which bytes a key names.

use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::ibv;

use crate::ibverbs;
use crate::pieces::{Backing, Piece, User};
use crate::process::Process;
use crate::protection::{Protection, protects};
use crate::table::Table;

/// The rights that a region may ask for, without what is only a hint.
pub(crate) const ACCESS_KNOWN: u32 = ibv::ACCESS_LOCAL_WRITE
    | ibv::ACCESS_REMOTE_WRITE
    | ibv::ACCESS_REMOTE_READ
    | ibv::ACCESS_REMOTE_ATOMIC;

/// The key, the range or the right is wrong, or the memory is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault;

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
            pieces.push(Piece::new(user, backing, size(stop - begin)?));
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
        pieces.push(Piece::new(user, backing, size(end - begin)?));
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
    /// The queue pair's.
    pub(crate) epoch: u64,
    pub(crate) pd: u32,
    /// `enum ibv_access_flags`; 0: reading by the owner.
    pub(crate) access: u32,
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

/// Finds the bytes that a key and an address name, if all are mapped, and adds all that is mapped
/// of the region, unless it was added last: which piece that is, and where in it they begin.
pub(crate) fn place(
    regions: &Regions,
    key: u32,
    address: u64,
    length: usize,
    usage: Use,
    pieces: &mut Vec<Piece>,
) -> Option<(usize, usize)> {
    let (region, offset) = look(regions, key, address, length, usage).ok()?;
    let mapped = region.mapped.as_ref()?;
    let skip = offset.checked_sub(mapped.first)?;
    if skip.checked_add(length as u64)? > mapped.length {
        return None;
    }
    let user = User { key, region: region.number, qp: usage.qp, epoch: usage.epoch };
    if pieces.last().is_none_or(|last| last.user() != user) {
        let backing = Backing::Shared(mapped.endpoint, Arc::clone(&mapped.shared), mapped.at);
        pieces.push(Piece::new(user, backing, size(mapped.length).ok()?));
    }
    Some((pieces.len() - 1, size(skip).ok()?))
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
    let user = User { key, region: region.number, qp: usage.qp, epoch: usage.epoch };
    region.pieces(user, offset, length, pieces)
}

//! Memory of programs: which bytes a key names, and how they are copied.
//!
//! The memory of a program belongs to the program, which may write to it, unmap it or end at any time.
//! Bytes are copied from one place to another and never looked at; a place that is not there any more is
//! a [`Fault`]. Nothing here allocates after it was made.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::ibv;

use crate::sys;
use crate::table::Table;

/// How many bytes are copied at a time when they go through memory of the router: they stay in the
/// processor's cache between the two copies.
pub(crate) const CHUNK: usize = 64 * 1024;

/// The process whose memory a context names.
pub(crate) struct Process {
    pid: libc::pid_t,
    pidfd: OwnedFd,
}

impl Process {
    pub(crate) fn new((pid, pidfd): (libc::pid_t, OwnedFd)) -> Self {
        Self { pid, pidfd }
    }

    /// Its number, for people to read.
    pub(crate) fn pid(&self) -> libc::pid_t {
        self.pid
    }

    /// Whether the first and the last byte of a range can be read.
    pub(crate) fn has(&self, address: u64, length: u64) -> bool {
        let mut byte = 0_u8;
        [address, address + (length - 1)].into_iter().all(|at| {
            let place = [iovec(at, 1)];
            // SAFETY: `byte` is one byte of this function's own.
            sys::is_alive(&self.pidfd)
                && unsafe { sys::process_copy(self.pid, (&raw mut byte, 1), &place, false) }
        })
    }
}

/// Where the bytes of a region are.
#[derive(Clone)]
pub(crate) enum Backing {
    /// In a program, at this address.
    Process(Rc<Process>, u64),
    /// In memory that the router has mapped, from this offset: all of the region lies in it.
    Shared(Arc<SharedMemory>, u64),
}

/// A memory region.
pub(crate) struct Region {
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) iova: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
    pub(crate) backing: Backing,
    /// Handle of the memory, 0 if it is the program's own.
    pub(crate) memory: u32,
}

/// What a key is to be used for.
#[derive(Clone, Copy)]
pub(crate) struct Use {
    pub(crate) pd: u32,
    /// `enum ibv_access_flags`; 0: reading by the owner.
    pub(crate) access: u32,
}

/// Bytes somewhere, found and checked.
#[derive(Clone)]
pub(crate) struct Piece {
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

/// Finds the bytes that a key and an address name.
pub(crate) fn find(
    regions: &Regions,
    key: u32,
    address: u64,
    length: usize,
    usage: Use,
) -> Result<Piece, Fault> {
    let region = regions.get(key).ok_or(Fault)?;
    let offset = address.checked_sub(region.iova).ok_or(Fault)?;
    let end = offset.checked_add(length as u64).ok_or(Fault)?;
    if end > region.length || region.pd != usage.pd || region.access & usage.access != usage.access
    {
        return Err(Fault);
    }
    let backing = match &region.backing {
        Backing::Process(process, at) => {
            Backing::Process(Rc::clone(process), at.checked_add(offset).ok_or(Fault)?)
        }
        Backing::Shared(memory, at) => {
            Backing::Shared(Arc::clone(memory), at.checked_add(offset).ok_or(Fault)?)
        }
    };
    Ok(Piece { backing, length })
}

/// Copies bytes through memory of its own, [`CHUNK`] at a time.
pub(crate) struct Copier {
    buffer: Box<[u8; CHUNK]>,
    remote: Vec<libc::iovec>,
}

impl Copier {
    pub(crate) fn new() -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice().try_into();
        Self { buffer: buffer.expect("as long as a chunk"), remote: Vec::with_capacity(64) }
    }

    /// Copies the pieces of one side to those of the other: the same number of bytes, at most a chunk.
    pub(crate) fn copy(&mut self, from: &[Piece], to: &[Piece]) -> Result<(), Side> {
        let length: usize = from.iter().map(|p| p.length).sum();
        debug_assert_eq!(length, to.iter().map(|p| p.length).sum());
        // One copy where one side is a single piece of memory that the router has mapped.
        if let [Piece { backing: Backing::Shared(memory, at), .. }] = from {
            let place = place(memory, *at, length).ok_or(Side::Source)?;
            return transfer(&mut self.remote, place, to, true).map_err(|_| Side::Destination);
        }
        if let [Piece { backing: Backing::Shared(memory, at), .. }] = to {
            let place = place(memory, *at, length).ok_or(Side::Destination)?;
            return transfer(&mut self.remote, place, from, false).map_err(|_| Side::Source);
        }
        let own = self.buffer.get_mut(..length).ok_or(Side::Source)?;
        let own = (own.as_mut_ptr(), length);
        transfer(&mut self.remote, own, from, false).map_err(|_| Side::Source)?;
        transfer(&mut self.remote, own, to, true).map_err(|_| Side::Destination)
    }

    /// Reads the pieces into memory of the router.
    pub(crate) fn load(&mut self, from: &[Piece], to: &mut [u8]) -> Result<(), Fault> {
        transfer(&mut self.remote, (to.as_mut_ptr(), to.len()), from, false)
    }

    /// Reads the pieces, `length` bytes and at most a chunk, and shows what they were.
    pub(crate) fn load_own(&mut self, from: &[Piece], length: usize) -> Result<&[u8], Fault> {
        let own = self.buffer.get_mut(..length).ok_or(Fault)?;
        transfer(&mut self.remote, (own.as_mut_ptr(), length), from, false)?;
        Ok(&self.buffer[..length])
    }

    /// Writes bytes to the pieces.
    pub(crate) fn store(&mut self, from: &[u8], to: &[Piece]) -> Result<(), Fault> {
        // The bytes are only read.
        transfer(&mut self.remote, (from.as_ptr().cast_mut(), from.len()), to, true)
    }
}

fn iovec(address: u64, length: usize) -> libc::iovec {
    let address = usize::try_from(address).unwrap_or(0);
    // A number of another process, and no address here.
    libc::iovec { iov_base: core::ptr::without_provenance_mut(address), iov_len: length }
}

/// The address of bytes in mapped memory, if all of them lie in it.
fn place(memory: &Arc<SharedMemory>, at: u64, length: usize) -> Option<(*mut u8, usize)> {
    let at = usize::try_from(at).ok()?;
    if at.checked_add(length)? > memory.len() {
        return None;
    }
    // SAFETY: the check above says that the range lies in the mapping.
    Some((unsafe { memory.as_ptr().byte_add(at) }.as_ptr(), length))
}

/// Copies between `own`, which is mapped here, and pieces with as many bytes; `write` is to the pieces.
/// Neighbouring pieces of one process take one system call.
fn transfer(
    remote: &mut Vec<libc::iovec>,
    own: (*mut u8, usize),
    pieces: &[Piece],
    write: bool,
) -> Result<(), Fault> {
    let mut done = 0;
    let mut i = 0;
    while i < pieces.len() {
        // SAFETY: the pieces have as many bytes as `own` together.
        let here = unsafe { own.0.add(done) };
        match &pieces[i].backing {
            Backing::Shared(memory, at) => {
                let length = pieces[i].length;
                let (there, _) = place(memory, *at, length).ok_or(Fault)?;
                let (from, to) = if write { (here, there) } else { (there, here) };
                // SAFETY: both ranges are mapped. The program may write to one meanwhile: what is
                // copied then is any mixture of bytes, which nobody looks at. They may be the same
                // memory, therefore not `copy_nonoverlapping`.
                unsafe { core::ptr::copy(from, to, length) };
                done += length;
                i += 1;
            }
            Backing::Process(process, _) => {
                remote.clear();
                let mut length = 0;
                while let Some(Piece { backing: Backing::Process(p, at), length: n }) =
                    pieces.get(i)
                    && Rc::ptr_eq(p, process)
                    && remote.len() < remote.capacity()
                {
                    remote.push(iovec(*at, *n));
                    length += n;
                    i += 1;
                }
                // SAFETY: `own` is the caller's, and has these bytes from `done` on.
                let copied = sys::is_alive(&process.pidfd)
                    && unsafe { sys::process_copy(process.pid, (here, length), remote, write) };
                if !copied {
                    return Err(Fault);
                }
                done += length;
            }
        }
    }
    Ok(())
}

/// The rights that a region may ask for, without what is only a hint.
pub(crate) const ACCESS_KNOWN: u32 = ibv::ACCESS_LOCAL_WRITE
    | ibv::ACCESS_REMOTE_WRITE
    | ibv::ACCESS_REMOTE_READ
    | ibv::ACCESS_REMOTE_ATOMIC;

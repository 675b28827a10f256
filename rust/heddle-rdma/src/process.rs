//! The memory of the programs that have connected.
//!
//! It belongs to the program, which may write to it, unmap it or end at any time.

#![expect(unsafe_code, reason = "memory of other processes")]

use core::sync::atomic::{AtomicU64, Ordering};
use std::os::fd::OwnedFd;

use shared_ring::SharedMemory;
use verbs_protocol::abi;

use crate::baton::Worker;
use crate::protection::{Protection, protects};
use crate::sys;

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

    /// Whose it is.
    pub(crate) fn endpoint(&self) -> u32 {
        self.endpoint
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
    pub(crate) unsafe fn copy(
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

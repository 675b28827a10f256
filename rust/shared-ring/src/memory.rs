//! Sealed shared memory: a memfd whose size can never change, mapped.
//!
//! A mapping of a file that shrinks kills its reader by SIGBUS, and a peer that holds the
//! descriptor can shrink it. Therefore memory is mapped only after the kernel has promised, by
//! seals, that nobody can change its size any more.

#![expect(unsafe_code, reason = "memory that a peer writes to")]

use core::ffi::CStr;
use core::ptr::NonNull;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::protection::protects;
use crate::sys;

/// Why memory could not be made or was refused.
#[derive(Debug)]
pub enum MemoryError {
    /// The kernel refused a call.
    Os {
        /// What was being done, for the message.
        doing: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The descriptor is no memfd of ordinary pages. Huge pages are refused, because a peer can
    /// give them back by a hole, and a later access ends by SIGBUS if the machine has no other.
    NotMemory,
    /// The size is not sealed: these are the seals (`F_SEAL_*`) that the file has.
    NotSealed(i32),
    /// The file is sealed against writing: these are the seals that it has.
    NotWritable(i32),
    /// The file has another size than was agreed upon, in bytes.
    WrongSize {
        /// The size of the file.
        is: u64,
        /// The size that was agreed upon.
        want: u64,
    },
}

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os { doing, source } => write!(f, "{doing}: {source}"),
            Self::NotMemory => write!(f, "the descriptor is no memfd of ordinary pages"),
            Self::NotSealed(seals) => write!(f, "the size is not sealed (seals {seals:#x})"),
            Self::NotWritable(seals) => write!(f, "sealed against writing (seals {seals:#x})"),
            Self::WrongSize { is, want } => write!(f, "{is} bytes where {want} were agreed upon"),
        }
    }
}

impl std::error::Error for MemoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Os { source, .. } => Some(source),
            _ => None,
        }
    }
}

fn os(doing: &'static str) -> impl FnOnce(io::Error) -> MemoryError {
    move |source| MemoryError::Os { doing, source }
}

/// A mapped memfd whose size is sealed. Rings and doorbells in it keep it mapped.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    file: File,
    closed: AtomicBool,
}

// SAFETY: the mapping belongs to no thread. This crate reads and writes it by atomics only.
unsafe impl Send for SharedMemory {}
// SAFETY: as above; a shared reference gives nothing but atomics and an address.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes memory of `len` bytes, all zero, seals its size and maps it. `name` is what
    /// `/proc/PID/maps` shows. The descriptor is closed on exec.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Os`] if the kernel refuses, such as EMFILE, or EINVAL for a length of 0.
    pub fn create(name: &CStr, len: usize) -> Result<Arc<Self>, MemoryError> {
        let file = File::from(sys::memfd_create(name).map_err(os("create memfd"))?);
        file.set_len(len as u64).map_err(os("size memfd"))?;
        if protects("seals") {
            sys::add_seals(file.as_fd(), sys::SIZE_SEALS).map_err(os("seal memfd"))?;
        }
        Self::map(file, len)
    }

    /// Maps memory that another process made, after checking that nobody can change its size any
    /// more and that it has the `len` bytes that both sides agreed upon. How the descriptor came
    /// here (`SCM_RIGHTS`) is the caller's business; so is that it is closed on exec.
    ///
    /// # Errors
    ///
    /// Everything but [`MemoryError::Os`] means that the peer does not keep to the rules.
    pub fn open(fd: OwnedFd, len: usize) -> Result<Arc<Self>, MemoryError> {
        let file = File::from(fd);
        let seals = match sys::seals(file.as_fd()) {
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => Err(MemoryError::NotMemory),
            result => result.map_err(os("read seals")),
        }?;
        if seals & sys::SIZE_SEALS != sys::SIZE_SEALS {
            return Err(MemoryError::NotSealed(seals));
        }
        if seals & sys::WRITE_SEALS != 0 {
            return Err(MemoryError::NotWritable(seals));
        }
        if !sys::is_tmpfs(file.as_fd()).map_err(os("read file system"))? {
            return Err(MemoryError::NotMemory);
        }
        // Asked after the seals: from here on no answer can change.
        let is = file.metadata().map_err(os("read size"))?.len();
        if is != len as u64 {
            return Err(MemoryError::WrongSize { is, want: len as u64 });
        }
        Self::map(file, len)
    }

    /// Maps all of the memory of a PCI device, by the file that the kernel has for it in sysfs
    /// (`resourceN`): what a virtual machine sees of memory that the machine outside has made. The
    /// device's size is the file's, and nobody in here can change it.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotMemory`] for a file that is not in sysfs, [`MemoryError::Os`].
    pub fn of_device(file: File) -> Result<Arc<Self>, MemoryError> {
        if !sys::is_sysfs(file.as_fd()).map_err(os("read file system"))? {
            return Err(MemoryError::NotMemory);
        }
        let len = file.metadata().map_err(os("read size"))?.len();
        Self::map(file, usize::try_from(len).unwrap_or(0))
    }

    fn map(file: File, len: usize) -> Result<Arc<Self>, MemoryError> {
        let base = sys::map(file.as_fd(), len).map_err(os("map memfd"))?;
        Ok(Arc::new(Self { base, len, file, closed: AtomicBool::new(false) }))
    }

    /// Whether [`Self::close_to_holes`] was called, and has succeeded.
    #[must_use]
    pub fn is_closed_to_holes(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// From now on nobody makes a hole in the memory: who touches a page while somebody does waits
    /// until all of that hole is made, perhaps with the address space locked. Nobody maps the
    /// memory for writing any more, either: the peer has to have done so. It waits for a hole that
    /// is being made.
    ///
    /// # Errors
    ///
    /// The kernel's: EPERM if the peer has kept others from adding seals.
    pub fn close_to_holes(&self) -> io::Result<()> {
        let fd = self.file.as_fd();
        if protects("holes")
            && let Err(err) = sys::add_seals(fd, sys::HOLE_SEALS)
            && sys::seals(fd)? & libc::F_SEAL_FUTURE_WRITE == 0
        {
            return Err(err);
        }
        self.closed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of the memory.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory of no bytes cannot be made")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Where the memory lies in this process: [`Self::len`] bytes, at a page boundary, as long as
    /// `self` lives. A peer may write any of them at any time, so that a reader has to use atomics
    /// or volatile reads, and has to copy a value before it checks it.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// The four bytes at `offset`, which the peer may write to at any time; `None` if they are not
    /// aligned or not inside the memory.
    #[must_use]
    pub fn word32(&self, offset: usize) -> Option<&AtomicU32> {
        // SAFETY: `place` has checked it, any bytes are a value of an atomic, and `self` keeps the
        // memory mapped.
        self.place(offset, 0).map(|word| unsafe { word.as_ref() })
    }

    /// The same of eight bytes.
    #[must_use]
    pub fn word64(&self, offset: usize) -> Option<&AtomicU64> {
        // SAFETY: as in `word32`.
        self.place(offset, 0).map(|word| unsafe { word.as_ref() })
    }

    /// The address of a `T` at `offset`; `None` if it is not aligned for a `T` or not all of it and
    /// the `extra` bytes behind it lie in the memory.
    pub(crate) fn place<T>(&self, offset: usize, extra: usize) -> Option<NonNull<T>> {
        let end = offset.checked_add(size_of::<T>())?.checked_add(extra)?;
        if end > self.len || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: the check above says that `offset` is inside the mapping.
        Some(unsafe { self.base.byte_add(offset) }.cast())
    }
}

impl AsFd for SharedMemory {
    /// The memfd, to be passed on to the peer.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping, and whoever uses it holds an Arc of `self`.
        unsafe { sys::unmap(self.base, self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn copy(memory: &SharedMemory) -> OwnedFd {
        memory.as_fd().try_clone_to_owned().unwrap()
    }

    fn unsealed(len: u64) -> File {
        let file = File::from(sys::memfd_create(c"test").unwrap());
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn a_file_that_is_no_devices_is_refused() {
        let refused = SharedMemory::of_device(unsealed(4096)).unwrap_err();
        assert!(matches!(refused, MemoryError::NotMemory));
    }

    #[test]
    fn both_sides_see_the_same_bytes() {
        let ours = SharedMemory::create(c"test", 8192).unwrap();
        let theirs = SharedMemory::open(copy(&ours), 8192).unwrap();
        assert_ne!(ours.as_ptr(), theirs.as_ptr());
        let [ours, theirs] = [&ours, &theirs].map(|m| m.as_ptr().as_ptr().wrapping_add(8191));
        // SAFETY: the address is of the mapping's last byte, and nobody else uses it.
        unsafe { ours.write_volatile(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.read_volatile() }, 7);
    }

    #[test]
    fn nobody_can_change_the_size() {
        let memory = SharedMemory::create(c"test", 8192).unwrap();
        let file = File::from(copy(&memory));
        for len in [0, 4096, 16384] {
            let err = file.set_len(len).unwrap_err();
            assert_eq!(err.raw_os_error(), Some(libc::EPERM), "{len}");
        }
        let err = sys::add_seals(file.as_fd(), libc::F_SEAL_WRITE).unwrap_err();
        assert_eq!(err.raw_os_error(), Some(libc::EBUSY));
    }

    #[test]
    fn nobody_can_make_holes_when_it_is_closed_to_them() {
        let ours = SharedMemory::create(c"test", 8192).unwrap();
        let theirs = SharedMemory::open(copy(&ours), 8192).unwrap();
        let punch = || {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            // SAFETY: fallocate takes numbers.
            let punched = unsafe { libc::fallocate(theirs.file.as_raw_fd(), mode, 0, 8192) };
            if punched == 0 { None } else { io::Error::last_os_error().raw_os_error() }
        };
        assert_eq!((punch(), ours.is_closed_to_holes()), (None, false));
        ours.close_to_holes().unwrap();
        assert_eq!((punch(), ours.is_closed_to_holes()), (Some(libc::EPERM), true));
        // What was mapped stays so.
        // SAFETY: the address is of the mapping's first byte, and nobody else uses it.
        unsafe { theirs.as_ptr().as_ptr().write_volatile(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { ours.as_ptr().as_ptr().read_volatile() }, 7);
        assert!(SharedMemory::open(copy(&ours), 8192).is_err());
        // A second time there is nothing to add.
        ours.close_to_holes().unwrap();
        // A peer that has its own way with seals.
        let ours = SharedMemory::create(c"test", 8192).unwrap();
        sys::add_seals(ours.file.as_fd(), libc::F_SEAL_SEAL).unwrap();
        assert_eq!(ours.close_to_holes().unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(!ours.is_closed_to_holes());
    }

    #[test]
    fn what_is_not_sealed_is_refused() {
        let all = [libc::F_SEAL_SHRINK, libc::F_SEAL_GROW];
        for missing in all {
            let file = unsealed(4096);
            let seals = all.iter().filter(|s| **s != missing).fold(0, |a, b| a | b);
            sys::add_seals(file.as_fd(), seals).unwrap();
            let refused = SharedMemory::open(file.into(), 4096);
            assert!(matches!(refused, Err(MemoryError::NotSealed(_))), "{missing}: {refused:?}");
        }
        for extra in [libc::F_SEAL_WRITE, libc::F_SEAL_FUTURE_WRITE] {
            let file = unsealed(4096);
            sys::add_seals(file.as_fd(), sys::SIZE_SEALS | extra).unwrap();
            let refused = SharedMemory::open(file.into(), 4096);
            assert!(matches!(refused, Err(MemoryError::NotWritable(_))), "{extra}: {refused:?}");
        }
    }

    #[test]
    fn other_sizes_and_other_files_are_refused() {
        let memory = SharedMemory::create(c"test", 8192).unwrap();
        for want in [4096, 8191, 8193, 1 << 40] {
            let refused = SharedMemory::open(copy(&memory), want);
            assert!(
                matches!(refused, Err(MemoryError::WrongSize { is: 8192, .. })),
                "{want}: {refused:?}"
            );
        }
        let null = File::open("/dev/null").unwrap();
        assert!(matches!(SharedMemory::open(null.into(), 4096), Err(MemoryError::NotMemory)));
        assert!(matches!(SharedMemory::create(c"test", 0), Err(MemoryError::Os { .. })));
    }

    #[test]
    fn a_descriptor_that_may_only_read_is_refused() {
        let memory = SharedMemory::create(c"test", 4096).unwrap();
        let path = format!("/proc/self/fd/{}", memory.as_fd().as_raw_fd());
        let refused = SharedMemory::open(File::open(path).unwrap().into(), 4096);
        assert!(matches!(refused, Err(MemoryError::Os { doing: "map memfd", .. })), "{refused:?}");
    }

    #[test]
    fn places_are_inside_and_aligned() {
        let memory = SharedMemory::create(c"test", 4096).unwrap();
        assert!(memory.place::<u64>(4088, 0).is_some());
        for (offset, extra) in
            [(4089, 0), (4096, 0), (4088, 1), (4, 0), (usize::MAX - 7, 0), (8, usize::MAX)]
        {
            assert!(memory.place::<u64>(offset, extra).is_none(), "{offset} {extra}");
        }
        assert!(memory.word32(4092).is_some() && memory.word64(4088).is_some());
        assert!(memory.word32(4094).is_none() && memory.word32(4096).is_none());
        assert!(memory.word64(4092).is_none() && memory.word64(4096).is_none());
    }
}

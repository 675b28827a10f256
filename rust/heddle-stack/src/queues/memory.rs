//! The memory of a region: which byte is what, and every access to it that is no ring of nqes.

#![expect(unsafe_code, reason = "memory that a peer writes to")]

use core::mem::offset_of;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use shared_ring::{ALIGNMENT, SharedMemory, ring_size};
use unix_io::length;

use super::abi::*;
use super::proto::Errno;

const PAGE: usize = 4096;

/// What a region is made of, and where. The service computes it and never reads it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Slots of each of the two rings of nqes.
    pub slots: u32,
    /// Pairs of byte rings.
    pub streams: u32,
    /// Bytes of each byte ring.
    pub capacity: u32,
    /// Where the job ring lies.
    pub jobs: usize,
    /// Where the completion ring lies.
    pub completions: usize,
    stream_words: usize,
    bytes: usize,
    /// Bytes of the region.
    pub size: usize,
}

impl Layout {
    /// The layout of a region with so much of everything; EINVAL if there can be none.
    ///
    /// # Errors
    ///
    /// As above.
    pub fn new(slots: u32, streams: u32, capacity: u32) -> Result<Self, Errno> {
        let good = slots.is_power_of_two()
            && (QUEUES_SLOTS_MIN..=QUEUES_SLOTS_MAX).contains(&slots)
            && (1..=QUEUES_STREAMS_MAX).contains(&streams)
            && capacity.is_power_of_two()
            && (QUEUES_CAPACITY_MIN..=QUEUES_CAPACITY_MAX).contains(&capacity);
        if !good {
            return Err(Errno(libc::EINVAL));
        }
        let ring = ring_size(slots).next_multiple_of(PAGE);
        let jobs = PAGE;
        let completions = jobs + ring;
        let stream_words = completions + ring;
        let words = streams as usize * size_of::<queues_stream>();
        let bytes = stream_words + words.next_multiple_of(PAGE);
        let size = bytes + 2 * streams as usize * capacity as usize;
        Ok(Self { slots, streams, capacity, jobs, completions, stream_words, bytes, size })
    }

    /// The layout that a header claims; `None` unless it is one that a service makes.
    #[must_use]
    pub fn claimed(header: &Claim, size: usize) -> Option<Self> {
        let ours = Self::new(header.slots, header.streams, header.capacity).ok()?;
        let same = ours.size == size
            && header.size == size as u64
            && header.jobs == ours.jobs as u64
            && header.completions == ours.completions as u64
            && header.streams_at == ours.stream_words as u64
            && header.bytes == ours.bytes as u64;
        same.then_some(ours)
    }
}

/// The constant part of a header, copied.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the header describes them")]
pub struct Claim {
    pub magic: u64,
    pub version: u32,
    pub flags: u32,
    pub size: u64,
    pub generation: u64,
    pub slots: u32,
    pub streams: u32,
    pub capacity: u32,
    pub jobs: u64,
    pub completions: u64,
    pub streams_at: u64,
    pub bytes: u64,
}

/// Which of the two byte rings of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the guest.
    Out,
    /// To the guest.
    In,
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident: $field:ident, $t:ty) => {
        $(#[$doc])*
        #[must_use]
        pub fn $name(&self, stream: u16) -> &$t {
            self.at(self.word_of(stream, offset_of!(queues_stream, $field)))
        }
    };
}

/// A region's memory. All addresses that it gives lie within it.
#[derive(Debug)]
pub struct View {
    memory: Arc<SharedMemory>,
    /// Where things lie.
    pub layout: Layout,
}

/// What may be read and written as it lies in shared memory.
trait Word {}
impl Word for AtomicU32 {}
impl Word for AtomicU64 {}
impl Word for AtomicI32 {}

impl View {
    /// A view of memory that has the layout's size.
    ///
    /// # Panics
    ///
    /// If it has another.
    #[must_use]
    pub fn new(memory: Arc<SharedMemory>, layout: Layout) -> Self {
        assert!(memory.len() == layout.size, "a layout of another memory");
        Self { memory, layout }
    }

    /// The memory itself.
    #[must_use]
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    fn at<T: Word>(&self, offset: usize) -> &T {
        let end = offset.checked_add(size_of::<T>());
        assert!(
            end.is_some_and(|end| end <= self.layout.size)
                && offset.is_multiple_of(align_of::<T>()),
            "a word outside of the region"
        );
        // SAFETY: the assertion says that it lies in the mapping.
        let place = unsafe { self.memory.as_ptr().byte_add(offset) }.cast::<T>();
        // SAFETY: it is aligned, mapped as long as `self` lives, and any bytes are an atomic.
        unsafe { place.as_ref() }
    }

    fn word_of(&self, stream: u16, field: usize) -> usize {
        assert!(u32::from(stream) < self.layout.streams, "no such stream");
        self.layout.stream_words + usize::from(stream) * size_of::<queues_stream>() + field
    }

    word!(
        /// Bytes that the guest has put into the out ring.
        out_produced: out_produced, AtomicU64
    );
    word!(
        /// Bytes that the guest has taken out of the in ring.
        in_consumed: in_consumed, AtomicU64
    );
    word!(
        /// `QUEUES_WAITS_...`: the guest wants room.
        out_waiting: out_waiting, AtomicU32
    );
    word!(
        /// 1: the guest waits for bytes.
        in_waiting: in_waiting, AtomicU32
    );
    word!(
        /// Bytes that the socket has taken.
        out_consumed: out_consumed, AtomicU64
    );
    word!(
        /// Bytes that came from the socket.
        in_produced: in_produced, AtomicU64
    );
    word!(
        /// 1: the service waits for bytes.
        out_asleep: out_asleep, AtomicU32
    );
    word!(
        /// 1: the service waits for room.
        in_asleep: in_asleep, AtomicU32
    );
    word!(
        /// Of the connection that has the stream.
        generation: generation, AtomicU32
    );
    word!(
        /// `QUEUES_STREAM_...`
        state: state, AtomicU32
    );
    word!(
        /// How the connection ended.
        error: error, AtomicI32
    );

    /// A word of the header.
    #[must_use]
    pub fn header(&self, field: HeaderWord) -> &AtomicU32 {
        self.at(match field {
            HeaderWord::Beat => offset_of!(queues_header, beat),
            HeaderWord::Ended => offset_of!(queues_header, ended),
            HeaderWord::Stop => offset_of!(queues_header, stop),
            HeaderWord::GuestBeat => offset_of!(queues_header, guest_beat),
        })
    }

    /// Writes the constant part of the header.
    pub fn describe(&self, flags: u32, generation: u64) {
        let l = &self.layout;
        let word = |at, value| self.at::<AtomicU32>(at).store(value, Ordering::Relaxed);
        let long = |at, value| self.at::<AtomicU64>(at).store(value, Ordering::Relaxed);
        word(offset_of!(queues_header, version), QUEUES_VERSION);
        // Of sockets that are programs' own.
        let edges = if flags & QUEUES_CONTROL == 0 { QUEUES_EDGES } else { 0 };
        word(offset_of!(queues_header, flags), flags | edges);
        long(offset_of!(queues_header, size), l.size as u64);
        word(offset_of!(queues_header, slots), l.slots);
        word(offset_of!(queues_header, streams), l.streams);
        word(offset_of!(queues_header, capacity), l.capacity);
        long(offset_of!(queues_header, jobs_at), l.jobs as u64);
        long(offset_of!(queues_header, completions_at), l.completions as u64);
        long(offset_of!(queues_header, streams_at), l.stream_words as u64);
        long(offset_of!(queues_header, bytes_at), l.bytes as u64);
        for field in [HeaderWord::Beat, HeaderWord::Ended, HeaderWord::Stop, HeaderWord::GuestBeat]
        {
            self.header(field).store(0, Ordering::Relaxed);
        }
        word(JOB_BELL, 0);
        word(COMPLETION_BELL, 0);
        long(offset_of!(queues_header, generation), generation);
        // The guest of a virtual machine looks at this one first.
        self.at::<AtomicU64>(offset_of!(queues_header, magic))
            .store(QUEUES_MAGIC, Ordering::Release);
    }

    /// Copies the constant part of the header, of memory that a service has made.
    #[must_use]
    pub fn claim(memory: &SharedMemory) -> Option<Claim> {
        if memory.len() < size_of::<queues_header>() {
            return None;
        }
        // SAFETY: it lies in the mapping, which begins at a page, and consists of integers; another
        // process may write it, which is what volatile reads are for.
        let h = unsafe { memory.as_ptr().cast::<queues_header>().read_volatile() };
        let claim = Claim {
            magic: h.magic,
            version: h.version,
            flags: h.flags,
            size: h.size,
            generation: h.generation,
            slots: h.slots,
            streams: h.streams,
            capacity: h.capacity,
            jobs: h.jobs_at,
            completions: h.completions_at,
            streams_at: h.streams_at,
            bytes: h.bytes_at,
        };
        (claim.magic == QUEUES_MAGIC && claim.version == QUEUES_VERSION).then_some(claim)
    }

    /// The two pieces that `n` bytes of a byte ring are, from byte `from` of its stream.
    fn pieces(&self, stream: u16, way: Way, from: u64, n: usize) -> [libc::iovec; 2] {
        let capacity = self.layout.capacity as usize;
        assert!(u32::from(stream) < self.layout.streams && n <= capacity, "no such bytes");
        let ring = 2 * usize::from(stream) + usize::from(way == Way::In);
        let base = self.layout.bytes + ring * capacity;
        let at = usize::try_from(from & (capacity as u64 - 1)).unwrap_or(0);
        let first = n.min(capacity - at);
        let piece = |offset, length| {
            // SAFETY: the layout's size has all byte rings, and `offset` lies in this one.
            let place = unsafe { self.memory.as_ptr().byte_add(base + offset) };
            libc::iovec { iov_base: place.as_ptr().cast(), iov_len: length }
        };
        [piece(at, first), piece(0, n - first)]
    }

    /// Has a socket take bytes out of the out ring, and never waits. The kernel copies them, so
    /// that it is all the same what the guest does to them meanwhile.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn send(&self, to: BorrowedFd<'_>, stream: u16, from: u64, n: usize) -> io::Result<usize> {
        let mut pieces = self.pieces(stream, Way::Out, from, n);
        let message = message_of(&mut pieces);
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `message` names memory of the region, which the kernel reads.
        length(unsafe { libc::sendmsg(to.as_raw_fd(), &raw const message, flags) })
    }

    /// Has bytes of a socket come into the in ring, and never waits.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn receive(
        &self,
        from: BorrowedFd<'_>,
        stream: u16,
        to: u64,
        n: usize,
    ) -> io::Result<usize> {
        let mut pieces = self.pieces(stream, Way::In, to, n);
        let mut message = message_of(&mut pieces);
        // SAFETY: `message` names memory of the region, which the kernel writes.
        length(unsafe { libc::recvmsg(from.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) })
    }

    /// Copies bytes into a byte ring, or out of it: the guest's side.
    pub fn copy(&self, stream: u16, way: Way, at: u64, bytes: &mut [u8]) {
        let mut rest = bytes;
        for piece in self.pieces(stream, way, at, rest.len()) {
            let (some, more) = rest.split_at_mut(piece.iov_len);
            let theirs = piece.iov_base.cast::<u8>();
            match way {
                // SAFETY: both have `iov_len` bytes, and do not overlap.
                Way::Out => unsafe { theirs.copy_from_nonoverlapping(some.as_ptr(), some.len()) },
                // SAFETY: as above.
                Way::In => unsafe {
                    some.as_mut_ptr().copy_from_nonoverlapping(theirs, some.len());
                },
            }
            rest = more;
        }
    }

    /// Waits at a word until somebody wakes, if it is 1.
    pub fn wait(word: &AtomicU32) {
        let forever = core::ptr::null::<libc::timespec>();
        // SAFETY: the kernel reads the word, which is mapped.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 1, forever) };
    }

    /// Wakes whoever waits at a word.
    pub fn wake(word: &AtomicU32) {
        // SAFETY: FUTEX_WAKE looks at no memory.
        unsafe {
            libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX);
        }
    }
}

fn message_of(pieces: &mut [libc::iovec; 2]) -> libc::msghdr {
    // SAFETY: msghdr consists of integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = pieces.as_mut_ptr();
    message.msg_iovlen = if pieces[1].iov_len == 0 { 1 } else { 2 };
    message
}

/// Words of the header that change.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the header describes them")]
pub enum HeaderWord {
    Beat,
    Ended,
    Stop,
    GuestBeat,
}

/// Where the doorbells lie.
pub const JOB_BELL: usize = offset_of!(queues_header, job_bell);
/// As above.
pub const COMPLETION_BELL: usize = offset_of!(queues_header, completion_bell);

/// Says that this side waits, and has to look once more.
pub fn arm(word: &AtomicU32) {
    word.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Whether the other side waits, and this one is to wake it: asked after something was shown.
#[must_use]
pub fn take_armed(word: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    word.load(Ordering::Relaxed) == 1
        && word.compare_exchange(1, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// `take_armed` of a word of several bits: those that were set.
#[must_use]
pub fn take_waits(word: &AtomicU32) -> u32 {
    fence(Ordering::SeqCst);
    if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::Relaxed) }
}

const _: () = {
    assert!(size_of::<queues_nqe>() == shared_ring::SLOT_SIZE);
    assert!(JOB_BELL.is_multiple_of(ALIGNMENT) && COMPLETION_BELL.is_multiple_of(ALIGNMENT));
    assert!(size_of::<queues_header>() <= PAGE);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_those_of_the_page() {
        let l = Layout::new(256, 4, 65536).unwrap();
        assert_eq!((l.jobs, l.completions), (4096, 4096 + 20480));
        assert_eq!(l.size - l.bytes, 8 * 65536);
        for (slots, streams, capacity) in
            [(0, 1, 65536), (48, 1, 65536), (8192, 1, 65536), (16, 0, 65536), (16, 1025, 65536)]
        {
            assert_eq!(Layout::new(slots, streams, capacity), Err(Errno(libc::EINVAL)));
        }
        for capacity in [0, 32768, 65537, 1 << 21] {
            assert_eq!(Layout::new(16, 1, capacity), Err(Errno(libc::EINVAL)));
        }
    }

    #[test]
    fn bytes_wrap() {
        let layout = Layout::new(16, 2, 65536).unwrap();
        let view = View::new(SharedMemory::create(c"test", layout.size).unwrap(), layout);
        let mut bytes: Vec<u8> = (0..=255).cycle().take(40000).collect();
        view.copy(1, Way::Out, 50000, &mut bytes);
        let [a, b] = view.pieces(1, Way::Out, 50000, 40000);
        assert_eq!((a.iov_len, b.iov_len), (15536, 24464));
        // SAFETY: nobody else uses the memory.
        assert_eq!(unsafe { b.iov_base.cast::<u8>().read() }, bytes[15536]);
    }

    #[test]
    fn a_header_is_what_was_described() {
        let layout = Layout::new(16, 2, 65536).unwrap();
        let view = View::new(SharedMemory::create(c"test", layout.size).unwrap(), layout);
        assert!(View::claim(view.memory()).is_none());
        view.describe(QUEUES_CONTROL, 7);
        let claim = View::claim(view.memory()).unwrap();
        assert_eq!((claim.flags, claim.generation), (QUEUES_CONTROL, 7));
        assert_eq!(Layout::claimed(&claim, layout.size), Some(layout));
        assert_eq!(Layout::claimed(&Claim { bytes: 4096, ..claim }, layout.size), None);
    }
}

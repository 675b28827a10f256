//! Streams: a pair of byte rings in a region (`docs/protocols/stack-queues.md`). All access to them
//! is here. The peer may write anything at any time: counters of the own side are private, the
//! peer's are checked whenever they are read, and bytes go between the memory and a socket by the
//! kernel, so that nobody looks at them twice.

#![expect(unsafe_code, reason = "memory that a peer writes to")]

use core::mem::offset_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::Arc;

use heddle_stack::queues::abi::*;
use shared_ring::SharedMemory;
use shared_ring::protection::protects;

use crate::region::Layout;

/// The peer shows a counter that the rules do not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Broken;

/// Words of `struct queues_stream` that belong to one ring: what is produced and consumed, and
/// where the producer says that it waits for room, and the consumer for bytes.
#[derive(Clone, Copy, Debug)]
struct Words {
    produced: usize,
    consumed: usize,
    producer_waits: usize,
    consumer_waits: usize,
}

const OUT: Words = Words {
    produced: offset_of!(queues_stream, out_produced),
    consumed: offset_of!(queues_stream, out_consumed),
    producer_waits: offset_of!(queues_stream, out_waiting),
    consumer_waits: offset_of!(queues_stream, out_asleep),
};
const IN: Words = Words {
    produced: offset_of!(queues_stream, in_produced),
    consumed: offset_of!(queues_stream, in_consumed),
    producer_waits: offset_of!(queues_stream, in_asleep),
    consumer_waits: offset_of!(queues_stream, in_waiting),
};

/// A stream of a region, which stays mapped.
#[derive(Clone, Debug)]
pub struct Stream {
    head: NonNull<u8>,
    bytes: NonNull<u8>,
    capacity: usize,
    _memory: Arc<SharedMemory>,
}

// SAFETY: the addresses are of memory that belongs to no thread.
unsafe impl Send for Stream {}

impl Stream {
    /// The stream of this number; `None` if the region has none.
    #[must_use]
    pub fn find(memory: &Arc<SharedMemory>, layout: &Layout, number: u16) -> Option<Self> {
        let number = usize::from(number);
        if number >= layout.streams as usize {
            return None;
        }
        let capacity = layout.capacity as usize;
        let head = layout.streams_at + number * size_of::<queues_stream>();
        let bytes = layout.bytes_at + 2 * capacity * number;
        let base = memory.as_ptr();
        // SAFETY: the check above says that it is inside the mapping.
        let head = unsafe { base.byte_add(head) };
        // SAFETY: as above.
        let bytes = unsafe { base.byte_add(bytes) };
        Some(Self { head, bytes, capacity, _memory: Arc::clone(memory) })
    }

    fn word<T>(&self, offset: usize) -> &T {
        // SAFETY: the offsets in this file are of words of a stream, which is in the mapping.
        let word = unsafe { self.head.byte_add(offset) }.cast();
        // SAFETY: T is an atomic of this file's, for which any bytes are a value; a region and its
        // streams are aligned.
        unsafe { word.as_ref() }
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        self.word(offset)
    }

    fn flag(&self, offset: usize) -> &AtomicU32 {
        self.word(offset)
    }

    /// Where the byte of a counter lies in a ring, and how many follow it without a turn.
    fn place(&self, ring: usize, counter: u64) -> (NonNull<u8>, usize) {
        let offset = usize::try_from(counter % self.capacity as u64).unwrap_or(0);
        // SAFETY: `find` has checked both rings, and the offset is less than one has.
        let at = unsafe { self.bytes.add(ring * self.capacity + offset) };
        (at, self.capacity - offset)
    }

    /// Begins the stream, for a connection of this generation: the service does.
    pub fn begin(&self, generation: u32) {
        for words in [OUT, IN] {
            self.counter(words.produced).store(0, Ordering::Relaxed);
            self.counter(words.consumed).store(0, Ordering::Relaxed);
            self.flag(words.producer_waits).store(0, Ordering::Relaxed);
            self.flag(words.consumer_waits).store(0, Ordering::Relaxed);
        }
        self.word::<AtomicI32>(offset_of!(queues_stream, error)).store(0, Ordering::Relaxed);
        self.flag(offset_of!(queues_stream, generation)).store(generation, Ordering::Relaxed);
        self.flag(offset_of!(queues_stream, state)).store(QUEUES_STREAM_USED, Ordering::Release);
    }

    /// The flags of the stream, `QUEUES_STREAM_*`.
    #[must_use]
    pub fn state(&self) -> u32 {
        self.flag(offset_of!(queues_stream, state)).load(Ordering::Acquire)
    }

    /// Which connection has it.
    #[must_use]
    pub fn generation(&self) -> u32 {
        self.flag(offset_of!(queues_stream, generation)).load(Ordering::Relaxed)
    }

    /// Says what has become of the stream, after all that was produced.
    pub fn set_state(&self, state: u32, error: i32) {
        self.word::<AtomicI32>(offset_of!(queues_stream, error)).store(error, Ordering::Relaxed);
        self.flag(offset_of!(queues_stream, state)).store(state, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Whether whoever waits for bytes of the in ring is to be told; it is told once.
    #[must_use]
    pub fn wakes_reader(&self) -> bool {
        take(self.flag(IN.consumer_waits))
    }
}

fn take(word: &AtomicU32) -> bool {
    let relaxed = Ordering::Relaxed;
    word.load(relaxed) == 1 && word.compare_exchange(1, 0, relaxed, relaxed).is_ok()
}

/// The side of a byte ring that puts bytes in.
#[derive(Debug)]
pub struct Writer {
    stream: Stream,
    ring: usize,
    words: Words,
    produced: u64,
    consumed: u64,
}

impl Writer {
    /// The guest's, of the out ring.
    #[must_use]
    pub fn of_guest(stream: Stream) -> Self {
        Self { stream, ring: 0, words: OUT, produced: 0, consumed: 0 }
    }

    /// The service's, of the in ring.
    #[must_use]
    pub fn of_service(stream: Stream) -> Self {
        Self { stream, ring: 1, words: IN, produced: 0, consumed: 0 }
    }

    /// Bytes that were put in since the stream began.
    #[must_use]
    pub fn produced(&self) -> u64 {
        self.produced
    }

    /// Where the next bytes go, and how many of them without a turn.
    ///
    /// # Errors
    ///
    /// The peer's counter cannot be.
    pub fn room(&mut self) -> Result<(NonNull<u8>, usize), Broken> {
        let consumed = self.stream.counter(self.words.consumed).load(Ordering::Acquire);
        if (consumed < self.consumed || consumed > self.produced) && protects("counters") {
            return Err(Broken);
        }
        self.consumed = consumed;
        let used = usize::try_from(self.produced.wrapping_sub(consumed)).unwrap_or(usize::MAX);
        let (at, straight) = self.stream.place(self.ring, self.produced);
        // A counter that nobody checked may say that there is room where there is none.
        Ok((at, straight.min(self.stream.capacity.wrapping_sub(used))))
    }

    /// Shows so many bytes to the other side. Says whether it is to be told.
    pub fn put(&mut self, count: usize) -> bool {
        self.produced = self.produced.wrapping_add(count as u64);
        self.stream.counter(self.words.produced).store(self.produced, Ordering::Release);
        // Each side writes a word, then reads the other's: one of them sees what the other wrote.
        fence(Ordering::SeqCst);
        take(self.stream.flag(self.words.consumer_waits))
    }

    /// Asks to be told of room. Says whether there is some already.
    ///
    /// # Errors
    ///
    /// The peer's counter cannot be.
    pub fn ask(&mut self) -> Result<bool, Broken> {
        self.stream.flag(self.words.producer_waits).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.room().map(|(_, n)| n > 0)
    }
}

/// The side of a byte ring that takes bytes out.
#[derive(Debug)]
pub struct Reader {
    stream: Stream,
    ring: usize,
    words: Words,
    consumed: u64,
    produced: u64,
}

impl Reader {
    /// The guest's, of the in ring.
    #[must_use]
    pub fn of_guest(stream: Stream) -> Self {
        Self { stream, ring: 1, words: IN, consumed: 0, produced: 0 }
    }

    /// The service's, of the out ring.
    #[must_use]
    pub fn of_service(stream: Stream) -> Self {
        Self { stream, ring: 0, words: OUT, consumed: 0, produced: 0 }
    }

    /// Bytes that were taken out since the stream began.
    #[must_use]
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Bytes that the other side has put in, as was seen last.
    #[must_use]
    pub fn produced(&self) -> u64 {
        self.produced
    }

    /// Where the next bytes are, and how many of them without a turn.
    ///
    /// # Errors
    ///
    /// The peer's counter cannot be.
    pub fn bytes(&mut self) -> Result<(NonNull<u8>, usize), Broken> {
        let produced = self.stream.counter(self.words.produced).load(Ordering::Acquire);
        let most = self.consumed + self.stream.capacity as u64;
        if (produced < self.produced || produced > most) && protects("counters") {
            return Err(Broken);
        }
        self.produced = produced;
        let there = usize::try_from(produced.wrapping_sub(self.consumed)).unwrap_or(usize::MAX);
        let (at, straight) = self.stream.place(self.ring, self.consumed);
        Ok((at, straight.min(there)))
    }

    /// Gives back so many bytes. Says whether the other side is to be told: the service tells of
    /// room when half of the ring is free.
    pub fn take(&mut self, count: usize) -> bool {
        self.consumed = self.consumed.wrapping_add(count as u64);
        self.stream.counter(self.words.consumed).store(self.consumed, Ordering::Release);
        fence(Ordering::SeqCst);
        let left = self.produced.saturating_sub(self.consumed);
        let due = self.ring == 1 || left <= self.stream.capacity as u64 / 2;
        due && take(self.stream.flag(self.words.producer_waits))
    }

    /// Asks to be told of bytes. Says whether there are some already.
    ///
    /// # Errors
    ///
    /// The peer's counter cannot be.
    pub fn ask(&mut self) -> Result<bool, Broken> {
        self.stream.flag(self.words.consumer_waits).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.bytes().map(|(_, n)| n > 0)
    }
}

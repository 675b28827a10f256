//! Every access to shared memory, each with its memory order and the reason for it. Nothing else in
//! the crate names an order.
//!
//! Slots are read and written as relaxed atomics, eight bytes at a time. A peer that keeps to the
//! rules never touches a slot at the same time; one that does not may, and then the words that are
//! read are any mixture of its writes, but it is no data race, which would be undefined behaviour.

#![expect(unsafe_code, reason = "memory that a peer writes to")]

#[cfg(loom)]
pub(crate) use self::modelled::{DoorbellStorage, RingStorage};
#[cfg(not(loom))]
pub(crate) use self::shared::{DoorbellStorage, RingStorage};

#[cfg(not(loom))]
use core::sync::atomic::{Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{Ordering, fence};

/// The sleeper is awake: nobody needs to ring.
const AWAKE: u32 = 0;
/// The sleeper is about to wait, or waits.
const ASLEEP: u32 = 1;

impl RingStorage {
    /// The producer shows what it wrote into the slots before `index`. Release: whoever acquires
    /// this index finds those slots written.
    #[inline]
    pub(crate) fn publish_produced(&self, index: u32) {
        self.produced().store(index, Ordering::Release);
    }

    /// The consumer looks how far the producer is. Acquire: the slots before this index are as the
    /// producer wrote them.
    #[inline]
    pub(crate) fn observe_produced(&self) -> u32 {
        self.produced().load(Ordering::Acquire)
    }

    /// The consumer gives back the slots before `index`. Release: its reads of them are over before
    /// the producer can see the index and write over them.
    #[inline]
    pub(crate) fn publish_consumed(&self, index: u32) {
        self.consumed().store(index, Ordering::Release);
    }

    /// The producer looks how far the consumer is. Acquire: what it writes into the slots before
    /// this index comes after the consumer's reads of them.
    #[inline]
    pub(crate) fn observe_consumed(&self) -> u32 {
        self.consumed().load(Ordering::Acquire)
    }
}

impl DoorbellStorage {
    /// The sleeper says that it wants to be rung. Relaxed: [`Self::separate`] follows, and orders
    /// it before the last look for work.
    #[inline]
    pub(crate) fn fall_asleep(&self) {
        self.word().store(ASLEEP, Ordering::Relaxed);
    }

    /// The sleeper says that it need not be rung. Relaxed: if a ringer misses it, it rings once for
    /// nothing.
    #[inline]
    pub(crate) fn wake_up(&self) {
        self.word().store(AWAKE, Ordering::Relaxed);
    }

    /// The ringer looks whether the other side sleeps. Relaxed: [`Self::separate`] came before, and
    /// orders it after the index that was published.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.word().load(Ordering::Relaxed) == ASLEEP
    }

    /// The ringer takes it upon itself to ring: true for one of all ringers. It writes nothing
    /// otherwise, so that only a ringer that rings ever clears the word: clearing it too late costs
    /// no wake-up. Relaxed: what the sleeper finds after it was rung is ordered by the fences.
    #[inline]
    pub(crate) fn take_asleep(&self) -> bool {
        let (relaxed, word) = (Ordering::Relaxed, self.word());
        word.compare_exchange(ASLEEP, AWAKE, relaxed, relaxed).is_ok()
    }

    /// Both sides write one word and then read the other's (index and doorbell). Sequentially
    /// consistent: of two such fences one is first, and the side whose fence is second sees what
    /// the other wrote. Release and acquire alone would let both read old values: the sleeper
    /// sleeps, and nobody rings.
    #[inline]
    pub(crate) fn separate(&self) {
        if self.is_fenced() {
            fence(Ordering::SeqCst);
        }
    }
}

/// The storage of the product: addresses in sealed shared memory.
#[cfg(not(loom))]
mod shared {
    use core::ptr::NonNull;
    use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
    use std::sync::Arc;

    use crate::layout::{self, DoorbellLine, RingHeader, SLOT_SIZE, Slot};
    use crate::memory::SharedMemory;
    use crate::ring::AttachError;

    type Header = RingHeader<AtomicU32, AtomicU64>;

    /// Eight words of a slot in shared memory.
    #[repr(C, align(64))]
    struct SharedSlot([AtomicU64; SLOT_SIZE / 8]);

    /// A ring in shared memory. The capacity is a copy that the peer cannot change.
    #[derive(Debug)]
    pub(crate) struct RingStorage {
        header: NonNull<Header>,
        slots: NonNull<SharedSlot>,
        capacity: u32,
        /// Keeps the addresses above mapped.
        _memory: Arc<SharedMemory>,
    }

    // SAFETY: the addresses are of atomics in memory that belongs to no thread.
    unsafe impl Send for RingStorage {}

    impl RingStorage {
        /// Finds the ring of `capacity` slots at `offset`, whatever its header says.
        pub(crate) fn find(
            memory: &Arc<SharedMemory>,
            offset: usize,
            capacity: u32,
        ) -> Result<Self, AttachError> {
            if !layout::is_capacity(capacity) {
                return Err(AttachError::BadCapacity(capacity));
            }
            let header = memory
                .place::<Header>(offset, capacity as usize * SLOT_SIZE)
                .ok_or(AttachError::BadOffset(offset))?;
            // SAFETY: `place` has checked that the slots behind the header are in the mapping.
            let slots = unsafe { header.add(1) }.cast();
            Ok(Self { header, slots, capacity, _memory: Arc::clone(memory) })
        }

        /// Writes the header of a fresh ring. Relaxed: the peer gets the memory by a message, which
        /// orders all that came before it.
        pub(crate) fn describe(&self) {
            let d = &self.header().description;
            d.version.store(layout::VERSION, Ordering::Relaxed);
            d.slot_size.store(layout::SLOT_SIZE_FIELD, Ordering::Relaxed);
            d.capacity.store(self.capacity, Ordering::Relaxed);
            d.magic.store(layout::MAGIC, Ordering::Relaxed);
            self.produced().store(0, Ordering::Relaxed);
            self.consumed().store(0, Ordering::Relaxed);
        }

        /// Compares the header with what this side knows and was told. Relaxed: as in
        /// [`Self::describe`]. Nothing of the header is used after this.
        pub(crate) fn check_description(&self) -> Result<(), AttachError> {
            let d = &self.header().description;
            let magic = d.magic.load(Ordering::Relaxed);
            if magic != layout::MAGIC {
                return Err(AttachError::NoRing(magic));
            }
            let version = d.version.load(Ordering::Relaxed);
            if version != layout::VERSION {
                return Err(AttachError::OtherVersion(version));
            }
            let slot_size = d.slot_size.load(Ordering::Relaxed);
            if slot_size != layout::SLOT_SIZE_FIELD {
                return Err(AttachError::OtherSlotSize(slot_size));
            }
            let capacity = d.capacity.load(Ordering::Relaxed);
            if capacity != self.capacity {
                return Err(AttachError::OtherCapacity { is: capacity, want: self.capacity });
            }
            Ok(())
        }

        #[inline]
        pub(crate) fn capacity(&self) -> u32 {
            self.capacity
        }

        /// Copies a slot out of the memory: the copy is what is looked at. Relaxed: the index that
        /// was acquired before orders it.
        #[inline]
        pub(crate) fn read_slot(&self, index: u32, copy: &mut Slot) {
            for (word, shared) in copy.0.iter_mut().zip(&self.slot(index).0) {
                *word = shared.load(Ordering::Relaxed);
            }
        }

        /// Copies a slot into the memory. Relaxed: the index that is published after it orders it.
        #[inline]
        pub(crate) fn write_slot(&self, index: u32, slot: &Slot) {
            for (word, shared) in slot.0.iter().zip(&self.slot(index).0) {
                shared.store(*word, Ordering::Relaxed);
            }
        }

        #[inline]
        pub(super) fn produced(&self) -> &AtomicU32 {
            &self.header().produced.0
        }

        #[inline]
        pub(super) fn consumed(&self) -> &AtomicU32 {
            &self.header().consumed.0
        }

        #[inline]
        fn header(&self) -> &Header {
            // SAFETY: `find` has checked place and alignment, and `_memory` keeps it mapped. All of
            // the header is atomics, for which any bytes are a value.
            unsafe { self.header.as_ref() }
        }

        #[inline]
        fn slot(&self, index: u32) -> &SharedSlot {
            let i = (index & (self.capacity - 1)) as usize;
            // SAFETY: `find` has checked that `capacity` slots are in the mapping, and `i` is less.
            let slot = unsafe { self.slots.add(i) };
            // SAFETY: as in `header`.
            unsafe { slot.as_ref() }
        }
    }

    /// A doorbell's word in shared memory.
    #[derive(Debug)]
    pub(crate) struct DoorbellStorage {
        line: NonNull<DoorbellLine<AtomicU32>>,
        /// Keeps the address above mapped.
        _memory: Arc<SharedMemory>,
    }

    // SAFETY: the address is of an atomic in memory that belongs to no thread.
    unsafe impl Send for DoorbellStorage {}

    impl DoorbellStorage {
        pub(crate) fn find(memory: &Arc<SharedMemory>, offset: usize) -> Result<Self, AttachError> {
            let line = memory.place(offset, 0).ok_or(AttachError::BadOffset(offset))?;
            Ok(Self { line, _memory: Arc::clone(memory) })
        }

        #[inline]
        pub(super) fn word(&self) -> &AtomicU32 {
            // SAFETY: `find` has checked place and alignment, and `_memory` keeps it mapped.
            &unsafe { self.line.as_ref() }.0
        }

        /// Only models can do without the fence.
        #[inline]
        #[expect(clippy::unused_self, reason = "the models' storage answers by its own field")]
        pub(super) fn is_fenced(&self) -> bool {
            true
        }
    }
}

/// The storage of the models: loom's atomics, and slots for which loom reports any access by both
/// sides that the indices do not keep apart.
#[cfg(loom)]
mod modelled {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU32;

    use crate::layout::Slot;

    #[derive(Debug)]
    struct Lines {
        produced: AtomicU32,
        consumed: AtomicU32,
        slots: Vec<UnsafeCell<Slot>>,
    }

    #[derive(Clone, Debug)]
    pub(crate) struct RingStorage(Arc<Lines>);

    // SAFETY: loom reports every access to a slot that is not ordered against the other side's.
    unsafe impl Send for RingStorage {}

    impl RingStorage {
        pub(crate) fn new(capacity: u32) -> Self {
            Self(Arc::new(Lines {
                produced: AtomicU32::new(0),
                consumed: AtomicU32::new(0),
                slots: (0..capacity).map(|_| UnsafeCell::new(Slot::default())).collect(),
            }))
        }

        pub(crate) fn capacity(&self) -> u32 {
            u32::try_from(self.0.slots.len()).unwrap()
        }

        pub(crate) fn read_slot(&self, index: u32, copy: &mut Slot) {
            // SAFETY: loom fails the model if anybody writes the slot meanwhile.
            self.slot(index).with(|slot| *copy = unsafe { *slot });
        }

        pub(crate) fn write_slot(&self, index: u32, slot: &Slot) {
            // SAFETY: loom fails the model if anybody uses the slot meanwhile.
            self.slot(index).with_mut(|shared| unsafe { *shared = *slot });
        }

        fn slot(&self, index: u32) -> &UnsafeCell<Slot> {
            &self.0.slots[(index & (self.capacity() - 1)) as usize]
        }

        pub(super) fn produced(&self) -> &AtomicU32 {
            &self.0.produced
        }

        pub(super) fn consumed(&self) -> &AtomicU32 {
            &self.0.consumed
        }
    }

    #[derive(Clone, Debug)]
    pub(crate) struct DoorbellStorage {
        word: Arc<AtomicU32>,
        fenced: bool,
    }

    impl DoorbellStorage {
        /// A doorbell; without its fences if `fenced` is false, to show that they are needed.
        pub(crate) fn new(fenced: bool) -> Self {
            Self { word: Arc::new(AtomicU32::new(super::AWAKE)), fenced }
        }

        pub(super) fn word(&self) -> &AtomicU32 {
            &self.word
        }

        pub(super) fn is_fenced(&self) -> bool {
            self.fenced
        }
    }
}

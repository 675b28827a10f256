//! A ring with one producer and one consumer.
//!
//! Each side keeps its own index in private memory and only shows it to the peer. The peer's index
//! is read, checked against what it can be by the rules, and kept as a private copy until more is
//! needed. So a hostile peer can make this side stop, by an index that cannot be, and it can put
//! any bytes into slots, but it can make this side neither lose count nor touch other memory.
//!
//! Nothing here blocks or makes a system call. [`crate::doorbell`] is for waiting.

use std::fmt;

use crate::layout::Slot;
#[cfg(not(loom))]
use crate::memory::SharedMemory;
use crate::protection::protects;
use crate::storage::RingStorage;
#[cfg(not(loom))]
use std::sync::Arc;

/// Why a ring or a doorbell cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// A capacity that is no power of two or larger than [`crate::CAPACITY_MAX`].
    BadCapacity(u32),
    /// An offset that is no multiple of [`crate::ALIGNMENT`], or from which it does not fit into
    /// the memory.
    BadOffset(usize),
    /// There is another number where [`crate::MAGIC`] should be.
    NoRing(u64),
    /// A version other than [`crate::VERSION`].
    OtherVersion(u32),
    /// Slots of another size than [`crate::SLOT_SIZE`] bytes.
    OtherSlotSize(u32),
    /// Another capacity than was agreed upon.
    OtherCapacity {
        /// What the header says.
        is: u32,
        /// What was agreed upon.
        want: u32,
    },
    /// The index of the own side is not 0: somebody uses this side of the ring, or has.
    InUse(u32),
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadCapacity(n) => write!(f, "a ring cannot have {n} slots"),
            Self::BadOffset(at) => write!(f, "offset {at} is not aligned or outside of the memory"),
            Self::NoRing(magic) => write!(f, "no ring here: it begins with {magic:#018x}"),
            Self::OtherVersion(v) => write!(f, "version {v} is unknown"),
            Self::OtherSlotSize(n) => write!(f, "slots of {n} bytes are unknown"),
            Self::OtherCapacity { is, want } => {
                write!(f, "the header says {is} slots where {want} were agreed upon")
            }
            Self::InUse(index) => write!(f, "this side of the ring is in use (index {index})"),
        }
    }
}

impl std::error::Error for AttachError {}

/// The peer is broken: it shows an index that the rules do not allow. The ring is dead: every later
/// call gives the same error and reads nothing from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBroken {
    /// The peer's index.
    pub index: u32,
    /// The least that it could be, modulo 2^32: what it was before.
    pub least: u32,
    /// The most that it could be, modulo 2^32.
    pub most: u32,
}

impl fmt::Display for PeerBroken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { index, least, most } = self;
        write!(f, "the peer is broken: its index is {index}, outside of {least}..={most}")
    }
}

impl std::error::Error for PeerBroken {}

/// Writes the header of a ring of `capacity` slots at `offset` into memory that no peer has yet.
///
/// # Errors
///
/// [`AttachError::BadCapacity`] and [`AttachError::BadOffset`].
#[cfg(not(loom))]
pub fn create(memory: &Arc<SharedMemory>, offset: usize, capacity: u32) -> Result<(), AttachError> {
    RingStorage::find(memory, offset, capacity)?.describe();
    Ok(())
}

/// The ring at `offset`, if nothing has been done yet on the side whose index `observe` reads.
#[cfg(not(loom))]
fn fresh(
    memory: &Arc<SharedMemory>,
    offset: usize,
    capacity: u32,
    observe: fn(&RingStorage) -> u32,
) -> Result<RingStorage, AttachError> {
    let storage = RingStorage::find(memory, offset, capacity)?;
    storage.check_description()?;
    match observe(&storage) {
        0 => Ok(storage),
        index => Err(AttachError::InUse(index)),
    }
}

/// The side of a ring that pushes.
#[derive(Debug)]
pub struct Producer {
    storage: RingStorage,
    /// Slots pushed so far, modulo 2^32. The memory has a copy for the consumer.
    produced: u32,
    /// The last index of the consumer that was read and found good.
    consumed: u32,
    broken: Option<PeerBroken>,
}

impl Producer {
    /// Takes the producing side of the ring of `capacity` slots at `offset`, which has to be as
    /// fresh as [`create`] left it. Offset and capacity are what both sides agreed upon elsewhere.
    ///
    /// # Errors
    ///
    /// An [`AttachError`] if there is no such ring: the peer is broken, or of another version.
    #[cfg(not(loom))]
    pub fn attach(
        memory: &Arc<SharedMemory>,
        offset: usize,
        capacity: u32,
    ) -> Result<Self, AttachError> {
        fresh(memory, offset, capacity, RingStorage::observe_produced).map(Self::over)
    }

    pub(crate) fn over(storage: RingStorage) -> Self {
        Self { storage, produced: 0, consumed: 0, broken: None }
    }

    /// Copies as many of `slots` into the ring as there is room for, shows them to the consumer all
    /// at once, and says how many there were. What belongs together can be kept together by asking
    /// for [`Self::room`] before: it never shrinks but by pushing.
    ///
    /// # Errors
    ///
    /// [`PeerBroken`], now and for ever. What was pushed before may or may not have been read.
    #[inline]
    pub fn push(&mut self, slots: &[Slot]) -> Result<usize, PeerBroken> {
        let mut room = self.known_room();
        if (room as usize) < slots.len() || self.broken.is_some() {
            room = self.room()?;
        }
        let fit = &slots[..slots.len().min(room as usize)];
        let mut index = self.produced;
        for slot in fit {
            self.storage.write_slot(index, slot);
            index = index.wrapping_add(1);
        }
        if index != self.produced {
            self.produced = index;
            self.storage.publish_produced(index);
        }
        Ok(fit.len())
    }

    /// How many slots can be pushed, by the consumer's index as it is now.
    ///
    /// # Errors
    ///
    /// [`PeerBroken`] if that index cannot be.
    #[inline]
    pub fn room(&mut self) -> Result<u32, PeerBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        // The consumer's index moves from what it was up to the own one. So the number of slots
        // under way can only have shrunk; any other index, modulo 2^32, makes it larger.
        let index = self.storage.observe_consumed();
        if self.produced.wrapping_sub(index) > self.produced.wrapping_sub(self.consumed) {
            let broken = PeerBroken { index, least: self.consumed, most: self.produced };
            self.broken = Some(broken);
            return Err(broken);
        }
        self.consumed = index;
        Ok(self.known_room())
    }

    /// Whether [`Self::push`] would do anything but answer 0: what a producer waits for.
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        !matches!(self.room(), Ok(0))
    }

    #[inline]
    fn known_room(&self) -> u32 {
        self.storage.capacity() - self.produced.wrapping_sub(self.consumed)
    }
}

/// The side of a ring that pops.
#[derive(Debug)]
pub struct Consumer {
    storage: RingStorage,
    /// Slots popped so far, modulo 2^32. The memory has a copy for the producer.
    consumed: u32,
    /// The last index of the producer that was read and found good.
    produced: u32,
    broken: Option<PeerBroken>,
}

impl Consumer {
    /// Takes the consuming side of the ring of `capacity` slots at `offset`, of which nothing has
    /// been popped yet. Offset and capacity are what both sides agreed upon elsewhere.
    ///
    /// # Errors
    ///
    /// An [`AttachError`] if there is no such ring: the peer is broken, or of another version.
    #[cfg(not(loom))]
    pub fn attach(
        memory: &Arc<SharedMemory>,
        offset: usize,
        capacity: u32,
    ) -> Result<Self, AttachError> {
        fresh(memory, offset, capacity, RingStorage::observe_consumed).map(Self::over)
    }

    pub(crate) fn over(storage: RingStorage) -> Self {
        Self { storage, consumed: 0, produced: 0, broken: None }
    }

    /// Copies as many slots out of the ring as there are and `copies` has room for, gives them all
    /// back to the producer at once, and says how many there were. What is in a copy is the peer's
    /// word, but it cannot change any more.
    ///
    /// # Errors
    ///
    /// [`PeerBroken`], now and for ever. Slots that were shown before are not delivered.
    #[inline]
    pub fn pop(&mut self, copies: &mut [Slot]) -> Result<usize, PeerBroken> {
        let mut available = self.known_available();
        if (available as usize) < copies.len() || self.broken.is_some() {
            available = self.available()?;
        }
        let count = copies.len().min(available as usize);
        let mut index = self.consumed;
        for copy in &mut copies[..count] {
            self.storage.read_slot(index, copy);
            index = index.wrapping_add(1);
        }
        if index != self.consumed {
            self.consumed = index;
            self.storage.publish_consumed(index);
        }
        Ok(count)
    }

    /// A slot that is to be popped, so many behind the next one: what the peer says now, and may
    /// say otherwise when it is popped. `None` if it was not there when the consumer looked last.
    #[must_use]
    pub fn peek(&self, ahead: u32) -> Option<Slot> {
        let mut slot = Slot::default();
        (ahead < self.known_available()).then(|| {
            self.storage.read_slot(self.consumed.wrapping_add(ahead), &mut slot);
            slot
        })
    }

    /// A slot that was popped last, as the peer has it by now: what nobody who is not attacked may
    /// look at.
    #[cfg(feature = "attack")]
    #[must_use]
    pub fn look_again(&self, slots_ago: u32) -> Slot {
        let mut slot = Slot::default();
        self.storage.read_slot(self.consumed.wrapping_sub(slots_ago), &mut slot);
        slot
    }

    /// How many slots can be popped, by the producer's index as it is now.
    ///
    /// # Errors
    ///
    /// [`PeerBroken`] if that index cannot be.
    #[inline]
    pub fn available(&mut self) -> Result<u32, PeerBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        // The producer's index moves from what it was up to a full ring ahead of the own one. So
        // its room can only have shrunk; any other index, modulo 2^32, makes it larger.
        let index = self.storage.observe_produced();
        let most = self.consumed.wrapping_add(self.storage.capacity());
        let is_wild = most.wrapping_sub(index) > most.wrapping_sub(self.produced);
        if is_wild && protects("indices") {
            let broken = PeerBroken { index, least: self.produced, most };
            self.broken = Some(broken);
            return Err(broken);
        }
        self.produced = index;
        Ok(self.known_available())
    }

    /// Whether [`Self::pop`] would do anything but answer 0: what a consumer waits for.
    #[must_use]
    pub fn is_ready(&mut self) -> bool {
        !matches!(self.available(), Ok(0))
    }

    #[inline]
    fn known_available(&self) -> u32 {
        self.produced.wrapping_sub(self.consumed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use core::sync::atomic::Ordering;

    use super::*;
    use crate::layout::ring_size;

    const CAPACITY: u32 = 8;

    fn memory() -> Arc<SharedMemory> {
        let memory = SharedMemory::create(c"test", ring_size(CAPACITY)).unwrap();
        create(&memory, 0, CAPACITY).unwrap();
        memory
    }

    fn pair(memory: &Arc<SharedMemory>) -> (Producer, Consumer) {
        let producer = Producer::attach(memory, 0, CAPACITY).unwrap();
        (producer, Consumer::attach(memory, 0, CAPACITY).unwrap())
    }

    /// What a peer does: writes a word of the shared part.
    fn poke(memory: &SharedMemory, offset: usize, value: u32) {
        memory.word32(offset).unwrap().store(value, Ordering::Relaxed);
    }

    fn numbered(n: u32) -> Slot {
        Slot([n.into(); 8])
    }

    #[test]
    fn a_full_ring_takes_no_more_and_an_empty_one_gives_none() {
        let (mut producer, mut consumer) = pair(&memory());
        let mut copies = [Slot::default(); 16];
        assert_eq!(consumer.pop(&mut copies), Ok(0));
        assert!(!consumer.is_ready());
        let slots: Vec<Slot> = (0..12).map(numbered).collect();
        assert_eq!(producer.push(&slots), Ok(8));
        assert_eq!(producer.push(&slots[8..]), Ok(0));
        assert!(!producer.is_ready());
        assert_eq!(consumer.available(), Ok(8));
        assert_eq!(consumer.pop(&mut copies[..3]), Ok(3));
        assert_eq!(producer.room(), Ok(3));
        assert_eq!(producer.push(&slots[8..]), Ok(3));
        assert_eq!(consumer.pop(&mut copies[3..]), Ok(8));
        assert_eq!(copies[..11], slots[..11]);
    }

    #[test]
    fn indices_wrap() {
        let memory = memory();
        let (mut producer, mut consumer) = pair(&memory);
        let start = u32::MAX - 20;
        poke(&memory, 128, start);
        poke(&memory, 256, start);
        (producer.produced, producer.consumed) = (start, start);
        (consumer.produced, consumer.consumed) = (start, start);
        for n in 0..40 {
            assert_eq!(producer.push(&[numbered(2 * n), numbered(2 * n + 1)]), Ok(2));
            let mut copies = [Slot::default(); 4];
            assert_eq!(consumer.pop(&mut copies), Ok(2));
            assert_eq!(copies[..2], [numbered(2 * n), numbered(2 * n + 1)]);
        }
        assert_eq!(producer.produced, start.wrapping_add(80));
    }

    #[test]
    fn a_producer_cannot_claim_more_than_a_full_ring_nor_take_slots_back() {
        for (index, broken) in
            [(4, None), (11, None), (12, Some(12)), (2, Some(2)), (u32::MAX, Some(u32::MAX))]
        {
            let memory = memory();
            let (mut producer, mut consumer) = pair(&memory);
            assert_eq!(producer.push(&[Slot::default(); 4]), Ok(4));
            assert_eq!(consumer.pop(&mut [Slot::default(); 3]), Ok(3));
            poke(&memory, 128, index);
            let want = match broken {
                None => Ok(index - 3),
                Some(index) => Err(PeerBroken { index, least: 4, most: 11 }),
            };
            assert_eq!(consumer.available(), want, "{index}");
            // A dead ring stays dead when the index is repaired.
            poke(&memory, 128, 4);
            assert_eq!(consumer.pop(&mut [Slot::default(); 8]).is_err(), broken.is_some());
            assert_eq!(consumer.pop(&mut []).is_err(), broken.is_some());
        }
    }

    #[test]
    fn a_consumer_cannot_give_back_what_it_never_had() {
        for (index, broken) in [(1, false), (4, false), (5, true), (0, true), (u32::MAX, true)] {
            let memory = memory();
            let (mut producer, mut consumer) = pair(&memory);
            assert_eq!(producer.push(&[Slot::default(); 4]), Ok(4));
            assert_eq!(consumer.pop(&mut [Slot::default(); 1]), Ok(1));
            assert_eq!(producer.room(), Ok(5));
            poke(&memory, 256, index);
            assert_eq!(producer.room().is_err(), broken, "{index}");
            poke(&memory, 256, 4);
            assert_eq!(producer.push(&[Slot::default()]).is_err(), broken, "{index}");
        }
    }

    #[test]
    fn headers_are_checked() {
        for (offset, value, want) in [
            (0, 0, AttachError::NoRing(crate::MAGIC & !0xffff_ffff)),
            (8, 2, AttachError::OtherVersion(2)),
            (12, 128, AttachError::OtherSlotSize(128)),
            (16, 16, AttachError::OtherCapacity { is: 16, want: CAPACITY }),
            (128, 1, AttachError::InUse(1)),
        ] {
            let memory = memory();
            poke(&memory, offset, value);
            assert_eq!(Producer::attach(&memory, 0, CAPACITY).unwrap_err(), want);
        }
        let memory = memory();
        poke(&memory, 256, 9);
        assert_eq!(Consumer::attach(&memory, 0, CAPACITY).unwrap_err(), AttachError::InUse(9));
    }

    #[test]
    fn rings_lie_inside_the_memory() {
        let memory = memory();
        for capacity in [0, 3, 12, 1 << 21, u32::MAX] {
            assert_eq!(create(&memory, 0, capacity), Err(AttachError::BadCapacity(capacity)));
        }
        for (offset, capacity) in
            [(64, 4), (128, 8), (0, 16), (1 << 20, 1), (usize::MAX - 127, 8), (0, 1 << 20)]
        {
            assert_eq!(create(&memory, offset, capacity), Err(AttachError::BadOffset(offset)));
        }
    }
}

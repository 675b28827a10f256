//! Which byte is what: `docs/protocols/shared-rings.md` as types. Everything is in the machine's
//! own byte order, because both sides are on one machine.

use core::mem::{offset_of, size_of};

/// The first eight bytes of a ring: "HDLRING" and a zero byte, read as a number of the machine's
/// own byte order.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"HDLRING\0");

/// The version of the layout and of the rules. A side that meets another version refuses the ring.
pub const VERSION: u32 = 1;

/// Bytes in a slot.
pub const SLOT_SIZE: usize = SLOT_SIZE_FIELD as usize;

/// The same as a ring's header has it.
pub(crate) const SLOT_SIZE_FIELD: u32 = 64;

/// The most slots in a ring: 64 MiB of them.
pub const CAPACITY_MAX: u32 = 1 << 20;

/// Rings and doorbells begin at multiples of this many bytes. It is two cache lines, because x86
/// processors fetch lines in pairs, and a pair that both sides write would travel between them.
pub const ALIGNMENT: usize = 128;

/// Bytes of a doorbell in shared memory.
pub const DOORBELL_SIZE: usize = size_of::<DoorbellLine<u32>>();

/// Bytes in front of the first slot.
pub(crate) const SLOTS_OFFSET: usize = size_of::<RingHeader<u32, u64>>();

/// Bytes that a ring of `capacity` slots takes in shared memory.
#[must_use]
pub const fn ring_size(capacity: u32) -> usize {
    SLOTS_OFFSET + capacity as usize * SLOT_SIZE
}

/// Whether a ring can have this many slots: a power of two, so that an index is found by a mask
/// also when the counter wraps, and at most [`CAPACITY_MAX`].
#[must_use]
pub(crate) const fn is_capacity(capacity: u32) -> bool {
    capacity.is_power_of_two() && capacity <= CAPACITY_MAX
}

/// What one slot carries. Its meaning is the business of the two sides; the bytes of each word are
/// in the machine's own order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Slot(pub [u64; SLOT_SIZE / 8]);

impl Slot {
    /// Makes a slot of bytes as they lie in memory.
    #[must_use]
    #[inline]
    pub fn from_bytes(bytes: &[u8; SLOT_SIZE]) -> Self {
        let mut slot = Self::default();
        for (word, eight) in slot.0.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*eight);
        }
        slot
    }

    /// The bytes of the slot as they lie in memory.
    #[must_use]
    #[inline]
    pub fn to_bytes(&self) -> [u8; SLOT_SIZE] {
        let mut bytes = [0; SLOT_SIZE];
        for (eight, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.0) {
            *eight = word.to_ne_bytes();
        }
        bytes
    }
}

/// The three parts of a ring that lie in front of its slots. `U32` and `U64` are atomics in shared
/// memory; plain numbers stand for them where only sizes are asked for.
#[derive(Default)]
#[repr(C)]
pub(crate) struct RingHeader<U32, U64> {
    pub(crate) description: Description<U32, U64>,
    /// How many slots were ever pushed, modulo 2^32. Only the producer writes it.
    pub(crate) produced: Index<U32>,
    /// How many slots were ever popped, modulo 2^32. Only the consumer writes it.
    pub(crate) consumed: Index<U32>,
}

/// What the maker of a ring writes before it passes the memory on. Nobody writes it afterwards.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct Description<U32, U64> {
    pub(crate) magic: U64,
    pub(crate) version: U32,
    pub(crate) slot_size: U32,
    pub(crate) capacity: U32,
}

/// An index that has its cache lines for itself.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct Index<U32>(pub(crate) U32);

/// A doorbell's word, with cache lines of its own: 0 while the sleeper is awake, 1 once it wants to
/// be rung.
#[derive(Default)]
#[repr(C, align(128))]
pub(crate) struct DoorbellLine<U32>(pub(crate) U32);

// The page of the protocol says these numbers, and C code in containers relies on them.
const _: () = {
    assert!(offset_of!(Description<u32, u64>, magic) == 0);
    assert!(offset_of!(Description<u32, u64>, version) == 8);
    assert!(offset_of!(Description<u32, u64>, slot_size) == 12);
    assert!(offset_of!(Description<u32, u64>, capacity) == 16);
    assert!(offset_of!(RingHeader<u32, u64>, produced) == 128);
    assert!(offset_of!(RingHeader<u32, u64>, consumed) == 256);
    assert!(SLOTS_OFFSET == 384);
    assert!(size_of::<Slot>() == SLOT_SIZE);
    assert!(DOORBELL_SIZE == 128);
};

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn slots_are_bytes_in_memory_order() {
        let mut bytes = [0; SLOT_SIZE];
        for (i, b) in bytes.iter_mut().enumerate() {
            *b = u8::try_from(i).unwrap();
        }
        let slot = Slot::from_bytes(&bytes);
        assert_eq!(slot.0[1], u64::from_ne_bytes([8, 9, 10, 11, 12, 13, 14, 15]));
        assert_eq!(slot.to_bytes(), bytes);
    }

    #[test]
    fn capacities_are_powers_of_two() {
        for (capacity, good) in
            [(0, false), (1, true), (2, true), (3, false), (1 << 20, true), (1 << 21, false)]
        {
            assert_eq!(is_capacity(capacity), good, "{capacity}");
        }
        assert_eq!(ring_size(1024), 384 + 65536);
    }
}

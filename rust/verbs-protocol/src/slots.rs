//! Work requests out of slots that were copied. `docs/protocols/verbs-rings.md`.

use crate::abi::{self, verbs_receive, verbs_send, verbs_sge};
use crate::plain;

/// Bytes of a slot.
pub const SLOT: usize = abi::VERBS_SLOT_SIZE as usize;
/// Slots of the longest work request, of either kind.
pub const SLOTS_MAX: usize = abi::VERBS_SEND_SLOTS_MAX as usize;
/// Bytes of the longest payload.
pub const PAYLOAD_MAX: usize = abi::VERBS_SEND_PAYLOAD_MAX as usize;

const SEND_PAYLOAD: usize = abi::VERBS_SEND_PAYLOAD as usize;
const RECEIVE_PAYLOAD: usize = abi::VERBS_RECEIVE_PAYLOAD as usize;
const SGE: usize = size_of::<verbs_sge>();

/// The number of slots by which the work request that begins with this slot says where the next one
/// begins. `None` if that cannot be, and the ring has no next one.
#[must_use]
pub fn send_slots(first: &[u8; SLOT]) -> Option<usize> {
    slots(first[10])
}

/// The same for a receive request.
#[must_use]
pub fn receive_slots(first: &[u8; SLOT]) -> Option<usize> {
    slots(first[8])
}

fn slots(field: u8) -> Option<usize> {
    let count = usize::from(field);
    (1..=SLOTS_MAX).contains(&count).then_some(count)
}

/// The bytes behind a request's head. Few are kept in place, so that a request is moved cheaply.
#[derive(Clone, Debug)]
struct Payload {
    few: [u8; FEW],
    /// All, if they are more.
    many: Option<Box<[u8; PAYLOAD_MAX]>>,
}

/// Four entries.
const FEW: usize = 64;

impl Payload {
    fn new(from: &[u8]) -> Self {
        let (mut few, mut many) = ([0; FEW], None);
        if let Some(room) = few.get_mut(..from.len()) {
            room.copy_from_slice(from);
        } else {
            let all = many.insert(Box::new([0; PAYLOAD_MAX]));
            all[..from.len()].copy_from_slice(from);
        }
        Self { few, many }
    }

    fn bytes(&self) -> &[u8] {
        self.many.as_ref().map_or(&self.few[..], |all| &all[..])
    }
}

/// A send request.
#[derive(Clone, Debug)]
pub struct Send {
    /// The first slot, without its payload.
    pub head: verbs_send,
    /// Bytes of the message: at most 32 times 4 GiB.
    length: u64,
    payload: Payload,
}

impl Send {
    /// Reads a request out of all of its slots. What is wrong in it, so that it is completed with
    /// an error, is answered as `Err` with its `wr_id`.
    ///
    /// # Errors
    ///
    /// The `wr_id` of a request that has another number of slots than it needs, more entries than
    /// there can be, or unknown flags.
    pub fn parse(bytes: &[u8]) -> Result<Self, u64> {
        let first = bytes.get(..SLOT).ok_or(0_u64)?;
        let head: verbs_send = plain::read(first).ok_or(0_u64)?;
        let inline = u32::from(head.flags) & abi::VERBS_SEND_INLINE != 0;
        let length =
            if inline { head.inline_length as usize } else { usize::from(head.sge_count) * SGE };
        let good = head.flags < 16
            && length <= PAYLOAD_MAX
            && (!inline || head.sge_count == 0)
            && (inline || head.inline_length == 0)
            && bytes.len() == SLOT * slots_for(length, SLOT - SEND_PAYLOAD);
        let Some(from) = bytes.get(SEND_PAYLOAD..).filter(|_| good) else {
            return Err(head.wr_id);
        };
        let payload = Payload::new(&from[..length]);
        let lengths = || (0..head.sge_count.into()).map(|i| entry(payload.bytes(), i).length);
        let length = if inline { length as u64 } else { lengths().map(u64::from).sum() };
        Ok(Self { head, length, payload })
    }

    /// Whether the bytes are in the request itself.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        u32::from(self.head.flags) & abi::VERBS_SEND_INLINE != 0
    }

    /// The inline data.
    #[must_use]
    pub fn inline(&self) -> &[u8] {
        &self.payload.bytes()[..self.head.inline_length as usize]
    }

    /// How many entries there are.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.head.sge_count.into()
    }

    /// An entry, below [`Self::entries`].
    #[must_use]
    pub fn entry(&self, i: usize) -> verbs_sge {
        entry(self.payload.bytes(), i)
    }

    /// Bytes of the message: at most 32 times 4 GiB.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }
}

/// A receive request.
#[derive(Clone, Debug)]
pub struct Receive {
    /// What the program calls it.
    pub wr_id: u64,
    entries: usize,
    payload: Payload,
}

impl Receive {
    /// Reads a request out of all of its slots.
    ///
    /// # Errors
    ///
    /// The `wr_id` of a request that has another number of slots than it needs or too many entries.
    pub fn parse(bytes: &[u8]) -> Result<Self, u64> {
        let first = bytes.get(..SLOT).ok_or(0_u64)?;
        let head: verbs_receive = plain::read(first).ok_or(0_u64)?;
        let entries = usize::from(head.sge_count);
        let length = entries * SGE;
        let good = length <= PAYLOAD_MAX
            && bytes.len() == SLOT * slots_for(length, SLOT - RECEIVE_PAYLOAD);
        let Some(from) = bytes.get(RECEIVE_PAYLOAD..).filter(|_| good) else {
            return Err(head.wr_id);
        };
        let payload = Payload::new(&from[..length]);
        Ok(Self { wr_id: head.wr_id, entries, payload })
    }

    /// How many entries there are.
    #[must_use]
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// An entry, below [`Self::entries`].
    #[must_use]
    pub fn entry(&self, i: usize) -> verbs_sge {
        entry(self.payload.bytes(), i)
    }

    /// Bytes that it has room for.
    #[must_use]
    pub fn length(&self) -> u64 {
        (0..self.entries).map(|i| u64::from(self.entry(i).length)).sum()
    }
}

fn entry(payload: &[u8], i: usize) -> verbs_sge {
    payload.get(i * SGE..(i + 1) * SGE).and_then(plain::read).unwrap_or_default()
}

/// Slots that a payload needs of which `first` bytes fit into the first one.
#[must_use]
pub const fn slots_for(payload: usize, first: usize) -> usize {
    1 + payload.saturating_sub(first).div_ceil(SLOT)
}

/// Slots of a send request with this many entries or bytes of inline data.
#[must_use]
pub const fn slots_to_send(entries: usize, inline: usize) -> usize {
    let payload = if entries * SGE > inline { entries * SGE } else { inline };
    slots_for(payload, SLOT - SEND_PAYLOAD)
}

/// Slots of a receive request with this many entries.
#[must_use]
pub const fn slots_to_receive(entries: usize) -> usize {
    slots_for(entries * SGE, SLOT - RECEIVE_PAYLOAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_s_sums() {
        assert_eq!(slots_to_send(1, 0), 1);
        assert_eq!(slots_to_send(2, 0), 2);
        assert_eq!(slots_to_send(32, 0), 9);
        assert_eq!(slots_to_send(0, 512), 9);
        assert_eq!(slots_to_send(0, 17), 2);
        assert_eq!(slots_to_receive(3), 1);
        assert_eq!(slots_to_receive(4), 2);
        assert_eq!(slots_to_receive(32), 9);
    }

    #[test]
    fn a_payload_goes_on_in_the_next_slot() {
        let mut slots = [0_u8; 2 * SLOT];
        let head = verbs_send {
            wr_id: 5,
            slots: 2,
            flags: 8,
            inline_length: 20,
            payload: [7; 16],
            ..Default::default()
        };
        slots[..SLOT].copy_from_slice(plain::bytes(&head));
        slots[SLOT..SLOT + 4].fill(8);
        let send = Send::parse(&slots).unwrap();
        assert_eq!(send.inline()[..16], [7; 16]);
        assert_eq!(send.inline()[16..], [8; 4]);
        assert_eq!(Send::parse(&slots[..SLOT]).unwrap_err(), 5);
        assert!(send_slots(slots[..SLOT].try_into().unwrap()) == Some(2));
    }

    #[test]
    fn counts_that_do_not_fit_are_refused() {
        for (flags, sge_count, inline_length) in
            [(0, 33, 0), (8, 0, 513), (8, 1, 4), (0, 1, 4), (16, 1, 0)]
        {
            let head =
                verbs_send { wr_id: 5, flags, sge_count, inline_length, ..Default::default() };
            assert_eq!(Send::parse(plain::bytes(&head)).unwrap_err(), 5);
        }
    }
}

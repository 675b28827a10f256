//! Work requests out of rings, and completions into them. `docs/protocols/verbs-rings.md`.

use core::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::Arc;

use shared_ring::{Consumer, PeerBroken, Producer, SharedMemory, Slot};
use verbs_protocol::abi::{self, verbs_completion};
use verbs_protocol::plain;
use verbs_protocol::slots::{self, Receive, SLOT, SLOTS_MAX, Send};

use crate::sys;

/// The ring cannot be read any more: an index that cannot be, or a request without an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dead;

impl From<PeerBroken> for Dead {
    fn from(_: PeerBroken) -> Self {
        Self
    }
}

/// Slots of one work request, collected while the program still shows them.
struct Staged {
    consumer: Consumer,
    bytes: [u8; SLOT * SLOTS_MAX],
    have: usize,
    dead: bool,
}

impl Staged {
    fn new(consumer: Consumer) -> Self {
        Self { consumer, bytes: [0; SLOT * SLOTS_MAX], have: 0, dead: false }
    }

    /// The slots of the next request, if all of them are there. `count` says how many that are.
    fn next(&mut self, count: fn(&[u8; SLOT]) -> Option<usize>) -> Result<Option<&[u8]>, Dead> {
        if self.dead {
            return Err(Dead);
        }
        let all = loop {
            let all = match self.bytes.first_chunk::<SLOT>() {
                Some(first) if self.have > 0 => count(first).ok_or(Dead),
                _ => Ok(1),
            };
            let all = all.inspect_err(|_| self.dead = true)?;
            if self.have == all && self.have > 0 {
                break all;
            }
            // Most have one.
            let got = if all - self.have == 1 {
                self.take(&mut [Slot::default()])?
            } else {
                let mut copies = [Slot::default(); SLOTS_MAX];
                self.take(&mut copies[..all - self.have])?
            };
            if got == 0 {
                return Ok(None);
            }
        };
        self.have = 0;
        Ok(Some(&self.bytes[..all * SLOT]))
    }

    /// Collects as many slots as there are and `copies` has room for.
    fn take(&mut self, copies: &mut [Slot]) -> Result<usize, Dead> {
        let got = self.consumer.pop(copies)?;
        for copy in &copies[..got] {
            let at = self.have * SLOT;
            self.bytes[at..at + SLOT].copy_from_slice(&copy.to_bytes());
            self.have += 1;
        }
        Ok(got)
    }

    /// Drops what is there now, and not what a program adds meanwhile without end.
    fn clear(&mut self) {
        self.have = 0;
        let mut left = self.consumer.available().unwrap_or(0) as usize;
        let mut copies = [Slot::default(); SLOTS_MAX];
        while left > 0 {
            match self.consumer.pop(&mut copies[..left.min(SLOTS_MAX)]) {
                Ok(got) if got > 0 => left -= got,
                _ => break,
            }
        }
    }
}

/// Send requests of a queue pair.
pub(crate) struct SendRing {
    staged: Staged,
    /// One that was taken and not begun, or the `wr_id` of one that is wrong.
    returned: Option<Result<Send, u64>>,
}

impl SendRing {
    pub(crate) fn attach(memory: &Arc<SharedMemory>, capacity: u32) -> Option<Self> {
        let at = abi::VERBS_QP_SEND_RING as usize;
        let consumer = Consumer::attach(memory, at, capacity).ok()?;
        Some(Self { staged: Staged::new(consumer), returned: None })
    }

    /// The next request; the `wr_id` of one that is wrong in itself.
    pub(crate) fn next(&mut self) -> Result<Option<Result<Send, u64>>, Dead> {
        if let Some(returned) = self.returned.take() {
            return Ok(Some(returned));
        }
        Ok(self.staged.next(slots::send_slots)?.map(Send::parse))
    }

    /// Puts what came last back, to be the next one again.
    pub(crate) fn put_back(&mut self, next: Result<Send, u64>) {
        self.returned = Some(next);
    }

    pub(crate) fn clear(&mut self) {
        self.returned = None;
        self.staged.clear();
    }

    /// A request as the program has it by now: what nobody may look at once it was found good.
    #[cfg(feature = "attack")]
    pub(crate) fn looked_at_again(&self, send: &Send) -> Send {
        // The time that others take to read it.
        std::thread::sleep(std::time::Duration::from_millis(1));
        let head = self.staged.consumer.look_again(send.head.slots.into()).to_bytes();
        let mut again = send.clone();
        again.head = plain::read(&head).expect("a slot holds a head");
        again
    }
}

/// Receive requests of a queue pair or of a shared receive queue.
pub(crate) struct ReceiveRing {
    staged: Staged,
    /// Those that were taken and not used after all, or the `wr_id` of one that is wrong: of a
    /// shared queue more than one at a time.
    returned: Vec<Result<Receive, u64>>,
    /// Requests in the ring that were counted, and their slots.
    counted: (u32, u32),
}

impl ReceiveRing {
    pub(crate) fn attach(memory: &Arc<SharedMemory>, offset: usize, capacity: u32) -> Option<Self> {
        let consumer = Consumer::attach(memory, offset, capacity).ok()?;
        Some(Self { staged: Staged::new(consumer), returned: Vec::new(), counted: (0, 0) })
    }

    /// The next request; the `wr_id` of one that is wrong in itself.
    pub(crate) fn next(&mut self) -> Result<Option<Result<Receive, u64>>, Dead> {
        if let Some(returned) = self.returned.pop() {
            return Ok(Some(returned));
        }
        let Some(bytes) = self.staged.next(slots::receive_slots)? else { return Ok(None) };
        let slots = u32::try_from(bytes.len() / SLOT).unwrap_or(u32::MAX);
        let (requests, counted) = self.counted;
        self.counted = (requests.saturating_sub(1), counted.saturating_sub(slots));
        Ok(Some(Receive::parse(bytes)))
    }

    /// Puts a request back, to be the next one again.
    pub(crate) fn give_back(&mut self, receive: Result<Receive, u64>) {
        self.returned.push(receive);
    }

    pub(crate) fn clear(&mut self) {
        self.returned.clear();
        self.counted = (0, 0);
        self.staged.clear();
    }

    /// Requests that are there, as their heads say; each is looked at once. One that is wrong, or
    /// changed meanwhile, has its program alone count wrongly.
    pub(crate) fn requests(&mut self) -> u32 {
        let available = self.staged.consumer.available().unwrap_or(0);
        while let Some(head) = self.staged.consumer.peek(self.counted.1) {
            let slots = slots::receive_slots(&head.to_bytes()).unwrap_or(1);
            let slots = self.counted.1 + u32::try_from(slots).unwrap_or(1);
            if slots > available {
                break;
            }
            self.counted = (self.counted.0 + 1, slots);
        }
        let returned = u32::try_from(self.returned.len()).unwrap_or(u32::MAX);
        self.counted.0.saturating_add(returned)
    }
}

/// Completions of a completion queue, and whether the program wants an event.
pub(crate) struct CompletionRing {
    memory: Arc<SharedMemory>,
    producer: Producer,
    capacity: u32,
    /// What was pushed since the program's wish was looked at.
    any: bool,
    solicited: bool,
}

impl CompletionRing {
    pub(crate) fn attach(memory: &Arc<SharedMemory>, capacity: u32) -> Option<Self> {
        let producer = Producer::attach(memory, abi::VERBS_CQ_RING as usize, capacity).ok()?;
        Some(Self { memory: Arc::clone(memory), producer, capacity, any: false, solicited: false })
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// What comes from now on is in another ring, and the program's wish with it.
    pub(crate) fn go_on_in(&mut self, other: Self) {
        if let (Some(here), Some(there)) = (self.wish(), other.wish()) {
            there.store(here.swap(abi::VERBS_ARM_NONE, Ordering::SeqCst), Ordering::SeqCst);
        }
        (self.memory, self.producer, self.capacity) =
            (other.memory, other.producer, other.capacity);
    }

    /// Shows a completion. False if there is no room for it, or the ring is dead.
    pub(crate) fn push(&mut self, completion: &verbs_completion, solicited: bool) -> bool {
        let slot = plain::bytes(completion).first_chunk::<SLOT>().map(Slot::from_bytes);
        self.any = true;
        self.solicited |= solicited;
        slot.is_some_and(|slot| self.producer.push(&[slot]) == Ok(1))
    }

    /// Whether the program is to get an event for what was pushed since the last time. It wants
    /// none any more then.
    pub(crate) fn take_wish(&mut self) -> bool {
        let (any, solicited) = (self.any, self.solicited);
        (self.any, self.solicited) = (false, false);
        if !any {
            return false;
        }
        // The program writes its wish and then looks for completions; here it is the other way
        // round. Without a fence on both sides either might miss the other.
        fence(Ordering::SeqCst);
        let Some(word) = self.wish() else { return false };
        let wish = word.load(Ordering::Relaxed);
        let matches = wish == abi::VERBS_ARM_NEXT || wish == abi::VERBS_ARM_SOLICITED && solicited;
        let (none, relaxed) = (abi::VERBS_ARM_NONE, Ordering::Relaxed);
        // Exchanged and not written: a wish that is new by now would be lost.
        matches && word.compare_exchange(wish, none, relaxed, relaxed).is_ok()
    }

    /// What the program wants to hear of; there is one in every memory that has a ring.
    fn wish(&self) -> Option<&AtomicU32> {
        self.memory.word32(abi::VERBS_CQ_ARM as usize)
    }
}

/// Wakes threads of a program that wait for a completion in a poll, once it is shown. A program
/// that always says so has a system call made for each turn, as by a doorbell.
pub(crate) fn wake_polls(context: &SharedMemory) {
    const AT: usize = abi::VERBS_CONTEXT_NAP as usize;
    const { assert!(AT + 4 <= abi::VERBS_CONTEXT_SIZE as usize && AT.is_multiple_of(4)) };
    // The program says that it waits and then looks for completions; here it is the other way
    // round.
    fence(Ordering::SeqCst);
    let Some(word) = context.word32(AT) else { return };
    if word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0 {
        sys::wake_all(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shared_ring::{ring, ring_size};

    #[test]
    fn a_send_request_that_is_put_back_is_the_next_one_until_a_reset() {
        let memory = SharedMemory::create(c"test", ring_size(4)).unwrap();
        ring::create(&memory, 0, 4).unwrap();
        let mut program = Producer::attach(&memory, 0, 4).unwrap();
        let mut sends = SendRing::attach(&memory, 4).unwrap();
        for wr_id in [1, 2, 3] {
            // The second one has flags that there are not.
            let flags = if wr_id == 2 { 16 } else { 0 };
            let head = abi::verbs_send { wr_id, flags, slots: 1, ..Default::default() };
            let slot = plain::bytes(&head).first_chunk::<SLOT>().map(Slot::from_bytes).unwrap();
            assert_eq!(program.push(&[slot]), Ok(1));
        }
        for wanted in [Ok(1), Err(2)] {
            for puts_back in [true, false] {
                let next = sends.next().unwrap().unwrap();
                assert_eq!(next.as_ref().map(|send| send.head.wr_id).map_err(|id| *id), wanted);
                if puts_back {
                    sends.put_back(next);
                }
            }
        }
        let last = sends.next().unwrap().unwrap();
        sends.put_back(last);
        sends.clear();
        assert!(sends.next().unwrap().is_none());
    }

    #[test]
    fn all_requests_that_are_put_back_come_again() {
        let memory = SharedMemory::create(c"test", ring_size(4)).unwrap();
        ring::create(&memory, 0, 4).unwrap();
        let mut program = Producer::attach(&memory, 0, 4).unwrap();
        let mut receives = ReceiveRing::attach(&memory, 0, 4).unwrap();
        for wr_id in [1, 2] {
            let head = abi::verbs_receive { wr_id, slots: 1, ..Default::default() };
            let slot = plain::bytes(&head).first_chunk::<SLOT>().map(Slot::from_bytes).unwrap();
            assert_eq!(program.push(&[slot]), Ok(1));
        }
        let mut next = || receives.next().unwrap().unwrap().unwrap();
        let taken = [next(), next()];
        for receive in taken {
            receives.give_back(Ok(receive));
        }
        assert_eq!(receives.requests(), 2);
        let mut again = [(); 2].map(|()| receives.next().unwrap().unwrap().unwrap().wr_id);
        again.sort_unstable();
        assert_eq!(again, [1, 2]);
        assert!(receives.next().unwrap().is_none());
    }
}

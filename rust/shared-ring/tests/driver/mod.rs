//! Plays one side of a ring and of a doorbell against a peer whose moves are bytes: the fuzz target
//! feeds it what libFuzzer finds, `random.rs` what a seeded generator makes. Every move has to end
//! in a value or a typed error, as a second, simpler reckoning says, and bytes around the ring have
//! to stay as they are.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use shared_ring::{
    ALIGNMENT, Consumer, DOORBELL_SIZE, PeerBroken, Producer, Ringer, SharedMemory, Sleeper, Slot,
    doorbell, ring, ring_size,
};

const PRODUCED: usize = 128;
const CONSUMED: usize = 256;
const GUARD: u8 = 0xa5;
/// The parts of the memory: a guard, the ring, a guard, the doorbell.
const RING: usize = ALIGNMENT;

/// What came of the moves, so that a run can show that it reached all of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) moved: u64,
    pub(crate) broken: u64,
    pub(crate) refused: u64,
    pub(crate) rung: u64,
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*first))
    }
}

/// Both sides of the ring as this process keeps them, and what they have to be.
struct Game<'a> {
    memory: Arc<SharedMemory>,
    capacity: u32,
    producer: Producer,
    consumer: Consumer,
    /// By the second reckoning: index, the last good one of the peer, and the error, if there is
    /// one.
    pushed: Side,
    popped: Side,
    ringer: Ringer,
    sleeper: Sleeper,
    outcomes: &'a mut Outcomes,
}

#[derive(Default)]
struct Side {
    own: u32,
    peer: u32,
    broken: Option<PeerBroken>,
}

impl Side {
    /// What a look at the peer's index has to give: it lies between what it was and `most`.
    fn look(&mut self, index: u32, most: u32) -> Result<(), PeerBroken> {
        if let Some(broken) = self.broken {
            return Err(broken);
        }
        if index.wrapping_sub(self.peer) > most.wrapping_sub(self.peer) {
            let broken = PeerBroken { index, least: self.peer, most };
            self.broken = Some(broken);
            return Err(broken);
        }
        self.peer = index;
        Ok(())
    }
}

/// Plays the moves in `data`.
pub(crate) fn drive(data: &[u8], outcomes: &mut Outcomes) {
    let mut bytes = Bytes(data);
    let capacity = 1 << (bytes.byte().unwrap_or(0) % 7);
    let doorbell_at = RING + ring_size(capacity).next_multiple_of(ALIGNMENT) + ALIGNMENT;
    let memory = SharedMemory::create(c"driver", doorbell_at + DOORBELL_SIZE).unwrap();
    ring::create(&memory, RING, capacity).unwrap();
    let ends = doorbell::descriptors().unwrap();
    let mut game = Game {
        producer: Producer::attach(&memory, RING, capacity).unwrap(),
        consumer: Consumer::attach(&memory, RING, capacity).unwrap(),
        pushed: Side::default(),
        popped: Side::default(),
        ringer: Ringer::attach(&memory, doorbell_at, ends.ring).unwrap(),
        sleeper: Sleeper::attach(&memory, doorbell_at, ends.wait, Duration::ZERO).unwrap(),
        outcomes,
        memory,
        capacity,
    };
    let end = RING + ring_size(capacity);
    let guards: Vec<usize> = (0..RING).chain(end..doorbell_at).collect();
    let start = game.memory.as_ptr().as_ptr();
    let byte = |at| start.wrapping_add(at);
    for at in &guards {
        // SAFETY: guards lie in the memory, and nobody else uses it yet.
        unsafe { byte(*at).write_volatile(GUARD) };
    }
    while game.play(&mut bytes).is_some() {}
    for at in &guards {
        // SAFETY: as above.
        let now = unsafe { byte(*at).read_volatile() };
        assert_eq!(now, GUARD, "byte {at} was written");
    }
}

impl Game<'_> {
    /// One move; None when there are no more bytes.
    fn play(&mut self, bytes: &mut Bytes<'_>) -> Option<()> {
        match bytes.byte()? % 9 {
            0 => self.write(RING + usize::from(bytes.byte()?) * 4, bytes.number()?),
            1 => self.write(RING + PRODUCED, self.popped.own.wrapping_add(bytes.byte()?.into())),
            2 => self.write(RING + CONSUMED, self.pushed.own.wrapping_sub(bytes.byte()?.into())),
            3 => self.push(usize::from(bytes.byte()?) % 80),
            4 => self.pop(usize::from(bytes.byte()?) % 80),
            5 => self.look(),
            6 => self.doorbell(bytes.byte()?, bytes.number()?),
            7 => self.attach(bytes.byte()?),
            _ => self.write(RING + CONSUMED, self.popped.own),
        }
        Some(())
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `at` is a multiple of 4 that callers keep inside of the memory.
        let word = unsafe { self.memory.as_ptr().byte_add(at) }.cast::<AtomicU32>();
        // SAFETY: as above; any bytes are a value of an atomic, and `memory` keeps it mapped.
        unsafe { word.as_ref() }
    }

    /// The peer writes a word of the ring. Beyond its end the guards follow, which it spares.
    fn write(&mut self, at: usize, value: u32) {
        if at < RING + ring_size(self.capacity) {
            self.word(at).store(value, Ordering::Relaxed);
        }
    }

    fn push(&mut self, count: usize) {
        let known = self.capacity - self.pushed.own.wrapping_sub(self.pushed.peer);
        let index = self.word(RING + CONSUMED).load(Ordering::Relaxed);
        let want = if count > known as usize || self.pushed.broken.is_some() {
            self.pushed.look(index, self.pushed.own)
        } else {
            Ok(())
        };
        let want = want.map(|()| {
            let room = self.capacity - self.pushed.own.wrapping_sub(self.pushed.peer);
            count.min(room as usize)
        });
        let got = self.producer.push(&vec![Slot([7; 8]); count]);
        assert_eq!(got, want);
        let Ok(pushed) = got else { return self.outcomes.broken += 1 };
        self.pushed.own = self.pushed.own.wrapping_add(u32::try_from(pushed).unwrap());
        self.outcomes.moved += pushed as u64;
        if pushed > 0 {
            assert_eq!(self.word(RING + PRODUCED).load(Ordering::Relaxed), self.pushed.own);
        }
    }

    fn pop(&mut self, count: usize) {
        let known = self.popped.peer.wrapping_sub(self.popped.own);
        let index = self.word(RING + PRODUCED).load(Ordering::Relaxed);
        let want = if count > known as usize || self.popped.broken.is_some() {
            self.popped.look(index, self.popped.own.wrapping_add(self.capacity))
        } else {
            Ok(())
        };
        let want =
            want.map(|()| count.min(self.popped.peer.wrapping_sub(self.popped.own) as usize));
        let got = self.consumer.pop(&mut vec![Slot::default(); count]);
        assert_eq!(got, want);
        let Ok(popped) = got else { return self.outcomes.broken += 1 };
        self.popped.own = self.popped.own.wrapping_add(u32::try_from(popped).unwrap());
        self.outcomes.moved += popped as u64;
        if popped > 0 {
            assert_eq!(self.word(RING + CONSUMED).load(Ordering::Relaxed), self.popped.own);
        }
    }

    fn look(&mut self) {
        let index = self.word(RING + CONSUMED).load(Ordering::Relaxed);
        let want = self.pushed.look(index, self.pushed.own);
        assert_eq!(self.producer.room().map(drop), want);
        let index = self.word(RING + PRODUCED).load(Ordering::Relaxed);
        let want = self.popped.look(index, self.popped.own.wrapping_add(self.capacity));
        assert_eq!(self.consumer.available().map(drop), want);
    }

    /// The peer writes the doorbell's word, and this side rings and waits, for no time.
    fn doorbell(&mut self, choice: u8, value: u32) {
        let word = self.memory.len() - DOORBELL_SIZE;
        self.word(word).store(if choice < 128 { 1 } else { value }, Ordering::Relaxed);
        let asleep = self.word(word).load(Ordering::Relaxed) == 1;
        assert_eq!(self.ringer.ring().unwrap(), asleep);
        let ready = choice.is_multiple_of(2);
        let wake = self.sleeper.wait(Some(Duration::ZERO), || ready).unwrap();
        assert!(ready || asleep || wake != doorbell::Wake::Ready);
        self.outcomes.rung += u64::from(wake == doorbell::Wake::Rung);
    }

    /// Both sides are taken anew, of a ring as it lies there or of one made anew.
    fn attach(&mut self, choice: u8) {
        if choice.is_multiple_of(2) {
            ring::create(&self.memory, RING, self.capacity).unwrap();
        }
        let producer = Producer::attach(&self.memory, RING, self.capacity);
        let consumer = Consumer::attach(&self.memory, RING, self.capacity);
        match (producer, consumer) {
            (Ok(producer), Ok(consumer)) => {
                (self.producer, self.consumer) = (producer, consumer);
                (self.pushed, self.popped) = (Side::default(), Side::default());
            }
            _ => self.outcomes.refused += 1,
        }
    }
}

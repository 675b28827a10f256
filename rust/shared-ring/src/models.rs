//! Models of rings and doorbells for loom, which runs them in every order of steps, and with every
//! value that the memory orders let a load see. `make test-rust` runs them.

use std::io;
use std::time::Duration;

use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use crate::doorbell::{Ringer, Sleeper, Wake};
use crate::layout::Slot;
use crate::ring::{Consumer, Producer};
use crate::storage::{DoorbellStorage, RingStorage};

/// What eventfd and epoll set do together: a ring is kept until it is taken, two are one.
#[derive(Debug, Default)]
struct Event {
    rung: Mutex<bool>,
    changed: Condvar,
}

#[derive(Clone, Debug)]
pub(crate) struct RingEnd(Arc<Event>);

#[derive(Debug)]
pub(crate) struct WaitEnd(Arc<Event>);

impl RingEnd {
    pub(crate) fn ring(&mut self) -> io::Result<()> {
        *self.0.rung.lock().unwrap() = true;
        self.0.changed.notify_one();
        Ok(())
    }
}

impl WaitEnd {
    /// Waits for ever: a lost wake-up is a deadlock, which loom reports.
    pub(crate) fn wait(&self, _: Option<Duration>) -> io::Result<Wake> {
        let mut rung = self.0.rung.lock().unwrap();
        while !*rung {
            rung = self.0.changed.wait(rung).unwrap();
        }
        *rung = false;
        Ok(Wake::Rung)
    }
}

fn doorbell(fenced: bool) -> (RingEnd, DoorbellStorage, Sleeper) {
    let event = Arc::new(Event::default());
    let storage = DoorbellStorage::new(fenced);
    let sleeper = Sleeper::over(storage.clone(), WaitEnd(Arc::clone(&event)), Duration::ZERO);
    (RingEnd(event), storage, sleeper)
}

fn ring(capacity: u32) -> (Producer, Consumer) {
    let storage = RingStorage::new(capacity);
    (Producer::over(storage.clone()), Consumer::over(storage))
}

fn numbered(n: u64) -> Slot {
    Slot([n; 8])
}

/// Runs a model with at most three switches of threads where none is needed: with more it takes
/// minutes. Two are not enough: only with three did loom object to a ringer that cleared the word
/// without ringing.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

/// Pops until `count` slots came, and sleeps when there are none.
fn consume(consumer: &mut Consumer, sleeper: &mut Sleeper, count: u64, mut popped: impl FnMut()) {
    let mut next = 0;
    while next < count {
        let mut copy = [Slot::default(); 2];
        let got = consumer.pop(&mut copy).unwrap();
        for slot in &copy[..got] {
            assert_eq!(*slot, numbered(next));
            next += 1;
        }
        if got > 0 {
            popped();
        } else {
            sleeper.wait(None, || consumer.is_ready()).unwrap();
        }
    }
}

#[test]
fn slots_arrive_whole_and_in_order() {
    check(|| {
        let (mut producer, mut consumer) = ring(2);
        let pushing = thread::spawn(move || {
            let mut pushed = 0;
            for _ in 0..3 {
                let batch = [numbered(pushed), numbered(pushed + 1)];
                pushed += producer.push(&batch).unwrap() as u64;
            }
            pushed
        });
        let mut popped = 0;
        let mut pop = |consumer: &mut Consumer| {
            let mut copies = [Slot::default(); 2];
            let got = consumer.pop(&mut copies).unwrap();
            for slot in &copies[..got] {
                assert_eq!(*slot, numbered(popped));
                popped += 1;
            }
        };
        for _ in 0..3 {
            pop(&mut consumer);
        }
        let pushed = pushing.join().unwrap();
        pop(&mut consumer);
        assert_eq!(popped, pushed);
    });
}

fn a_consumer_sleeps(fenced: bool) {
    check(move || {
        let (mut producer, mut consumer) = ring(4);
        let (end, storage, mut sleeper) = doorbell(fenced);
        let pushing = thread::spawn(move || {
            let mut ringer = Ringer::over(storage, end);
            for n in 0..2 {
                assert_eq!(producer.push(&[numbered(n)]).unwrap(), 1);
                ringer.ring().unwrap();
            }
        });
        consume(&mut consumer, &mut sleeper, 2, || ());
        pushing.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost() {
    a_consumer_sleeps(true);
}

/// The fences are needed: without them loom finds a consumer that sleeps for ever.
#[test]
#[should_panic(expected = "deadlock")]
fn without_fences_a_wake_up_is_lost() {
    a_consumer_sleeps(false);
}

#[test]
fn a_producer_sleeps_until_there_is_room() {
    check(|| {
        let (mut producer, mut consumer) = ring(1);
        let (data_end, data_storage, mut consumers) = doorbell(true);
        let (room_end, room_storage, mut producers) = doorbell(true);
        let pushing = thread::spawn(move || {
            let mut data = Ringer::over(data_storage, data_end);
            for n in 0..2 {
                while producer.push(&[numbered(n)]).unwrap() == 0 {
                    producers.wait(None, || producer.is_ready()).unwrap();
                }
                data.ring().unwrap();
            }
        });
        let mut room = Ringer::over(room_storage, room_end);
        consume(&mut consumer, &mut consumers, 2, || {
            room.ring().unwrap();
        });
        pushing.join().unwrap();
    });
}

#[test]
fn one_doorbell_serves_two_rings_of_two_threads() {
    check(|| {
        let (end, storage, mut sleeper) = doorbell(true);
        let mut consumers = Vec::new();
        let mut pushing = Vec::new();
        for _ in 0..2 {
            let (mut producer, consumer) = ring(1);
            let mut ringer = Ringer::over(storage.clone(), end.clone());
            consumers.push(consumer);
            pushing.push(thread::spawn(move || {
                assert_eq!(producer.push(&[numbered(0)]).unwrap(), 1);
                ringer.ring().unwrap();
            }));
        }
        let mut got = 0;
        while got < 2 {
            let mut copy = [Slot::default()];
            let popped: usize = consumers.iter_mut().map(|c| c.pop(&mut copy).unwrap()).sum();
            got += popped;
            if popped == 0 {
                sleeper.wait(None, || consumers.iter_mut().any(Consumer::is_ready)).unwrap();
            }
        }
        for thread in pushing {
            thread.join().unwrap();
        }
    });
}

//! What of the card has ended is destroyed by a thread that does nothing else. A kernel may take
//! long for a queue pair: `rdma_rxe` waits for each of its packets that a network device still has,
//! 50 s if that sends nothing any more, and whoever has the baton would hold up all endpoints. The
//! same holds of regions that peers have begun to write to.
//!
//! Everything has one owner. Whoever has the baton takes a queue pair out of the objects, has the
//! card stop (`Pair::reset`), and gives it away; from then on it is the thread's alone, which drops
//! it. What is charged for it is the objects' all the time: the thread says that it is gone, and
//! whoever has the baton refunds that. Completions that come meanwhile name a connection, or a life
//! of a queue pair, that has no queue pair of the card any more; and the card gives its number to
//! no other one before it is destroyed.
//!
//! Nobody waits for the thread: when the process ends, the kernel destroys what is left.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::card::{Carrier, MEMORY};
use crate::endpoint::Quota;
use crate::ibverbs::Region;
use crate::native::Native;
use crate::objects::{Objects, Source};
use crate::sys::{self, Epoll};

/// The way to the thread, and back.
pub(crate) struct Drops {
    ended: Sender<Ended>,
    gone: Receiver<Charge>,
}

/// What the card is to let go, with its memory.
struct Ended {
    what: Box<dyn Send>,
    charge: Charge,
}

/// What an endpoint is charged for until something is gone.
#[derive(Clone, Copy, Default)]
struct Charge {
    endpoint: u32,
    memory: u64,
    pairs: u64,
    /// Those of them that are for peers without Heddle.
    outside: u64,
    regions: u64,
}

impl Charge {
    fn of_carrier(endpoint: u32) -> Self {
        Self { endpoint, memory: MEMORY as u64, pairs: 1, ..Self::default() }
    }
}

impl Drops {
    /// Starts the thread, which tells of itself by an event of a set.
    pub(crate) fn start(epoll: &Epoll) -> io::Result<Self> {
        let event = sys::eventfd()?;
        // Each write is an event, and nobody has to read.
        epoll.add(event.as_fd(), sys::READABLE | sys::EDGE, Source::CardDrops.id(0))?;
        let (ended, all) = channel::<Ended>();
        let (tells, gone) = channel();
        std::thread::Builder::new().name("card".into()).spawn(move || {
            for Ended { what, charge } in all {
                drop(what);
                if tells.send(charge).is_err() {
                    return;
                }
                sys::ring(&event);
            }
        })?;
        Ok(Self { ended, gone })
    }
}

impl Objects {
    fn give_away(&mut self, what: Box<dyn Send>, charge: Charge) {
        let ended = Ended { what, charge };
        let left = match &self.card_drops {
            Some(drops) => drops.ended.send(ended).err().map(|unsent| unsent.0),
            None => Some(ended),
        };
        // There is a thread as soon as there is a card.
        if let Some(Ended { what, charge }) = left {
            drop(what);
            self.refund_card(charge);
        }
    }

    /// The thread tells what is gone.
    pub(crate) fn card_dropped(&mut self) {
        let next = |o: &Self| o.card_drops.as_ref().and_then(|drops| drops.gone.try_recv().ok());
        while let Some(charge) = next(self) {
            self.refund_card(charge);
        }
    }

    fn refund_card(&mut self, charge: Charge) {
        if let Some(e) = self.endpoints.get_mut(charge.endpoint) {
            e.refund(Quota::Memory, charge.memory);
            e.refund(Quota::Mrs, charge.regions);
            e.card_pairs -= charge.pairs;
        }
        self.pooled -= charge.memory;
        if let Some(card) = &mut self.card {
            card.pairs = card.pairs.saturating_sub(charge.pairs);
        }
        self.outside.pairs -= charge.outside;
    }

    /// A connection's queue pair of the card could not be made.
    pub(crate) fn refund_carrier(&mut self, endpoint: u32) {
        self.refund_card(Charge::of_carrier(endpoint));
    }

    /// A connection does without its queue pair of the card, which has stopped, or has ended.
    pub(crate) fn drop_carrier(&mut self, endpoint: u32, carrier: Option<Box<Carrier>>) {
        if let Some(carrier) = carrier {
            self.give_away(carrier, Charge::of_carrier(endpoint));
        }
    }

    /// A region that the card may know is nobody's any more. Its memory counts as long as the
    /// thread has it (`kept`).
    pub(crate) fn drop_region(&mut self, endpoint: u32, region: Option<Arc<Region>>) {
        let charge = Charge { endpoint, regions: 1, ..Charge::default() };
        match region {
            Some(region) => self.give_away(Box::new(region), charge),
            None => self.refund_card(charge),
        }
    }

    /// A queue pair that had one of the card is gone; that one was reset.
    pub(crate) fn drop_native(&mut self, endpoint: u32, native: Option<Box<Native>>) {
        if let Some(native) = native {
            let memory = native.memory();
            let charge = Charge { endpoint, memory, pairs: 1, outside: 1, regions: 0 };
            self.give_away(native, charge);
        }
    }
}

//! Which memory copies that are under way touch: who deregisters a region, or destroys a queue pair
//! that has requests, is told so when no thread reads or writes the bytes any more, since they are
//! the program's own again from then on.

use std::sync::{Condvar, Mutex, PoisonError};

use crate::objects::Objects;
use crate::pieces::{Piece, User};

/// Copies by threads that have put the baton down for it.
#[derive(Default)]
pub(crate) struct UnderWay {
    /// Each copy's number, and by what it touches something.
    touched: Vec<(u64, User)>,
    copies: u64,
    numbers: u64,
    /// Threads that wait for the end of one.
    waiting: usize,
}

/// Tells threads that wait of the ends of copies.
#[derive(Default)]
pub(crate) struct Ends {
    count: Mutex<u64>,
    more: Condvar,
}

impl Ends {
    fn count(&self) -> u64 {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.more.notify_all();
    }

    /// Waits until there are more than `seen`.
    fn wait(&self, seen: u64) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        while *count == seen {
            count = self.more.wait(count).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Objects {
    /// A number that nothing else has had.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.under_way.numbers += 1;
        self.under_way.numbers
    }

    /// A queue pair that a thread began something for, in an epoch of it. If it was destroyed or
    /// reset meanwhile, which ends all that was begun: 0, which no queue pair has.
    pub(crate) fn still(&self, number: u32, epoch: u64) -> u32 {
        let qp = self.qps.get(number).filter(|qp| qp.epoch == epoch);
        qp.map_or(0, |_| number)
    }

    /// The epoch of a queue pair.
    pub(crate) fn epoch(&self, number: u32) -> u64 {
        self.qps.get(number).map_or(0, |qp| qp.epoch)
    }

    /// A copy of these pieces begins.
    pub(crate) fn begin_copy(&mut self, from: &[Piece], to: &[Piece]) -> u64 {
        let under_way = &mut self.under_way;
        under_way.copies += 1;
        let number = under_way.copies;
        under_way.touched.extend(from.iter().chain(to).map(|piece| (number, piece.user())));
        number
    }

    pub(crate) fn end_copy(&mut self, number: u64) {
        self.under_way.touched.retain(|(copy, _)| *copy != number);
        if self.under_way.waiting > 0 {
            self.shared.ends.tell();
        }
    }

    /// Waits until no thread copies bytes by such a region or queue pair of this endpoint, which
    /// is gone already. A page that holds the copy up is the endpoint's own, or is swapped out:
    /// with it no memory is touched whose pages come as another program likes. So this endpoint
    /// gets a thread.
    pub(crate) fn await_copies(self: &mut Box<Self>, endpoint: u32, such: impl Fn(User) -> bool) {
        while self.under_way.touched.iter().any(|(_, user)| such(*user)) {
            let ends = &self.shared.ends;
            // None is missed: whoever tells of the next has the baton, which is here.
            let seen = ends.count();
            self.under_way.waiting += 1;
            self.without_baton(|worker| {
                worker.touches(endpoint);
                ends.wait(seen);
            });
            self.under_way.waiting -= 1;
        }
    }
}

//! All that the router has is one thing that one thread has at a time: the baton. A thread puts it
//! down while it copies memory of programs and while it sleeps, and picks it up again. So a page
//! that a program does not deliver holds up who waits for it, and nobody else.
//!
//! The thread that serves all endpoints is watched. When it is in one copy for too long, the
//! endpoint whose memory that is gets a shard of its own: the thread that is stuck serves that
//! endpoint from then on, and a new one all others. `docs/architecture/verbs.md`.

use std::collections::HashMap;
use std::fs::File;
use std::mem::swap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::objects::Objects;
use crate::opener::Opener;
use crate::protection::{Protection, protects};
use crate::sys;
use crate::under_way::Ends;

/// Between two looks at least.
const LOOK_LEAST: Duration = Duration::from_micros(100);
/// Looks without a copy in between after which it stops looking.
const LOOKS_IDLE: u32 = 200;
/// What a look adds to the score of an endpoint if it finds the worker waiting for its memory. Each
/// look takes one away, so that who has the worker wait for a quarter of the time or more is found.
const LATE: u32 = 4;
const LATE_MOST: u32 = 40;
/// For how long a thread that goes on stands back for those that wait.
const STAND_BACK: Duration = Duration::from_millis(1);

/// The place for the baton. It has what the thread had before that took it: something hollow.
#[derive(Default)]
pub(crate) struct Place {
    at: Mutex<Option<Box<Objects>>>,
    free: Condvar,
    waiting: AtomicU32,
}

impl Place {
    /// Puts the baton down for the first time.
    pub(crate) fn begin(&self, objects: Box<Objects>) {
        *self.lock() = Some(objects);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<Objects>>> {
        // A thread that panics ends the process.
        self.at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the baton, leaving something hollow in its place.
    pub(crate) fn take(&self, hollow: &mut Box<Objects>, worker: &Arc<Worker>) {
        let mut at = self.lock();
        let mut waits = false;
        loop {
            if let Some(objects) = at.as_mut().filter(|o| o.is_real()) {
                swap(objects, hollow);
                break;
            }
            if !std::mem::replace(&mut waits, true) {
                self.waiting.fetch_add(1, Ordering::Relaxed);
            }
            at = self.free.wait(at).unwrap_or_else(PoisonError::into_inner);
        }
        if waits {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        // Mostly it was this thread that put it down, and counting costs as much as the lock.
        if !Arc::ptr_eq(&hollow.worker, worker) {
            hollow.worker = Arc::clone(worker);
        }
    }

    /// Puts the baton down.
    pub(crate) fn put(&self, objects: &mut Box<Objects>) {
        if let Some(hollow) = self.lock().as_mut() {
            swap(hollow, objects);
        }
        if self.waiting.load(Ordering::Relaxed) > 0 {
            self.free.notify_one();
        }
    }

    /// Lets others have the baton who wait for it.
    pub(crate) fn stand_back(&self, objects: &mut Box<Objects>, worker: &Arc<Worker>) {
        let waiting = self.waiting.load(Ordering::Relaxed);
        if waiting == 0 {
            return;
        }
        self.put(objects);
        let start = Instant::now();
        while self.waiting.load(Ordering::Relaxed) >= waiting && start.elapsed() < STAND_BACK {
            std::thread::yield_now();
        }
        self.take(objects, worker);
    }
}

/// What all threads of the router share. It is there as long as the process.
#[derive(Default)]
pub(crate) struct Shared {
    pub(crate) place: Place,
    pub(crate) watch: Watch,
    pub(crate) opener: Opener,
    pub(crate) ends: Ends,
}

/// A thread that serves endpoints.
#[derive(Default)]
pub(crate) struct Worker {
    /// The endpoint that it serves, 0 for all that have no worker of their own.
    endpoint: AtomicU32,
    /// Odd while it copies memory of a program.
    copies: AtomicU64,
    /// What the kernel says of its thread; None if that could not be opened.
    stat: OnceLock<Option<File>>,
    /// The endpoint whose memory that is, 0 if it is none's yet or any more.
    culprit: AtomicU32,
    /// One queue pair alone had work when it looked at all last. Its own thread's.
    alone: AtomicBool,
}

impl Worker {
    pub(crate) fn serves(&self) -> u32 {
        self.endpoint.load(Ordering::Relaxed)
    }

    /// This thread is the worker.
    pub(crate) fn begin(&self, opener: &Opener) {
        self.stat.get_or_init(|| opener.stat_of(sys::thread()).ok().map(File::from));
    }

    /// Whether its thread waits, and not just for a processor. Whoever is not known to run is taken
    /// to wait: its endpoint gets a thread of its own, which costs little.
    fn waits(&self) -> bool {
        self.stat.get().and_then(Option::as_ref).is_none_or(sys::waits)
    }

    /// From now on it serves this endpoint, or all with 0.
    pub(crate) fn serve(&self, endpoint: u32) {
        self.endpoint.store(endpoint, Ordering::Relaxed);
    }

    /// Whether one queue pair alone had work the last time.
    pub(crate) fn is_alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    pub(crate) fn set_alone(&self, alone: bool) {
        self.alone.store(alone, Ordering::Relaxed);
    }

    /// The next bytes are of a program of this endpoint.
    pub(crate) fn touches(&self, endpoint: u32) {
        self.culprit.store(endpoint, Ordering::Relaxed);
    }
}

/// Whose pages come, but late again and again: by endpoint, how often of late.
#[derive(Default)]
struct Late(HashMap<u32, u32>);

impl Late {
    /// A look has found the worker waiting for memory of an endpoint, or not. Says whether it did
    /// so too often.
    fn look(&mut self, culprit: Option<u32>) -> bool {
        self.0.retain(|_, score| {
            *score -= 1;
            *score > 0
        });
        let Some(culprit) = culprit else { return false };
        let score = self.0.entry(culprit).or_default();
        *score = (*score + LATE).min(LATE_MOST);
        *score == LATE_MOST
    }
}

/// Looks after the worker that serves all endpoints.
#[derive(Default)]
pub(crate) struct Watch {
    rests: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

impl Watch {
    /// A copy begins or ends.
    fn count(&self, worker: &Worker) {
        // Counted before it is looked, as the watch says that it rests before it looks at the
        // count: one of the two sees the other. A fence would cost as much as the lock once more.
        worker.copies.fetch_add(1, Ordering::SeqCst);
        if self.rests.load(Ordering::SeqCst) && self.rests.swap(false, Ordering::SeqCst) {
            let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = &*thread {
                thread.unpark();
            }
        }
    }

    /// Looks, for as long as the process runs, each time that `patience` has passed: a copy that it
    /// sees twice has taken this long at least. Zero is for tests: each copy that it sees counts as
    /// stuck. `take_over` gets the endpoint that holds up the worker, and the baton; it says who
    /// serves all endpoints from then on.
    pub(crate) fn run(
        &self,
        place: &Place,
        mut hollow: Box<Objects>,
        mut worker: Arc<Worker>,
        patience: Duration,
        take_over: impl Fn(&mut Objects, &Worker, u32) -> Option<Arc<Worker>>,
    ) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        let (mut seen, mut idle) = (0, 0);
        let mut late = Late::default();
        loop {
            std::thread::park_timeout(patience.max(LOOK_LEAST));
            let now = worker.copies.load(Ordering::SeqCst);
            let mut culprit = worker.culprit.load(Ordering::Relaxed);
            let copies = now & 1 == 1 && culprit != 0;
            // One that has no processor is not stuck.
            let waits = copies && worker.waits();
            let is_late = late.look(waits.then_some(culprit));
            let stuck = waits && (now == seen || is_late) || copies && patience.is_zero();
            if stuck && protects(Protection::Watch) {
                place.take(&mut hollow, &worker);
                // Ended meanwhile, it waits for the baton, or is ahead of us.
                culprit = worker.culprit.load(Ordering::Relaxed);
                if worker.copies.load(Ordering::SeqCst) == now
                    && culprit != 0
                    && let Some(next) = take_over(&mut hollow, &worker, culprit)
                {
                    worker = next;
                }
                place.put(&mut hollow);
            }
            idle = if now == seen { idle + 1 } else { 0 };
            seen = now;
            if idle >= LOOKS_IDLE && now & 1 == 0 {
                self.rests.store(true, Ordering::SeqCst);
                while worker.copies.load(Ordering::SeqCst) == now
                    && self.rests.load(Ordering::SeqCst)
                {
                    std::thread::park();
                }
                self.rests.store(false, Ordering::SeqCst);
                idle = 0;
            }
        }
    }
}

impl Objects {
    /// Does something that may take as long as a program likes, without the baton. It is another
    /// thread's meanwhile, so that what was looked up before has to be looked up again.
    pub(crate) fn without_baton<R>(self: &mut Box<Self>, work: impl FnOnce(&Worker) -> R) -> R {
        let router = self.shared;
        let worker = Arc::clone(&self.worker);
        router.watch.count(&worker);
        router.place.put(self);
        let result = work(&worker);
        // Waiting for the baton is nobody's fault.
        worker.touches(0);
        router.place.take(self, &worker);
        router.watch.count(&worker);
        result
    }
}

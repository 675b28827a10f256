//! The loop: events of sockets and doorbells, turns of queue pairs, and sleep.

use std::convert::Infallible;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::baton::{Shared, Worker};
use crate::card::Card;
use crate::card_drops::Drops;
use crate::events::EventSocket;
use crate::kept::Kept;
use crate::objects::{Objects, Source};
use crate::opener::Opener;
use crate::protection::{Protection, protects};
use crate::requests::QUANTUM;
use crate::sandbox;
use crate::shards::{NOBODY, Nudge};
use crate::sys::{self, Epoll};
use spin::Spin;

mod orders;
mod spin;
#[cfg(test)]
mod tests;

/// How the router is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens for its agent.
    pub agent: PathBuf,
    /// The directory below which endpoints' control sockets are.
    pub sockets: PathBuf,
    /// For how long it looks for work before it sleeps at most, whatever its endpoints say.
    pub spin: Duration,
    /// For how long a copy of a program's memory may wait until its endpoint gets a thread of its
    /// own. Zero is for tests: any copy may be taken for one that waits.
    pub patience: Duration,
    /// The card that pairs between nodes go by, by libibverbs's name.
    pub device: Option<String>,
}

/// Shared memory of all endpoints together is at most this part of the machine's.
const POOL_PART: u64 = 4;
/// What the queue pairs of an endpoint may cost together in a round.
const ENDPOINT_QUANTUM: i64 = 4 * QUANTUM;
/// For how long an agent may not read.
const AGENT_TIME: Duration = Duration::from_secs(5);
/// Turns between two looks at sockets while there is work.
const TURNS_UNTIL_EVENTS: u32 = 16;
/// A context with as many queue pairs, none of which has work, is to ring while others have some: a
/// look at each of hundreds in every round costs those others more than a ring does.
const IDLE_QPS: usize = 16;
/// Time between two looks for such contexts.
const REST_AFTER: Duration = Duration::from_millis(1);

/// Runs the router until its loop cannot go on.
///
/// # Errors
///
/// The kernel's: the agent's socket cannot be made, rights cannot be given up, or the loop's set
/// cannot be waited for.
pub fn run(options: &Options) -> io::Result<Infallible> {
    sys::raise_descriptors();
    let is_shut_off = sys::is_root() && protects(Protection::Sandbox);
    let opener = if is_shut_off { Opener::start(&options.sockets)? } else { Opener::default() };
    let agent_listener = sys::listen_packets(&options.agent)?;
    let userfaultfd = sys::open_userfaultfd().ok();
    if is_shut_off {
        sandbox::give_up_rights()?;
    }
    let epoll = Epoll::new()?;
    epoll.add(agent_listener.as_fd(), sys::READABLE, Source::AgentListener.id(0))?;
    let nudge = Nudge::of(&epoll)?;
    // As long as the process.
    let shared: &'static Shared = Box::leak(Box::new(Shared { opener, ..Shared::default() }));
    let mut objects = Objects::new(shared, Arc::new(epoll), nudge);
    objects.agent_listener = Some(agent_listener);
    objects.userfaultfd = userfaultfd;
    objects.spare = sys::eventfd().ok();
    objects.kept = Some(Kept::new(&objects.epoll)?);
    // What programs do not touch is charged to nobody else.
    objects.pool = sys::machine_memory() / POOL_PART;
    if let Some(name) = &options.device {
        objects.card_wanted = true;
        // Without it pairs go by TCP, and say so.
        match Card::open(name, &objects.epoll) {
            Ok(card) => {
                objects.card_drops = Some(Drops::start(&objects.epoll)?);
                objects.card = Some(card);
            }
            Err(why) => eprintln!("heddle-rdma: no card: {why}"),
        }
    }
    if is_shut_off {
        sandbox::filter_calls(objects.card.is_some())?;
    }
    let (worker, spin) = (Arc::<Worker>::default(), options.spin);
    let patience = options.patience;
    let watched = (objects.hollow(), Arc::clone(&worker));
    let hollow = objects.hollow();
    shared.place.begin(Box::new(objects));
    std::thread::Builder::new().name("watch".into()).spawn(move || {
        let (hollow, worker) = watched;
        shared.watch.run(&shared.place, hollow, worker, patience, |objects, stuck, culprit| {
            take_over(objects, stuck, culprit, spin)
        });
    })?;
    Loop::new(hollow, worker, spin).run()?;
    // This thread came to serve one endpoint, which has gone. Others serve the rest, and they would
    // end with it.
    loop {
        std::thread::park();
    }
}

/// Has a new worker serve all endpoints, because the one that did is stuck in memory of `culprit`,
/// whose worker it is from now on. None if that cannot be: it is tried again.
fn take_over(
    objects: &mut Objects,
    stuck: &Worker,
    culprit: u32,
    spin: Duration,
) -> Option<Arc<Worker>> {
    let worker = Arc::<Worker>::default();
    let (hollow, next) = (objects.hollow(), Arc::clone(&worker));
    // It waits for the baton, which is not its yet.
    let spawned = std::thread::Builder::new().name("serve".into()).spawn(move || {
        if let Err(err) = Loop::new(hollow, worker, spin).run() {
            eprintln!("heddle-rdma: {err}");
            std::process::exit(1);
        }
    });
    spawned.ok()?;
    if let Ok(serves) = objects.give_shard(culprit) {
        stuck.serve(serves);
    } else {
        // It ends.
        next.serve(NOBODY);
        return None;
    }
    Some(next)
}

/// What comes of a worker that falls asleep.
#[derive(Debug, PartialEq, Eq)]
enum Doze {
    /// There is something to do.
    Wakes,
    /// It sleeps, until then if not for ever.
    Sleeps(Option<Instant>),
}

/// What a worker does all the time.
struct Loop {
    /// All that there is, or something hollow while others have it.
    objects: Box<Objects>,
    worker: Arc<Worker>,
    spin_most: Duration,
    spin: Spin,
    turns: u32,
    /// When it looked last for contexts that may rest, and whether some do: they ring.
    last_rest: Instant,
    rests: bool,
    /// Something was done that others have not been woken for.
    untold: bool,
    rounds: u64,
    events: Vec<(u64, u32)>,
    /// Contexts that are looked at in a round.
    round: Vec<u32>,
}

impl Loop {
    fn new(objects: Box<Objects>, worker: Arc<Worker>, spin_most: Duration) -> Self {
        Self {
            objects,
            worker,
            spin_most,
            spin: Spin::default(),
            turns: 0,
            last_rest: Instant::now(),
            rests: false,
            untold: false,
            rounds: 0,
            events: Vec::with_capacity(64),
            round: Vec::new(),
        }
    }

    fn run(mut self) -> io::Result<()> {
        let all = self.objects.shared;
        self.worker.begin(&all.opener);
        all.place.take(&mut self.objects, &self.worker);
        loop {
            let shard = self.worker.serves();
            if shard != 0 && self.objects.shard_of(shard) == 0 {
                // Its endpoint has gone.
                all.place.put(&mut self.objects);
                return Ok(());
            }
            self.round(shard)?;
            all.place.stand_back(&mut self.objects, &self.worker);
        }
    }

    /// A turn of each queue pair that may have work; then events, waiting for them if there was
    /// none.
    fn round(&mut self, shard: u32) -> io::Result<()> {
        let now = Instant::now();
        let mut until = self.expire(shard, now);
        self.speak(shard);
        if self.objects.card_turn(shard) | self.turn(shard, now, &mut until) {
            self.spin.came();
            self.turns += 1;
            self.untold = true;
            // A worker that was stuck has another shard now, and must not take the events of the
            // one that it had: nobody else would see them.
            if self.turns < TURNS_UNTIL_EVENTS && !self.rests || self.worker.serves() != shard {
                return Ok(());
            }
            self.turns = 0;
            if now.duration_since(self.last_rest) >= REST_AFTER && !self.rest(shard, now) {
                return Ok(());
            }
            self.tell_others(shard);
            return self.dispatch(shard, Some(Duration::ZERO));
        }
        self.turns = 0;
        let time = self.spin_time(shard);
        if self.spin.goes_on(now, time) {
            return self.dispatch(shard, Some(Duration::ZERO));
        }
        self.sleep(shard, now)
    }

    /// For how long to look for work before it sleeps: as long as one of its endpoints that are
    /// awake says, and no longer than the operator lets it.
    fn spin_time(&self, shard: u32) -> Duration {
        if self.spin_most.is_zero() {
            return Duration::ZERO;
        }
        let awake = self.objects.contexts.iter().filter(|(_, c)| c.awake);
        let own = awake.filter(|(_, c)| self.objects.shard_of(c.endpoint) == shard);
        let endpoints = own.filter_map(|(_, c)| self.objects.endpoints.get(c.endpoint));
        let micros = endpoints.map(|e| e.spin_us).max().unwrap_or(0);
        Duration::from_micros(micros.into()).min(self.spin_most)
    }

    /// Does what is due. That is the business of the worker that serves all.
    fn expire(&mut self, shard: u32, now: Instant) -> Option<Instant> {
        if shard != 0 {
            return None;
        }
        // It may be the business of others, too.
        self.untold |= self.objects.is_due(now);
        self.objects.expire(now)
    }

    /// Contexts of this worker's endpoints, of those that are awake or, if `waiting`, wait.
    fn contexts(&mut self, shard: u32, waiting: bool) -> Vec<u32> {
        let mut round = std::mem::take(&mut self.round);
        round.clear();
        let all = self.objects.contexts.iter();
        let all = all.filter(|(_, c)| c.awake || waiting && (c.waits || c.dozes));
        let own = all.filter(|(_, c)| self.objects.shard_of(c.endpoint) == shard);
        round.extend(own.map(|(handle, _)| handle));
        round
    }

    /// A turn of each queue pair of the contexts that are awake or wait, as far as the budgets of
    /// their endpoints go. Says whether there was work, and when the first of those that wait gives
    /// up.
    fn turn(&mut self, shard: u32, now: Instant, until: &mut Option<Instant>) -> bool {
        let mut worked = self.visits(shard, now, until);
        let mut busy = u32::from(worked);
        let mut round = self.contexts(shard, true);
        self.rounds += 1;
        if !round.is_empty() {
            // Of one endpoint's contexts another one is first each time.
            let length = u64::try_from(round.len()).unwrap_or(1);
            round.rotate_left(usize::try_from(self.rounds % length).unwrap_or(0));
        }
        for handle in &round {
            let of_it = self.turn_of(*handle, now, until);
            busy += of_it;
            worked |= of_it > 0;
            if self.worker.serves() != shard {
                // It was stuck: others have gone on with the rest.
                return true;
            }
        }
        self.round = round;
        self.worker.set_alone(busy == 1);
        worked
    }

    /// The same for one context: how many of its queue pairs had work, or may have. What its
    /// endpoint has no budget left for is first the next time.
    fn turn_of(&mut self, handle: u32, now: Instant, until: &mut Option<Instant>) -> u32 {
        let Some(context) = self.objects.contexts.get(handle) else { return 0 };
        let (endpoint, first, all) = (context.endpoint, context.first, context.qps.len());
        let shard = self.worker.serves();
        let (mut busy, mut waits) = (0, false);
        for i in (0..all).map(|i| first + i) {
            if !self.has_budget(endpoint) {
                if let Some(context) = self.objects.contexts.get_mut(handle) {
                    context.first = i % all;
                }
                busy += 1;
                break;
            }
            let qp = self.objects.contexts.get(handle);
            let qp = qp.and_then(|c| c.qps.get(i % c.qps.len().max(1)).copied());
            let Some(qp) = qp else { break };
            let turn = self.objects.turn(qp, now);
            busy += u32::from(turn.worked);
            waits |= turn.waits;
            earlier(until, turn.until);
            if let Some(endpoint) = self.objects.endpoints.get_mut(endpoint) {
                endpoint.budget -= turn.cost;
            }
            if self.worker.serves() != shard {
                return busy;
            }
        }
        if let Some(context) = self.objects.contexts.get_mut(handle) {
            // What had no turn may wait.
            context.waits = waits || busy > 0;
        }
        busy
    }

    /// Whether an endpoint may go on in this round.
    fn has_budget(&mut self, endpoint: u32) -> bool {
        let Some(endpoint) = self.objects.endpoints.get_mut(endpoint) else { return false };
        if endpoint.round != self.rounds {
            endpoint.round = self.rounds;
            // Less after a round that cost more, and never more.
            endpoint.budget = endpoint.budget.min(0) + ENDPOINT_QUANTUM;
        }
        endpoint.budget > 0 || !protects(Protection::Rounds)
    }

    /// Turns of other endpoints' queue pairs whose requests are for memory of this worker's.
    fn visits(&mut self, shard: u32, now: Instant, until: &mut Option<Instant>) -> bool {
        let own = self.objects.endpoints.get_mut(shard).and_then(|e| e.shard.as_mut());
        let Some(own) = own.filter(|s| !s.visitors.is_empty()) else { return false };
        let mut worked = false;
        for number in std::mem::take(&mut own.visitors) {
            let turn = self.objects.turn(number, now);
            worked |= turn.worked;
            earlier(until, turn.until);
            if turn.worked || turn.waits {
                self.objects.visit(shard, number);
            }
        }
        worked
    }

    /// Has every program ring from now on, looks once more, and waits.
    fn sleep(&mut self, shard: u32, now: Instant) -> io::Result<()> {
        let look = |all: &mut Self, until: &mut _| {
            all.turn(shard, now, until) | all.objects.card_turn(shard)
        };
        let dozing = self.contexts(shard, false);
        let Doze::Sleeps(until) = self.doze(shard, now, dozing, look) else { return Ok(()) };
        self.tell_others(shard);
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        self.dispatch(shard, timeout)
    }

    /// Has the programs of contexts with many queue pairs ring from now on that had no work in the
    /// last round. False if the worker has another shard by now.
    #[cold]
    fn rest(&mut self, shard: u32, now: Instant) -> bool {
        self.last_rest = now;
        let mut idle = self.contexts(shard, false);
        let all = &self.objects.contexts;
        idle.retain(|h| all.get(*h).is_some_and(|c| !c.waits && c.qps.len() >= IDLE_QPS));
        for handle in idle {
            self.doze(shard, now, vec![handle], |all, _| all.has_work(handle, now));
            if self.worker.serves() != shard {
                return false;
            }
        }
        let mut all = self.objects.contexts.iter();
        self.rests = all.any(|(_, c)| !c.awake && c.qps.len() >= IDLE_QPS);
        true
    }

    /// Whether a queue pair of a context has work, which is begun then.
    fn has_work(&mut self, handle: u32, now: Instant) -> bool {
        let qps = self.objects.contexts.get(handle).map_or(Vec::new(), |c| c.qps.clone());
        qps.into_iter().any(|qp| {
            let turn = self.objects.turn(qp, now);
            turn.worked || turn.waits
        })
    }

    /// Has the programs of contexts ring from now on, and looks once more.
    fn doze(
        &mut self,
        shard: u32,
        now: Instant,
        dozing: Vec<u32>,
        look: impl FnOnce(&mut Self, &mut Option<Instant>) -> bool,
    ) -> Doze {
        for handle in &dozing {
            if let Some(context) = self.objects.contexts.get_mut(*handle) {
                // Before the look: who is woken in the middle of it, by a turn of another one or by
                // another thread while this one copies, is awake.
                (context.awake, context.dozes) = (false, true);
                if let Some(doorbell) = &context.doorbell {
                    doorbell.arm();
                }
            }
        }
        // What came before without a ring may be for another worker, such as a receive request that
        // a queue pair of its endpoint waits for: others have to look once more as well.
        self.untold |= !dozing.is_empty();
        let mut until = self.expire(shard, now);
        let worked = look(self, &mut until);
        let is_other = self.worker.serves() != shard;
        for handle in dozing {
            let Some(context) = self.objects.contexts.get_mut(handle) else { continue };
            context.dozes = false;
            context.awake |= worked || is_other;
            if let Some(doorbell) = context.doorbell.as_ref().filter(|_| worked && !is_other) {
                doorbell.disarm();
            }
        }
        if is_other {
            return Doze::Wakes;
        }
        self.speak(shard);
        if worked || !self.contexts(shard, false).is_empty() {
            return Doze::Wakes;
        }
        Doze::Sleeps(until)
    }

    /// Wakes other workers if something was done since the last time.
    fn tell_others(&mut self, shard: u32) {
        let asks = shard != 0 && !self.objects.asks.is_empty();
        if std::mem::take(&mut self.untold) || asks {
            self.objects.nudge_others(shard);
        }
    }

    fn dispatch(&mut self, shard: u32, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let (epoll, _nudge) = self.objects.epoll_for(shard);
        let waited = if timeout == Some(Duration::ZERO) {
            epoll.wait(&mut events, timeout)
        } else {
            let all = self.objects.shared;
            all.place.put(&mut self.objects);
            let waited = epoll.wait(&mut events, timeout);
            all.place.take(&mut self.objects, &self.worker);
            waited
        };
        let mut changed = false;
        for (id, _) in &events {
            changed |= self.event(*id);
            if self.worker.serves() != shard {
                break;
            }
        }
        if changed {
            self.spin.came();
            // Its own shard may be another one now.
            self.objects.nudge_others(self.worker.serves());
        }
        self.events = events;
        waited
    }

    /// Something has happened. Says whether it may be others' business, too.
    fn event(&mut self, id: u64) -> bool {
        let (source, handle) = Source::of(id);
        let is = |s: Source| source == s as u64;
        if is(Source::Doorbell) {
            if let Some(context) = self.objects.contexts.get_mut(handle) {
                context.awake = true;
            }
        } else if is(Source::Control) {
            self.objects.control(handle);
            self.objects.notify();
        } else if is(Source::Listener) {
            self.objects.accept(handle);
        } else if is(Source::Link) {
            self.objects.link_event(handle);
            self.objects.notify();
        } else if is(Source::Events) {
            let events = self.objects.contexts.get_mut(handle).and_then(|c| c.events.as_mut());
            if events.is_some_and(EventSocket::drain)
                && let Some(context) = self.objects.contexts.get(handle)
                && let Some(events) = &context.events
            {
                self.objects.epoll_of(context.endpoint).remove(events.socket.as_fd());
            }
        } else if is(Source::Channel) {
            let events = self.objects.channels.get_mut(handle).map(|c| &mut c.events);
            if events.is_some_and(EventSocket::drain)
                && let Some(channel) = self.objects.channels.get(handle)
            {
                let epoll = self.objects.epoll_of_context(channel.context);
                epoll.remove(channel.events.socket.as_fd());
            }
        } else if is(Source::Card) {
            self.objects.card_event();
        } else if is(Source::CardEvents) {
            self.objects.card_changed();
        } else if is(Source::CardDrops) {
            self.objects.card_dropped();
        } else if is(Source::Kept) {
            self.objects.take_gone();
        } else if is(Source::Outside) {
            self.objects.native_event();
        } else if is(Source::AgentListener) {
            self.accept_agent();
        } else if is(Source::Agent) {
            self.hear_agent();
        }
        !is(Source::Nudge)
    }
}

/// Makes a time the earlier one of itself and another.
fn earlier(until: &mut Option<Instant>, at: Option<Instant>) {
    *until = match (*until, at) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    };
}

//! The loop: events of sockets and doorbells, turns of queue pairs, and sleep.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use verbs_protocol::agent::{self, Message};

use crate::objects::{Endpoint, Objects, Source};
use crate::sys::{self, Epoll};

/// How the router is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens for its agent.
    pub agent: PathBuf,
    /// For how long it looks for work before it sleeps.
    pub spin: Duration,
}

/// Turns between two looks at sockets while there is work.
const TURNS_UNTIL_EVENTS: u32 = 16;

/// Runs the router until its loop cannot go on.
///
/// # Errors
///
/// The kernel's: the agent's socket cannot be made, or the loop's set cannot be waited for.
pub fn run(options: &Options) -> io::Result<()> {
    let mut router = Router::new(options)?;
    loop {
        router.round()?;
    }
}

struct Router {
    objects: Objects,
    agent_listener: OwnedFd,
    agent: Option<OwnedFd>,
    spin: Duration,
    /// When there was work last.
    worked: Instant,
    turns: u32,
    events: Vec<(u64, u32)>,
    /// Contexts that are looked at in a round.
    round: Vec<u32>,
}

impl Router {
    fn new(options: &Options) -> io::Result<Self> {
        let agent_listener = sys::listen_packets(&options.agent)?;
        let epoll = Epoll::new()?;
        epoll.add(agent_listener.as_fd(), sys::READABLE, Source::AgentListener.id(0))?;
        Ok(Self {
            objects: Objects::new(epoll),
            agent_listener,
            agent: None,
            spin: options.spin,
            worked: Instant::now(),
            turns: 0,
            events: Vec::with_capacity(64),
            round: Vec::new(),
        })
    }

    /// A turn of each queue pair that may have work; then events, waiting for them if there was
    /// none.
    fn round(&mut self) -> io::Result<()> {
        let now = Instant::now();
        let mut until = self.objects.expire(now);
        self.speak();
        if self.turn(now, &mut until) {
            self.worked = now;
            self.turns += 1;
            if self.turns < TURNS_UNTIL_EVENTS {
                return Ok(());
            }
            self.turns = 0;
            return self.dispatch(Some(Duration::ZERO));
        }
        self.turns = 0;
        if now.duration_since(self.worked) < self.spin {
            return self.dispatch(Some(Duration::ZERO));
        }
        self.sleep(now)
    }

    /// A turn of each queue pair of the contexts that are awake or wait. Says whether there was
    /// work, and when the first of those that wait gives up.
    fn turn(&mut self, now: Instant, until: &mut Option<Instant>) -> bool {
        let mut worked = false;
        let mut round = std::mem::take(&mut self.round);
        round.clear();
        let all = self.objects.contexts.iter();
        round.extend(all.filter(|(_, c)| c.awake || c.waits).map(|(handle, _)| handle));
        for handle in &round {
            let mut waits = false;
            let mut i = 0;
            while let Some(qp) =
                self.objects.contexts.get(*handle).and_then(|c| c.qps.get(i).copied())
            {
                let turn = self.objects.turn(qp, now);
                worked |= turn.worked;
                waits |= turn.waits;
                if let Some(at) = turn.until {
                    *until = Some(until.map_or(at, |first| first.min(at)));
                }
                i += 1;
            }
            if let Some(context) = self.objects.contexts.get_mut(*handle) {
                context.waits = waits;
            }
        }
        self.round = round;
        worked
    }

    /// Has every program ring from now on, looks once more, and waits.
    fn sleep(&mut self, now: Instant) -> io::Result<()> {
        let all = self.objects.contexts.iter().filter(|(_, c)| c.awake);
        let awake: Vec<u32> = all.map(|(handle, _)| handle).collect();
        for handle in &awake {
            if let Some(doorbell) =
                self.objects.contexts.get(*handle).and_then(|c| c.doorbell.as_ref())
            {
                doorbell.arm();
            }
        }
        let mut until = self.objects.expire(now);
        let worked = self.turn(now, &mut until);
        self.speak();
        if worked {
            self.worked = now;
            for handle in &awake {
                if let Some(doorbell) =
                    self.objects.contexts.get(*handle).and_then(|c| c.doorbell.as_ref())
                {
                    doorbell.disarm();
                }
            }
            return Ok(());
        }
        for handle in awake {
            if let Some(context) = self.objects.contexts.get_mut(handle) {
                context.awake = false;
            }
        }
        let timeout = until.map(|until| until.saturating_duration_since(Instant::now()));
        self.dispatch(timeout)
    }

    fn dispatch(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let waited = self.objects.epoll.wait(&mut events, timeout);
        for (id, _) in &events {
            self.event(*id);
        }
        self.events = events;
        waited
    }

    fn event(&mut self, id: u64) {
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
            if let Some(events) = events
                && events.drain()
            {
                self.objects.epoll.remove(events.socket.as_fd());
            }
        } else if is(Source::Channel) {
            if let Some(channel) = self.objects.channels.get_mut(handle)
                && channel.events.drain()
            {
                self.objects.epoll.remove(channel.events.socket.as_fd());
            }
        } else if is(Source::AgentListener) {
            self.accept_agent();
        } else if is(Source::Agent) {
            self.hear_agent();
        }
    }

    fn accept_agent(&mut self) {
        let Ok(socket) = sys::accept(&self.agent_listener) else { return };
        if let Some(old) = self.agent.take() {
            self.objects.epoll.remove(old.as_fd());
        }
        let added = self.objects.epoll.add(socket.as_fd(), sys::READABLE, Source::Agent.id(0));
        if added.is_ok() {
            self.agent = Some(socket);
            self.say(&Message::Hello { version: agent::VERSION });
        }
    }

    fn say(&mut self, message: &Message) {
        let Some(agent) = &self.agent else { return };
        // An agent that does not read is as good as none: it connects again.
        if sys::send(agent, &message.encode(), &[]).is_err() {
            self.drop_agent();
        }
    }

    /// Says to the agent what is to be said. Without one it is lost, and asked for again.
    fn speak(&mut self) {
        for message in std::mem::take(&mut self.objects.asks) {
            self.say(&message);
        }
    }

    fn drop_agent(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.objects.epoll.remove(agent.as_fd());
        }
    }

    fn hear_agent(&mut self) {
        let Some(agent) = &self.agent else { return };
        let mut bytes = [0; agent::MESSAGE_MAX + 1];
        let mut descriptors = Vec::new();
        let got = match sys::receive(agent, &mut bytes, &mut descriptors) {
            Err(err) if sys::would_block(&err) => return,
            result => result.unwrap_or(0),
        };
        let message = bytes.get(..got).map(Message::parse);
        let Some(Ok(message)) = message else {
            self.drop_agent();
            return;
        };
        self.obey(&message, &mut descriptors);
    }

    fn obey(&mut self, message: &Message, descriptors: &mut Vec<OwnedFd>) {
        match *message {
            Message::Hello { version } if version == agent::VERSION => {}
            Message::Begin => self.for_endpoints(|endpoint| endpoint.named = false),
            Message::End => {
                let all = self.objects.endpoints.iter().filter(|(_, e)| !e.named);
                for handle in all.map(|(handle, _)| handle).collect::<Vec<_>>() {
                    self.objects.remove_endpoint(handle);
                }
            }
            Message::Endpoint { endpoint, gids, limits, .. } => {
                let listener = descriptors.pop();
                let made = self.name_endpoint(endpoint, gids, &limits, listener);
                if let Err(err) = made {
                    let errno = err.raw_os_error().unwrap_or(libc::EINVAL).unsigned_abs();
                    self.say(&Message::Refused { endpoint, errno });
                }
            }
            Message::Remove { endpoint } => {
                if let Some(handle) = self.endpoint(endpoint) {
                    self.objects.remove_endpoint(handle);
                }
            }
            Message::Connected { tag, endpoint, errno } => {
                let socket = descriptors.pop().filter(|_| errno == 0);
                if let Some(handle) = self.endpoint(endpoint) {
                    self.objects.connected(tag, handle, socket);
                }
            }
            Message::Accepted { endpoint, source, destination } => {
                let handle = self.endpoint(endpoint);
                if let (Some(handle), Some(socket)) = (handle, descriptors.pop()) {
                    self.objects.accepted(handle, source, destination, socket);
                }
            }
            Message::Stats { tag, endpoint, kind, cursor } => {
                self.say(&self.objects.statistics(tag, endpoint, kind, cursor));
            }
            _ => self.drop_agent(),
        }
    }

    fn endpoint(&self, number: u64) -> Option<u32> {
        let mut all = self.objects.endpoints.iter();
        all.find(|(_, e)| e.number == number).map(|(handle, _)| handle)
    }

    fn for_endpoints(&mut self, change: impl Fn(&mut Endpoint)) {
        let all: Vec<u32> = self.objects.endpoints.iter().map(|(handle, _)| handle).collect();
        for handle in all {
            if let Some(endpoint) = self.objects.endpoints.get_mut(handle) {
                change(endpoint);
            }
        }
    }

    fn name_endpoint(
        &mut self,
        number: u64,
        gids: [verbs_protocol::Gid; 2],
        limits: &agent::Limits,
        listener: Option<OwnedFd>,
    ) -> io::Result<()> {
        let handle = match (self.endpoint(number), listener) {
            (Some(handle), None) => handle,
            (Some(handle), Some(listener)) => {
                self.listen(handle, &listener)?;
                if let Some(endpoint) = self.objects.endpoints.get_mut(handle) {
                    let old = std::mem::replace(&mut endpoint.listener, listener);
                    self.objects.epoll.remove(old.as_fd());
                }
                handle
            }
            (None, Some(listener)) => {
                let endpoint = Endpoint::new(number, gids, listener);
                let made = self.objects.endpoints.insert(endpoint, 0);
                let handle = made.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
                let listening = self.objects.endpoints.get(handle);
                let listening = listening.map_or(Ok(()), |e| self.listen(handle, &e.listener));
                if let Err(err) = listening {
                    self.objects.endpoints.remove(handle);
                    return Err(err);
                }
                handle
            }
            (None, None) => return Err(io::Error::from_raw_os_error(libc::EBADF)),
        };
        if let Some(endpoint) = self.objects.endpoints.get_mut(handle) {
            endpoint.gids = gids;
            endpoint.named = true;
            endpoint.limit(limits);
        }
        Ok(())
    }

    fn listen(&self, handle: u32, listener: &OwnedFd) -> io::Result<()> {
        sys::set_nonblocking(listener)?;
        self.objects.epoll.add(listener.as_fd(), sys::READABLE, Source::Listener.id(handle))
    }
}

//! Endpoints that are served by a thread of their own, because a copy of their memory took too long
//! once. They stay so: a thread costs little, and pages that came late once come late again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use verbs_protocol::statistics::Reason;

use crate::objects::{Objects, Source};
use crate::sys::{self, Epoll};

/// What a worker serves that is to end.
pub(crate) const NOBODY: u32 = u32::MAX;

/// Wakes a worker that sleeps.
#[derive(Clone)]
pub(crate) struct Nudge(Arc<OwnedFd>);

impl Nudge {
    /// One that wakes whoever waits for a set.
    pub(crate) fn of(epoll: &Epoll) -> io::Result<Self> {
        let fd = sys::eventfd()?;
        // Each write is an event, and nobody has to read.
        epoll.add(fd.as_fd(), sys::READABLE | sys::EDGE, Source::Nudge.id(0))?;
        Ok(Self(Arc::new(fd)))
    }

    fn ring(&self) {
        sys::ring(&self.0);
    }
}

/// What a worker has that serves one endpoint.
pub(crate) struct Shard {
    pub(crate) epoll: Arc<Epoll>,
    nudge: Nudge,
    /// Queue pairs of others whose requests are for memory of this endpoint.
    pub(crate) visitors: Vec<u32>,
}

impl Shard {
    /// Its endpoint is gone: the worker is to see that.
    pub(crate) fn end(&self) {
        self.nudge.ring();
    }

    fn new() -> io::Result<Self> {
        let epoll = Epoll::new()?;
        let nudge = Nudge::of(&epoll)?;
        Ok(Self { epoll: Arc::new(epoll), nudge, visitors: Vec::new() })
    }
}

impl Objects {
    /// Who serves an endpoint: 0 the worker of all.
    pub(crate) fn shard_of(&self, endpoint: u32) -> u32 {
        let has =
            self.shards > 0 && self.endpoints.get(endpoint).is_some_and(|e| e.shard.is_some());
        if has { endpoint } else { 0 }
    }

    /// The set in which an endpoint's descriptors are.
    pub(crate) fn epoll_of(&self, endpoint: u32) -> &Epoll {
        let shard = self.endpoints.get(endpoint).and_then(|e| e.shard.as_ref());
        shard.map_or(&self.epoll, |s| &s.epoll)
    }

    /// The set of a context's endpoint.
    pub(crate) fn epoll_of_context(&self, context: u32) -> &Epoll {
        self.contexts.get(context).map_or(&self.epoll, |c| self.epoll_of(c.endpoint))
    }

    /// The set that a worker waits for, and what wakes it, which has to live as long: a set forgets
    /// what is closed, and with it that it was rung.
    pub(crate) fn epoll_for(&self, shard: u32) -> (Arc<Epoll>, Nudge) {
        let shard = self.endpoints.get(shard).and_then(|e| e.shard.as_ref());
        let (epoll, nudge) = shard.map_or((&self.epoll, &self.nudge), |s| (&s.epoll, &s.nudge));
        (Arc::clone(epoll), nudge.clone())
    }

    /// Has the thread of an endpoint go on with a queue pair of another one.
    pub(crate) fn visit(&mut self, endpoint: u32, number: u32) {
        let own = self.worker.serves() == endpoint;
        let shard = self.endpoints.get_mut(endpoint).and_then(|e| e.shard.as_mut());
        if let Some(shard) = shard
            && !shard.visitors.contains(&number)
        {
            shard.visitors.push(number);
            if !own {
                shard.nudge.ring();
            }
        }
    }

    /// Wakes the worker of all, if this is another one.
    pub(crate) fn nudge_first(&self) {
        if self.worker.serves() != 0 {
            self.nudge.ring();
        }
    }

    /// Wakes the other workers: something has changed.
    pub(crate) fn nudge_others(&self, own: u32) {
        if self.shards == 0 {
            return;
        }
        if own != 0 {
            self.nudge.ring();
        }
        let others = self.endpoints.iter().filter(|(handle, _)| *handle != own);
        for shard in others.filter_map(|(_, e)| e.shard.as_ref()) {
            shard.nudge.ring();
        }
    }

    /// Gives an endpoint a shard: its descriptors are waited for there from now on. Says whom its
    /// worker serves: nobody, and so ends, if the endpoint has gone or has a worker already.
    pub(crate) fn give_shard(&mut self, handle: u32) -> io::Result<u32> {
        for context in self.contexts.handles() {
            // What was rung and not looked at yet must not be lost: events that the worker has got
            // go with it.
            if let Some(context) = self.contexts.get_mut(context) {
                context.awake = true;
            }
        }
        if self.endpoints.get(handle).is_none_or(|e| e.shard.is_some()) {
            return Ok(NOBODY);
        }
        let shard = Shard::new()?;
        for (fd, events, id) in self.descriptors_of(handle) {
            self.epoll.remove(fd);
            // Without it this endpoint is not served: it has no memory left for its sockets.
            let _ = shard.epoll.add(fd, events, id);
        }
        self.shards += 1;
        if let Some(endpoint) = self.endpoints.get_mut(handle) {
            endpoint.shard = Some(shard);
            endpoint.account.note(Reason::MemorySlow);
        }
        Ok(handle)
    }

    /// What of an endpoint is waited for, and how.
    fn descriptors_of(&self, endpoint: u32) -> Vec<(BorrowedFd<'_>, u32, u64)> {
        let mut all = Vec::new();
        if let Some(endpoint_object) = self.endpoints.get(endpoint) {
            let id = Source::Listener.id(endpoint);
            all.push((endpoint_object.listener.as_fd(), sys::READABLE, id));
        }
        for (handle, context) in self.contexts.iter().filter(|(_, c)| c.endpoint == endpoint) {
            let way = if context.unsent.is_some() { sys::WRITABLE } else { sys::READABLE };
            all.push((context.socket.as_fd(), way, Source::Control.id(handle)));
            if let Some(doorbell) = &context.doorbell {
                let way = sys::READABLE | sys::EDGE;
                all.push((doorbell.as_fd(), way, Source::Doorbell.id(handle)));
            }
            if let Some(events) = context.events.as_ref().filter(|e| e.holds()) {
                all.push((events.socket.as_fd(), sys::WRITABLE, Source::Events.id(handle)));
            }
            for (channel, object) in self.channels.iter().filter(|(_, c)| c.context == handle) {
                if object.events.holds() {
                    let id = Source::Channel.id(channel);
                    all.push((object.events.socket.as_fd(), sys::WRITABLE, id));
                }
            }
        }
        for (handle, link) in self.links.iter().filter(|(_, l)| l.endpoint == endpoint) {
            let way = sys::READABLE | if link.waits_for_room { sys::WRITABLE } else { 0 };
            all.push((link.stream.as_fd(), way, Source::Link.id(handle)));
        }
        all
    }
}

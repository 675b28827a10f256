//! What the router and its agent say to each other. `docs/protocols/verbs-agent.md`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use verbs_protocol::agent::{self, Message};
use verbs_protocol::statistics::Reason;

use super::{AGENT_TIME, Loop};
use crate::cm_link;
use crate::endpoint::Endpoint;
use crate::objects::Source;
use crate::protection::{Protection, protects};
use crate::sys;

impl Loop {
    pub(crate) fn accept_agent(&mut self) {
        let Some(listener) = &self.objects.agent_listener else { return };
        let Ok(socket) = sys::accept(listener) else { return };
        self.drop_agent();
        let added = self.objects.epoll.add(socket.as_fd(), sys::READABLE, Source::Agent.id(0));
        if added.is_ok() {
            self.objects.agent = Some(socket);
            self.say(Message::Hello { version: agent::VERSION });
        }
    }

    pub(crate) fn say(&mut self, message: Message) {
        self.objects.asks.push(message);
        self.speak(0);
    }

    /// Says to the agent what is to be said, as far as there is room. Without one it is lost, and
    /// asked for again.
    pub(crate) fn speak(&mut self, shard: u32) {
        let objects = &mut self.objects;
        if shard != 0 || objects.asks.is_empty() {
            return;
        }
        let Some(agent) = &objects.agent else { return objects.asks.clear() };
        let mut said = 0;
        let mut ended = None;
        for message in &objects.asks {
            let of = |m: &Message| match m {
                Message::Released { endpoint } => Some(*endpoint),
                _ => None,
            };
            let listener =
                objects.given_back.iter().find(|(number, _)| Some(*number) == of(message));
            let listener: Vec<_> = listener.iter().map(|(_, listener)| listener.as_fd()).collect();
            if let Err(err) = sys::send(agent, &message.encode(), &listener) {
                ended = Some(err);
                break;
            }
            objects.given_back.retain(|(number, _)| Some(*number) != of(message));
            said += 1;
        }
        objects.asks.drain(..said);
        let Some(err) = ended else { return self.agent_has_room() };
        let now = Instant::now();
        let since = objects.agent_full_since.filter(|_| said == 0);
        // One that does not read for so long is as good as none: it connects again.
        if !sys::would_block(&err) || since.is_some_and(|since| now >= since + AGENT_TIME) {
            return self.drop_agent();
        }
        objects.agent_full_since = since.or(Some(now));
        let way = sys::READABLE | sys::WRITABLE;
        let _ = objects.epoll.modify(agent.as_fd(), way, Source::Agent.id(0));
    }

    /// All is said.
    fn agent_has_room(&mut self) {
        let objects = &mut self.objects;
        if objects.agent_full_since.take().is_some()
            && let Some(agent) = &objects.agent
        {
            let _ = objects.epoll.modify(agent.as_fd(), sys::READABLE, Source::Agent.id(0));
        }
    }

    pub(crate) fn drop_agent(&mut self) {
        self.objects.agent_full_since = None;
        self.objects.asks.clear();
        self.objects.given_back.clear();
        // What it was about to tell of is told by nobody.
        self.objects.home = None;
        if std::mem::take(&mut self.objects.drains)
            && self.objects.endpoints.iter().next().is_none()
        {
            // Another one has all that this one had.
            std::process::exit(0);
        }
        if let Some(agent) = self.objects.agent.take() {
            self.objects.epoll.remove(agent.as_fd());
        }
    }

    pub(crate) fn hear_agent(&mut self) {
        let Some(agent) = &self.objects.agent else { return };
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
            Message::Begin => {
                self.objects.elsewhere.begin();
                self.for_endpoints(|endpoint| endpoint.named = false);
            }
            Message::End => {
                self.objects.elsewhere.end();
                let all = self.objects.endpoints.iter().filter(|(_, e)| !e.named);
                for handle in all.map(|(handle, _)| handle).collect::<Vec<_>>() {
                    self.objects.remove_endpoint(handle);
                }
                self.objects.ask_outside_anew();
            }
            Message::AskAnew => self.objects.ask_outside_anew(),
            Message::Answer { tag, endpoint, destination, errno, marks } => {
                if let Some(handle) = self.endpoint(endpoint) {
                    self.objects.hear_answer(tag, handle, &destination, (errno, marks));
                    self.objects.notify();
                }
            }
            Message::Endpoint { endpoint, gids, limits, .. } => {
                let listener = descriptors.pop();
                let made = self.name_endpoint(endpoint, gids, &limits, listener);
                if let Err(err) = made {
                    let errno = err.raw_os_error().unwrap_or(libc::EINVAL).unsigned_abs();
                    self.say(Message::Refused { endpoint, errno });
                }
            }
            Message::Groups { endpoint: 0, gids, ref groups } => {
                self.objects.elsewhere.name(gids, groups.clone());
            }
            Message::Remove { endpoint } => {
                if let Some(handle) = self.endpoint(endpoint) {
                    self.objects.remove_endpoint(handle);
                }
            }
            Message::Card { endpoint, lid, ref gids } => {
                self.objects.hear_home(endpoint, lid, gids);
            }
            Message::Connected { tag, endpoint, errno } => {
                let socket = descriptors.pop().filter(|_| errno == 0);
                self.connected(tag, endpoint, socket, errno);
            }
            Message::Accepted { endpoint, source, destination } => {
                self.objects.keep_home_of(endpoint);
                let handle = self.endpoint(endpoint);
                if let (Some(handle), Some(socket)) = (handle, descriptors.pop()) {
                    self.objects.accepted(handle, source, destination, socket);
                }
                self.objects.home = None;
            }
            Message::Drain => {
                self.objects.drains = true;
                let all = self.objects.endpoints.iter().map(|(handle, _)| handle);
                for handle in all.collect::<Vec<_>>() {
                    self.objects.give_endpoint_back(handle);
                }
                self.say(Message::Drain);
            }
            Message::Stats { tag, endpoint, kind, cursor } => {
                self.say(self.objects.statistics(tag, endpoint, kind, cursor));
            }
            _ => self.drop_agent(),
        }
    }

    /// The agent has connected an endpoint for queue pairs or an id of RDMA-CM, or could not.
    fn connected(&mut self, tag: u32, endpoint: u64, socket: Option<OwnedFd>, errno: u32) {
        self.objects.keep_home_of(endpoint);
        if let Some(handle) = self.endpoint(endpoint) {
            if tag & !cm_link::IDS == cm_link::TAG {
                self.objects.cm_connected(tag, handle, socket, errno);
            } else {
                self.objects.connected(tag, handle, socket);
            }
        }
        self.objects.home = None;
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
                    self.objects.epoll_of(handle).remove(old.as_fd());
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
            // TCP holds it to its cap, and its programs may connect again.
            if endpoint.is_capped() && endpoint.card_pairs > 0 && protects(Protection::Caps) {
                self.objects.end_card_pairs(Reason::CardCapped, |e| e == handle);
            }
        }
        self.objects.tell_groups(handle);
        self.objects.check_outside(handle);
        Ok(())
    }

    fn listen(&self, handle: u32, listener: &OwnedFd) -> io::Result<()> {
        sys::set_nonblocking(listener)?;
        let id = Source::Listener.id(handle);
        self.objects.epoll_of(handle).add(listener.as_fd(), sys::READABLE, id)
    }
}

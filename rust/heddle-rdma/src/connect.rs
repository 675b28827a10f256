//! How connections between endpoints are asked for: one for a pair of queues, one for the datagrams
//! to a GID. The agent makes them. `docs/protocols/verbs-agent.md`.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use verbs_protocol::Gid;
use verbs_protocol::agent::Message;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, Greeting};
use verbs_qp::Service;

use crate::link::{Phase, Timer};
use crate::objects::Objects;

/// After which an agent that does not answer is asked again: it may have ended.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// For how long datagrams wait for a connection, and the queue pair that sends them with them.
const DATAGRAMS_TIME: Duration = Duration::from_secs(10);
/// Between two attempts to connect.
const AGAIN_FIRST: Duration = Duration::from_millis(50);
const AGAIN_MOST: Duration = Duration::from_secs(1);

/// The tag of a CONNECT for datagrams has this bit, beside a number of its own; the others have the
/// number of a queue pair.
const DATAGRAMS: u32 = 1 << 31;

/// Destinations of datagrams that an endpoint may wait for at a time; what goes to others is
/// dropped.
const ASKED_MAX: usize = 64;

/// A CONNECT for datagrams that the agent has not answered.
pub(crate) struct Asked {
    tag: u32,
    endpoint: u32,
    other: Gid,
    /// When it was asked for first, and last.
    first: Instant,
    last: Instant,
}

impl Objects {
    /// Looks for the connection of a queue pair that has come to know its peer.
    pub(crate) fn seek(&mut self, number: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        if !qp.service.is_connected() || qp.link != 0 || self.is_own(number) {
            return;
        }
        // One that has come before.
        let waiting = self.links.iter().find(|(_, l)| {
            l.phase == Phase::Unmatched
                && l.endpoint == qp.endpoint
                && l.greeting.is_some_and(|g| g.destination_qp == number)
        });
        if let Some((handle, _)) = waiting {
            self.match_link(handle);
        }
        // Once, however often the program changes the state.
        if self.qps.get(number).is_some_and(|qp| !qp.seeks) {
            self.ask_for_link(number, 0);
        }
    }

    /// Whether a queue pair is connected with one of its own endpoint: that needs no connection.
    pub(crate) fn is_own(&self, number: u32) -> bool {
        self.qps.get(number).is_some_and(|qp| {
            self.endpoints.get(qp.endpoint).is_some_and(|e| e.has(&qp.attr.address.gid))
        })
    }

    pub(crate) fn ask_for_link(&mut self, number: u32, after: u64) {
        if number & DATAGRAMS != 0 {
            // Asked for again by the next datagram.
            let now = Instant::now();
            self.datagrams_refused.retain(|(_, _, until)| *until > now);
            self.give_up_datagrams(now);
            return;
        }
        if self.ask_outside_again(number) {
            return;
        }
        let established = self.is_established(number);
        let Some(qp) = self.qps.get_mut(number) else { return };
        let wants = qp.state.receives() && qp.service.is_connected() && !established && !qp.closed;
        qp.seeks = wants;
        let Some(endpoint) = self.endpoints.get(qp.endpoint).filter(|_| wants) else { return };
        let source = endpoint.gid(qp.attr.address.sgid_index);
        let destination = qp.attr.address.gid;
        if (source, number) > (destination, qp.attr.dest_qp_num) {
            qp.seeks = false;
            return;
        }
        let now = Instant::now();
        let trying = qp.link != 0 || qp.asked.is_some_and(|at| now < at + ANSWER_TIME);
        if !trying {
            qp.asked = Some(now);
        }
        let endpoint = endpoint.number;
        if !trying {
            self.asks.push(Message::Connect { tag: number, endpoint, source, destination });
        }
        // Asked for again if nothing comes of it.
        let after = Duration::from_millis(after).saturating_mul(2).clamp(AGAIN_FIRST, AGAIN_MOST);
        let again = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        self.at(Instant::now() + after, Timer::Seek(number, again));
    }

    /// The connection by which an endpoint sends datagrams to a GID; asked for if there is none.
    /// `Err` says that it was refused.
    pub(crate) fn datagram_link(
        &mut self,
        endpoint: u32,
        source: Gid,
        destination: Gid,
    ) -> Result<Option<u32>, ()> {
        let now = Instant::now();
        let is = |(e, g): (u32, Gid)| e == endpoint && g == destination;
        if self.datagrams_refused.iter().any(|(e, g, until)| is((*e, *g)) && *until > now) {
            return Err(());
        }
        if let Some((_, _, link)) = self.datagram_links.iter().find(|(e, g, _)| is((*e, *g))) {
            let established = self.links.get(*link).is_some_and(|l| l.phase == Phase::Established);
            return Ok(established.then_some(*link));
        }
        let Some(number) = self.endpoints.get(endpoint).map(|e| e.number) else { return Err(()) };
        if let Some(asked) = self.datagrams_asked.iter_mut().find(|a| is((a.endpoint, a.other))) {
            // An agent that did not answer in time may have ended. Either answer will do.
            if now >= asked.last + ANSWER_TIME {
                asked.last = now;
                let tag = asked.tag;
                self.asks.push(Message::Connect { tag, endpoint: number, source, destination });
            }
            return Ok(None);
        }
        if self.datagrams_asked.iter().filter(|a| a.endpoint == endpoint).count() >= ASKED_MAX {
            return Err(());
        }
        self.last_tag = self.last_tag.wrapping_add(1) | DATAGRAMS;
        let tag = self.last_tag;
        let asked = Asked { tag, endpoint, other: destination, first: now, last: now };
        self.datagrams_asked.push(asked);
        self.asks.push(Message::Connect { tag, endpoint: number, source, destination });
        for after in [ANSWER_TIME, DATAGRAMS_TIME] {
            self.at(now + after, Timer::Seek(DATAGRAMS, 0));
        }
        Ok(None)
    }

    /// Takes what was not answered in time for refused, so that no queue waits for it any longer.
    fn give_up_datagrams(&mut self, now: Instant) {
        let late = |a: &mut Asked| now >= a.first + DATAGRAMS_TIME;
        for asked in self.datagrams_asked.extract_if(.., late).collect::<Vec<_>>() {
            self.refuse_datagrams(asked.endpoint, asked.other);
        }
    }

    /// The agent's answer to a CONNECT.
    pub(crate) fn connected(&mut self, tag: u32, endpoint: u32, socket: Option<OwnedFd>) {
        if tag & DATAGRAMS != 0 {
            let is = |a: &Asked| a.tag == tag && a.endpoint == endpoint;
            let asked = self.datagrams_asked.iter().position(is);
            let Some(at) = asked else { return };
            let other = self.datagrams_asked.remove(at).other;
            let Some(own) = self.endpoints.get(endpoint).map(|e| e.gid_like(&other)) else {
                return;
            };
            let greeting = greeting(wire::DATAGRAMS, own, other);
            let made = socket.and_then(|socket| self.open_link(endpoint, socket, greeting));
            match made {
                Some(link) => self.datagram_links.push((endpoint, other, link)),
                None => self.refuse_datagrams(endpoint, other),
            }
            return;
        }
        // Without a socket the timer of this attempt asks again.
        let Some(qp) = self.qps.get_mut(tag) else { return };
        qp.asked = None;
        let Some(socket) = socket else { return self.note(endpoint, Reason::ConnectRefused) };
        let wants = qp.state.receives() && qp.link == 0;
        let Some(e) = self.endpoints.get(qp.endpoint).filter(|_| wants) else { return };
        let own = e.gid(qp.attr.address.sgid_index);
        let greeting = Greeting {
            source_qp: tag,
            destination_qp: qp.attr.dest_qp_num,
            qp_type: service_number(qp.service),
            ..greeting(wire::PAIR, own, qp.attr.address.gid)
        };
        let endpoint = qp.endpoint;
        let card = self.offers_card(endpoint, &greeting.destination);
        let greeting = Greeting { card, ..greeting };
        if let Some(handle) = self.open_link(endpoint, socket, greeting) {
            // Not used before it is established, but nobody has to ask for another one.
            self.attach(handle, tag);
        }
    }

    pub(crate) fn refuse_datagrams(&mut self, endpoint: u32, other: Gid) {
        self.note(endpoint, Reason::ConnectRefused);
        self.drop_held(endpoint, &other);
        let until = Instant::now() + AGAIN_MOST;
        self.datagrams_refused.push((endpoint, other, until));
        self.at(until, Timer::Seek(DATAGRAMS, 0));
        self.wake_endpoint(endpoint);
    }

    /// The endpoint of this node that has a GID.
    pub(crate) fn endpoint_with(&self, gid: &Gid) -> Option<u32> {
        self.endpoints.iter().find(|(_, e)| e.has(gid)).map(|(handle, _)| handle)
    }

    /// Contexts of an endpoint look at their queue pairs again.
    pub(crate) fn wake_endpoint(&mut self, endpoint: u32) {
        let all = self.contexts.iter().filter(|(_, c)| c.endpoint == endpoint);
        for handle in all.map(|(handle, _)| handle).collect::<Vec<_>>() {
            if let Some(context) = self.contexts.get_mut(handle) {
                context.awake = true;
            }
        }
    }
}

pub(crate) fn greeting(kind: u16, source: Gid, destination: Gid) -> Greeting {
    Greeting {
        version: wire::VERSION,
        kind,
        status: 0,
        source_qp: 0,
        destination_qp: 0,
        source,
        destination,
        qp_type: 0,
        card: false,
    }
}

pub(crate) fn service_number(service: Service) -> u8 {
    match service {
        Service::ReliableConnection => 2,
        Service::UnreliableConnection => 3,
        Service::UnreliableDatagram => 0,
    }
}

//! Connections between endpoints: how they are asked for, greeted, matched with queue pairs, and
//! ended. `docs/protocols/verbs-wire.md`. What is said on them after the greeting is `remote`'s.
//!
//! A pair on one node has a connection as well, both ends of which are here: it says that the two
//! may speak, until it ends.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbs_protocol::cm_message::Message;
use verbs_protocol::slots::Send;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, FRAME_MAX, GREETING, Greeting, HEADER, Header, Kind};
use verbs_protocol::{Gid, ibv};

use crate::card::Carrier;
use crate::card_home::Home;
use crate::direct::Direct;
use crate::objects::{Objects, Source};
use crate::protection::{Protection, protects};
use crate::sys;

/// For how long a greeting may take, and an acceptor waits for its queue pair.
pub(crate) const GREETING_TIME: Duration = Duration::from_secs(10);
/// For how long the last bytes may take.
const CLOSING_TIME: Duration = Duration::from_secs(5);
/// Connections without a queue pair that an endpoint may have.
const UNMATCHED_MAX: usize = 256;
/// Bytes that are read of one connection before others have their turn.
const TURN_BYTES: usize = 4 * FRAME_MAX;
/// Room for a frame that has not come yet.
const RECEIVE_FIRST: usize = 4096;
const RECEIVE_ALL: usize = 2 * (HEADER + FRAME_MAX);
/// No more is added to what waits to be sent than up to here.
pub(crate) const SEND_HIGH: usize = 2 * FRAME_MAX;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A greeting is to come: the opener's, or the answer.
    Greeting,
    /// The opener has greeted, and the queue pair that it means is not ready.
    Unmatched,
    Established,
    /// Only what waits to be sent still matters.
    Closing,
}

/// A request that was sent, or is being sent, and is not complete.
pub(crate) struct Sent {
    pub(crate) send: Send,
    pub(crate) number: u32,
    /// Bytes of a READ that have come.
    pub(crate) read: u64,
    /// It failed here, and is completed so when all before it are.
    pub(crate) failed: Option<u32>,
    /// The card has been told to place its bytes.
    pub(crate) placed: bool,
}

/// What a responder owes, in order.
#[derive(Clone, Copy)]
pub(crate) enum Response {
    Ack {
        number: u32,
        status: u32,
    },
    NotReady {
        number: u32,
        timer: u8,
    },
    Read {
        number: u32,
        key: u32,
        address: u64,
        total: u64,
        done: u64,
    },
    Atomic {
        number: u32,
        value: u64,
    },
    /// A region as the card knows it.
    Key {
        key: u32,
    },
}

/// A message that is coming in.
#[derive(Clone, Copy)]
pub(crate) struct Inbound {
    pub(crate) head: Header,
    pub(crate) got: u64,
    /// Its bytes go nowhere: an unreliable one that cannot be had.
    pub(crate) dropped: bool,
}

#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub(crate) struct Link {
    pub(crate) endpoint: u32,
    pub(crate) stream: Arc<TcpStream>,
    pub(crate) own: Gid,
    pub(crate) other: Gid,
    pub(crate) opener: bool,
    /// It came to nothing, and is closed.
    is_refused: bool,
    /// The other end is an endpoint of this node, too.
    pub(crate) is_local: bool,
    pub(crate) phase: Phase,
    pub(crate) kind: u16,
    /// The queue pair here; 0 for datagrams, and when it has gone.
    pub(crate) qp: u32,
    pub(crate) greeting: Option<Greeting>,
    /// The id of RDMA-CM here; 0 if there is none.
    pub(crate) cm: u32,
    /// A request that waits for room at its listener.
    pub(crate) cm_request: Option<Box<Message>>,
    /// The two have said that their nodes have a card; the queue pair of it, as long as it may be
    /// the way.
    pub(crate) card_offered: bool,
    pub(crate) card: Option<Box<Carrier>>,
    /// Where its queue pair of the card has to be, if the agent knows.
    pub(crate) home: Option<Home>,
    pub(crate) received: Vec<u8>,
    pub(crate) filled: usize,
    pub(crate) unsent: VecDeque<u8>,
    pub(crate) direct: Direct,
    pub(crate) waits_for_room: bool,
    /// Since when datagrams find it full; none if half of that was sent since.
    pub(crate) full_since: Option<Instant>,
    pub(crate) deadline: Option<Instant>,

    // The requester.
    pub(crate) sent: VecDeque<Sent>,
    /// The first of `sent` that has frames to be sent, and how many of its bytes were.
    pub(crate) next: usize,
    pub(crate) offset: u64,
    pub(crate) number: u32,
    pub(crate) not_before: Option<Instant>,
    pub(crate) not_ready: u8,
    pub(crate) heard: Instant,

    // The responder.
    pub(crate) expected: u32,
    pub(crate) inbound: Option<Inbound>,
    /// After a negative answer: requests are dropped until the one that is expected comes again.
    pub(crate) drops: bool,
    /// After an error: nothing is served any more.
    pub(crate) refuses: bool,
    pub(crate) responses: VecDeque<Response>,
}

impl Link {
    /// Adds a frame to what waits to be sent; bytes follow, if the header says so.
    pub(crate) fn say(&mut self, header: &Header) {
        self.unsent.extend(header.encode());
    }

    /// It is known whether a card is its way. One that is being closed has no more time for that.
    pub(crate) fn knows_its_way(&mut self) {
        if self.phase != Phase::Closing {
            self.deadline = None;
        }
    }
}

/// What is to happen at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A connection is not where it has to be.
    Link(u32),
    /// A queue pair asks for its connection again, having waited for so many milliseconds.
    Seek(u32, u64),
    /// An id of RDMA-CM waits.
    Cm(u32),
    /// The agent is to hear of an endpoint's groups.
    Groups(u32),
}

impl Objects {
    pub(crate) fn at(&mut self, when: Instant, timer: Timer) {
        self.timers.push(Reverse((when, timer)));
        // It may sleep for longer.
        self.nudge_first();
    }

    /// Whether there is something for [`Self::expire`].
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.timers.peek().is_some_and(|Reverse((when, _))| *when <= now)
    }

    /// Does what is due, and says when the next thing is.
    pub(crate) fn expire(&mut self, now: Instant) -> Option<Instant> {
        while let Some(Reverse((when, timer))) = self.timers.peek().copied() {
            if when > now {
                return Some(when);
            }
            self.timers.pop();
            match timer {
                Timer::Link(handle) => {
                    let Some(link) = self.links.get(handle) else { continue };
                    if link.deadline.is_some_and(|due| due <= now)
                        && protects(Protection::Deadlines)
                    {
                        if link.phase != Phase::Closing {
                            let by_card = link.card.is_some();
                            let reason =
                                if by_card { Reason::CardFailed } else { Reason::LinkUnmatched };
                            self.note(link.endpoint, reason);
                        }
                        self.end_link(handle);
                    }
                }
                Timer::Seek(number, after) => self.ask_for_link(number, after),
                Timer::Cm(handle) => self.cm_expire(handle, now),
                Timer::Groups(handle) => self.tell_groups(handle),
            }
        }
        None
    }

    pub(crate) fn set_deadline(&mut self, handle: u32, after: Duration) {
        let when = Instant::now() + after;
        if let Some(link) = self.links.get_mut(handle) {
            link.deadline = Some(when);
            self.at(when, Timer::Link(handle));
        }
    }

    pub(crate) fn open_link(
        &mut self,
        endpoint: u32,
        socket: OwnedFd,
        greeting: Greeting,
    ) -> Option<u32> {
        let ends = (greeting.source, greeting.destination);
        let handle = self.add_link(endpoint, socket, ends, true)?;
        let link = self.links.get_mut(handle)?;
        link.kind = greeting.kind;
        link.unsent.extend(greeting.encode());
        link.greeting = Some(greeting);
        self.push(handle);
        self.links.get(handle).is_some().then_some(handle)
    }

    /// A connection that another endpoint has made to this one, as the agent says.
    pub(crate) fn accepted(&mut self, endpoint: u32, from: Gid, to: Gid, socket: OwnedFd) {
        let unmatched = |l: &Link| {
            l.endpoint == endpoint
                && (matches!(l.phase, Phase::Greeting | Phase::Unmatched)
                    || l.phase == Phase::Closing && l.is_refused
                    || l.kind == wire::RDMA_CM && l.phase == Phase::Established && l.cm == 0)
        };
        let known = self.endpoints.get(endpoint).is_some_and(|e| e.has(&to));
        if known && self.links.iter().filter(|(_, l)| unmatched(l)).count() < UNMATCHED_MAX {
            self.add_link(endpoint, socket, (to, from), false);
        } else {
            self.note(endpoint, Reason::LinkUnmatched);
        }
    }

    fn add_link(
        &mut self,
        endpoint: u32,
        socket: OwnedFd,
        (own, other): (Gid, Gid),
        opener: bool,
    ) -> Option<u32> {
        let stream = TcpStream::from(socket);
        stream.set_nonblocking(true).ok()?;
        // What is small is an answer that somebody waits for. Not every socket has it.
        let _ = stream.set_nodelay(true);
        let link = Link {
            endpoint,
            stream: Arc::new(stream),
            own,
            other,
            opener,
            is_refused: false,
            is_local: false,
            phase: Phase::Greeting,
            kind: wire::PAIR,
            qp: 0,
            greeting: None,
            cm: 0,
            cm_request: None,
            card_offered: false,
            card: None,
            home: self.home.take().map(|(_, home)| home),
            received: vec![0; RECEIVE_FIRST],
            filled: 0,
            unsent: VecDeque::new(),
            waits_for_room: false,
            direct: Direct::default(),
            full_since: None,
            deadline: None,
            sent: VecDeque::new(),
            next: 0,
            offset: 0,
            number: 0,
            not_before: None,
            not_ready: 0,
            heard: Instant::now(),
            expected: 0,
            inbound: None,
            drops: false,
            refuses: false,
            responses: VecDeque::new(),
        };
        let handle = self.links.insert(link, 0)?;
        let added = {
            let stream = &self.links.get(handle)?.stream;
            self.epoll_of(endpoint).add(stream.as_fd(), sys::READABLE, Source::Link.id(handle))
        };
        if added.is_err() {
            self.links.remove(handle);
            return None;
        }
        self.set_deadline(handle, GREETING_TIME);
        Some(handle)
    }

    /// Something has come on a connection, or there is room on it.
    pub(crate) fn link_event(self: &mut Box<Self>, handle: u32) {
        if let Some(link) = self.links.get_mut(handle) {
            link.direct.is_full = false;
        }
        self.push(handle);
        let mut left = TURN_BYTES;
        while left > 0 {
            let Some(link) = self.links.get_mut(handle) else { return };
            let got = (&*link.stream).read(&mut link.received[link.filled..]);
            match got {
                Ok(0) => return self.hear_end(handle),
                // All comes by the card.
                Ok(_) if link.card.as_ref().is_some_and(|c| c.is_settled()) => {
                    return self.break_link(handle);
                }
                Ok(n) => {
                    link.filled += n;
                    link.heard = Instant::now();
                    left = left.saturating_sub(n);
                }
                Err(err) if sys::would_block(&err) => break,
                Err(_) => return self.end_link(handle),
            }
            self.take_in(handle);
        }
        self.after_bytes(handle);
    }

    /// The other end says no more. What it has said by a card before is here.
    fn hear_end(self: &mut Box<Self>, handle: u32) {
        if self.links.get(handle).is_some_and(|l| l.card.is_some()) {
            self.take_all_completions();
            self.take_from_card(handle);
        }
        self.end_link(handle);
    }

    /// Answers what has come, and has the queue pair of a connection go on.
    pub(crate) fn after_bytes(self: &mut Box<Self>, handle: u32) {
        self.respond(handle);
        self.push(handle);
        if let Some(link) = self.links.get(handle) {
            let (qp, endpoint) = (link.qp, link.endpoint);
            if let Some(context) = self.qps.get(qp).map(|q| q.context) {
                if let Some(context) = self.contexts.get_mut(context) {
                    context.awake = true;
                }
            } else if link.kind == wire::DATAGRAMS {
                self.wake_endpoint(endpoint);
            }
        }
    }

    /// Takes what has come apart.
    pub(crate) fn take_in(self: &mut Box<Self>, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let mut received = std::mem::take(&mut link.received);
        let filled = std::mem::take(&mut link.filled);
        let mut at = 0;
        let mut needs = 0;
        loop {
            let Some(link) = self.links.get(handle) else { return };
            let rest = &received[at..filled];
            match link.phase {
                Phase::Closing => at = filled,
                // The opener is not to speak before it was answered.
                Phase::Unmatched if !rest.is_empty() => return self.break_link(handle),
                Phase::Unmatched => {}
                Phase::Greeting => {
                    if let Some(bytes) = rest.first_chunk::<GREETING>() {
                        at += GREETING;
                        self.greeted(handle, bytes);
                        continue;
                    }
                }
                Phase::Established => {
                    if let Some(bytes) = rest.first_chunk::<HEADER>() {
                        let Ok(header) = Header::parse(bytes) else {
                            return self.break_link(handle);
                        };
                        let whole = HEADER + header.length as usize;
                        if let Some(frame) = rest.get(..whole) {
                            at += whole;
                            if !self.frame(handle, &header, &frame[HEADER..]) {
                                return self.break_link(handle);
                            }
                            continue;
                        }
                        needs = whole;
                    }
                }
            }
            break;
        }
        received.copy_within(at..filled, 0);
        if needs > received.len() {
            received.resize(RECEIVE_ALL, 0);
        }
        if let Some(link) = self.links.get_mut(handle) {
            link.received = received;
            link.filled = filled - at;
        }
    }

    /// Whether the connection of a queue pair says that it may speak.
    pub(crate) fn is_established(&self, number: u32) -> bool {
        let link = self.qps.get(number).and_then(|qp| self.links.get(qp.link));
        link.is_some_and(|l| l.phase == Phase::Established)
    }

    /// Sends what waits, as far as there is room.
    pub(crate) fn push(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.direct.is_busy {
            // Who writes to it goes on with what waits.
            return;
        }
        if link.card.as_ref().is_some_and(|c| c.active) {
            return self.push_by_card(handle);
        }
        while !link.unsent.is_empty() {
            match (&*link.stream).write(link.unsent.as_slices().0) {
                Ok(n) => {
                    link.unsent.drain(..n);
                    // The other end takes bytes: it is no silence while they go.
                    link.heard = Instant::now();
                }
                Err(err) if sys::would_block(&err) => break,
                Err(_) => {
                    // Of whatever it was: what comes after what is lost must not be sent, and the
                    // reader finds the end.
                    link.unsent.clear();
                    let _: io::Result<()> = link.stream.shutdown(Shutdown::Both);
                }
            }
        }
        // What is owed goes on as soon as there is room.
        let wants = !link.unsent.is_empty() || !link.responses.is_empty() || link.direct.is_full;
        if wants != link.waits_for_room {
            link.waits_for_room = wants;
            let events = sys::READABLE | if wants { sys::WRITABLE } else { 0 };
            let (endpoint, id) = (link.endpoint, Source::Link.id(handle));
            let Some(link) = self.links.get(handle) else { return };
            let _ = self.epoll_of(endpoint).modify(link.stream.as_fd(), events, id);
        }
        let Some(link) = self.links.get(handle) else { return };
        if link.unsent.is_empty() && link.phase == Phase::Closing {
            // What the other end has sent meanwhile is read, so that it gets the last bytes.
            let _: io::Result<()> = link.stream.shutdown(Shutdown::Write);
        }
        self.activate_card(handle);
    }

    /// Says goodbye for a queue pair that is reset, destroyed or in ERR.
    pub(crate) fn unlink(&mut self, number: u32) {
        self.end_native(number);
        let Some(qp) = self.qps.get_mut(number) else { return };
        let handle = std::mem::take(&mut qp.link);
        let Some(link) = self.links.get_mut(handle) else { return };
        // What was sent is flushed with what was not.
        link.qp = 0;
        qp.unlinked.extend(link.sent.drain(..).map(|s| s.send.head.wr_id));
        // The answer to an opener's greeting may be under way.
        if link.phase == Phase::Established || link.phase == Phase::Greeting && link.opener {
            // What is owed comes first, and what of a message was begun is no frame any more.
            self.respond_briefly(handle);
            if let Some(link) = self.links.get_mut(handle) {
                link.say(&Header::new(Kind::Close));
            }
        }
        self.close_link(handle);
    }

    /// Closes a connection that came to nothing: until the peer has closed it as well it counts as
    /// one that waits for its queue pair.
    pub(crate) fn refuse_link(&mut self, handle: u32) {
        if let Some(link) = self.links.get_mut(handle) {
            link.is_refused = true;
        }
        self.close_link(handle);
    }

    pub(crate) fn close_link(&mut self, handle: u32) {
        if let Some(link) = self.links.get_mut(handle) {
            link.phase = Phase::Closing;
            link.responses.clear();
            self.set_deadline(handle, CLOSING_TIME);
            self.push(handle);
        }
    }

    /// The other end said goodbye: the queue pair stays as it is, and finds no peer any more.
    pub(crate) fn closed_by_peer(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let number = std::mem::take(&mut link.qp);
        let sent: Vec<Sent> = link.sent.drain(..).collect();
        if let Some(qp) = self.qps.get_mut(number) {
            qp.link = 0;
            qp.closed = true;
        }
        self.close_link(handle);
        self.fail_sent(number, sent);
    }

    /// The first of what was under way gets no answer any more, the others are flushed.
    fn fail_sent(&mut self, number: u32, sent: Vec<Sent>) {
        let mut sent = sent.into_iter();
        let Some(first) = sent.next() else { return };
        if let Some(qp) = self.qps.get_mut(number) {
            qp.unlinked.extend(sent.map(|s| s.send.head.wr_id));
        }
        self.fail_send(number, &first.send, first.failed.unwrap_or(ibv::WC_RETRY_EXC_ERR));
    }

    /// Ends a connection whose other end breaks a rule.
    pub(crate) fn break_link(&mut self, handle: u32) {
        if let Some(endpoint) = self.links.get(handle).map(|l| l.endpoint) {
            self.note(endpoint, Reason::LinkBroken);
        }
        self.end_link(handle);
    }

    /// Ends a connection that has ended, or that breaks a rule: its queue pair fails, if it was
    /// more than a try.
    pub(crate) fn end_link(&mut self, handle: u32) {
        let Some(mut link) = self.links.remove(handle) else { return };
        let (endpoint, carrier) = (link.endpoint, link.card.take());
        if let Some(carrier) = &carrier {
            carrier.stop();
        }
        self.epoll_of(endpoint).remove(link.stream.as_fd());
        // Whoever else has the socket open, the other end is to know.
        let _: io::Result<()> = link.stream.shutdown(Shutdown::Both);
        self.link_ended(handle, link);
        self.drop_carrier(endpoint, carrier);
    }

    fn link_ended(&mut self, handle: u32, link: Link) {
        let tried = self.datagram_links.iter().position(|(_, _, l)| *l == handle);
        if let Some(at) = tried {
            self.datagram_links.remove(at);
            if link.phase == Phase::Greeting {
                self.refuse_datagrams(link.endpoint, link.other);
            }
        }
        if link.kind == wire::RDMA_CM {
            return self.cm_link_ended(&link);
        }
        let Some(qp) = self.qps.get_mut(link.qp) else { return };
        qp.link = 0;
        // One that was not established is asked for again by the timer of the last attempt.
        if link.phase != Phase::Established {
            return;
        }
        qp.closed = true;
        let current = if link.sent.is_empty() { qp.current.take() } else { None };
        self.note(link.endpoint, Reason::LinkCut);
        if !link.sent.is_empty() {
            self.fail_sent(link.qp, link.sent.into_iter().collect());
        } else if let Some(current) = current {
            self.fail_send(link.qp, &current.send, ibv::WC_RETRY_EXC_ERR);
        } else {
            self.fail_fatally(link.qp);
        }
        self.notify();
    }
}

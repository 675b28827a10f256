//! RDMA-CM between endpoints: a connection for each two ids, and what they say on it.
//! `docs/protocols/verbs-wire.md`. It is the same on one node and between nodes.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use verbs_protocol::agent;
use verbs_protocol::cm::{EventKind, Param};
use verbs_protocol::cm_message::{self, Message, What};
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, Header};

use crate::cm::{
    Incoming, PRIVATE_REJECT, PRIVATE_REPLY, PRIVATE_SERVICE_REPLY, PROGRAM_TIME, State,
};
use crate::connect::greeting;
use crate::link::{Link, Timer};
use crate::objects::Objects;
use crate::remote::Broken;
use crate::sys;

/// The tag of a CONNECT for RDMA-CM has this bit, beside the handle of an id.
pub(crate) const TAG: u32 = 1 << 30;
pub(crate) const IDS: u32 = TAG - 1;
/// After which an agent that does not answer is asked again.
const ANSWER_TIME: Duration = Duration::from_secs(5);
/// What an endpoint may ask for at a time: the agent's socket has room for so much of all. Other
/// ids wait, and so do those of programs that connect and give up at once.
const ASKED_MAX: usize = 64;

impl Objects {
    /// An id waits for so long.
    pub(crate) fn cm_wait(&mut self, handle: u32, time: Duration) {
        let when = Instant::now() + time;
        if let Ok(id) = self.cm_get(handle) {
            id.deadline = Some(when);
            self.at(when, Timer::Cm(handle));
        }
    }

    /// Asks for the connection of an id to its peer, for so long.
    pub(crate) fn cm_ask(&mut self, handle: u32, time: Duration) {
        self.cm_wait(handle, time);
        let Some(id) = self.cm.table.get(handle) else { return };
        let (Some(own), Some(other)) = (id.source, id.destination) else { return };
        let Some(endpoint) = self.endpoints.get(id.endpoint) else { return };
        if endpoint.has(&other.gid) {
            // Nobody has to be asked whether an endpoint may speak to itself.
            let endpoint = id.endpoint;
            let Ok((ours, theirs)) = sys::stream_pair() else { return self.cm_fail(handle, 0) };
            self.accepted(endpoint, own.gid, other.gid, theirs);
            return self.cm_open(handle, ours);
        }
        let (number, endpoint, now) = (endpoint.number, id.endpoint, Instant::now());
        self.at(now + ANSWER_TIME, Timer::Cm(handle));
        let Some(endpoint) = self.endpoints.get_mut(endpoint) else { return };
        let asked = &mut endpoint.cm.asked;
        asked.retain(|(id, since)| *id != handle && now < *since + ANSWER_TIME);
        if asked.len() >= ASKED_MAX {
            return;
        }
        asked.push((handle, now));
        self.asks.push(agent::Message::Connect {
            tag: TAG | handle,
            endpoint: number,
            source: own.gid,
            destination: other.gid,
        });
    }

    /// The agent has answered for an id: the next one that waits may ask.
    fn cm_ask_next(&mut self, endpoint: u32, answered: u32) {
        let Some(e) = self.endpoints.get_mut(endpoint) else { return };
        e.cm.asked.retain(|(id, _)| *id != answered);
        let asked = &e.cm.asked;
        let next = self.cm.table.iter().find(|(handle, id)| {
            id.endpoint == endpoint
                && id.state == State::Connecting
                && id.link == 0
                && !asked.iter().any(|(id, _)| id == handle)
        });
        let next = next.and_then(|(handle, id)| Some((handle, id.deadline?)));
        if let Some((handle, deadline)) = next {
            self.cm_ask(handle, deadline.saturating_duration_since(Instant::now()));
        }
    }

    /// The agent's answer.
    pub(crate) fn cm_connected(
        &mut self,
        tag: u32,
        endpoint: u32,
        socket: Option<OwnedFd>,
        errno: u32,
    ) {
        let handle = tag & IDS;
        self.cm_answered_by_agent(handle, endpoint, socket, errno);
        self.cm_ask_next(endpoint, handle);
    }

    fn cm_answered_by_agent(
        &mut self,
        handle: u32,
        endpoint: u32,
        socket: Option<OwnedFd>,
        errno: u32,
    ) {
        let waits = self.cm.table.get(handle).is_some_and(|id| {
            id.endpoint == endpoint && id.state == State::Connecting && id.link == 0
        });
        if !waits {
            return;
        }
        if let Some(socket) = socket {
            self.cm_open(handle, socket);
        } else {
            self.note(endpoint, Reason::ConnectRefused);
            self.cm_fail(handle, i32::try_from(errno).unwrap_or(0));
        }
    }

    fn cm_open(&mut self, handle: u32, socket: OwnedFd) {
        let Some(id) = self.cm.table.get(handle) else { return };
        let (Some(own), Some(other)) = (id.source, id.destination) else { return };
        let endpoint = id.endpoint;
        let greeting = greeting(wire::RDMA_CM, own.gid, other.gid);
        let Some(link) = self.open_link(endpoint, socket, greeting) else {
            return self.cm_fail(handle, 0);
        };
        if let Some(link) = self.links.get_mut(link) {
            link.cm = handle;
        }
        if let Ok(id) = self.cm_get(handle) {
            id.link = link;
        }
    }

    /// The greeting of an opener was answered: it says what its program wants.
    pub(crate) fn cm_established(&mut self, link: u32) {
        let Some(handle) = self.links.get(link).map(|l| l.cm) else { return };
        if let Some(first) = self.cm_first(handle) {
            self.cm_say(handle, &first);
            self.cm_wait(handle, PROGRAM_TIME);
        }
    }

    pub(crate) fn cm_say(&mut self, handle: u32, message: &Message) {
        if let Some(link) = self.cm.table.get(handle).map(|id| id.link) {
            self.cm_say_on(link, message);
        }
    }

    fn cm_say_on(&mut self, handle: u32, message: &Message) {
        if let Some(link) = self.links.get_mut(handle) {
            let (header, bytes) = message.encode();
            link.say(&header);
            link.unsent.extend(bytes);
            self.push(handle);
        }
    }

    /// Nothing more is said or heard for an id; what it has said goes out.
    pub(crate) fn cm_hang_up(&mut self, handle: u32) {
        let Ok(id) = self.cm_get(handle) else { return };
        id.deadline = None;
        let link = std::mem::take(&mut id.link);
        if let Some(l) = self.links.get_mut(link) {
            l.cm = 0;
            self.close_link(link);
        }
    }

    /// An id is destroyed: its peer is told.
    pub(crate) fn cm_leave(&mut self, handle: u32) {
        let Some(id) = self.cm.table.get(handle) else { return };
        let goodbye = match id.state {
            State::Connected | State::Accepted | State::Answered => {
                Some(Message::new(What::DisconnectRequest))
            }
            State::Requested => Some(refusal(id.has_datagrams(), cm_message::BY_CONSUMER)),
            _ => None,
        };
        if let Some(goodbye) = goodbye {
            self.cm_say(handle, &goodbye);
        }
        self.cm_hang_up(handle);
    }

    /// There is no connection. Errno 0: it took too long.
    fn cm_fail(&mut self, handle: u32, errno: i32) {
        let errno = if errno == 0 { libc::ETIMEDOUT } else { errno };
        self.cm_end(handle, EventKind::Unreachable, -errno, &Param::default());
    }

    /// An id has ended, and its program is told.
    fn cm_end(&mut self, handle: u32, kind: EventKind, status: i32, param: &Param) {
        self.cm_hang_up(handle);
        if let Ok(id) = self.cm_get(handle) {
            id.state = State::Ended;
            self.cm_tell(handle, kind, status, param);
        }
    }

    /// Something was to happen by now.
    pub(crate) fn cm_expire(&mut self, handle: u32, now: Instant) {
        let Some(id) = self.cm.table.get(handle) else { return };
        let Some(deadline) = id.deadline else { return };
        let state = id.state;
        if deadline > now {
            if state == State::Connecting && id.link == 0 {
                // The agent may have ended.
                self.cm_ask(handle, deadline - now);
            }
            return;
        }
        match state {
            State::Connecting | State::Accepted => self.cm_fail(handle, 0),
            State::Disconnecting => {
                self.cm_end(handle, EventKind::Disconnected, 0, &Param::default());
            }
            _ => {}
        }
    }

    /// Does what a frame says.
    pub(crate) fn cm_frame(
        &mut self,
        link: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let message = Message::parse(header, bytes).map_err(|_| Broken)?;
        let Some(l) = self.links.get_mut(link) else { return Ok(()) };
        let (handle, is_opener) = (l.cm, l.opener);
        if matches!(message.what, What::Request | What::ServiceRequest) {
            if is_opener || handle != 0 || l.cm_request.is_some() {
                return Err(Broken);
            }
            l.deadline = None;
            self.cm_request(link, &message);
            return Ok(());
        }
        let state = self.cm.table.get(handle).ok_or(Broken)?.state;
        let p = message.param;
        match (message.what, state) {
            (What::Reply, State::Connecting) if is_opener => self.cm_answered(handle, &p),
            (What::ServiceReply, State::Connecting) if is_opener => {
                let param = Param { private: p.private.padded(PRIVATE_SERVICE_REPLY), ..p };
                if message.status == 0 {
                    self.cm_hang_up(handle);
                    self.cm_get(handle).map_err(|_| Broken)?.state = State::Connected;
                    self.cm_tell(handle, EventKind::Established, 0, &param);
                } else {
                    let status = message.status.cast_signed();
                    self.cm_end(handle, EventKind::Unreachable, status, &param);
                }
            }
            (What::ReadyToUse, State::Accepted) => {
                let id = self.cm_get(handle).map_err(|_| Broken)?;
                id.state = State::Connected;
                id.deadline = None;
                self.cm_tell(handle, EventKind::Established, 0, &Param::default());
            }
            // The program was told by the first message of its peer, or wants the end meanwhile.
            (What::ReadyToUse, State::Connected | State::Disconnecting) if !is_opener => {}
            (What::Reject, State::Connecting | State::Accepted) => {
                let private = p.private.padded(PRIVATE_REJECT);
                let status = message.status.cast_signed();
                self.cm_end(handle, EventKind::Rejected, status, &Param { private, ..p });
            }
            (
                What::DisconnectRequest,
                State::Accepted | State::Answered | State::Connected | State::Disconnecting,
            ) => {
                self.cm_say(handle, &Message::new(What::DisconnectReply));
                self.cm_end(handle, EventKind::Disconnected, 0, &Param::default());
            }
            (What::DisconnectReply, State::Disconnecting) => {
                self.cm_end(handle, EventKind::Disconnected, 0, &Param::default());
            }
            _ => return Err(Broken),
        }
        Ok(())
    }

    fn cm_answered(&mut self, handle: u32, reply: &Param) {
        let Ok(id) = self.cm_get(handle) else { return };
        id.state = State::Answered;
        id.deadline = None;
        id.peer = Param {
            // What the peer can be asked for is what it can answer.
            responder_resources: reply.initiator_depth,
            initiator_depth: reply.responder_resources,
            retry_count: id.own.retry_count,
            ..*reply
        };
        let private = reply.private.padded(PRIVATE_REPLY);
        let param = Param { private, retry_count: 0, ..id.peer };
        self.cm_tell(handle, EventKind::ConnectResponse, 0, &param);
    }

    fn cm_request(&mut self, link: u32, message: &Message) {
        match self.cm_incoming(link, message) {
            Incoming::Made => {}
            Incoming::Waits => {
                if let Some(link) = self.links.get_mut(link) {
                    link.cm_request = Some(Box::new(*message));
                }
            }
            Incoming::Refused(reason) => {
                let datagrams = message.what == What::ServiceRequest;
                self.cm_say_on(link, &refusal(datagrams, reason));
                self.refuse_link(link);
            }
        }
    }

    /// A listener of an endpoint may have room for requests, or may be gone.
    pub(crate) fn cm_admit(&mut self, endpoint: u32) {
        let all = self.links.iter();
        let held = all.filter(|(_, l)| l.endpoint == endpoint && l.cm_request.is_some());
        for link in held.map(|(link, _)| link).collect::<Vec<_>>() {
            let request = self.links.get_mut(link).and_then(|l| l.cm_request.take());
            if let Some(request) = request {
                self.cm_request(link, &request);
            }
        }
    }

    /// A connection has ended without a word.
    pub(crate) fn cm_link_ended(&mut self, link: &Link) {
        let Some(id) = self.cm.table.get(link.cm) else { return };
        match id.state {
            State::Connecting => self.cm_fail(link.cm, 0),
            State::Answered | State::Accepted | State::Connected | State::Disconnecting => {
                self.note(link.endpoint, Reason::LinkCut);
                self.cm_end(link.cm, EventKind::Disconnected, 0, &Param::default());
            }
            _ => {
                self.cm_hang_up(link.cm);
                if let Ok(id) = self.cm_get(link.cm) {
                    id.state = State::Ended;
                }
            }
        }
    }
}

/// What an opener gets if there is no connection.
fn refusal(datagrams: bool, reason: u32) -> Message {
    let (what, status) = match (datagrams, reason) {
        (true, cm_message::NO_LISTENER) => (What::ServiceReply, cm_message::SIDR_UNSUPPORTED),
        (true, _) => (What::ServiceReply, cm_message::SIDR_REJECTED),
        _ => (What::Reject, reason),
    };
    Message { status, ..Message::new(what) }
}

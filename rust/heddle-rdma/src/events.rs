//! What programs are told: completions, and events on sockets.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};

use verbs_protocol::abi::{self, verbs_async_event, verbs_completion};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{ibv, plain};

use crate::objects::{Objects, Source};
use crate::queues::wake_polls;
use crate::sys;

type Packet = [u8; 16];

/// A socket on which the router only sends: 16 bytes for an event.
pub(crate) struct EventSocket {
    pub(crate) socket: OwnedFd,
    /// Events for which it had no room, in their order, and which of them are still to be sent:
    /// each once. So there are no more than the objects that they are of have kinds of events, and
    /// none is lost.
    held: VecDeque<Packet>,
    wanted: HashSet<Packet>,
}

impl EventSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, held: VecDeque::new(), wanted: HashSet::new() }
    }

    /// Whether it waits for room.
    pub(crate) fn holds(&self) -> bool {
        !self.held.is_empty()
    }

    fn hold(&mut self, event: Packet) {
        if self.wanted.insert(event) {
            self.held.push_back(event);
        }
    }

    /// Sends an event, or holds it; true if the caller has to wait for room.
    fn send(&mut self, event: Packet) -> bool {
        if !self.held.is_empty() {
            self.hold(event);
            return false;
        }
        match sys::send(&self.socket, &event, &[]) {
            Err(err) if sys::would_block(&err) => {
                self.hold(event);
                true
            }
            // A program that has closed its end wants no events.
            _ => false,
        }
    }

    /// Sends what was held; true if nothing is held any more.
    pub(crate) fn drain(&mut self) -> bool {
        while let Some(event) = self.held.front() {
            if self.wanted.contains(event) {
                match sys::send(&self.socket, event, &[]) {
                    Err(err) if sys::would_block(&err) => return false,
                    _ => self.wanted.remove(event),
                };
            }
            self.held.pop_front();
        }
        true
    }

    /// The object of these is gone: what a program does not read must not grow with the objects
    /// that it makes and destroys.
    fn forget(&mut self, events: impl IntoIterator<Item = Packet>) {
        for event in events {
            self.wanted.remove(&event);
        }
        // Rarely, as it takes as long as there are many.
        if self.held.len() > 2 * self.wanted.len() + 64 {
            self.held.retain(|event| self.wanted.contains(event));
        }
    }
}

impl Objects {
    /// Shows a completion to the program. A queue without room is dead from then on.
    pub(crate) fn complete(&mut self, cq: u32, completion: &verbs_completion, solicited: bool) {
        self.account_error(completion.qp_num, completion.status);
        let Some(queue) = self.cqs.get_mut(cq) else { return };
        if queue.dead {
            return;
        }
        if !queue.ring.push(completion, solicited || completion.status != ibv::WC_SUCCESS) {
            queue.dead = true;
            self.broken.push(cq);
        }
        if !queue.touched {
            queue.touched = true;
            self.touched.push(cq);
        }
    }

    /// Sends the events that completions of this turn call for, and ends what uses a dead queue.
    pub(crate) fn notify(&mut self) {
        while let Some(cq) = self.touched.pop() {
            let Some(queue) = self.cqs.get_mut(cq) else { continue };
            queue.touched = false;
            if let Some(memory) = self.contexts.get(queue.context).and_then(|c| c.memory.as_ref()) {
                wake_polls(memory);
            }
            if !queue.ring.take_wish() {
                continue;
            }
            let event = abi::verbs_completion_event { user: queue.user, cq, reserved: 0 };
            let channel = queue.channel;
            let Some(channel_object) = self.channels.get_mut(channel) else { continue };
            if channel_object.events.send(packet(&event))
                && let Some(object) = self.channels.get(channel)
            {
                let id = Source::Channel.id(channel);
                let fd = object.events.socket.as_fd();
                // Without it the event comes with the next one.
                let _ = self.epoll_of_context(object.context).add(fd, sys::WRITABLE, id);
            }
        }
        while let Some(cq) = self.broken.pop() {
            let Some(queue) = self.cqs.get(cq) else { continue };
            let (context, user) = (queue.context, queue.user);
            self.tell(context, ibv::EVENT_CQ_ERR, cq, user);
            if let Some(endpoint) = self.contexts.get(context).map(|c| c.endpoint) {
                self.note(endpoint, Reason::CqOverrun);
            }
            let users = self.qps.iter().filter(|(_, q)| q.send_cq == cq || q.recv_cq == cq);
            for number in users.map(|(number, _)| number).collect::<Vec<_>>() {
                self.fail_fatally(number);
            }
        }
    }

    /// Sends an asynchronous event.
    pub(crate) fn tell(&mut self, context: u32, event: u32, object: u32, user: u64) {
        let Some(c) = self.contexts.get_mut(context) else { return };
        let Some(events) = c.events.as_mut() else { return };
        if events.send(packet(&verbs_async_event { user, event, object }))
            && let Some(c) = self.contexts.get(context)
            && let Some(events) = &c.events
        {
            let id = Source::Events.id(context);
            let _ = self.epoll_of(c.endpoint).add(events.socket.as_fd(), sys::WRITABLE, id);
        }
    }
}

impl Objects {
    /// Asynchronous events of an object that is gone are sent to nobody any more.
    pub(crate) fn tell_no_more(&mut self, context: u32, kinds: &[u32], object: u32, user: u64) {
        if let Some(events) = self.contexts.get_mut(context).and_then(|c| c.events.as_mut()) {
            let of = |event: &u32| packet(&verbs_async_event { user, event: *event, object });
            events.forget(kinds.iter().map(of));
        }
    }

    /// The same of a completion queue's on its channel.
    pub(crate) fn notify_no_more(&mut self, channel: u32, cq: u32, user: u64) {
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.events.forget([packet(&abi::verbs_completion_event { user, cq, reserved: 0 })]);
        }
    }
}

fn packet<T: plain::Plain>(event: &T) -> Packet {
    *plain::bytes(event).first_chunk().expect("events have 16 bytes")
}

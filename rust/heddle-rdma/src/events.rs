//! What programs are told: completions, and events on sockets.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use verbs_protocol::abi::{self, verbs_async_event, verbs_completion};
use verbs_protocol::statistics::Reason;
use verbs_protocol::{ibv, plain};

use crate::objects::{Objects, Source};
use crate::queues::wake_polls;
use crate::sys;

/// A socket on which the router only sends: 16 bytes for an event.
pub(crate) struct EventSocket {
    pub(crate) socket: OwnedFd,
    /// Events for which it had no room.
    pub(crate) held: VecDeque<[u8; 16]>,
}

impl EventSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, held: VecDeque::new() }
    }

    /// Sends an event, or holds it; true if the caller has to wait for room.
    fn send(&mut self, event: [u8; 16]) -> bool {
        if !self.held.is_empty() {
            self.held.push_back(event);
            return false;
        }
        match sys::send(&self.socket, &event, &[]) {
            Err(err) if sys::would_block(&err) => {
                self.held.push_back(event);
                true
            }
            // A program that has closed its end wants no events.
            _ => false,
        }
    }

    /// Sends what was held; true if nothing is held any more.
    pub(crate) fn drain(&mut self) -> bool {
        while let Some(event) = self.held.front() {
            match sys::send(&self.socket, event, &[]) {
                Err(err) if sys::would_block(&err) => return false,
                _ => self.held.pop_front(),
            };
        }
        true
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
            let event = packet(&event);
            if channel_object.events.held.contains(&event) {
                continue;
            }
            if channel_object.events.send(event)
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
        const HELD_MAX: usize = 64;
        let Some(c) = self.contexts.get_mut(context) else { return };
        let Some(events) = c.events.as_mut().filter(|e| e.held.len() < HELD_MAX) else { return };
        if events.send(packet(&verbs_async_event { user, event, object }))
            && let Some(c) = self.contexts.get(context)
            && let Some(events) = &c.events
        {
            let id = Source::Events.id(context);
            let _ = self.epoll_of(c.endpoint).add(events.socket.as_fd(), sys::WRITABLE, id);
        }
    }
}

fn packet<T: plain::Plain>(event: &T) -> [u8; 16] {
    *plain::bytes(event).first_chunk().expect("events have 16 bytes")
}

//! Events of RDMA-CM, until programs get them. `docs/protocols/verbs-control.md`.

use std::collections::VecDeque;

use verbs_protocol::abi;
use verbs_protocol::cm::{Event, EventKind, Param, Path};
use verbs_protocol::control::{EINVAL, Errno};

use crate::cm::CHANNELS;
use crate::commands::{Answer, answer};
use crate::endpoint::Quota;
use crate::events::EventSocket;
use crate::objects::Objects;
use crate::sys;
use verbs_protocol::statistics::Reason;

/// What a context is that is an event channel.
#[derive(Default)]
pub(crate) struct EventChannel {
    queue: VecDeque<Queued>,
    /// A message that says so is in the socket.
    told: bool,
    /// The last event was taken, which the next reply says.
    drained: bool,
}

struct Queued {
    /// The id whose event it is: of a request, the listener.
    owner: u32,
    /// The id that a request has made, else 0.
    request: u32,
    /// The number of the group whose event it is, else 0.
    group: u32,
    event: Event,
}

impl EventChannel {
    /// Takes the events of an id.
    fn take_of(&mut self, id: u32) -> Vec<Queued> {
        let (taken, kept) = self.queue.drain(..).partition(|q| q.owner == id);
        self.queue = VecDeque::from_iter::<Vec<Queued>>(kept);
        self.took();
        taken
    }

    fn took(&mut self) {
        if self.told && self.queue.is_empty() {
            self.told = false;
            self.drained = true;
        }
    }
}

impl Objects {
    /// The first request of a connection that is an event channel.
    pub(crate) fn cm_hello(&mut self, context: u32) -> Result<Answer, Errno> {
        let (ours, theirs) = sys::packet_pair().map_err(|_| libc::ENOMEM)?;
        let endpoint = self.endpoint_of(context).ok_or(EINVAL)?;
        if endpoint.cm.channels >= CHANNELS {
            endpoint.account.note(Reason::QuotaObjects);
            return Err(libc::ENOMEM);
        }
        // It counts as a channel instead.
        endpoint.cm.channels += 1;
        endpoint.refund(Quota::Contexts, 1);
        let mut answer = answer(&abi::verbs_hello_reply {
            version: abi::VERBS_VERSION,
            node_guid: endpoint.guid(),
            gid: endpoint.gids,
            gid_count: crate::commands::gid_count(&endpoint.gids),
            ..Default::default()
        });
        answer.descriptors.push(theirs);
        let context = self.contexts.get_mut(context).ok_or(EINVAL)?;
        context.events = Some(EventSocket::new(ours));
        context.cm = Some(EventChannel::default());
        Ok(answer)
    }

    /// Ends the ids of an event channel that is closed.
    pub(crate) fn cm_close(&mut self, context: u32) {
        let all = self.cm.table.iter().filter(|(_, id)| id.context == context);
        for id in all.map(|(id, _)| id).collect::<Vec<_>>() {
            self.cm_destroy(id);
        }
    }

    /// Whether the reply to a channel's command has to say that the last event was taken.
    pub(crate) fn cm_drained(&mut self, context: u32) -> bool {
        let channel = self.contexts.get_mut(context).and_then(|c| c.cm.as_mut());
        channel.is_some_and(|c| std::mem::take(&mut c.drained))
    }

    /// Tells the program of an id of an event.
    pub(crate) fn cm_tell(&mut self, handle: u32, kind: EventKind, status: i32, param: &Param) {
        let Some(id) = self.cm.table.get(handle).filter(|id| id.uid != 0) else { return };
        let datagrams = id.has_datagrams();
        let path = self.cm_peer_path(id);
        let (uid, number) = (id.uid, id.number);
        let event = Event { uid, id: number, kind, status, param: *param, datagrams, path };
        self.cm_queue(id.context, Queued { owner: handle, request: 0, group: 0, event });
    }

    /// Tells the program of a listener of a request.
    pub(crate) fn cm_tell_request(&mut self, listener: u32, handle: u32, param: &Param) {
        let Some(id) = self.cm.table.get(handle) else { return };
        let Some(l) = self.cm.table.get(listener) else { return };
        let event = Event {
            uid: l.uid,
            id: id.number,
            kind: EventKind::ConnectRequest,
            status: 0,
            param: *param,
            datagrams: id.has_datagrams(),
            path: None,
        };
        self.cm_queue(l.context, Queued { owner: listener, request: handle, group: 0, event });
    }

    /// Tells the program of an id of what became of a group, by the group's uid and number.
    pub(crate) fn cm_tell_joined(
        &mut self,
        handle: u32,
        (uid, number): (u64, u32),
        kind: EventKind,
        param: &Param,
        path: Path,
    ) {
        let Some(id) = self.cm.table.get(handle) else { return };
        let param = *param;
        let event =
            Event { uid, id: number, kind, status: 0, param, datagrams: true, path: Some(path) };
        self.cm_queue(id.context, Queued { owner: handle, request: 0, group: number, event });
    }

    /// Drops the events of a group that were not got.
    pub(crate) fn cm_drop_joined(&mut self, context: u32, handle: u32, number: u32) {
        if let Some(channel) = self.contexts.get_mut(context).and_then(|c| c.cm.as_mut()) {
            channel.queue.retain(|q| q.owner != handle || q.group != number);
            channel.took();
        }
    }

    fn cm_queue(&mut self, context: u32, queued: Queued) {
        let channel = self.contexts.get_mut(context).and_then(|c| c.cm.as_mut());
        let Some(channel) = channel else { return };
        channel.queue.push_back(queued);
        if !std::mem::replace(&mut channel.told, true) {
            // Zeros: which event it is, the program asks for.
            self.tell(context, 0, 0, 0);
        }
    }

    /// The oldest event of a channel, for its program.
    pub(crate) fn cm_event(&mut self, context: u32) -> Result<Event, Errno> {
        let channel = self.contexts.get_mut(context).and_then(|c| c.cm.as_mut());
        let channel = channel.ok_or(EINVAL)?;
        let queued = channel.queue.pop_front().ok_or(libc::EAGAIN)?;
        channel.took();
        if let Ok(owner) = self.cm_get(queued.owner) {
            owner.reported += 1;
            if let Some(group) = owner.groups.iter_mut().find(|g| g.number == queued.group) {
                group.reported += 1;
            }
            let endpoint = owner.endpoint;
            if queued.request != 0 {
                self.cm_admit(endpoint);
            }
        }
        Ok(queued.event)
    }

    /// Requests of a listener that its program has not got.
    pub(crate) fn cm_requests(&self, context: u32, listener: u32) -> usize {
        let channel = self.contexts.get(context).and_then(|c| c.cm.as_ref());
        channel
            .map_or(0, |c| c.queue.iter().filter(|q| q.owner == listener && q.request != 0).count())
    }

    /// Drops the events of an id, and says which ids its requests have made.
    pub(crate) fn cm_forget(&mut self, context: u32, id: u32) -> Vec<u32> {
        let channel = self.contexts.get_mut(context).and_then(|c| c.cm.as_mut());
        let Some(channel) = channel else { return Vec::new() };
        let dropped = channel.take_of(id).into_iter();
        dropped.map(|q| q.request).filter(|r| *r != 0).collect()
    }

    /// Moves the events of an id to another channel, with the ids that requests have made.
    pub(crate) fn cm_move_events(&mut self, id: u32, from: u32, to: u32) {
        let channel = self.contexts.get_mut(from).and_then(|c| c.cm.as_mut());
        let Some(channel) = channel else { return };
        for queued in channel.take_of(id) {
            if let Ok(request) = self.cm_get(queued.request) {
                request.context = to;
            }
            self.cm_queue(to, queued);
        }
    }
}

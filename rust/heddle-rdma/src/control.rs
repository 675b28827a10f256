//! The control sockets of contexts: messages in, replies out, never waiting.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use verbs_protocol::abi::{self, verbs_reply, verbs_request};
use verbs_protocol::control::{self, Request};
use verbs_protocol::plain;
use verbs_protocol::statistics::Reason;

use crate::endpoint::Quota;
use crate::objects::{Context, Objects, Source, Unsent};
use crate::process::Process;
use crate::protection::{Protection, protects};
use crate::sys;

/// Requests that one context gets served before others have their turn.
const REQUESTS: usize = 16;

impl Objects {
    /// Takes the connections that wait at an endpoint's socket.
    pub(crate) fn accept(&mut self, endpoint: u32) {
        for _ in 0..REQUESTS {
            let free = self.free(Quota::Contexts);
            let Some(listening) = self.endpoints.get_mut(endpoint) else { return };
            let socket = match sys::accept(&listening.listener) {
                Ok(socket) => socket,
                Err(err) if sys::no_descriptors(&err) => {
                    listening.account.note(Reason::RouterFull);
                    // Whoever waits is told, and does not make the loop turn without end.
                    self.spare = None;
                    if let Some(listening) = self.endpoints.get(endpoint) {
                        let _ = sys::accept(&listening.listener);
                    }
                    self.spare = sys::eventfd().ok();
                    return;
                }
                Err(_) => return,
            };
            // A connection that cannot be had is closed: the library reads end of file.
            if !listening.charge(Quota::Contexts, 1, free) {
                continue;
            }
            if let Err(err) = self.open(endpoint, socket)
                && let Some(listening) = self.endpoints.get_mut(endpoint)
            {
                listening.refund(Quota::Contexts, 1);
                // A program that has ended by now is refused nothing.
                if !sys::is_gone(&err) {
                    listening.account.note(Reason::RouterFull);
                }
            }
        }
    }

    fn open(&mut self, endpoint: u32, socket: OwnedFd) -> io::Result<()> {
        let process = Arc::new(Process::new(endpoint, self.shared.opener.memory_of(&socket)?));
        let context = Context::new(endpoint, socket, process);
        let full = || io::Error::from_raw_os_error(libc::ENOMEM);
        let handle = self.contexts.insert(context, 0).ok_or_else(full)?;
        let context = self.contexts.get(handle).ok_or_else(full)?;
        let added = self.epoll_of(endpoint).add(
            context.socket.as_fd(),
            sys::READABLE,
            Source::Control.id(handle),
        );
        if added.is_err() {
            self.contexts.remove(handle);
        }
        added
    }

    /// Serves the requests of a context that are there, and goes on with a reply that is under way.
    pub(crate) fn control(self: &mut Box<Self>, handle: u32) {
        for served in 0.. {
            if served >= REQUESTS && protects(Protection::Turns) {
                return;
            }
            let Some(context) = self.contexts.get_mut(handle) else { return };
            if let Some(unsent) = context.unsent.take() {
                if !self.reply(handle, unsent, true) {
                    return;
                }
                continue;
            }
            let mut bytes = [0; abi::VERBS_MESSAGE_MAX as usize];
            let mut descriptors = Vec::new();
            let got = match sys::receive(&context.socket, &mut bytes, &mut descriptors) {
                Err(err) if sys::would_block(&err) => return,
                result => result.unwrap_or(0),
            };
            let message = bytes.get(..got).filter(|m| !m.is_empty() && descriptors.is_empty());
            let Some(Ok((head, request))) = message.map(control::parse) else {
                let endpoint = context.endpoint;
                if got > 0 {
                    self.note(endpoint, Reason::ControlMalformed);
                }
                self.close(handle);
                return;
            };
            let reply = self.answer(handle, head, request);
            if !self.reply(handle, reply, false) {
                return;
            }
        }
    }

    fn answer(
        self: &mut Box<Self>,
        handle: u32,
        head: verbs_request,
        request: Result<Request, control::Errno>,
    ) -> Unsent {
        let (greeted, is_channel) = self
            .contexts
            .get(handle)
            .map_or((false, false), |c| (c.doorbell.is_some() || c.cm.is_some(), c.cm.is_some()));
        let answer = request.and_then(|request| match &request {
            Request::Hello(hello) if !greeted => {
                let result = self.hello(handle, hello);
                result.inspect_err(|errno| self.note_full(handle, *errno))
            }
            _ if !greeted => Err(libc::EPROTO),
            Request::RdmaCm { response_max, command } if is_channel => {
                let command = command.as_ref().map_err(|errno| *errno)?;
                self.cm_command(handle, command, *response_max)
            }
            Request::Hello(_) => Err(libc::EPROTO),
            _ if is_channel => Err(libc::EOPNOTSUPP),
            _ => self.serve_request(handle, &request),
        });
        let error = answer.as_ref().err().copied().unwrap_or(0);
        let reply = verbs_reply { command: head.command, tag: head.tag, error, reserved: 0 };
        match answer {
            Ok(mut answer) => {
                let length = size_of::<verbs_reply>();
                answer.bytes[..length].copy_from_slice(plain::bytes(&reply));
                (answer.bytes, answer.descriptors)
            }
            Err(_) => (plain::bytes(&reply).to_vec(), Vec::new()),
        }
    }

    /// Sends a reply, or keeps it until there is room. `kept` says that it was. False if nothing
    /// more is to be read from the context for now.
    fn reply(&mut self, handle: u32, (bytes, descriptors): Unsent, kept: bool) -> bool {
        let Some(context) = self.contexts.get_mut(handle) else { return false };
        let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        let id = Source::Control.id(handle);
        let sent = sys::send(&context.socket, &bytes, &borrowed);
        let way = match sent {
            Ok(()) if kept => sys::READABLE,
            Ok(()) => return true,
            Err(err) if sys::would_block(&err) => {
                context.unsent = Some((bytes, descriptors));
                if kept {
                    return false;
                }
                sys::WRITABLE
            }
            Err(_) => {
                self.close(handle);
                return false;
            }
        };
        if let Some(context) = self.contexts.get(handle) {
            let _ = self.epoll_of(context.endpoint).modify(context.socket.as_fd(), way, id);
        }
        way == sys::READABLE
    }
}

//! How the two ends of a connection greet each other, and which queue pair it is for.
//! `docs/protocols/verbs-wire.md`.

use verbs_protocol::Gid;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{self, GREETING, Greeting};

use crate::connect::service_number;
use crate::link::{GREETING_TIME, Phase};
use crate::objects::Objects;
use crate::protection::{Protection, protects};

/// Connections for datagrams to an endpoint that one peer may have opened.
const DATAGRAM_LINKS_MAX: usize = 2;

impl Objects {
    pub(crate) fn greeted(&mut self, handle: u32, bytes: &[u8; GREETING]) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Ok(heard) = Greeting::parse(bytes) else { return self.break_link(handle) };
        if link.opener {
            let same = link.greeting.is_some_and(|said| {
                heard.version == said.version
                    && heard.status == 0
                    && heard.kind == said.kind
                    && (heard.source, heard.source_qp) == (said.destination, said.destination_qp)
                    && (heard.destination, heard.destination_qp) == (said.source, said.source_qp)
            });
            if same {
                let said = link.greeting.is_some_and(|said| said.card);
                link.greeting = Some(heard);
                if said && !heard.card {
                    let endpoint = link.endpoint;
                    self.note(endpoint, Reason::CardMissing);
                }
                self.establish(handle);
            } else {
                self.end_link(handle);
            }
            return;
        }
        let status = if heard.version != wire::VERSION {
            libc::EPROTONOSUPPORT
        } else if (heard.source, heard.destination) != (link.other, link.own) {
            libc::EACCES
        } else {
            0
        };
        link.greeting = Some(heard);
        link.kind = heard.kind;
        if status != 0 {
            self.answer_greeting(handle, status);
            self.refuse_link(handle);
        } else if matches!(heard.kind, wire::DATAGRAMS | wire::RDMA_CM) {
            self.answer_greeting(handle, 0);
            self.establish(handle);
        } else {
            link.phase = Phase::Unmatched;
            self.match_link(handle);
        }
    }

    fn answer_greeting(&mut self, handle: u32, status: i32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(heard) = link.greeting else { return };
        let answer = Greeting {
            version: wire::VERSION,
            status: status.unsigned_abs(),
            source: heard.destination,
            destination: heard.source,
            source_qp: heard.destination_qp,
            destination_qp: heard.source_qp,
            card: heard.card && status == 0,
            ..heard
        };
        link.unsent.extend(answer.encode());
        self.push(handle);
    }

    /// Joins a connection that was greeted with the queue pair that it means, if that names the
    /// opener's.
    pub(crate) fn match_link(&mut self, handle: u32) {
        let Some(link) = self.links.get(handle) else { return };
        let Some(heard) = link.greeting else { return };
        let matches = self.qps.get(heard.destination_qp).is_some_and(|qp| {
            let names = qp.attr.dest_qp_num == heard.source_qp;
            let names = names && qp.attr.address.gid == heard.source;
            qp.endpoint == link.endpoint
                && qp.state.receives()
                && (names || !protects(Protection::Pairs))
                && service_number(qp.service) == heard.qp_type
                && qp.link == 0
                && !qp.closed
        });
        if matches {
            let endpoint = link.endpoint;
            let offers = self.offers_card(endpoint, &heard.source);
            if offers && !heard.card {
                self.note(endpoint, Reason::CardMissing);
            }
            if let Some(greeting) = self.links.get_mut(handle).and_then(|l| l.greeting.as_mut()) {
                greeting.card &= offers;
            }
            self.attach(handle, heard.destination_qp);
            self.answer_greeting(handle, 0);
            self.establish(handle);
        }
    }

    pub(crate) fn attach(&mut self, handle: u32, number: u32) {
        if let Some(qp) = self.qps.get_mut(number) {
            qp.link = handle;
        }
        if let Some(link) = self.links.get_mut(handle) {
            link.qp = number;
        }
    }

    fn establish(&mut self, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        link.phase = Phase::Established;
        link.is_local = self.endpoints.iter().any(|(_, e)| e.has(&link.other));
        link.deadline = None;
        let (endpoint, other, kind) = (link.endpoint, link.other, link.kind);
        if kind == wire::RDMA_CM {
            if link.opener {
                self.cm_established(handle);
            } else {
                // The request is to follow at once.
                self.set_deadline(handle, GREETING_TIME);
            }
            return;
        }
        if kind == wire::DATAGRAMS && !link.opener {
            self.datagram_links.push((endpoint, other, handle));
            self.end_old_datagram_link(endpoint, other);
        }
        if kind == wire::DATAGRAMS {
            self.say_held(handle);
        }
        if self.links.get(handle).and_then(|l| l.greeting).is_some_and(|g| g.card) {
            self.begin_card(handle);
        }
        self.wake_endpoint(endpoint);
    }

    /// A peer opens one connection for datagrams, and another one if that has ended, which may not
    /// be known here yet. If it has opened more, the oldest ends.
    fn end_old_datagram_link(&mut self, endpoint: u32, other: Gid) {
        let all = self.datagram_links.iter().filter(|(e, g, link)| {
            (*e, *g) == (endpoint, other) && self.links.get(*link).is_some_and(|l| !l.opener)
        });
        let all: Vec<u32> = all.map(|(_, _, link)| *link).collect();
        if let [oldest, .., _] = all[..]
            && all.len() > DATAGRAM_LINKS_MAX
        {
            self.break_link(oldest);
        }
    }
}

//! The card, its port or a queue pair of it is lost: what goes by it ends or goes by TCP.

use std::os::fd::AsFd;
use std::sync::Arc;

use verbs_protocol::statistics::Reason;

use crate::ibverbs::{
    EVENT_CQ_ERR, EVENT_DEVICE_FATAL, EVENT_PORT_ERR, EVENT_QP_FATAL, Event, PORT_CHANGES,
};
use crate::objects::Objects;

/// Events of it that are taken before others have their turn.
const EVENTS: u32 = 64;

impl Objects {
    /// The card tells that something has become of it.
    pub(crate) fn card_changed(&mut self) {
        let mut changed = false;
        for _ in 0..EVENTS {
            let next = self.card.as_ref().and_then(|c| c.device.event());
            let Some(event) = next else { break };
            if event.pair != 0 {
                self.pair_failed(&event);
                continue;
            }
            match event.kind {
                EVENT_PORT_ERR => {
                    changed = false;
                    if let Some(card) = &mut self.card {
                        card.port.active = false;
                    }
                    self.end_card_pairs(Reason::CardGone, |_| true);
                }
                EVENT_DEVICE_FATAL => self.lose_card("the card is gone"),
                EVENT_CQ_ERR if self.is_of_queue(&event) => {
                    // Nothing tells any more what the card has done.
                    self.lose_card("a completion queue of the card has failed: it is not used");
                }
                kind => changed |= PORT_CHANGES.contains(&kind),
            }
        }
        if changed {
            self.look_at_port();
        }
    }

    /// Its port may be another one now. Finding that out reads some hundred small files.
    fn look_at_port(&mut self) {
        if let Some(card) = &mut self.card {
            match card.device.port() {
                Ok(port) => card.port = port,
                Err(_) => card.port.active = false,
            }
        }
    }

    /// A queue pair of it has failed.
    fn pair_failed(&mut self, event: &Event) {
        if self.native_failed(event.pair) || event.kind != EVENT_QP_FATAL {
            return;
        }
        let Some(card) = &mut self.card else { return };
        for handle in self.links.handles() {
            if let Some(carrier) = self.links.get_mut(handle).and_then(|l| l.card.as_mut())
                && carrier.pair.number() == event.pair
            {
                carrier.broken = true;
                card.wake(handle, carrier);
            }
        }
    }

    /// Whether an event is about a completion queue, of those that there are.
    fn is_of_queue(&self, event: &Event) -> bool {
        let own = self.card.as_ref().map(|c| Arc::clone(&c.completions));
        own.into_iter().chain(self.outside.completions()).any(|queue| queue.is_of(event))
    }

    /// Ends all that goes by the card, which nothing does any more.
    fn lose_card(&mut self, why: &str) {
        self.end_card_pairs(Reason::CardGone, |_| true);
        self.lose_outside();
        if let Some(card) = self.card.take() {
            eprintln!("heddle-rdma: {why}");
            self.epoll.remove(card.device.as_fd());
            self.epoll.remove(card.completions.as_fd());
        }
    }

    /// Ends what goes by the card, of some endpoints, and has what is not agreed go by TCP.
    pub(crate) fn end_card_pairs(&mut self, reason: Reason, which: impl Fn(u32) -> bool) {
        for handle in self.links.handles() {
            let Some(link) = self.links.get(handle).filter(|l| which(l.endpoint)) else { continue };
            let (endpoint, agreed) = (link.endpoint, link.card.as_ref().map(|c| c.agreed()));
            match agreed {
                Some(true) => {
                    self.note(endpoint, reason);
                    self.end_link(handle);
                }
                Some(false) => self.refuse_card(handle, libc::ENETDOWN.unsigned_abs()),
                None => {}
            }
        }
        self.notify();
    }
}

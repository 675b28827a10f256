//! The card, its port or a queue pair of it is lost: what goes by it ends or goes by TCP.

use std::os::fd::AsFd;

use verbs_protocol::statistics::Reason;

use crate::ibverbs::{EVENT_DEVICE_FATAL, EVENT_PORT_ERR, EVENT_QP_FATAL};
use crate::objects::Objects;

/// Events of it that are taken before others have their turn.
const EVENTS: u32 = 64;

impl Objects {
    /// The card tells that something has become of it.
    pub(crate) fn card_changed(&mut self) {
        for _ in 0..EVENTS {
            let next = self.card.as_ref().and_then(|c| c.device.event());
            let Some((event, number)) = next else { return };
            if number != 0 && self.native_failed(number) {
                continue;
            }
            if event == EVENT_QP_FATAL {
                let Some(card) = &mut self.card else { return };
                for handle in self.links.handles() {
                    if let Some(carrier) = self.links.get_mut(handle).and_then(|l| l.card.as_mut())
                        && carrier.pair.number() == number
                    {
                        carrier.broken = true;
                        card.wake(handle, carrier);
                    }
                }
                continue;
            }
            let gone = matches!(event, EVENT_PORT_ERR | EVENT_DEVICE_FATAL);
            if let Some(card) = &mut self.card {
                match card.device.port() {
                    Ok(port) if !gone => card.port = port,
                    _ => card.port.active = false,
                }
            }
            if gone {
                self.end_card_pairs(Reason::CardGone, |_| true);
            }
            if event == EVENT_DEVICE_FATAL {
                self.lose_outside();
            }
            if event == EVENT_DEVICE_FATAL
                && let Some(card) = self.card.take()
            {
                eprintln!("heddle-rdma: the card is gone");
                self.epoll.remove(card.device.as_fd());
                self.epoll.remove(card.completions.as_fd());
            }
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

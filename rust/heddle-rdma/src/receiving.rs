//! Receive requests of queue pairs and of their shared queues: which one a message takes, and what
//! becomes of one that is wrong or not used after all.

use verbs_protocol::ibv;
use verbs_protocol::slots::Receive;
use verbs_protocol::statistics::Reason;

use crate::objects::Objects;
use crate::queues::{Dead, ReceiveRing};
use crate::requests::Pending;

/// A receive request, taken for a message.
pub(crate) enum Taken {
    Ready(Receive),
    /// None is there.
    Empty,
    /// One that cannot be used: the receiver has failed.
    Wrong,
}

impl Objects {
    /// Takes a receive request of a queue pair or of its shared queue. What is wrong with it fails
    /// the receiver.
    pub(crate) fn take_receive(&mut self, number: u32) -> Taken {
        let Some(qp) = self.qps.get_mut(number) else { return Taken::Empty };
        if let Some(inbound) = qp.inbound.take() {
            return Taken::Ready(inbound);
        }
        let (srq, most) = (qp.srq, qp.capabilities.recv_sge);
        let next = if srq == 0 {
            qp.receive.as_mut().map(ReceiveRing::next)
        } else {
            self.srqs.get_mut(srq).map(|s| s.ring.next())
        };
        let taken = match next {
            Some(Ok(Some(Ok(receive)))) if receive.entries() <= most as usize => {
                Taken::Ready(receive)
            }
            Some(Ok(Some(Ok(receive)))) => {
                self.fail_receive(number, receive.wr_id, ibv::WC_LOC_QP_OP_ERR);
                Taken::Wrong
            }
            Some(Ok(Some(Err(wr_id)))) => {
                self.fail_receive(number, wr_id, ibv::WC_LOC_QP_OP_ERR);
                Taken::Wrong
            }
            Some(Ok(None)) | None => Taken::Empty,
            Some(Err(Dead)) => {
                self.note_of(number, Reason::RingBroken);
                self.fail_fatally(number);
                Taken::Wrong
            }
        };
        if srq != 0 && matches!(taken, Taken::Ready(_)) {
            self.check_limit(srq);
        }
        taken
    }

    /// Takes the next receive request for a message of a connected peer, as
    /// [`Self::receive_for`] does. None if there is no good one: it is left to that then.
    pub(crate) fn good_receive(&mut self, number: u32) -> Option<Receive> {
        let qp = self.qps.get_mut(number).filter(|qp| qp.inbound.is_none())?;
        let (srq, most) = (qp.srq, qp.capabilities.recv_sge as usize);
        let ring = match srq {
            0 => qp.receive.as_mut()?,
            _ => &mut self.srqs.get_mut(srq)?.ring,
        };
        let next = ring.next().ok()??;
        match next {
            Ok(receive) if receive.entries() <= most => {
                if srq != 0 {
                    self.check_limit(srq);
                }
                self.hold(number, 1);
                Some(receive)
            }
            other => {
                ring.give_back(other);
                None
            }
        }
    }

    fn check_limit(&mut self, handle: u32) {
        let Some(srq) = self.srqs.get_mut(handle) else { return };
        if srq.limit > 0 && srq.ring.requests() < srq.limit {
            srq.limit = 0;
            let (context, user) = (srq.context, srq.user);
            self.tell(context, ibv::EVENT_SRQ_LIMIT_REACHED, handle, user);
        }
    }

    pub(crate) fn give_back(&mut self, number: u32, receive: Receive) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        if let Some(own) = &mut qp.receive {
            own.give_back(Ok(receive));
        } else if let Some(srq) = self.srqs.get_mut(qp.srq) {
            srq.ring.give_back(Ok(receive));
        }
    }

    /// Takes the receive request for a message of a connected peer.
    pub(crate) fn receive_for(&mut self, peer: u32) -> Result<Receive, Pending> {
        match self.take_receive(peer) {
            Taken::Ready(receive) => {
                self.hold(peer, 1);
                Ok(receive)
            }
            Taken::Empty => {
                let timer = self.qps.get(peer).map_or(0, |p| p.attr.min_rnr_timer);
                Err(Pending::NotReady(timer))
            }
            Taken::Wrong => Err(Pending::Failed(ibv::WC_REM_OP_ERR)),
        }
    }

    /// Notes that a thread takes a receive request of a queue pair (1), or is done with it (-1).
    pub(crate) fn hold(&mut self, number: u32, more: i32) {
        if let Some(qp) = self.qps.get_mut(number) {
            qp.taken = qp.taken.saturating_add_signed(more);
        }
    }
}

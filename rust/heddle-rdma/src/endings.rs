//! How queue pairs, contexts and endpoints end.

use std::os::fd::{AsFd, OwnedFd};

use verbs_protocol::agent::Message;
use verbs_protocol::{ibv, statistics};
use verbs_qp::State;

use crate::endpoint::Quota;
use crate::objects::Objects;

impl Objects {
    /// Moves a queue pair to ERR: what is in its rings is flushed in its next turns.
    pub(crate) fn fail(&mut self, number: u32) {
        let Some(qp) = self.qps.get_mut(number) else { return };
        if matches!(qp.state, State::Error | State::Reset) {
            return;
        }
        qp.state = State::Error;
        qp.waits_since = None;
        let (context, srq) = (qp.context, qp.srq);
        self.unlink(number);
        if let Some(context) = self.contexts.get_mut(context) {
            context.awake = true;
        }
        // Told once all of it is flushed.
        if let Some(qp) = self.qps.get_mut(number) {
            qp.tells_last = srq != 0;
        }
    }

    /// The same, where no completion tells of it.
    pub(crate) fn fail_fatally(&mut self, number: u32) {
        let Some(qp) = self.qps.get(number) else { return };
        if !matches!(qp.state, State::Error | State::Reset) {
            let (context, user) = (qp.context, qp.user);
            self.fail(number);
            self.tell(context, ibv::EVENT_QP_FATAL, number, user);
        }
    }

    /// Ends a context with all that it has.
    pub(crate) fn close(&mut self, handle: u32) {
        let Some(context) = self.contexts.get_mut(handle) else { return };
        for number in std::mem::take(&mut context.qps) {
            // What refuses is gone already.
            let _ = self.forget_qp(handle, number);
        }
        macro_rules! of {
            ($($table:ident $destroy:ident),*) => {$(
                let all = self.$table.iter().filter(|(_, o)| o.context == handle);
                for object in all.map(|(object, _)| object).collect::<Vec<_>>() {
                    let _ = self.$destroy(handle, object);
                }
            )*};
        }
        of!(
            srqs destroy_srq,
            cqs destroy_cq,
            channels destroy_channel,
            ahs destroy_ah,
            regions end_region,
            memories destroy_memory,
            pds deallocate_pd
        );
        self.cm_close(handle);
        let Some(mut context) = self.contexts.remove(handle) else { return };
        let epoll = self.epoll_of(context.endpoint);
        epoll.remove(context.socket.as_fd());
        if let Some(doorbell) = &context.doorbell {
            epoll.remove(doorbell.as_fd());
        }
        if let Some(endpoint) = self.endpoints.get_mut(context.endpoint) {
            if context.cm.is_some() {
                endpoint.cm.channels -= 1;
            } else {
                endpoint.refund(Quota::Contexts, 1);
            }
        }
        let (endpoint, memory) = (context.endpoint, context.memory.take());
        drop(context);
        if let Some(memory) = memory {
            self.let_go(endpoint, memory);
        }
        self.give_endpoint_back(endpoint);
    }

    /// Gives an endpoint back if another router is to have it and nothing of it is open here.
    pub(crate) fn give_endpoint_back(&mut self, handle: u32) {
        if !self.drains || self.contexts.iter().any(|(_, c)| c.endpoint == handle) {
            return;
        }
        let Some(endpoint) = self.endpoints.get(handle).map(|e| e.number) else { return };
        // What it did goes before it.
        let last = self.statistics(0, endpoint, statistics::KIND_ENDPOINTS, 0);
        let Some(listener) = self.remove_endpoint(handle) else { return };
        self.given_back.push((endpoint, listener));
        self.asks.extend([last, Message::Released { endpoint }]);
        self.nudge_first();
    }

    /// Ends an endpoint with all that it has, but for its socket.
    pub(crate) fn remove_endpoint(&mut self, handle: u32) -> Option<OwnedFd> {
        let all = self.contexts.iter().filter(|(_, c)| c.endpoint == handle);
        for context in all.map(|(context, _)| context).collect::<Vec<_>>() {
            self.close(context);
        }
        let all = self.links.iter().filter(|(_, l)| l.endpoint == handle);
        for link in all.map(|(link, _)| link).collect::<Vec<_>>() {
            self.end_link(link);
        }
        self.held.retain(|h| h.endpoint != handle);
        // Its listener may be another router's from now on, and would be an event here, too.
        self.epoll_of(handle).remove(self.endpoints.get(handle)?.listener.as_fd());
        let endpoint = self.endpoints.remove(handle)?;
        if let Some(shard) = endpoint.shard {
            self.shards -= 1;
            shard.end();
        }
        Some(endpoint.listener)
    }
}

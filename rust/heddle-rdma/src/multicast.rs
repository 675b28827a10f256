//! Multicast groups of UD queue pairs: who of this router is in which. `elsewhere` has the others.

use std::collections::HashMap;
use std::time::Instant;

use verbs_protocol::Gid;
use verbs_protocol::abi::verbs_mcast_request;
use verbs_protocol::control::{EINVAL, Errno};
use verbs_protocol::statistics::{Path, Reason};
use verbs_qp::Service;

use crate::commands::{Answer, done, usable};
use crate::datagrams::Way;
use crate::objects::Objects;
use crate::protection::{Protection, protects};
use crate::requests::{Pending, REQUEST_COST, Step, Told};

/// Memberships of an endpoint's queue pairs: each may cost who sends to the group a copy.
pub(crate) const MEMBERSHIPS: u32 = 256;
/// The number of all queue pairs of a group.
pub(crate) const GROUP_QP: u32 = 0xff_ffff;

/// Queue pairs by group.
pub(crate) type Groups = HashMap<Gid, Vec<u32>>;

/// Whether a GID is a group's: `ff..`, or of IPv4 224.0.0.0/4.
pub(crate) fn is_multicast(gid: &Gid) -> bool {
    gid[0] == 0xff || is_ipv4(gid) && gid[12] >> 4 == 0xe
}

/// Whether it is that of an IPv4 address.
pub(crate) fn is_ipv4(gid: &Gid) -> bool {
    gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
}

impl Objects {
    /// Has a queue pair in a group; it may be in it already.
    pub(crate) fn join_group(
        &mut self,
        context: u32,
        request: &verbs_mcast_request,
    ) -> Result<Answer, Errno> {
        let qp = usable(self.qps.get(request.qp).filter(|q| q.context == context))?;
        if qp.service != Service::UnreliableDatagram || !is_multicast(&request.gid) {
            return Err(EINVAL);
        }
        let endpoint = usable(self.endpoints.get_mut(qp.endpoint))?;
        let members = self.groups.entry(request.gid).or_default();
        if members.contains(&request.qp) {
            return Ok(done());
        }
        if endpoint.memberships >= MEMBERSHIPS {
            endpoint.account.note(Reason::QuotaObjects);
            if members.is_empty() {
                self.groups.remove(&request.gid);
            }
            return Err(libc::ENOMEM);
        }
        endpoint.memberships += 1;
        members.push(request.qp);
        let endpoint = qp.endpoint;
        self.groups_changed(endpoint);
        Ok(done())
    }

    pub(crate) fn leave_group(
        &mut self,
        context: u32,
        request: &verbs_mcast_request,
    ) -> Result<Answer, Errno> {
        usable(self.qps.get(request.qp).filter(|q| q.context == context))?;
        if self.leave(request.qp, &request.gid) { Ok(done()) } else { Err(EINVAL) }
    }

    /// Says whether the queue pair was in the group.
    fn leave(&mut self, number: u32, gid: &Gid) -> bool {
        let Some(members) = self.groups.get_mut(gid) else { return false };
        let Some(at) = members.iter().position(|m| *m == number) else { return false };
        members.remove(at);
        if members.is_empty() {
            self.groups.remove(gid);
        }
        let Some(handle) = self.qps.get(number).map(|qp| qp.endpoint) else { return true };
        if let Some(endpoint) = self.endpoints.get_mut(handle) {
            endpoint.memberships -= 1;
        }
        self.groups_changed(handle);
        true
    }

    /// A queue pair is about to be destroyed.
    pub(crate) fn leave_groups(&mut self, number: u32) {
        let of = |(gid, members): (&Gid, &Vec<u32>)| members.contains(&number).then_some(*gid);
        let groups: Vec<Gid> = self.groups.iter().filter_map(of).collect();
        for gid in groups {
            self.leave(number, &gid);
        }
    }

    /// Gives a datagram to all queue pairs of a group, the sender's own among them, if policy lets
    /// it pass to their endpoints. Who cannot take it has lost it; nobody waits for him.
    pub(crate) fn send_to_group(
        self: &mut Box<Self>,
        number: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
    ) -> Step {
        let endpoint = self.qps.get(number).map(|qp| qp.endpoint).ok_or(Pending::Peer)?;
        if way.qp != GROUP_QP {
            self.note(endpoint, Reason::DatagramUnwanted);
            return Ok(());
        }
        let now = Instant::now();
        let own = self.endpoints.get_mut(endpoint).ok_or(Pending::Peer)?;
        if let Some(until) = own.egress.until(now) {
            return Err(Pending::Later(until));
        }
        let members = self.groups.get(&way.destination).cloned().unwrap_or_default();
        let looked_at = i64::try_from(members.len()).unwrap_or(0);
        let mut reached = Vec::with_capacity(members.len());
        for member in members {
            if self.reaches(endpoint, way, member, now)? {
                reached.push(member);
            }
        }
        // The sender pays for each copy, and for each member that gets none.
        let payload_cost = i64::try_from(payload.len()).unwrap_or(0);
        let mut cost = looked_at * REQUEST_COST;
        for member in reached {
            cost += payload_cost;
            self.copied(number, member, told.length);
            self.deliver_to(member, endpoint, way, told, payload, Path::Memory);
        }
        cost += self.send_elsewhere(number, endpoint, way, told, payload);
        // One copy is the request itself.
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.budget -= (cost - REQUEST_COST - payload_cost).max(0);
        }
        Ok(())
    }

    /// Whether a member of a group may get a datagram now. Only for the agent's answer is waited.
    fn reaches(
        &mut self,
        endpoint: u32,
        way: &Way,
        member: u32,
        now: Instant,
    ) -> Result<bool, Pending> {
        let Some(to) = self.qps.get(member).map(|qp| qp.endpoint) else { return Ok(false) };
        let shard = self.shard_of(to);
        if shard != 0 && shard != self.worker.serves() {
            self.note(endpoint, Reason::DatagramNoReceive);
            return Ok(false);
        }
        if to == endpoint {
            return Ok(true);
        }
        let Some(other) = self.endpoints.get_mut(to) else { return Ok(false) };
        if other.ingress.until(now).is_some() {
            if other.ingress.begins_to_wait() {
                other.account.note(Reason::RateBytes);
            }
            return Ok(false);
        }
        let gid = other.gid_like(&way.source);
        match self.datagram_link(endpoint, way.source, gid) {
            Err(()) => Ok(!protects(Protection::Groups)),
            Ok(None) => Err(Pending::Peer),
            Ok(Some(link)) => Ok(self.links.get(link).is_some_and(|l| l.is_local)),
        }
    }
}

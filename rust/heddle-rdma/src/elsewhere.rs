//! Multicast groups between nodes: members at other routers, as the agent names them, what waits
//! for connections to them, and what the agent is told of this router's. Nobody waits for a member:
//! what cannot go to it is lost. `docs/protocols/verbs-wire.md`, `docs/protocols/verbs-agent.md`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use verbs_protocol::Gid;
use verbs_protocol::agent::Message;
use verbs_protocol::statistics::{Path, Reason, Traffic};

use crate::datagrams::Way;
use crate::link::{SEND_HIGH, Timer};
use crate::multicast::is_ipv4;
use crate::objects::Objects;
use crate::protection::{Protection, protects};
use crate::requests::{REQUEST_COST, Told};

/// Members of a group at other routers that get a datagram.
const MEMBERS_MAX: usize = 256;
/// What waits for a connection to a member, and the members of an endpoint's groups for which
/// something does.
const HELD_BYTES: usize = 16 * 1024;
const HELD_MAX: usize = 64;
/// Between two messages to the agent about the groups of an endpoint.
const TELL_EVERY: Duration = Duration::from_millis(100);
/// What copies of datagrams from other nodes may cost in a second, beside the first of each: those
/// are bytes that the connection was to carry.
pub(crate) const COPIES_A_SECOND: u64 = 64 << 20;

/// Members of groups at other routers, by their GIDs: of IPv4, and of IPv6.
#[derive(Default)]
pub(crate) struct Elsewhere {
    members: HashMap<[Gid; 2], Member>,
    by_group: HashMap<Gid, Vec<[Gid; 2]>>,
}

struct Member {
    groups: Vec<Gid>,
    /// The agent has named it since it came.
    named: bool,
}

impl Elsewhere {
    /// The agent begins to name all.
    pub(crate) fn begin(&mut self) {
        for member in self.members.values_mut() {
            member.named = false;
        }
    }

    /// The agent has named all.
    pub(crate) fn end(&mut self) {
        let gone = self.members.iter().filter(|(_, m)| !m.named);
        for gids in gone.map(|(gids, _)| *gids).collect::<Vec<_>>() {
            self.name(gids, Vec::new());
        }
    }

    /// A member is in these groups from now on, and in no other.
    pub(crate) fn name(&mut self, gids: [Gid; 2], groups: Vec<Gid>) {
        if let Some(before) = self.members.remove(&gids) {
            for group in before.groups {
                let Some(members) = self.by_group.get_mut(&group) else { continue };
                members.retain(|m| *m != gids);
                if members.is_empty() {
                    self.by_group.remove(&group);
                }
            }
        }
        for group in &groups {
            let members = self.by_group.entry(*group).or_default();
            if !members.contains(&gids) {
                members.push(gids);
            }
        }
        if !groups.is_empty() {
            self.members.insert(gids, Member { groups, named: true });
        }
    }

    /// The GIDs of a group's members of the family of `like`.
    fn of(&self, group: &Gid, like: &Gid) -> Vec<Gid> {
        let family = usize::from(!is_ipv4(like));
        let all = self.by_group.get(group).into_iter().flatten().map(|gids| gids[family]);
        all.filter(|gid| *gid != [0; 16]).collect()
    }
}

/// Frames that wait for a connection of an endpoint to a member.
pub(crate) struct Held {
    pub(crate) endpoint: u32,
    other: Gid,
    frames: Vec<u8>,
    count: u64,
}

impl Objects {
    /// Sends a datagram to the members of a group at other routers. Says what that has cost: who
    /// cannot be sent to was looked for, too.
    pub(crate) fn send_elsewhere(
        &mut self,
        number: u32,
        endpoint: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
    ) -> i64 {
        let members = self.elsewhere.of(&way.destination, &way.source);
        let (mut copies, mut cost) = (0, 0);
        for (i, member) in members.into_iter().enumerate() {
            let Some(own) = self.endpoints.get(endpoint) else { break };
            if own.has(&member) {
                continue;
            }
            cost += REQUEST_COST;
            let link = if i < MEMBERS_MAX {
                self.datagram_link(endpoint, way.source, member)
            } else {
                Err(())
            };
            let sent = match link {
                // Who is here was given it, as far as policy lets that be.
                Err(()) | Ok(None) if self.endpoint_with(&member).is_some() => continue,
                Err(()) => false,
                Ok(None) => self.hold_frame(endpoint, member, way, told, payload),
                Ok(Some(link)) => {
                    let Some(link_object) = self.links.get_mut(link) else { continue };
                    if link_object.is_local {
                        continue;
                    }
                    let has_room = link_object.unsent.len() < SEND_HIGH;
                    if has_room {
                        link_object.say(&way.header(told, payload.len()));
                        link_object.unsent.extend(payload);
                        self.push(link);
                    }
                    has_room
                }
            };
            if sent {
                copies += 1;
                cost += i64::try_from(payload.len()).unwrap_or(0);
            } else {
                self.note(endpoint, Reason::DatagramNoRoom);
            }
        }
        if copies > 0 {
            let sent = told.length * copies;
            self.account(number, Path::Tcp, &Traffic { sent, ..Traffic::default() });
        }
        cost
    }

    /// Keeps a datagram until its connection is there; false: there is no room.
    fn hold_frame(
        &mut self,
        endpoint: u32,
        other: Gid,
        way: &Way,
        told: Told,
        payload: &[u8],
    ) -> bool {
        let is = |h: &Held| (h.endpoint, h.other) == (endpoint, other);
        let at = self.held.iter().position(is).unwrap_or(self.held.len());
        if at == self.held.len() {
            if self.held.iter().filter(|h| h.endpoint == endpoint).count() >= HELD_MAX {
                return false;
            }
            self.held.push(Held { endpoint, other, frames: Vec::new(), count: 0 });
        }
        let held = &mut self.held[at];
        let header = way.header(told, payload.len()).encode();
        if held.frames.len() + header.len() + payload.len() > HELD_BYTES {
            return false;
        }
        held.frames.extend(header);
        held.frames.extend(payload);
        held.count += 1;
        true
    }

    fn take_held(&mut self, endpoint: u32, other: &Gid) -> Option<Held> {
        let is = |h: &Held| (h.endpoint, &h.other) == (endpoint, other);
        let at = self.held.iter().position(is)?;
        Some(self.held.swap_remove(at))
    }

    /// A connection for datagrams is there: what waited for it goes.
    pub(crate) fn say_held(&mut self, handle: u32) {
        let Some(link) = self.links.get(handle) else { return };
        let (endpoint, other, is_local) = (link.endpoint, link.other, link.is_local);
        let Some(held) = self.take_held(endpoint, &other) else { return };
        // Who is here was given it.
        if let Some(link) = self.links.get_mut(handle).filter(|_| !is_local) {
            link.unsent.extend(held.frames);
            self.push(handle);
        }
    }

    /// There is no connection.
    pub(crate) fn drop_held(&mut self, endpoint: u32, other: &Gid) {
        if let Some(held) = self.take_held(endpoint, other) {
            for _ in 0..held.count {
                self.note(endpoint, Reason::DatagramNoRoom);
            }
        }
    }

    /// Gives a datagram that has come for a group to the queue pairs of the endpoint that are in
    /// it, which is the connection's: policy has let the sender connect to that one.
    pub(crate) fn deliver_to_group(
        self: &mut Box<Self>,
        endpoint: u32,
        way: &Way,
        told: Told,
        payload: &[u8],
    ) {
        let members = self.groups.get(&way.destination).into_iter().flatten().copied();
        let is_own = |m: &u32| self.qps.get(*m).is_some_and(|qp| qp.endpoint == endpoint);
        let members: Vec<u32> = members.filter(is_own).collect();
        if members.is_empty() {
            return self.note(endpoint, Reason::DatagramUnwanted);
        }
        let now = Instant::now();
        let cost = REQUEST_COST.unsigned_abs() + told.length;
        for (i, member) in members.into_iter().enumerate() {
            let Some(own) = self.endpoints.get_mut(endpoint) else { return };
            if i > 0 && own.copies.until(now).is_some() && protects(Protection::Copied) {
                self.note(endpoint, Reason::DatagramNoRoom);
                continue;
            }
            own.copies.take(if i > 0 { cost } else { 0 });
            self.deliver_to(member, endpoint, way, told, payload, Path::Tcp);
        }
    }

    /// The agent is to hear of the groups of an endpoint, not too often.
    pub(crate) fn groups_changed(&mut self, handle: u32) {
        let Some(endpoint) = self.endpoints.get_mut(handle) else { return };
        if !std::mem::replace(&mut endpoint.groups_due, true) {
            let now = Instant::now();
            let when = endpoint.groups_told.map_or(now, |told| now.max(told + TELL_EVERY));
            self.at(when, Timer::Groups(handle));
        }
    }

    pub(crate) fn tell_groups(&mut self, handle: u32) {
        let of = |qp: &u32| self.qps.get(*qp).is_some_and(|qp| qp.endpoint == handle);
        let all = self.groups.iter().filter(|(_, members)| members.iter().any(of));
        let mut groups: Vec<Gid> = all.map(|(group, _)| *group).collect();
        groups.sort_unstable();
        let Some(endpoint) = self.endpoints.get_mut(handle) else { return };
        (endpoint.groups_due, endpoint.groups_told) = (false, Some(Instant::now()));
        let endpoint = endpoint.number;
        self.asks.push(Message::Groups { endpoint, gids: [[0; 16]; 2], groups });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::endpoint::Endpoint;
    use crate::shards::Nudge;
    use crate::sys::{self, Epoll};

    fn gid(n: u8, last: u8) -> Gid {
        let mut gid = [0; 16];
        gid[10..12].fill(0xff);
        (gid[12], gid[15]) = (n, last);
        gid
    }

    #[test]
    fn who_sends_pays_for_members_that_get_nothing_as_well() {
        let shared = Box::leak(Box::default());
        let epoll = Epoll::new().unwrap();
        let nudge = Nudge::of(&epoll).unwrap();
        let mut objects = Objects::new(shared, Arc::new(epoll), nudge);
        let (own, group) = (gid(10, 1), gid(239, 1));
        let endpoint = Endpoint::new(1, [own, [0; 16]], sys::eventfd().unwrap());
        let endpoint = objects.endpoints.insert(endpoint, 0).unwrap();
        for n in 2..=200 {
            objects.elsewhere.name([gid(10, n), [0; 16]], vec![group]);
            objects.refuse_datagrams(endpoint, gid(10, n));
        }
        let told = Told { opcode: 2, imm: 0, solicited: false, source: 7, length: 50 };
        let way = Way::of(own, group);
        let cost = objects.send_elsewhere(7, endpoint, &way, told, &[0; 50]);
        assert_eq!(cost, 199 * REQUEST_COST);
    }

    #[test]
    fn members_are_those_that_were_named_last() {
        let (one, two) = ([gid(10, 1), [1; 16]], [gid(10, 2), [0; 16]]);
        let (a, b) = (gid(239, 1), gid(239, 2));
        let mut all = Elsewhere::default();
        all.name(one, vec![a, b, a]);
        all.name(two, vec![a]);
        assert_eq!(all.of(&a, &one[0]), [one[0], two[0]]);
        // Who has no address of the sender's family gets nothing of it.
        assert_eq!(all.of(&a, &[1; 16]), [[1; 16]]);
        all.name(one, vec![b]);
        assert_eq!((all.of(&a, &one[0]), all.of(&b, &one[0])), (vec![two[0]], vec![one[0]]));
        all.begin();
        all.name(two, vec![b]);
        all.end();
        assert_eq!((all.of(&a, &one[0]), all.of(&b, &one[0])), (vec![], vec![two[0]]));
        all.name(two, vec![]);
        assert!(all.members.is_empty() && all.by_group.is_empty());
    }
}

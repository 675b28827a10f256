//! Where a peer's queue pair of the card may be: at the card of the node that the peer lives on, as
//! the agents know it. The peer says where it is, and may be a container that says what it wants.

use verbs_protocol::Gid;

use crate::ibverbs::Remote;
use crate::objects::Objects;
use crate::protection::{Protection, protects};

/// The card of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) lid: u32,
    pub(crate) gids: Vec<Gid>,
}

impl Home {
    /// Whether a queue pair is at this card, as far as its address says.
    pub(crate) fn has(&self, remote: &Remote) -> bool {
        u32::from(remote.lid) == self.lid && self.gids.contains(&remote.gid)
    }
}

impl Objects {
    /// The agent tells of the card at the other end of the connection that it tells of next.
    pub(crate) fn hear_home(&mut self, endpoint: u64, lid: u32, gids: &[Gid]) {
        self.home = Some((endpoint, Home { lid, gids: gids.to_vec() }));
    }

    /// The agent tells of a connection of an endpoint: what it told before may be of another one.
    pub(crate) fn keep_home_of(&mut self, endpoint: u64) {
        self.home.take_if(|(of, _)| *of != endpoint);
    }

    /// Whether the peer of a connection may have its queue pair of the card where it says.
    pub(crate) fn is_at_home(&self, handle: u32, remote: &Remote) -> bool {
        let home = self.links.get(handle).and_then(|l| l.home.as_ref());
        home.is_some_and(|home| home.has(remote)) || !protects(Protection::Homes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_at_home_where_lid_and_gid_are_the_cards() {
        let home = Home { lid: 3, gids: vec![[1; 16], [2; 16]] };
        let at = |lid, gid| home.has(&Remote { number: 7, psn: 9, mtu: 3, lid, gid });
        assert!(at(3, [1; 16]) && at(3, [2; 16]));
        assert!(!at(4, [1; 16]) && !at(3, [3; 16]) && !at(3, [0; 16]));
        let none = Home { lid: 0, gids: Vec::new() };
        assert!(!none.has(&Remote { number: 7, psn: 9, mtu: 3, lid: 0, gid: [0; 16] }));
    }
}

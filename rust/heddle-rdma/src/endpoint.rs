//! A container's place in the network, and what it may have.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use verbs_protocol::statistics::{QUOTAS, Reason};
use verbs_protocol::{Gid, agent};

use crate::accounts::Account;
use crate::bucket::Bucket;
use crate::cm;
use crate::elsewhere::COPIES_A_SECOND;
use crate::multicast::is_ipv4;
use crate::outside::ASKS_A_SECOND;
use crate::placing::REGISTERED_A_SECOND;
use crate::protection::{Protection, protects};
use crate::shards::Shard;

/// What an endpoint may have only so much of.
#[derive(Clone, Copy)]
pub(crate) enum Quota {
    Contexts,
    Qps,
    Cqs,
    Mrs,
    Pds,
    Srqs,
    Ahs,
    Channels,
    /// Bytes of shared memory.
    Memory,
    /// Pieces of it that the program asked for by itself: each takes a descriptor and a mapping of
    /// the router, of which there are only so many for all endpoints, however few bytes it has.
    /// With them count pieces of any kind that the router has forgotten and somebody has.
    Memories,
}

impl Quota {
    /// Why something is refused when it is used up.
    fn reason(self) -> Reason {
        match self {
            Self::Contexts => Reason::QuotaContexts,
            Self::Memory | Self::Memories => Reason::QuotaMemory,
            _ => Reason::QuotaObjects,
        }
    }
}

/// The agent does not name a limit of these.
const MEMORIES: u32 = 1024;
/// Tokens of which time may be taken at once. Bytes: of more than the shortest sleep.
const REQUESTS_AT_ONCE: Duration = Duration::from_millis(100);
const BYTES_AT_ONCE: Duration = Duration::from_millis(10);

/// A container's place in the network.
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub(crate) struct Endpoint {
    /// The agent's number.
    pub(crate) number: u64,
    pub(crate) gids: [Gid; 2],
    pub(crate) listener: OwnedFd,
    /// For how long its programs, and whoever serves it, look for work before they sleep.
    pub(crate) spin_us: u32,
    /// Send requests.
    requests: Bucket,
    /// Bytes that are copied out of the memory of its programs, and into it, on this node.
    pub(crate) egress: Bucket,
    pub(crate) ingress: Bucket,
    /// What its queue pairs may still cost in the round with this number.
    pub(crate) budget: i64,
    pub(crate) round: u64,
    limits: [u64; QUOTAS],
    used: [u64; QUOTAS],
    pub(crate) account: Account,
    /// The thread that serves it and nothing else, if it has one.
    pub(crate) shard: Option<Shard>,
    /// A thread is in the middle of an atomic on its memory.
    pub(crate) in_atomic: bool,
    pub(crate) cm: cm::Usage,
    /// Of its queue pairs in groups.
    pub(crate) memberships: u32,
    /// The agent is to hear of its groups; when it was told of them last.
    pub(crate) groups_due: bool,
    pub(crate) groups_told: Option<Instant>,
    /// Copies of datagrams for a group that came from another node.
    pub(crate) copies: Bucket,
    /// Pairs that go by the card, or may.
    pub(crate) card_pairs: u64,
    /// Regions that the card gets to know.
    pub(crate) registers: Bucket,
    /// It may have peers without Heddle; how often the agent is asked for them.
    pub(crate) outside: bool,
    pub(crate) asks: Bucket,
    /// The agent has named it since it came.
    pub(crate) named: bool,
}

impl Endpoint {
    pub(crate) fn new(number: u64, gids: [Gid; 2], listener: OwnedFd) -> Self {
        Self {
            number,
            gids,
            listener,
            spin_us: 0,
            requests: Bucket::new(),
            egress: Bucket::new(),
            ingress: Bucket::new(),
            budget: 0,
            round: 0,
            limits: [0; QUOTAS],
            used: [0; QUOTAS],
            account: Account::default(),
            shard: None,
            in_atomic: false,
            cm: cm::Usage::default(),
            memberships: 0,
            groups_due: false,
            groups_told: None,
            copies: Bucket::new(),
            card_pairs: 0,
            registers: Bucket::new(),
            outside: false,
            asks: Bucket::new(),
            named: true,
        }
    }

    pub(crate) fn limit(&mut self, l: &agent::Limits) {
        let given = [
            (l.contexts, 64),
            (l.qps, 1024),
            (l.cqs, 2048),
            (l.mrs, 16384),
            (l.pds, 256),
            (l.srqs, 256),
            (l.ahs, 4096),
            (l.channels, 256),
            (l.memory_mib, 1024),
            (MEMORIES, MEMORIES),
        ];
        for (limit, (given, default)) in self.limits.iter_mut().zip(given) {
            *limit = u64::from(if given == 0 { default } else { given });
        }
        self.limits[Quota::Memory as usize] <<= 20;
        self.spin_us = l.spin_us;
        self.outside = l.outside != 0;
        let now = Instant::now();
        self.requests.limit(l.sends_per_second.into(), REQUESTS_AT_ONCE, now);
        self.egress.limit(u64::from(l.egress_kbit) * 125, BYTES_AT_ONCE, now);
        self.registers.limit(REGISTERED_A_SECOND, Duration::from_secs(1), now);
        self.ingress.limit(u64::from(l.ingress_kbit) * 125, BYTES_AT_ONCE, now);
        self.copies.limit(COPIES_A_SECOND, BYTES_AT_ONCE, now);
        self.asks.limit(ASKS_A_SECOND, Duration::from_secs(1), now);
    }

    /// Whether there is a cap on its bytes.
    pub(crate) fn is_capped(&self) -> bool {
        self.egress.is_limited() || self.ingress.is_limited()
    }

    /// When a send request may be taken, if not now.
    pub(crate) fn wait_to_send(&mut self) -> Option<Instant> {
        if !self.requests.is_limited() {
            return None;
        }
        let until = self.requests.until(Instant::now());
        if until.is_some() && self.requests.begins_to_wait() {
            self.account.note(Reason::RateRequests);
        }
        until
    }

    /// A send request was taken.
    pub(crate) fn count_send(&mut self) {
        self.requests.take(1);
    }

    pub(crate) fn limit_of(&self, quota: Quota) -> u32 {
        u32::try_from(self.limits[quota as usize]).unwrap_or(u32::MAX)
    }

    /// Whether there is that much left; then it is used. `free` is what there is for all: nobody
    /// gets more than he leaves, so that there is something for whoever comes next (dynamic
    /// thresholds: Choudhury and Hahne, 1998).
    pub(crate) fn charge(&mut self, quota: Quota, amount: u64, free: u64) -> bool {
        let used = self.used[quota as usize] + amount;
        let fair = if protects(Protection::Shares) { used } else { amount };
        if fair > free && used <= self.limits[quota as usize] {
            self.account.note(Reason::RouterFull);
            return false;
        }
        let memories = Quota::Memories as usize;
        let keeps_many =
            matches!(quota, Quota::Memory) && self.used[memories] > self.limits[memories];
        if (used > self.limits[quota as usize] || keeps_many) && protects(Protection::Quotas) {
            self.account.note(quota.reason());
            return false;
        }
        self.used[quota as usize] = used;
        true
    }

    /// It has one more of something, whether it may or not.
    pub(crate) fn hold(&mut self, quota: Quota) {
        self.used[quota as usize] += 1;
    }

    pub(crate) fn refund(&mut self, quota: Quota, amount: u64) {
        self.used[quota as usize] -= amount;
    }

    pub(crate) fn used(&self) -> [u64; QUOTAS] {
        self.used
    }

    pub(crate) fn limits(&self) -> [u64; QUOTAS] {
        self.limits
    }

    /// An entry of the table of GIDs.
    pub(crate) fn gid(&self, index: u8) -> Gid {
        self.gids[usize::from(index) & 1]
    }

    /// The GUID of its device, in network byte order: one of a locally administered kind, out of
    /// the address.
    pub(crate) fn guid(&self) -> u64 {
        let mut guid = [0x02, 0x48, 0x44, 0xff, 0xfe, 0, 0, 0];
        guid[5..].copy_from_slice(&self.gids[0][13..]);
        u64::from_ne_bytes(guid)
    }

    /// The endpoint's own GID of the family of another one.
    pub(crate) fn gid_like(&self, other: &Gid) -> Gid {
        self.gids[usize::from(!is_ipv4(other))]
    }

    pub(crate) fn has(&self, gid: &Gid) -> bool {
        *gid != [0; 16] && self.gids.contains(gid)
    }
}

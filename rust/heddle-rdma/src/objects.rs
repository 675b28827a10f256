//! What the router keeps: endpoints, what their containers have made, and how it ends.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shared_ring::{SharedMemory, Sleeper};
use verbs_protocol::abi::{self, verbs_async_event, verbs_completion, verbs_qp_attr};
use verbs_protocol::agent::Message;
use verbs_protocol::slots::{Receive, Send};
use verbs_protocol::statistics::{self, QUOTAS, Reason};
use verbs_protocol::{Gid, agent, ibv, plain};
use verbs_qp::{Service, State};

use crate::accounts::{Account, QpAccount};
use crate::baton::{Shared, Worker};
use crate::bucket::Bucket;
use crate::card::Card;
use crate::card_home::Home;
use crate::cm;
use crate::cm_events::EventChannel;
use crate::connect::Asked;
use crate::elsewhere::{COPIES_A_SECOND, Elsewhere, Held};
use crate::ibverbs::Domain;
use crate::kept::Kept;
use crate::link::{Link, Timer};
use crate::memory::{Copier, Piece, Process, Regions};
use crate::multicast::{Groups, is_ipv4};
use crate::placing::REGISTERED_A_SECOND;
use crate::protection::{Protection, protects};
use crate::queues::{CompletionRing, ReceiveRing, SendRing, wake_polls};
use crate::shards::{Nudge, Shard};
use crate::sys::{self, Epoll};
use crate::table::Table;

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
pub(crate) struct Endpoint {
    /// The agent's number.
    pub(crate) number: u64,
    pub(crate) gids: [Gid; 2],
    pub(crate) listener: OwnedFd,
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
        let now = Instant::now();
        self.requests.limit(l.sends_per_second.into(), REQUESTS_AT_ONCE, now);
        self.egress.limit(u64::from(l.egress_kbit) * 125, BYTES_AT_ONCE, now);
        self.registers.limit(REGISTERED_A_SECOND, Duration::from_secs(1), now);
        self.ingress.limit(u64::from(l.ingress_kbit) * 125, BYTES_AT_ONCE, now);
        self.copies.limit(COPIES_A_SECOND, BYTES_AT_ONCE, now);
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

/// A socket on which the router only sends: 16 bytes for an event.
pub(crate) struct EventSocket {
    pub(crate) socket: OwnedFd,
    /// Events for which it had no room.
    pub(crate) held: VecDeque<[u8; 16]>,
}

impl EventSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, held: VecDeque::new() }
    }

    /// Sends an event, or holds it; true if the caller has to wait for room.
    fn send(&mut self, event: [u8; 16]) -> bool {
        if !self.held.is_empty() {
            self.held.push_back(event);
            return false;
        }
        match sys::send(&self.socket, &event, &[]) {
            Err(err) if sys::would_block(&err) => {
                self.held.push_back(event);
                true
            }
            // A program that has closed its end wants no events.
            _ => false,
        }
    }

    /// Sends what was held; true if nothing is held any more.
    pub(crate) fn drain(&mut self) -> bool {
        while let Some(event) = self.held.front() {
            match sys::send(&self.socket, event, &[]) {
                Err(err) if sys::would_block(&err) => return false,
                _ => self.held.pop_front(),
            };
        }
        true
    }
}

/// A reply that the control socket had no room for.
pub(crate) type Unsent = (Vec<u8>, Vec<OwnedFd>);

/// An open device of a program.
#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub(crate) struct Context {
    pub(crate) endpoint: u32,
    pub(crate) socket: OwnedFd,
    pub(crate) process: Arc<Process>,
    /// The doorbell, once the library has said hello.
    pub(crate) doorbell: Option<Sleeper>,
    pub(crate) memory: Option<Arc<SharedMemory>>,
    /// The process has shown that the memory that it is taken for is its own.
    pub(crate) shown: bool,
    pub(crate) events: Option<EventSocket>,
    pub(crate) qps: Vec<u32>,
    /// It is no device, but an event channel of RDMA-CM.
    pub(crate) cm: Option<EventChannel>,
    pub(crate) unsent: Option<Unsent>,
    /// Its rings are looked at in each turn, and it need not ring.
    pub(crate) awake: bool,
    /// Its rings are looked at once more before it sleeps.
    pub(crate) dozes: bool,
    /// The queue pair that is first in the next round.
    pub(crate) first: usize,
    /// Something of it waits for others.
    pub(crate) waits: bool,
}

impl Context {
    pub(crate) fn new(endpoint: u32, socket: OwnedFd, process: Arc<Process>) -> Self {
        Self {
            endpoint,
            socket,
            process,
            doorbell: None,
            memory: None,
            shown: false,
            events: None,
            qps: Vec::new(),
            cm: None,
            unsent: None,
            awake: false,
            dozes: false,
            waits: false,
            first: 0,
        }
    }
}

pub(crate) struct Pd {
    pub(crate) context: u32,
    pub(crate) users: u32,
    /// That of the card, once a pair of it goes by that.
    pub(crate) card: Option<Arc<Domain>>,
}

pub(crate) struct Channel {
    pub(crate) context: u32,
    pub(crate) users: u32,
    pub(crate) events: EventSocket,
}

pub(crate) struct Cq {
    pub(crate) context: u32,
    pub(crate) users: u32,
    pub(crate) user: u64,
    pub(crate) channel: u32,
    pub(crate) ring: CompletionRing,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) dead: bool,
    pub(crate) touched: bool,
}

pub(crate) struct Srq {
    pub(crate) context: u32,
    pub(crate) users: u32,
    pub(crate) user: u64,
    pub(crate) pd: u32,
    pub(crate) ring: ReceiveRing,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) limit: u32,
}

pub(crate) struct Ah {
    pub(crate) context: u32,
    pub(crate) pd: u32,
    pub(crate) gid: Gid,
    pub(crate) hop_limit: u8,
    pub(crate) sgid_index: u8,
}

pub(crate) struct Memory {
    pub(crate) context: u32,
    pub(crate) users: u32,
    pub(crate) shared: Arc<SharedMemory>,
}

/// What a queue pair was granted.
#[derive(Clone, Copy)]
pub(crate) struct Capabilities {
    pub(crate) send_sge: u32,
    pub(crate) recv_sge: u32,
    pub(crate) inline: u32,
}

/// A request under way, and how far it is.
pub(crate) struct Current {
    pub(crate) send: Send,
    pub(crate) done: u64,
}

#[expect(clippy::struct_excessive_bools, reason = "facts that do not depend on each other")]
pub(crate) struct Qp {
    pub(crate) context: u32,
    pub(crate) endpoint: u32,
    pub(crate) user: u64,
    pub(crate) pd: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srq: u32,
    pub(crate) service: Service,
    pub(crate) signal_all: bool,
    pub(crate) capabilities: Capabilities,
    pub(crate) state: State,
    pub(crate) attr: verbs_qp_attr,
    pub(crate) send: SendRing,
    /// None with a shared receive queue.
    pub(crate) receive: Option<ReceiveRing>,
    /// What has the rings.
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) current: Option<Current>,
    /// The receive request into which a message of the peer is being copied.
    pub(crate) inbound: Option<Receive>,
    /// Since when the current request waits for the peer, or for a receive request of it (true).
    pub(crate) waits_since: Option<(Instant, bool)>,
    pub(crate) heard: bool,
    /// The connection with the peer, 0 if there is none.
    pub(crate) link: u32,
    /// A timer asks for the connection again.
    pub(crate) seeks: bool,
    /// When the agent was asked for one, if it has not answered.
    pub(crate) asked: Option<Instant>,
    /// There was one, and it has ended.
    pub(crate) closed: bool,
    /// Its endpoint has sent as much as it may: until then.
    pub(crate) throttled: Option<Instant>,
    /// Requests that were sent when the connection ended, to be flushed.
    pub(crate) unlinked: VecDeque<u64>,
    pub(crate) account: QpAccount,
    /// What its last turn cost more than it had, to be taken from the next one.
    pub(crate) debt: i64,
    /// A thread has its turn under way.
    pub(crate) in_turn: bool,
    /// Another one was due meanwhile.
    pub(crate) is_due: bool,
    /// `IBV_EVENT_QP_LAST_WQE_REACHED` is to come.
    pub(crate) tells_last: bool,
    /// `IBV_EVENT_SQ_DRAINED` is to come.
    pub(crate) tells_drained: bool,
    /// Receive requests of it that threads have under way.
    pub(crate) taken: u32,
}

/// All that there is.
pub(crate) struct Objects {
    pub(crate) shared: &'static Shared,
    /// The thread that has this now.
    pub(crate) worker: Arc<Worker>,
    /// It stands in the place of the real one.
    is_hollow: bool,
    /// Of the worker that serves all endpoints without a shard.
    pub(crate) epoll: Arc<Epoll>,
    pub(crate) nudge: Nudge,
    /// Endpoints with a shard.
    pub(crate) shards: u32,
    pub(crate) agent_listener: Option<OwnedFd>,
    pub(crate) agent: Option<OwnedFd>,
    /// It has another router take the place of this one: endpoints without contexts are given back.
    pub(crate) drains: bool,
    /// Listening sockets of those, by the agent's numbers, that go with RELEASED.
    pub(crate) given_back: Vec<(u64, OwnedFd)>,
    /// Since when its socket has had no room.
    pub(crate) agent_full_since: Option<Instant>,
    /// Bytes of shared memory that all endpoints may have together, and have.
    pub(crate) pool: u64,
    pub(crate) pooled: u64,
    pub(crate) kept: Option<Kept>,
    /// Given up for a moment when there are no more descriptors, to refuse a connection.
    pub(crate) spare: Option<OwnedFd>,
    pub(crate) endpoints: Table<Endpoint>,
    pub(crate) contexts: Table<Context>,
    pub(crate) pds: Table<Pd>,
    pub(crate) channels: Table<Channel>,
    pub(crate) cqs: Table<Cq>,
    pub(crate) qps: Table<Qp>,
    pub(crate) srqs: Table<Srq>,
    pub(crate) ahs: Table<Ah>,
    pub(crate) memories: Table<Memory>,
    pub(crate) regions: Regions,
    pub(crate) copier: Option<Copier>,
    /// Room for the pieces of one copy.
    pub(crate) from: Vec<Piece>,
    pub(crate) to: Vec<Piece>,
    touched: Vec<u32>,
    broken: Vec<u32>,
    pub(crate) cm: cm::Ids,
    pub(crate) groups: Groups,
    /// Members of groups at other routers, and what waits for connections to them.
    pub(crate) elsewhere: Elsewhere,
    pub(crate) held: Vec<Held>,
    pub(crate) links: Table<Link>,
    /// The node is to have a card; the card, as long as it is there.
    pub(crate) card_wanted: bool,
    pub(crate) card: Option<Card>,
    /// The card at the other end of a connection that the agent is about to tell of.
    pub(crate) home: Option<(u64, Home)>,
    /// Of an endpoint to a GID. There are few of an endpoint: one for each peer.
    pub(crate) datagram_links: Vec<(u32, Gid, u32)>,
    pub(crate) datagrams_asked: Vec<Asked>,
    pub(crate) last_tag: u32,
    pub(crate) datagrams_refused: Vec<(u32, Gid, Instant)>,
    pub(crate) timers: BinaryHeap<Reverse<(Instant, Timer)>>,
    /// Messages for the agent.
    pub(crate) asks: Vec<Message>,
}

/// What a descriptor in the set is, in the upper half of its number; the lower half is a handle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    AgentListener = 1,
    Agent,
    Listener,
    Control,
    Doorbell,
    Events,
    Channel,
    Link,
    Nudge,
    Card,
    CardEvents,
    Kept,
}

impl Source {
    pub(crate) fn id(self, handle: u32) -> u64 {
        (self as u64) << 32 | u64::from(handle)
    }

    pub(crate) fn of(id: u64) -> (u64, u32) {
        (id >> 32, u32::try_from(id & u64::from(u32::MAX)).unwrap_or(0))
    }
}

impl Objects {
    pub(crate) fn new(shared: &'static Shared, epoll: Arc<Epoll>, nudge: Nudge) -> Self {
        // Numbers of queue pairs have 24 bits.
        let qps = Table::new(16, 24);
        Self {
            shared,
            worker: Arc::default(),
            is_hollow: false,
            epoll,
            nudge,
            shards: 0,
            agent_listener: None,
            agent: None,
            drains: false,
            given_back: Vec::new(),
            agent_full_since: None,
            pool: u64::MAX,
            pooled: 0,
            kept: None,
            spare: None,
            endpoints: Table::new(14, 32),
            contexts: Table::new(16, 32),
            pds: Table::new(18, 32),
            channels: Table::new(18, 32),
            cqs: Table::new(18, 32),
            qps,
            srqs: Table::new(18, 32),
            ahs: Table::new(20, 32),
            memories: Table::new(18, 32),
            regions: Table::new(18, 32),
            copier: None,
            from: Vec::with_capacity(64),
            to: Vec::with_capacity(64),
            touched: Vec::with_capacity(64),
            broken: Vec::new(),
            cm: cm::Ids::new(),
            groups: Groups::new(),
            elsewhere: Elsewhere::default(),
            held: Vec::new(),
            links: Table::new(18, 32),
            card_wanted: false,
            card: None,
            home: None,
            datagram_links: Vec::new(),
            datagrams_asked: Vec::new(),
            last_tag: 0,
            datagrams_refused: Vec::new(),
            timers: BinaryHeap::new(),
            asks: Vec::new(),
        }
    }

    /// What another thread keeps in the place of it.
    pub(crate) fn hollow(&self) -> Box<Self> {
        let mut hollow = Self::new(self.shared, Arc::clone(&self.epoll), self.nudge.clone());
        hollow.is_hollow = true;
        Box::new(hollow)
    }

    pub(crate) fn is_real(&self) -> bool {
        !self.is_hollow
    }

    pub(crate) fn endpoint_of(&mut self, context: u32) -> Option<&mut Endpoint> {
        let endpoint = self.contexts.get(context)?.endpoint;
        self.endpoints.get_mut(endpoint)
    }

    /// How much of something there is left for all.
    pub(crate) fn free(&self, quota: Quota) -> u64 {
        match quota {
            Quota::Contexts => self.contexts.free(),
            Quota::Qps => self.qps.free(),
            Quota::Cqs => self.cqs.free(),
            Quota::Mrs => self.regions.free(),
            Quota::Pds => self.pds.free(),
            Quota::Srqs => self.srqs.free(),
            Quota::Ahs => self.ahs.free(),
            Quota::Channels => self.channels.free(),
            Quota::Memories => self.memories.free(),
            Quota::Memory => self.pool.saturating_sub(self.pooled),
        }
    }

    pub(crate) fn refund(&mut self, context: u32, quota: Quota, amount: u64) {
        if matches!(quota, Quota::Memory) {
            self.pooled -= amount;
        }
        if let Some(endpoint) = self.endpoint_of(context) {
            endpoint.refund(quota, amount);
        }
    }

    /// Shows a completion to the program. A queue without room is dead from then on.
    pub(crate) fn complete(&mut self, cq: u32, completion: &verbs_completion, solicited: bool) {
        self.account_error(completion.qp_num, completion.status);
        let Some(queue) = self.cqs.get_mut(cq) else { return };
        if queue.dead {
            return;
        }
        if !queue.ring.push(completion, solicited || completion.status != ibv::WC_SUCCESS) {
            queue.dead = true;
            self.broken.push(cq);
        }
        if !queue.touched {
            queue.touched = true;
            self.touched.push(cq);
        }
    }

    /// Sends the events that completions of this turn call for, and ends what uses a dead queue.
    pub(crate) fn notify(&mut self) {
        while let Some(cq) = self.touched.pop() {
            let Some(queue) = self.cqs.get_mut(cq) else { continue };
            queue.touched = false;
            if let Some(memory) = self.contexts.get(queue.context).and_then(|c| c.memory.as_ref()) {
                wake_polls(memory);
            }
            if !queue.ring.take_wish() {
                continue;
            }
            let event = abi::verbs_completion_event { user: queue.user, cq, reserved: 0 };
            let channel = queue.channel;
            let Some(channel_object) = self.channels.get_mut(channel) else { continue };
            let event = packet(&event);
            if channel_object.events.held.contains(&event) {
                continue;
            }
            if channel_object.events.send(event)
                && let Some(object) = self.channels.get(channel)
            {
                let id = Source::Channel.id(channel);
                let fd = object.events.socket.as_fd();
                // Without it the event comes with the next one.
                let _ = self.epoll_of_context(object.context).add(fd, sys::WRITABLE, id);
            }
        }
        while let Some(cq) = self.broken.pop() {
            let Some(queue) = self.cqs.get(cq) else { continue };
            let (context, user) = (queue.context, queue.user);
            self.tell(context, ibv::EVENT_CQ_ERR, cq, user);
            if let Some(endpoint) = self.contexts.get(context).map(|c| c.endpoint) {
                self.note(endpoint, Reason::CqOverrun);
            }
            let users = self.qps.iter().filter(|(_, q)| q.send_cq == cq || q.recv_cq == cq);
            for number in users.map(|(number, _)| number).collect::<Vec<_>>() {
                self.fail_fatally(number);
            }
        }
    }

    /// Sends an asynchronous event.
    pub(crate) fn tell(&mut self, context: u32, event: u32, object: u32, user: u64) {
        const HELD_MAX: usize = 64;
        let Some(c) = self.contexts.get_mut(context) else { return };
        let Some(events) = c.events.as_mut().filter(|e| e.held.len() < HELD_MAX) else { return };
        if events.send(packet(&verbs_async_event { user, event, object }))
            && let Some(c) = self.contexts.get(context)
            && let Some(events) = &c.events
        {
            let id = Source::Events.id(context);
            let _ = self.epoll_of(c.endpoint).add(events.socket.as_fd(), sys::WRITABLE, id);
        }
    }

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
            let _ = self.destroy_qp(handle, number);
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
            regions deregister,
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

fn packet<T: plain::Plain>(event: &T) -> [u8; 16] {
    *plain::bytes(event).first_chunk().expect("events have 16 bytes")
}

//! What the router keeps: endpoints, and what their containers have made.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use shared_ring::{SharedMemory, Sleeper};
use verbs_protocol::Gid;
use verbs_protocol::abi::verbs_qp_attr;
use verbs_protocol::agent::Message;
use verbs_protocol::slots::{Receive, Send};
use verbs_qp::{Service, State};

use crate::accounts::QpAccount;
use crate::baton::{Shared, Worker};
use crate::card::Card;
use crate::card_drops::Drops;
use crate::card_home::Home;
use crate::cm;
use crate::cm_events::EventChannel;
use crate::connect::Asked;
use crate::copying::Copier;
use crate::elsewhere::{Elsewhere, Held};
use crate::endpoint::{Endpoint, Quota};
use crate::events::EventSocket;
use crate::ibverbs::Domain;
use crate::kept::Kept;
use crate::link::{Link, Timer};
use crate::memory::Regions;
use crate::multicast::Groups;
use crate::native::Native;
use crate::outside::Outside;
use crate::pieces::Piece;
use crate::process::Process;
use crate::queues::{CompletionRing, ReceiveRing, SendRing};
use crate::shards::Nudge;
use crate::sys::Epoll;
use crate::table::Table;
use crate::together::{Batch, Done};
use crate::under_way::UnderWay;

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
    /// With a shared receive queue: what that was granted.
    pub(crate) recv_sge: u32,
    pub(crate) inline: u32,
}

/// A request under way, and how far it is.
pub(crate) struct Current {
    pub(crate) send: Send,
    pub(crate) done: u64,
    /// Requests behind it that were copied together with it.
    pub(crate) more: Vec<Done>,
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
    /// Another one after each RESET: what a thread began before is not its own any more.
    pub(crate) epoch: u64,
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
    /// What it has at the card, if it may have a peer without Heddle.
    pub(crate) native: Option<Box<Native>>,
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
    pub(crate) under_way: UnderWay,
    /// Given up for a moment when there are no more descriptors, to refuse a connection.
    pub(crate) spare: Option<OwnedFd>,
    /// By which programs make userfaultfds of their own memory; None: this kernel has none.
    pub(crate) userfaultfd: Option<OwnedFd>,
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
    pub(crate) batch: Option<Box<Batch>>,
    pub(crate) touched: Vec<u32>,
    pub(crate) broken: Vec<u32>,
    pub(crate) cm: cm::Ids,
    pub(crate) groups: Groups,
    /// Members of groups at other routers, and what waits for connections to them.
    pub(crate) elsewhere: Elsewhere,
    pub(crate) held: Vec<Held>,
    pub(crate) links: Table<Link>,
    /// The node is to have a card; the card, as long as it is there.
    pub(crate) card_wanted: bool,
    pub(crate) card: Option<Card>,
    pub(crate) card_drops: Option<Drops>,
    /// The card at the other end of a connection that the agent is about to tell of.
    pub(crate) home: Option<(u64, Home)>,
    pub(crate) outside: Outside,
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
    CardDrops,
    Kept,
    Outside,
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
            under_way: UnderWay::default(),
            userfaultfd: None,
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
            batch: None,
            touched: Vec::with_capacity(64),
            broken: Vec::new(),
            cm: cm::Ids::new(),
            groups: Groups::new(),
            elsewhere: Elsewhere::default(),
            held: Vec::new(),
            links: Table::new(18, 32),
            card_wanted: false,
            card: None,
            card_drops: None,
            home: None,
            outside: Outside::default(),
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
}

//! The host: one thread, one epoll. It serves the agent, and gives tenants turns by deficit round
//! robin. The thread owns all state.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use core::cmp::Reverse;
use shared_ring::protection::protects;
use smoltcp::time::Instant;

use crate::abi::*;
use crate::outbox::Outbox;
use crate::proto::{self, Errno, Request, named};
use crate::sys::{self, Epoll};
use crate::tenant::{Context, Tenant};

const LISTENER: u64 = u64::MAX;
const AGENT: u64 = u64::MAX - 1;
/// What a tenant of weight 1 may use in a round, in bytes.
const QUANTUM: isize = 1 << 20;
/// Messages of the agent's that are served before tenants have their turns.
const MESSAGES: usize = 256;
/// Answers that wait before the agent is read no more.
const ANSWERS: usize = 4096;

/// The module host.
pub struct Host {
    epoll: Epoll,
    listener: Option<OwnedFd>,
    agent: Option<OwnedFd>,
    greeted: bool,
    watched: u32,
    outbox: Outbox,
    tenants: Vec<Option<Box<Tenant>>>,
    by_id: HashMap<u64, usize>,
    /// Tenants that have something to do.
    active: VecDeque<usize>,
    timers: BinaryHeap<Reverse<(Instant, usize)>>,
    events: Vec<(u64, u32)>,
    /// The thread's processor time when a tenant was charged last.
    charged: u64,
    /// That of tenants that are gone.
    gone: stack_stats,
    /// How far the host's clock is ahead of the machine's, in tests.
    ahead: smoltcp::time::Duration,
}

impl Host {
    /// A host without an agent.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: Epoll::new()?,
            listener: None,
            agent: None,
            greeted: false,
            watched: sys::READABLE,
            outbox: Outbox::default(),
            tenants: Vec::new(),
            by_id: HashMap::new(),
            active: VecDeque::new(),
            timers: BinaryHeap::new(),
            events: Vec::new(),
            charged: sys::thread_time(),
            gone: stack_stats::default(),
            ahead: smoltcp::time::Duration::ZERO,
        })
    }

    /// Moves the host's clock on, for tests.
    pub fn skip(&mut self, time: Duration) {
        self.ahead += time.into();
    }

    fn now(&self) -> Instant {
        let micros = i64::try_from(sys::monotonic() / 1000).unwrap_or(i64::MAX);
        Instant::from_micros(micros) + self.ahead
    }

    /// Has agents connect at a path.
    ///
    /// # Errors
    ///
    /// The kernel's: the path is in use, say.
    pub fn listen(&mut self, path: &Path) -> io::Result<()> {
        let listener = sys::listen_packets(path)?;
        self.epoll.add(listener.as_fd(), sys::READABLE, LISTENER)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Takes an agent's connection in place of the one before.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn connect(&mut self, agent: OwnedFd) -> io::Result<()> {
        self.part();
        self.epoll.add(agent.as_fd(), sys::READABLE, AGENT)?;
        self.agent = Some(agent);
        self.outbox.reset(true);
        Ok(())
    }

    /// Ends the agent's connection; everything else goes on.
    fn part(&mut self) {
        if let Some(agent) = self.agent.take() {
            self.epoll.remove(agent.as_fd());
        }
        self.greeted = false;
        self.watched = sys::READABLE;
        self.outbox.reset(false);
    }

    /// Whether an agent is connected.
    #[must_use]
    pub fn has_agent(&self) -> bool {
        self.agent.is_some()
    }

    /// Waits for something to do, so long at most, and does it.
    ///
    /// # Errors
    ///
    /// The kernel's, of epoll.
    pub fn step(&mut self, most: Option<Duration>) -> io::Result<()> {
        let timeout =
            if self.active.is_empty() { self.timeout(most) } else { Some(Duration::ZERO) };
        let mut events = core::mem::take(&mut self.events);
        self.epoll.wait(&mut events, timeout)?;
        let mut heard = false;
        for (token, what) in events.drain(..) {
            match token {
                LISTENER => self.accept(),
                AGENT => heard = true,
                _ => self.tenant_event(token, what),
            }
        }
        self.events = events;
        let now = self.now();
        if heard {
            self.hear(now);
        }
        self.expire(now);
        self.round(now);
        self.flush();
        Ok(())
    }

    fn timeout(&self, most: Option<Duration>) -> Option<Duration> {
        let Some(Reverse((at, _))) = self.timers.peek() else { return most };
        let now = self.now();
        let left = if *at > now { Duration::from(*at - now) } else { Duration::ZERO };
        Some(most.map_or(left, |m| m.min(left)))
    }

    fn tenant_event(&mut self, token: u64, what: u32) {
        let slot = usize::try_from(token >> 32).unwrap_or(usize::MAX);
        let Some(Some(tenant)) = self.tenants.get_mut(slot) else { return };
        match usize::try_from(token & u64::from(u32::MAX)) {
            Ok(0) => {
                if what & sys::WRITABLE != 0 {
                    tenant.device_writable();
                }
                if what & !sys::WRITABLE != 0 {
                    tenant.device_readable();
                }
            }
            Ok(n) => tenant.pair_event(n - 1, what),
            Err(_) => {}
        }
        self.activate(slot);
    }

    fn activate(&mut self, slot: usize) {
        if let Some(Some(tenant)) = self.tenants.get_mut(slot)
            && !tenant.active
        {
            tenant.active = true;
            self.active.push_back(slot);
        }
    }

    fn expire(&mut self, now: Instant) {
        while let Some(Reverse((at, slot))) = self.timers.peek().copied()
            && at <= now
        {
            self.timers.pop();
            if let Some(Some(tenant)) = self.tenants.get_mut(slot)
                && tenant.timer == Some(at)
            {
                tenant.timer = None;
                self.activate(slot);
            }
        }
    }

    /// A turn for each tenant that has something to do.
    fn round(&mut self, now: Instant) {
        for _ in 0..self.active.len() {
            let Some(slot) = self.active.pop_front() else { break };
            let Some(tenant) = self.tenants.get_mut(slot).and_then(Option::as_mut) else {
                continue;
            };
            let mut more = false;
            if tenant.may_run(now) {
                tenant.credit = if protects("share") {
                    tenant.credit + QUANTUM * tenant.weight()
                } else {
                    isize::MAX
                };
                let mut context = Context { epoll: &self.epoll, outbox: &mut self.outbox, now };
                more = tenant.turn(&mut context);
                let used = sys::thread_time();
                tenant.used(used - core::mem::replace(&mut self.charged, used));
            }
            if more {
                self.active.push_back(slot);
            } else {
                tenant.active = false;
                tenant.credit = tenant.credit.min(0);
            }
            if let Some(at) = tenant.next()
                && tenant.timer.is_none_or(|due| at < due)
            {
                tenant.timer = Some(at);
                self.timers.push(Reverse((at, slot)));
            }
        }
    }

    // The agent.

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let Ok(agent) = sys::accept(listener) else { return };
        if let Err(err) = self.connect(agent) {
            eprintln!("heddle-stack: take the agent's connection: {err}");
        }
    }

    fn flush(&mut self) {
        let Some(agent) = &self.agent else { return };
        if self.outbox.flush(agent).is_err() {
            return self.part();
        }
        let reads = if self.outbox.len() < ANSWERS { sys::READABLE } else { 0 };
        let writes = if self.outbox.len() > 0 { sys::WRITABLE } else { 0 };
        if self.watched != reads | writes {
            self.watched = reads | writes;
            // It is in the set since it connected.
            let _ = self.epoll.modify(agent.as_fd(), self.watched, AGENT);
        }
    }

    /// Serves what the agent has asked for.
    fn hear(&mut self, now: Instant) {
        let mut bytes = [0; proto::MESSAGE_MAX];
        for _ in 0..MESSAGES {
            let Some(agent) = &self.agent else { return };
            let mut descriptors = Vec::new();
            let length = match sys::receive(agent, &mut bytes, &mut descriptors) {
                Ok(n @ 1..) => n,
                Err(err) if sys::would_block(&err) => return,
                _ => return self.part(),
            };
            let parsed = bytes.get(..length).map(|b| proto::parse(b, descriptors.len()));
            let Some(Ok((head, request))) = parsed else {
                eprintln!("heddle-stack: a malformed message of {length} bytes from the agent");
                return self.part();
            };
            if !self.greeted && !matches!(request, Request::Hello { .. }) {
                return self.say_and_part(&head, libc::EPROTO);
            }
            self.serve(&head, request, descriptors.pop(), now);
        }
    }

    fn say_and_part(&mut self, head: &stack_head, errno: i32) {
        self.outbox.send(proto::plain_answer(head, Err(Errno(errno))), None);
        self.flush();
        self.part();
    }

    fn serve(
        &mut self,
        head: &stack_head,
        request: Request,
        descriptor: Option<OwnedFd>,
        now: Instant,
    ) {
        match request {
            Request::Hello { version } => return self.greet(head, version),
            Request::Begin => return self.begin(),
            Request::TellSent => return self.outbox.tell_sent(),
            Request::End => return self.end(now),
            Request::Tenant(message) => {
                let result = self.tenant(&message, descriptor, now);
                return self.outbox.send(proto::plain_answer(head, result), None);
            }
            Request::TenantGone => {
                let slot = self.by_id.get(&head.tenant).copied();
                let result = slot.map(|s| self.forget(s, now)).ok_or(Errno(libc::ENODEV));
                return self.outbox.send(proto::plain_answer(head, result), None);
            }
            Request::Stats if head.tenant == 0 => {
                let stats = stack_stats { head: proto::answer_to(head), ..self.stats() };
                return self.outbox.send(proto::bytes(&stats), None);
            }
            _ => {}
        }
        let Some(slot) = self.by_id.get(&head.tenant).copied() else {
            // A connect that cannot be brings its pair back; TAKEN has no answer.
            if !matches!(request, Request::Taken) {
                let answer = proto::plain_answer(head, Err(Errno(libc::ENODEV)));
                self.outbox.send(answer, descriptor);
            }
            return;
        };
        if let Some(tenant) = &mut self.tenants[slot] {
            let mut context = Context { epoll: &self.epoll, outbox: &mut self.outbox, now };
            ask(tenant, head, request, descriptor, &mut context);
        }
        self.activate(slot);
    }

    fn greet(&mut self, head: &stack_head, version: u32) {
        if self.greeted {
            return self.say_and_part(head, libc::EPROTO);
        }
        if version != STACK_VERSION {
            return self.say_and_part(head, libc::EPROTONOSUPPORT);
        }
        self.greeted = true;
        let mut name = [0; 32];
        let text = b"smoltcp 0.14.0";
        name[..text.len()].copy_from_slice(text);
        let hello = stack_hello {
            head: proto::answer_to(head),
            version: STACK_VERSION,
            features: STACK_CAN_RENO | STACK_CAN_CUBIC | STACK_CAN_IPV6 | STACK_CAN_TELL_SENT,
            name,
        };
        self.outbox.send(proto::bytes(&hello), None);
    }

    fn begin(&mut self) {
        for tenant in self.tenants.iter_mut().flatten() {
            tenant.named = false;
        }
    }

    fn end(&mut self, now: Instant) {
        for slot in 0..self.tenants.len() {
            if self.tenants[slot].as_ref().is_some_and(|t| !t.named) {
                self.forget(slot, now);
            }
        }
        self.outbox.go_live();
        for tenant in self.tenants.iter_mut().flatten() {
            tenant.announce_all(&mut self.outbox);
        }
    }

    /// TENANT: a new one, or another container in its place, or other limits.
    fn tenant(
        &mut self,
        message: &stack_tenant,
        device: Option<OwnedFd>,
        now: Instant,
    ) -> Result<(), Errno> {
        let known = self.by_id.get(&message.head.tenant).copied();
        if let Some(slot) = known
            && let Some(tenant) = &mut self.tenants[slot]
            && tenant.generation == message.generation
        {
            tenant.named = true;
            if device.is_some() {
                return Err(Errno(libc::EEXIST));
            }
            return tenant.change(message, now);
        }
        if let Some(slot) = known {
            self.forget(slot, now);
        }
        let device = device.ok_or(Errno(libc::ENODEV))?;
        let slot = self.tenants.iter().position(Option::is_none).unwrap_or(self.tenants.len());
        let number = u32::try_from(slot).map_err(|_| Errno(libc::ENOBUFS))?;
        let context = Context { epoll: &self.epoll, outbox: &mut self.outbox, now };
        let tenant = Tenant::new(message, device, number, &context)?;
        if slot == self.tenants.len() {
            self.tenants.push(None);
        }
        eprintln!("heddle-stack: tenant {} is {}", tenant.id, tenant.name());
        self.tenants[slot] = Some(Box::new(tenant));
        self.by_id.insert(message.head.tenant, slot);
        Ok(())
    }

    fn forget(&mut self, slot: usize, now: Instant) {
        let Some(tenant) = self.tenants[slot].take() else { return };
        self.by_id.remove(&tenant.id);
        self.active.retain(|s| *s != slot);
        let stats = tenant.stats();
        let mut context = Context { epoll: &self.epoll, outbox: &mut self.outbox, now };
        tenant.end(&mut context);
        add_counters(&mut self.gone, &stats);
    }

    /// The module's own.
    fn stats(&self) -> stack_stats {
        let mut sum = self.gone;
        for tenant in self.tenants.iter().flatten() {
            let s = tenant.stats();
            add_counters(&mut sum, &s);
            for (to, from) in [
                (&mut sum.memory, s.memory),
                (&mut sum.memory_reserved, s.memory_reserved),
                (&mut sum.tenants, s.tenants),
                (&mut sum.sockets, s.sockets),
                (&mut sum.connections, s.connections),
                (&mut sum.half_open, s.half_open),
                (&mut sum.time_wait, s.time_wait),
                (&mut sum.send_queued, s.send_queued),
                (&mut sum.receive_queued, s.receive_queued),
            ] {
                *to += from;
            }
        }
        sum.processor = sys::process_time();
        sum
    }
}

/// What only grows.
fn add_counters(sum: &mut stack_stats, s: &stack_stats) {
    for (to, from) in [
        (&mut sum.connected, s.connected),
        (&mut sum.accepted, s.accepted),
        (&mut sum.failed, s.failed),
        (&mut sum.reset, s.reset),
        (&mut sum.bytes_sent, s.bytes_sent),
        (&mut sum.bytes_received, s.bytes_received),
        (&mut sum.segments_sent, s.segments_sent),
        (&mut sum.segments_received, s.segments_received),
        (&mut sum.retransmits, s.retransmits),
        (&mut sum.drop_malformed, s.drop_malformed),
        (&mut sum.drop_martian, s.drop_martian),
        (&mut sum.drop_checksum, s.drop_checksum),
        (&mut sum.drop_protocol, s.drop_protocol),
        (&mut sum.drop_backlog, s.drop_backlog),
        (&mut sum.drop_connections, s.drop_connections),
        (&mut sum.drop_memory, s.drop_memory),
        (&mut sum.drop_rate, s.drop_rate),
        (&mut sum.drop_device, s.drop_device),
        (&mut sum.refuse_connections, s.refuse_connections),
        (&mut sum.refuse_memory, s.refuse_memory),
        (&mut sum.refuse_rate, s.refuse_rate),
        (&mut sum.refuse_sockets, s.refuse_sockets),
        (&mut sum.refuse_ports, s.refuse_ports),
    ] {
        *to += from;
    }
}

/// Serves a request about a tenant.
fn ask(
    tenant: &mut Tenant,
    head: &stack_head,
    request: Request,
    descriptor: Option<OwnedFd>,
    context: &mut Context<'_>,
) {
    let name = |result: Result<smoltcp::wire::IpEndpoint, Errno>| match result {
        Ok(local) => {
            proto::bytes(&stack_named { head: proto::answer_to(head), local: named(local) })
        }
        Err(err) => proto::plain_answer(head, Err(err)),
    };
    let answer = match request {
        Request::Bind { address, flags } => name(tenant.bind(head.id, address, flags)),
        Request::Listen { address, flags, backlog, options } => {
            name(tenant.listen(head.id, address, flags, backlog, &options))
        }
        Request::Connect { remote, skip, options } => {
            let Some(pair) = descriptor else { return };
            if !sys::is_unix_stream(pair.as_fd()) {
                let answer = proto::plain_answer(head, Err(Errno(libc::EINVAL)));
                return context.outbox.send(answer, Some(pair));
            }
            let begun = tenant.connect(head, remote, skip, &options, pair, context);
            if let Err((err, pair)) = begun {
                context.outbox.send(proto::plain_answer(head, Err(err)), Some(pair));
            }
            return;
        }
        Request::Taken => return tenant.taken(head.id),
        Request::Set(options) => proto::plain_answer(head, tenant.set(head.id, &options)),
        Request::Info => match tenant.info(head.id) {
            Ok(info) => proto::bytes(&stack_info { head: proto::answer_to(head), ..info }),
            Err(err) => proto::plain_answer(head, Err(err)),
        },
        Request::Close { abort } => proto::plain_answer(head, tenant.close(head.id, abort)),
        Request::Stats => {
            proto::bytes(&stack_stats { head: proto::answer_to(head), ..tenant.stats() })
        }
        Request::List => {
            for info in tenant.list() {
                let id = info.head.id;
                let head = stack_head { type_: STACK_LISTED, id, ..*head };
                context.outbox.send(proto::bytes(&stack_info { head, ..info }), None);
            }
            proto::plain_answer(head, Ok(()))
        }
        // These are about no tenant that is there: the host has served them.
        Request::Hello { .. }
        | Request::Begin
        | Request::End
        | Request::TellSent
        | Request::Tenant(_)
        | Request::TenantGone => return,
    };
    context.outbox.send(answer, None);
}

//! RDMA-CM: ids, and what programs ask for on event channels. `docs/protocols/verbs-control.md`.
//!
//! An id belongs to an event channel, which is a context without queue pairs. What two ids say to
//! each other is `cm_link`'s, what programs hear `cm_events`'.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use verbs_protocol::abi;
use verbs_protocol::cm::{self, Address, Command, EventKind, PS_TCP, PS_UDP, Param, Private};
use verbs_protocol::cm_message::{self, Message, What};
use verbs_protocol::control::{EINVAL, EOPNOTSUPP, Errno};
use verbs_protocol::ibv;
use verbs_protocol::statistics::Reason;

use crate::cm_groups::Joined;
use crate::commands::{Answer, answer};
use crate::endpoint::Endpoint;
use crate::objects::Objects;
use crate::protection::{Protection, protects};
use crate::table::Table;

/// What an endpoint may have.
const IDS: u32 = 4096;
pub(crate) const CHANNELS: u32 = 1024;
pub(crate) const BACKLOG: u32 = 1024;
/// librdmacm keeps the ids of a process in a table of so many.
const NUMBERS: u32 = 1 << 16;
/// Ports that are given to those who want any.
pub(crate) const PORTS: std::ops::Range<u32> = 32768..61000;

/// The `Q_Key` of datagrams if a program names none: `RDMA_UDP_QKEY`.
pub(crate) const QKEY: u32 = 0x0123_4567;
/// The most bytes of private data: what a card's messages have room for.
const PRIVATE_REQUEST: u8 = 56;
pub(crate) const PRIVATE_REPLY: u8 = 196;
pub(crate) const PRIVATE_REJECT: u8 = 148;
const PRIVATE_SERVICE_REQUEST: u8 = 180;
pub(crate) const PRIVATE_SERVICE_REPLY: u8 = 136;

/// For how long a connection may take.
pub(crate) const CONNECT_TIME: Duration = Duration::from_secs(10);
/// For how long the other program may take to answer.
pub(crate) const PROGRAM_TIME: Duration = Duration::from_mins(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// Its program has called `rdma_connect()`, and has no answer.
    Connecting,
    /// It came by a listener, and its program has not accepted it.
    Requested,
    /// The peer has accepted; its program does not know, or has not moved its queue pair yet.
    Answered,
    /// Its program has accepted; the peer is not ready yet.
    Accepted,
    Connected,
    /// Its program wants the end, and the peer does not know yet.
    Disconnecting,
    Ended,
}

/// An id of RDMA-CM.
pub(crate) struct Id {
    /// The event channel.
    pub(crate) context: u32,
    pub(crate) endpoint: u32,
    /// By which its program knows it.
    pub(crate) number: u32,
    /// By which its program wants events; 0: none.
    pub(crate) uid: u64,
    pub(crate) space: u16,
    pub(crate) state: State,
    pub(crate) source: Option<Address>,
    pub(crate) destination: Option<Address>,
    /// It came by a listener.
    pub(crate) is_incoming: bool,
    pub(crate) reuses_port: bool,
    pub(crate) only_family: bool,
    pub(crate) backlog: u32,
    /// The peer's queue pair, and what of it `INIT_QP_ATTR` tells.
    pub(crate) peer: Param,
    /// What its program wants.
    pub(crate) own: Param,
    /// The connection on which it speaks; 0: none.
    pub(crate) link: u32,
    /// Events that were got and are not known to be acknowledged.
    pub(crate) reported: u32,
    pub(crate) groups: Vec<Joined>,
    /// When it is given up, in the states that wait.
    pub(crate) deadline: Option<Instant>,
}

/// All ids.
pub(crate) struct Ids {
    pub(crate) table: Table<Id>,
    /// By endpoint and number.
    numbers: HashMap<(u32, u32), u32>,
}

impl Ids {
    pub(crate) fn new() -> Self {
        // A handle is the tag of a CONNECT, beside a bit.
        Self { table: Table::new(16, 30), numbers: HashMap::new() }
    }
}

/// What an endpoint has of RDMA-CM.
#[derive(Default)]
pub(crate) struct Usage {
    ids: u32,
    pub(crate) channels: u32,
    /// Groups that its ids have joined, and the number of the last one.
    pub(crate) joined: u32,
    pub(crate) last_joined: u32,
    last_number: u32,
    pub(crate) last_port: u32,
    /// CONNECTs that the agent has not answered, by id and since when.
    pub(crate) asked: Vec<(u32, Instant)>,
}

impl Id {
    fn new(context: u32, endpoint: u32, uid: u64, space: u16) -> Self {
        Self {
            context,
            endpoint,
            number: 0,
            uid,
            space,
            state: State::Idle,
            source: None,
            destination: None,
            is_incoming: false,
            reuses_port: false,
            only_family: false,
            backlog: 0,
            peer: Param::default(),
            own: Param::default(),
            link: 0,
            reported: 0,
            groups: Vec::new(),
            deadline: None,
        }
    }

    pub(crate) fn has_datagrams(&self) -> bool {
        self.space == PS_UDP
    }

    fn most_private(&self, connection: u8, datagrams: u8) -> usize {
        usize::from(if self.has_datagrams() { datagrams } else { connection })
    }
}

/// What a card's messages have room for of what a program says.
fn fit(param: &Param, most: usize) -> Result<Param, Errno> {
    if param.private.bytes().len() > most || param.qp >= 1 << 24 {
        return Err(EINVAL);
    }
    Ok(Param {
        srq: u8::from(param.srq != 0),
        flow_control: u8::from(param.flow_control != 0),
        retry_count: param.retry_count.min(7),
        rnr_retry_count: param.rnr_retry_count.min(7),
        ..*param
    })
}

/// What came of a request.
pub(crate) enum Incoming {
    Made,
    /// Its listener has no room now.
    Waits,
    /// With this reason of REJ.
    Refused(u32),
}

impl Objects {
    /// Does what a program wrote to an event channel.
    pub(crate) fn cm_command(
        &mut self,
        context: u32,
        command: &Command,
        response_max: u32,
    ) -> Result<Answer, Errno> {
        let mut source = 0;
        let room = usize::try_from(response_max).unwrap_or(0);
        let bytes = match *command {
            Command::CreateId { uid, space } => {
                enough(room, 4)?;
                self.cm_create(context, uid, space)?.to_ne_bytes().to_vec()
            }
            Command::DestroyId(id) => {
                let id = self.cm_id(context, id)?;
                enough(room, 4)?;
                self.cm_destroy(id).to_ne_bytes().to_vec()
            }
            Command::Join { id, uid, address } => {
                let id = self.cm_id(context, id)?;
                enough(room, 4)?;
                self.cm_join(id, uid, address)?.to_ne_bytes().to_vec()
            }
            Command::Leave(number) => {
                enough(room, 4)?;
                self.cm_leave_group(context, number)?.to_ne_bytes().to_vec()
            }
            Command::MigrateId(id) => {
                enough(room, 4)?;
                let reported;
                (source, reported) = self.cm_migrate(context, id)?;
                reported.to_ne_bytes().to_vec()
            }
            Command::GetEvent => {
                enough(room, cm::EVENT_LEAST)?;
                cut(&self.cm_event(context)?.encode(), room)
            }
            Command::QueryRoute(id) => {
                enough(room, cm::ROUTE_LEAST)?;
                let id = self.cm_id(context, id)?;
                cut(&self.cm_route(id)?.encode(), room)
            }
            Command::InitQpAttr { id, state } => {
                enough(room, cm::QP_ATTR)?;
                let id = self.cm_id(context, id)?;
                self.cm_attributes(id, state)?.encode().to_vec()
            }
            _ => {
                self.cm_change(context, command)?;
                Vec::new()
            }
        };
        let from = if source == 0 { 0 } else { u32::from(self.cm_drained(source)) << 1 };
        let drained = u32::from(self.cm_drained(context)) | from;
        let length = u32::try_from(bytes.len()).unwrap_or(0);
        let head = abi::verbs_rdma_cm_reply { length, drained, ..Default::default() };
        let mut answer = answer(&head);
        answer.bytes.extend_from_slice(&bytes);
        Ok(answer)
    }

    /// Commands without a response.
    fn cm_change(&mut self, context: u32, command: &Command) -> Result<(), Errno> {
        match *command {
            Command::Bind { id, address } => {
                let id = self.cm_id(context, id)?;
                self.cm_bind(id, address)
            }
            Command::Resolve { id, source, destination } => {
                let id = self.cm_id(context, id)?;
                self.cm_resolve(id, source, destination)
            }
            Command::ResolveRoute(id) => {
                let id = self.cm_id(context, id)?;
                self.cm_step(id, State::AddressResolved, State::RouteResolved)?;
                self.cm_tell(id, EventKind::RouteResolved, 0, &Param::default());
                Ok(())
            }
            Command::Connect { id, param } => {
                let id = self.cm_id(context, id)?;
                self.cm_start(id, &param)
            }
            Command::Listen { id, backlog } => {
                let id = self.cm_id(context, id)?;
                self.cm_listen(id, backlog)
            }
            Command::Accept { id, uid, param } => {
                let id = self.cm_id(context, id)?;
                match param {
                    Some(param) => self.cm_accept(id, uid, &param),
                    None => self.cm_ready(id),
                }
            }
            Command::Reject { id, private } => {
                let id = self.cm_id(context, id)?;
                self.cm_reject(id, &private)
            }
            Command::Disconnect(id) => {
                let id = self.cm_id(context, id)?;
                self.cm_disconnect(id)
            }
            Command::SetOption { id, level, name, value } => {
                let id = self.cm_id(context, id)?;
                self.cm_option(id, (level, name), value)
            }
            Command::Notify { id, event } => {
                let id = self.cm_id(context, id)?;
                if event == ibv::EVENT_COMM_EST {
                    self.cm_communicates(id);
                }
                Ok(())
            }
            _ => Err(EOPNOTSUPP),
        }
    }

    fn cm_id(&self, context: u32, number: u32) -> Result<u32, Errno> {
        let endpoint = self.contexts.get(context).map(|c| c.endpoint).ok_or(EINVAL)?;
        let handle = self.cm.numbers.get(&(endpoint, number)).copied().ok_or(libc::ENOENT)?;
        let is_here = self.cm.table.get(handle).is_some_and(|i| i.context == context);
        if is_here { Ok(handle) } else { Err(EINVAL) }
    }

    pub(crate) fn cm_get(&mut self, id: u32) -> Result<&mut Id, Errno> {
        self.cm.table.get_mut(id).ok_or(libc::ENOENT)
    }

    fn cm_step(&mut self, id: u32, from: State, to: State) -> Result<(), Errno> {
        let id = self.cm_get(id)?;
        if id.state != from {
            return Err(EINVAL);
        }
        id.state = to;
        Ok(())
    }

    fn cm_create(&mut self, context: u32, uid: u64, space: u16) -> Result<u32, Errno> {
        if space != PS_TCP && space != PS_UDP {
            return Err(EOPNOTSUPP);
        }
        let endpoint = self.contexts.get(context).map(|c| c.endpoint).ok_or(EINVAL)?;
        let handle = self.cm_add(Id::new(context, endpoint, uid, space)).ok_or(libc::ENOMEM)?;
        Ok(self.cm_get(handle)?.number)
    }

    /// Takes in an id, and gives it a number. None if the endpoint has as many as it may.
    fn cm_add(&mut self, mut id: Id) -> Option<u32> {
        let free = self.cm.table.free();
        let endpoint = self.endpoints.get_mut(id.endpoint)?;
        if endpoint.cm.ids >= IDS {
            endpoint.account.note(Reason::QuotaObjects);
            return None;
        }
        // As of `Endpoint::charge`: nobody gets more than he leaves.
        if protects(Protection::Shares) && u64::from(endpoint.cm.ids) >= free {
            endpoint.account.note(Reason::RouterFull);
            return None;
        }
        loop {
            // Far fewer are in use than there are.
            endpoint.cm.last_number = (endpoint.cm.last_number + 1) % NUMBERS;
            id.number = endpoint.cm.last_number;
            if id.number != 0 && !self.cm.numbers.contains_key(&(id.endpoint, id.number)) {
                break;
            }
        }
        let key = (id.endpoint, id.number);
        let handle = self.cm.table.insert(id, 0)?;
        endpoint.cm.ids += 1;
        self.cm.numbers.insert(key, handle);
        Some(handle)
    }

    /// Ends an id with what it has, and says how many of its events were got.
    pub(crate) fn cm_destroy(&mut self, handle: u32) -> u32 {
        self.cm_leave(handle);
        let Some(id) = self.cm.table.remove(handle) else { return 0 };
        self.cm.numbers.remove(&(id.endpoint, id.number));
        if let Some(endpoint) = self.endpoints.get_mut(id.endpoint) {
            endpoint.cm.ids -= 1;
            endpoint.cm.joined -= u32::try_from(id.groups.len()).unwrap_or(0);
        }
        for request in self.cm_forget(id.context, handle) {
            self.cm_destroy(request);
        }
        if id.state == State::Listening {
            self.cm_admit(id.endpoint);
        }
        id.reported
    }

    /// Gives an id to another event channel of its process. Says which one had it, and how many of
    /// its events were got there.
    fn cm_migrate(&mut self, to: u32, number: u32) -> Result<(u32, u32), Errno> {
        let context = self.contexts.get(to).ok_or(EINVAL)?;
        let key = (context.endpoint, number);
        let handle = self.cm.numbers.get(&key).copied().ok_or(libc::ENOENT)?;
        let id = self.cm.table.get(handle).ok_or(libc::ENOENT)?;
        let from = id.context;
        let same =
            self.contexts.get(from).is_some_and(|c| c.process.pid() == context.process.pid());
        if !same {
            return Err(EINVAL);
        }
        let reported = id.reported;
        if from != to {
            self.cm_get(handle)?.context = to;
            self.cm_move_events(handle, from, to);
        }
        Ok((from, reported))
    }

    fn cm_option(&mut self, id: u32, option: (u32, u32), value: u32) -> Result<(), Errno> {
        const ID: u32 = 0;
        let id = self.cm_get(id)?;
        match option {
            // Quality of service and time-outs are those of the endpoint's connections.
            (ID, 0 | 3) => {}
            (ID, 1) => id.reuses_port = value != 0,
            (ID, 2) => id.only_family = value != 0,
            _ => return Err(EOPNOTSUPP),
        }
        Ok(())
    }

    /// `rdma_connect()`.
    fn cm_start(&mut self, handle: u32, param: &Param) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        if id.state != State::RouteResolved {
            return Err(EINVAL);
        }
        id.own = fit(param, id.most_private(PRIVATE_REQUEST, PRIVATE_SERVICE_REQUEST))?;
        id.state = State::Connecting;
        self.cm_ask(handle, CONNECT_TIME);
        Ok(())
    }

    /// What the one that connects says first.
    pub(crate) fn cm_first(&self, handle: u32) -> Option<Message> {
        let id = self.cm.table.get(handle)?;
        let ports = (id.source?.port, id.destination?.port);
        let datagrams = id.has_datagrams();
        let what = if datagrams { What::ServiceRequest } else { What::Request };
        let private = id.own.private;
        let param = if datagrams { Param { private, ..Param::default() } } else { id.own };
        let param = Param { qkey: 0, ..param };
        let (source_port, destination_port) = ports;
        Some(Message {
            space: id.space,
            source_port,
            destination_port,
            param,
            ..Message::new(what)
        })
    }

    fn cm_accept(&mut self, handle: u32, uid: u64, param: &Param) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        if id.state != State::Requested {
            return Err(EINVAL);
        }
        let own = fit(param, id.most_private(PRIVATE_REPLY, PRIVATE_SERVICE_REPLY))?;
        id.own = own;
        id.uid = uid;
        if id.has_datagrams() {
            id.state = State::Connected;
            let qkey = if own.qkey == 0 { QKEY } else { own.qkey };
            let param = Param { qp: own.qp, qkey, private: own.private, ..Param::default() };
            self.cm_say(handle, &Message { param, ..Message::new(What::ServiceReply) });
            self.cm_hang_up(handle);
            return Ok(());
        }
        id.state = State::Accepted;
        let param = Param { qkey: 0, retry_count: 0, ..own };
        self.cm_say(handle, &Message { param, ..Message::new(What::Reply) });
        self.cm_wait(handle, PROGRAM_TIME);
        Ok(())
    }

    /// The one that connects is ready.
    fn cm_ready(&mut self, handle: u32) -> Result<(), Errno> {
        self.cm_step(handle, State::Answered, State::Connected)?;
        self.cm_say(handle, &Message::new(What::ReadyToUse));
        Ok(())
    }

    /// The program has had a message of the peer: that is as good as its RTU.
    fn cm_communicates(&mut self, handle: u32) {
        if self.cm_step(handle, State::Accepted, State::Connected).is_ok() {
            self.cm_tell(handle, EventKind::Established, 0, &Param::default());
        }
    }

    fn cm_reject(&mut self, handle: u32, private: &Private) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        let most = id.most_private(PRIVATE_REJECT, PRIVATE_SERVICE_REPLY);
        if !matches!(id.state, State::Requested | State::Answered) || private.bytes().len() > most {
            return Err(EINVAL);
        }
        id.state = State::Ended;
        let (what, status) = if id.has_datagrams() {
            (What::ServiceReply, cm_message::SIDR_REJECTED)
        } else {
            (What::Reject, cm_message::BY_CONSUMER)
        };
        let param = Param { private: *private, ..Param::default() };
        self.cm_say(handle, &Message { status, param, ..Message::new(what) });
        self.cm_hang_up(handle);
        Ok(())
    }

    fn cm_disconnect(&mut self, handle: u32) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        match id.state {
            State::Accepted | State::Answered | State::Connected if id.link != 0 => {
                id.state = State::Disconnecting;
                self.cm_say(handle, &Message::new(What::DisconnectRequest));
                self.cm_wait(handle, CONNECT_TIME);
                Ok(())
            }
            // The peer was first.
            State::Ended | State::Disconnecting => Ok(()),
            _ => Err(EINVAL),
        }
    }

    /// The listener that a request is for.
    fn cm_listener(&self, endpoint: u32, own: &Address, space: u16) -> Option<u32> {
        let fits = |wildcard: bool| {
            self.cm.table.iter().find(|(_, id)| {
                id.state == State::Listening
                    && (id.endpoint, id.space) == (endpoint, space)
                    && id.source.is_some_and(|s| {
                        let family = s.is_ipv6 == own.is_ipv6 || s.is_ipv6 && !id.only_family;
                        s.port == own.port
                            && if wildcard { s.is_wildcard() && family } else { s.gid == own.gid }
                    })
            })
        };
        fits(false).or_else(|| fits(true)).map(|(handle, _)| handle)
    }

    /// Makes the id of a request that has come on a connection.
    pub(crate) fn cm_incoming(&mut self, link: u32, message: &Message) -> Incoming {
        let Some(l) = self.links.get(link) else { return Incoming::Made };
        let own = Address::of(l.own, message.destination_port);
        let other = Address::of(l.other, message.source_port);
        let listener = self.cm_listener(l.endpoint, &own, message.space);
        let Some((listener, l)) = listener.and_then(|l| Some((l, self.cm.table.get(l)?))) else {
            return Incoming::Refused(cm_message::NO_LISTENER);
        };
        if self.cm_requests(l.context, listener) >= l.backlog as usize {
            return Incoming::Waits;
        }
        let p = message.param;
        // What the peer can be asked for is what it can answer.
        let peer = Param {
            responder_resources: p.initiator_depth,
            initiator_depth: p.responder_resources,
            ..p
        };
        let id = Id {
            state: State::Requested,
            source: Some(own),
            destination: Some(other),
            peer,
            link,
            is_incoming: true,
            ..Id::new(l.context, l.endpoint, 0, message.space)
        };
        let Some(handle) = self.cm_add(id) else {
            return Incoming::Refused(cm_message::NO_RESOURCES);
        };
        if let Some(link) = self.links.get_mut(link) {
            link.cm = handle;
        }
        let datagrams = message.what == What::ServiceRequest;
        let most = if datagrams { PRIVATE_SERVICE_REQUEST } else { PRIVATE_REQUEST };
        let param = Param { private: p.private.padded(most), ..peer };
        self.cm_tell_request(listener, handle, &param);
        Incoming::Made
    }
}

/// The endpoint's own GID that an address is, or stands for.
pub(crate) fn own_gid(endpoint: &Endpoint, address: &Address) -> Option<verbs_protocol::Gid> {
    let gid = if address.is_loopback() { endpoint.gid_like(&address.gid) } else { address.gid };
    endpoint.has(&gid).then_some(gid)
}

fn enough(room: usize, least: usize) -> Result<(), Errno> {
    if room < least { Err(libc::ENOSPC) } else { Ok(()) }
}

fn cut(bytes: &[u8], room: usize) -> Vec<u8> {
    bytes[..bytes.len().min(room)].to_vec()
}

//! A tenant's connections: the tables that they are in, and what each change of one means.

use core::cmp::Reverse;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use super::turns::REFILL;
use super::{Context, Socket, Tenant, errno};
use crate::abi::*;
use crate::connection::{Budget, Change, Connection, Phase};
use crate::outbox::Outbox;
use crate::proto::{self, Errno, named};
use crate::settings::Settings;
use crate::sys;

/// What a connection takes beside its buffers.
pub(super) const OVERHEAD: usize = 2048;
/// What a connection takes that a peer's SYN has begun, until its handshake is over: the head of
/// each of its buffers, which nobody has used, and smoltcp's socket.
pub(super) const HALF_OPEN: usize = 16 << 10;
/// Bytes that may lie in a pair, in each direction.
const PAIR_BUFFER: u32 = 256 << 10;

impl Tenant {
    pub(super) fn insert(&mut self, mut connection: Connection) -> usize {
        connection.reserved = cost(&connection.settings);
        if connection.is_half_open() {
            self.half_open += 1;
            self.promised += core::mem::replace(&mut connection.reserved, HALF_OPEN);
        }
        self.reserved += connection.reserved;
        self.live += 1;
        self.ports.connected(connection.local.port);
        let slot = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        self.by_addresses.insert((connection.local, connection.remote), slot);
        self.sockets.insert(connection.id, Socket::Connection { slot });
        self.connections[slot] = Some(Box::new(connection));
        slot
    }

    /// Gives a connection its pair, whose events come here.
    pub(super) fn watch(
        &self,
        slot: usize,
        pair: UnixStream,
        connection: &mut Connection,
        context: &Context<'_>,
    ) -> Result<(), Errno> {
        let token = (u64::from(self.slot) << 32) | (slot as u64 + 1);
        let events = sys::READABLE | sys::WRITABLE | sys::HALF_CLOSED | sys::EDGE;
        let watched = pair
            .set_nonblocking(true)
            .and_then(|()| context.epoll.add(pair.as_fd(), events, token))
            .map_err(|e| errno(&e));
        connection.set_pair(pair);
        watched
    }

    /// Takes a connection out of all tables.
    pub(super) fn remove(&mut self, slot: usize) -> Option<Box<Connection>> {
        let connection = self.connections.get_mut(slot)?.take()?;
        self.free.push(slot);
        self.live -= 1;
        self.reserved -= connection.reserved;
        self.by_addresses.remove(&(connection.local, connection.remote));
        self.ports.disconnected(connection.local.port);
        if connection.is_half_open() {
            self.half_open -= 1;
            self.promised -= cost(&connection.settings);
        } else {
            self.not_pending(&connection);
        }
        // TIME-WAIT: the id was free before.
        if let Some(Socket::Connection { slot: of_id }) = self.sockets.get(&connection.id)
            && *of_id == slot
        {
            self.sockets.remove(&connection.id);
        }
        Some(connection)
    }

    /// Whether a connection is in TIME-WAIT, and nobody needs it any more.
    pub(super) fn waits(&self, slot: usize) -> bool {
        self.connections.get(slot).and_then(Option::as_ref).is_some_and(|c| c.waits())
    }

    fn not_pending(&mut self, connection: &Connection) {
        if !connection.taken
            && let Some(Socket::Listener { pending, .. }) =
                self.sockets.get_mut(&connection.listener)
        {
            *pending -= 1;
        }
    }

    pub(super) fn serve(&mut self, slot: usize, budget: &mut Budget, context: &mut Context<'_>) {
        let Some(mut connection) = self.connections.get_mut(slot).and_then(Option::take) else {
            return;
        };
        connection.queued = false;
        let turn = connection.turn(context.now, &mut self.interface, &mut self.device, budget);
        let stays = self.note(slot, &mut connection, turn.change, context);
        if !stays {
            self.connections[slot] = Some(connection);
            self.remove(slot);
            return;
        }
        if turn.throttled {
            self.throttled.push(slot);
            self.refill.get_or_insert(context.now + REFILL);
        }
        let next = connection.next(context.now, &mut self.interface);
        let again = turn.more || next.is_some_and(|at| at <= context.now);
        if again && !self.device.out.ready() {
            self.blocked.push(slot);
        } else if again {
            connection.queued = true;
            self.ready.push_back(slot);
        } else if let Some(at) = next
            && connection.due.is_none_or(|due| at < due)
        {
            connection.due = Some(at);
            self.timers.push(Reverse((at, slot)));
        }
        self.connections[slot] = Some(connection);
    }

    /// Does what a change asks for. Says whether the connection stays.
    fn note(
        &mut self,
        slot: usize,
        connection: &mut Connection,
        change: Change,
        context: &mut Context<'_>,
    ) -> bool {
        match change {
            Change::None => return true,
            Change::Gone => return false,
            Change::Failed(asked, errno) => {
                self.counts.failed += 1;
                let pair = connection.take_pair();
                if let Some(pair) = &pair {
                    context.epoll.remove(pair.as_fd());
                }
                let answer = proto::plain_answer(&asked, Err(Errno(errno)));
                context.outbox.send(answer, pair.map(OwnedFd::from));
                return false;
            }
            Change::Connected(asked) => {
                self.counts.connected += 1;
                let head = proto::answer_to(&asked);
                let answer = stack_named { head, local: named(connection.local) };
                context.outbox.send(proto::bytes(&answer), None);
            }
            Change::Accepted => {
                if !self.establish(connection) {
                    connection.phase = Phase::Arriving; // until its RST is sent
                    connection.abort(libc::ECONNABORTED);
                } else if let Err(err) = self.accept(slot, connection, context) {
                    // No descriptors: as if the backlog were full.
                    self.counts.drop_connections += 1;
                    connection.abort(err.0);
                }
            }
            Change::Ended(errno) => {
                self.ended(connection, errno, context);
                if connection.waits() {
                    self.time_wait.push_back(slot);
                }
                return connection.waits();
            }
        }
        true
    }

    /// A peer's handshake is over: its connection has what it needs from now on, and is in its
    /// listener's backlog. Says whether the tenant may have it: it may be the last of many that
    /// began at the same time.
    fn establish(&mut self, connection: &mut Connection) -> bool {
        let whole = cost(&connection.settings);
        if !self.make_room(whole.saturating_sub(connection.reserved)) {
            self.counts.drop_memory += 1;
            return false;
        }
        if !self.has_connection() {
            self.counts.drop_connections += 1;
            return false;
        }
        self.half_open -= 1;
        self.promised -= whole;
        self.reserved -= core::mem::replace(&mut connection.reserved, whole);
        self.reserved += whole;
        self.connect.take(1);
        connection.taken = false;
        if let Some(Socket::Listener { pending, .. }) = self.sockets.get_mut(&connection.listener) {
            *pending += 1;
        }
        self.counts.accepted += 1;
        true
    }

    /// Makes the pair of an accepted connection.
    fn accept(
        &mut self,
        slot: usize,
        connection: &mut Connection,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let (program, own) = UnixStream::pair().map_err(|e| errno(&e))?;
        sys::set_send_buffer(&program, PAIR_BUFFER);
        sys::set_send_buffer(&own, PAIR_BUFFER);
        (&program).write_all(&[0]).map_err(|e| errno(&e))?;
        self.watch(slot, own, connection, context)?;
        connection.program = Some(program.into());
        announce(self.id, connection, context.outbox);
        Ok(())
    }

    /// A connection is over: tells the agent, then the program.
    fn ended(&mut self, connection: &mut Connection, errno: i32, context: &mut Context<'_>) {
        let head = stack_head {
            type_: STACK_ENDED,
            tenant: self.id,
            error: errno,
            ..stack_head::default()
        };
        let info = connection.info(head, self.mtu);
        self.counts.reset += u64::from(errno != 0);
        self.counts.bytes_sent += info.bytes_sent;
        self.counts.bytes_received += info.bytes_received;
        if connection.program.is_none() {
            context.outbox.tell(proto::bytes(&info), None);
        }
        self.not_pending(connection);
        connection.taken = true;
        drop(connection.take_pair());
        self.sockets.remove(&connection.id);
    }

    pub(super) fn abort(&mut self, slot: usize) {
        if let Some(connection) = &mut self.connections[slot] {
            connection.abort(libc::ECONNABORTED);
            // Nobody took it, and nobody will.
            connection.program = None;
            self.enqueue(slot);
        }
    }

    /// A program has got a connection by `accept()`.
    pub(crate) fn taken(&mut self, id: u64) {
        if let Some(Socket::Connection { slot }) = self.sockets.get(&id).copied()
            && let Some(mut connection) = self.connections[slot].take()
        {
            self.not_pending(&connection);
            connection.taken = true;
            self.connections[slot] = Some(connection);
        }
    }

    /// Tells an agent that has just come of connections that nobody was told of.
    pub(crate) fn announce_all(&mut self, outbox: &mut Outbox) {
        for connection in self.connections.iter_mut().flatten() {
            announce(self.id, connection, outbox);
        }
    }
}

/// What a connection with these buffers takes.
fn cost(settings: &Settings) -> usize {
    settings.send_buffer as usize + settings.receive_buffer as usize + OVERHEAD
}

/// Tells the agent of an accepted connection, if one is there to hear of it.
fn announce(tenant: u64, connection: &mut Connection, outbox: &mut Outbox) {
    if !outbox.live() || !matches!(connection.phase, Phase::Open) {
        return;
    }
    let Some(program) = connection.program.take() else { return };
    let head =
        stack_head { type_: STACK_ACCEPTED, tenant, id: connection.id, ..stack_head::default() };
    let accepted = stack_accepted {
        head,
        listener: connection.listener,
        local: named(connection.local),
        remote: named(connection.remote),
    };
    outbox.tell(proto::bytes(&accepted), Some(program));
    if outbox.tells_sent() {
        // The outbox closes its descriptor before it sends the next message.
        let head = stack_head { type_: STACK_SENT, ..head };
        outbox.tell(proto::bytes(&stack_plain { head }), None);
    }
}

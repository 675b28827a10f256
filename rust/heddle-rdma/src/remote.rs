//! Work requests between nodes: what a requester says on a connection, how it hears answers, and
//! datagrams. `docs/protocols/verbs-wire.md`.

use std::time::Instant;

use verbs_protocol::abi;
use verbs_protocol::ibv;
use verbs_protocol::wire::{self, FIRST, FRAME_MAX, Header, Kind, LAST, SOLICITED};
use verbs_qp::Service;

use crate::copying::CHUNK;
use crate::link::{Link, Phase, SEND_HIGH, Sent};
use crate::memory::Fault;
use crate::objects::{Current, Objects};
use crate::placing::Placing;
use crate::requests::{Turn, gather, refusal};

/// Requests under way on one connection.
const WINDOW: u32 = 64;

// A frame goes through the buffer of one copy.
const _: () = assert!(FRAME_MAX == CHUNK);

/// A frame breaks a rule, and the connection ends.
pub(crate) struct Broken;

pub(crate) fn returns(opcode: u8) -> bool {
    matches!(opcode, ibv::WR_RDMA_READ | ibv::WR_ATOMIC_CMP_AND_SWP | ibv::WR_ATOMIC_FETCH_AND_ADD)
}

pub(crate) fn is_atomic(opcode: u8) -> bool {
    returns(opcode) && opcode != ibv::WR_RDMA_READ
}

/// Bytes of the next frame, of a message of which so many are left.
pub(crate) fn frame_length(left: u64) -> usize {
    usize::try_from(left).unwrap_or(FRAME_MAX).min(FRAME_MAX)
}

impl Sent {
    /// The header of a frame with `n` bytes from `offset` on.
    pub(crate) fn header(&self, offset: u64, n: usize) -> Header {
        let (head, length) = (self.send.head, self.send.length());
        let first = if offset == 0 { FIRST } else { 0 };
        let last = if self.ends_at(offset + n as u64) { LAST } else { 0 };
        let solicits = u32::from(head.flags) & abi::VERBS_SEND_SOLICITED != 0;
        Header {
            opcode: head.opcode,
            flags: first | last | if solicits { SOLICITED } else { 0 },
            length: u32::try_from(n).unwrap_or(0),
            number: self.number,
            immediate: head.imm,
            key: head.rkey,
            address: head.remote_address,
            total: if is_atomic(head.opcode) { head.compare_add } else { length },
            swap: head.swap,
            ..Header::new(Kind::Request)
        }
    }

    /// Whether all of its frames are said when so many bytes are.
    fn ends_at(&self, offset: u64) -> bool {
        returns(self.send.head.opcode) || offset == self.send.length()
    }

    /// What is to be said after `n` bytes of it, which is at `next`: of which request, from where.
    pub(crate) fn after(&self, next: usize, offset: u64, n: usize) -> (usize, u64) {
        let offset = offset + n as u64;
        if self.ends_at(offset) { (next + 1, 0) } else { (next, offset) }
    }
}

impl Link {
    /// READs and atomics that are not answered yet.
    fn outstanding(&self) -> usize {
        self.sent.iter().filter(|s| returns(s.send.head.opcode)).count()
    }
}

impl Objects {
    /// Whether the peer of a queue pair is on another node, and can be spoken to.
    pub(crate) fn is_remote(&self, number: u32) -> bool {
        let link = self.qps.get(number).and_then(|qp| self.links.get(qp.link));
        link.is_some_and(|l| l.phase == Phase::Established && !l.is_local)
    }

    /// Sends what may be sent of a queue pair's requests.
    pub(crate) fn remote_turn(self: &mut Box<Self>, number: u32, now: Instant) -> Turn {
        let mut turn = Turn::default();
        let Some(handle) = self.qps.get(number).map(|qp| qp.link) else { return turn };
        if self.awaits_card(handle) {
            return turn;
        }
        let said = |l: &Link| l.unsent.len() + l.direct.written;
        let before = self.links.get(handle).map_or(0, said);
        let reliable = self.is_reliable(number);
        let mut left = WINDOW as usize;
        while left > 0 {
            let link = self.links.get_mut(handle).filter(|l| l.qp == number);
            let Some(link) = link else { return turn };
            if link.unsent.len() >= SEND_HIGH
                || link.direct.is_full
                || link.not_before.is_some_and(|at| at > now)
            {
                break;
            }
            let Some(next) = link.sent.get(link.next) else {
                if !self.begin(number, handle) {
                    break;
                }
                left -= 1;
                continue;
            };
            if next.failed.is_some() {
                // Nothing of it is said, and nothing after it.
                link.next = link.sent.len();
                break;
            }
            let said = if reliable { self.send_mapped(number, handle, left) } else { None };
            if said.is_none() && !self.send_frame(number, handle) {
                break;
            }
            left = left.saturating_sub(said.unwrap_or(1).max(1));
            turn.worked |= said != Some(0);
        }
        let after = self.links.get(handle).map_or(0, said);
        turn.cost = i64::try_from(after.saturating_sub(before)).unwrap_or(0);
        self.push(handle);
        self.settle(number, handle);
        let Some(link) = self.links.get(handle) else { return turn };
        let Some(qp) = self.qps.get(number) else { return turn };
        let Some(first) = link.sent.front() else { return turn };
        turn.waits = true;
        let limit = verbs_qp::give_up_after(&qp.attr).map(|limit| link.heard + limit);
        if limit.is_some_and(|limit| limit <= now) {
            let send = first.send.clone();
            if let Some(link) = self.links.get_mut(handle) {
                link.sent.pop_front();
            }
            self.fail_send(number, &send, ibv::WC_RETRY_EXC_ERR);
            return Turn { worked: true, ..Turn::default() };
        }
        turn.until = match (limit, link.not_before.filter(|at| *at > now)) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        turn
    }

    /// Takes the next request of the ring, if it may be under way now. False if there is none.
    pub(crate) fn begin(&mut self, number: u32, handle: u32) -> bool {
        let Some(link) = self.links.get(handle) else { return false };
        let (pending, outstanding) = (link.sent.len(), link.outstanding());
        // One that failed here is the last one.
        let failed = link.sent.back().is_some_and(|s| s.failed.is_some());
        if pending >= WINDOW as usize || failed {
            return false;
        }
        let Some(current) = self.take_current(number) else { return false };
        let Some(qp) = self.qps.get(number) else { return false };
        let head = &current.send.head;
        let refusal = refusal(qp, &current.send, current.send.length());
        let fenced = u32::from(head.flags) & abi::VERBS_SEND_FENCE != 0 && outstanding > 0;
        let most = usize::from(qp.attr.max_rd_atomic.max(1));
        if fenced || returns(head.opcode) && outstanding >= most {
            self.keep_current(number, current);
            return false;
        }
        let Some(link) = self.links.get_mut(handle) else { return false };
        if pending == 0 {
            // From now on an answer is expected.
            link.heard = Instant::now();
        }
        let Current { send, .. } = current;
        link.sent.push_back(Sent {
            send,
            number: link.number,
            read: 0,
            failed: refusal,
            placed: false,
        });
        link.number = link.number.wrapping_add(1);
        true
    }

    /// Sends the next frame of the request that is being sent. False if that cannot be.
    fn send_frame(self: &mut Box<Self>, number: u32, handle: u32) -> bool {
        match self.place(number, handle) {
            Placing::Wait => return false,
            Placing::Placed => return true,
            Placing::Frames => {}
        }
        let usage = self.local(number, 0);
        let reliable = self.is_reliable(number);
        let Some(link) = self.links.get_mut(handle) else { return false };
        let (next, offset) = (link.next, link.offset);
        let Some(sent) = link.sent.get_mut(next) else { return false };
        let n = if returns(sent.send.head.opcode) {
            0
        } else {
            frame_length(sent.send.length() - offset)
        };
        let header = sent.header(offset, n);
        if sent.send.is_inline() {
            link.say(&header);
            let bytes = link.sent.get(next).map_or(&[][..], |s| s.send.inline());
            link.unsent.extend(bytes);
        } else {
            self.from.clear();
            let (entries, entry) = (sent.send.entries(), |i| sent.send.entry(i));
            let loaded = gather(&self.regions, entries, entry, offset, n, usage, &mut self.from)
                .and_then(|()| self.say_pieces(handle, &header, n));
            if loaded.is_err() {
                let Some(link) = self.links.get_mut(handle) else { return false };
                // What was begun of it stays without an end, which the end of the connection is.
                if let Some(sent) = link.sent.get_mut(next) {
                    sent.failed = Some(ibv::WC_LOC_PROT_ERR);
                }
                link.next = link.sent.len();
                return false;
            }
        }
        let Some(link) = self.links.get_mut(handle) else { return false };
        let Some(sent) = link.sent.get(next) else { return false };
        (link.next, link.offset) = sent.after(next, offset, n);
        if link.next > next && !reliable {
            self.complete_through(number, handle, header.number, false);
        }
        true
    }

    pub(crate) fn is_reliable(&self, number: u32) -> bool {
        self.qps.get(number).is_some_and(|q| q.service == Service::ReliableConnection)
    }

    /// Completes a request that failed here once all before it are complete.
    fn settle(&mut self, number: u32, handle: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(status) = link.sent.front().and_then(|s| s.failed) else { return };
        if let Some(sent) = link.sent.pop_front() {
            self.fail_send(number, &sent.send, status);
        }
    }

    /// Does what a frame says; false if it breaks a rule.
    pub(crate) fn frame(self: &mut Box<Self>, handle: u32, header: &Header, bytes: &[u8]) -> bool {
        let Some(link) = self.links.get(handle) else { return true };
        let number = link.qp;
        let datagrams = number == 0;
        if link.responses.len() > RESPONSES_MAX {
            // It asks and does not read.
            return false;
        }
        let taken_back = header.kind == Kind::CardReady;
        if link.card.as_ref().is_some_and(|c| c.active && !c.is_settled()) && !taken_back {
            // It comes by TCP, and is to come by the card.
            return false;
        }
        let result = match header.kind {
            Kind::Cm if link.kind == wire::RDMA_CM => self.cm_frame(handle, header, bytes),
            Kind::Cm => Err(Broken),
            _ if link.kind == wire::RDMA_CM => Err(Broken),
            Kind::Datagram if datagrams => self.hear_datagram(handle, header, bytes),
            Kind::Datagram => Err(Broken),
            _ if datagrams => Err(Broken),
            Kind::Request => self.request(number, handle, header, bytes),
            Kind::Ack => self.hear_ack(number, handle, header),
            Kind::ReadResponse => self.hear_read(number, handle, header, bytes),
            Kind::AtomicResponse => self.hear_atomic(number, handle, header),
            Kind::Rnr => self.hear_not_ready(number, handle, header),
            Kind::Card => self.hear_card(handle, header, bytes),
            Kind::CardReady => self.hear_card_ready(handle, header),
            Kind::CardAsk => self.hear_ask(handle, header),
            Kind::CardKey => self.hear_key(handle, header),
            Kind::Close => {
                self.closed_by_peer(handle);
                Ok(())
            }
        };
        result.is_ok()
    }

    /// Completes all requests up to one, or only those before it. READs and atomics among them are
    /// answered otherwise.
    fn complete_through(&mut self, number: u32, handle: u32, last: u32, before: bool) -> bool {
        loop {
            let Some(link) = self.links.get_mut(handle) else { return true };
            let Some(front) = link.sent.front() else { return true };
            let ahead = last.wrapping_sub(front.number);
            if ahead >= WINDOW_NUMBERS || before && ahead == 0 {
                return true;
            }
            if link.next == 0 || returns(front.send.head.opcode) {
                return false;
            }
            let Some(sent) = link.sent.pop_front() else { return true };
            link.next -= 1;
            link.not_ready = 0;
            self.complete_send(number, &sent.send, ibv::WC_SUCCESS);
        }
    }

    fn hear_ack(&mut self, number: u32, handle: u32, header: &Header) -> Result<(), Broken> {
        let failed = header.status != 0;
        let known = self.links.get(handle).is_some_and(|l| {
            l.sent.front().is_some_and(|s| header.number.wrapping_sub(s.number) < WINDOW_NUMBERS)
        });
        if !known || !self.complete_through(number, handle, header.number, failed) {
            return Err(Broken);
        }
        if !failed {
            return Ok(());
        }
        let status = match header.status {
            ibv::WC_REM_INV_REQ_ERR | ibv::WC_REM_ACCESS_ERR => header.status,
            _ => ibv::WC_REM_OP_ERR,
        };
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        let sent = link.sent.pop_front().filter(|s| s.number == header.number).ok_or(Broken)?;
        self.fail_send(number, &sent.send, status);
        Ok(())
    }

    fn hear_read(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        if !self.complete_through(number, handle, header.number, true) {
            return Err(Broken);
        }
        let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        let link = self.links.get_mut(handle).filter(|l| l.next > 0).ok_or(Broken)?;
        let sent = link.sent.front_mut().ok_or(Broken)?;
        let length = sent.send.length();
        let got = sent.read + bytes.len() as u64;
        let last = header.flags & LAST != 0;
        if sent.number != header.number
            || sent.send.head.opcode != ibv::WR_RDMA_READ
            || got > length
            || last != (got == length)
        {
            return Err(Broken);
        }
        self.to.clear();
        let (entries, entry) = (sent.send.entries(), |i| sent.send.entry(i));
        let to = &mut self.to;
        let stored = gather(&self.regions, entries, entry, sent.read, bytes.len(), usage, to)
            .and_then(|()| self.store(bytes));
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        if let Some(sent) = link.sent.front_mut() {
            sent.read = got;
        }
        if last || stored.is_err() {
            self.complete_answered(number, handle, stored);
        }
        Ok(())
    }

    /// Completes the first request, whose answer has come.
    fn complete_answered(&mut self, number: u32, handle: u32, stored: Result<(), Fault>) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(sent) = link.sent.pop_front() else { return };
        link.next = link.next.saturating_sub(1);
        link.not_ready = 0;
        match stored {
            Ok(()) => self.complete_send(number, &sent.send, ibv::WC_SUCCESS),
            Err(Fault) => self.fail_send(number, &sent.send, ibv::WC_LOC_PROT_ERR),
        }
    }

    fn hear_atomic(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        header: &Header,
    ) -> Result<(), Broken> {
        if !self.complete_through(number, handle, header.number, true) {
            return Err(Broken);
        }
        let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
        let link = self.links.get_mut(handle).filter(|l| l.next > 0).ok_or(Broken)?;
        let sent = link.sent.front().ok_or(Broken)?;
        if sent.number != header.number || !is_atomic(sent.send.head.opcode) {
            return Err(Broken);
        }
        self.to.clear();
        let (entries, entry) = (sent.send.entries(), |i| sent.send.entry(i));
        let stored = gather(&self.regions, entries, entry, 0, 8, usage, &mut self.to)
            .and_then(|()| self.store(&header.total.to_ne_bytes()));
        self.complete_answered(number, handle, stored);
        Ok(())
    }

    fn hear_not_ready(&mut self, number: u32, handle: u32, header: &Header) -> Result<(), Broken> {
        if !self.complete_through(number, handle, header.number, true) {
            return Err(Broken);
        }
        let retries = self.qps.get(number).map_or(0, |q| q.attr.rnr_retry);
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        if link.sent.front().is_none_or(|s| s.number != header.number) {
            return Err(Broken);
        }
        if retries < 7 && link.not_ready >= retries {
            let sent = link.sent.pop_front().ok_or(Broken)?;
            self.fail_send(number, &sent.send, ibv::WC_RNR_RETRY_EXC_ERR);
            return Ok(());
        }
        link.not_ready = link.not_ready.saturating_add(1);
        // All of them are sent again, except one that failed here, which stays behind them.
        (link.next, link.offset) = (0, 0);
        for sent in &mut link.sent {
            sent.read = 0;
            sent.placed = false;
        }
        let timer = u8::try_from(header.address & 31).unwrap_or(0);
        link.not_before = Some(Instant::now() + verbs_qp::rnr_time(timer));
        Ok(())
    }
}

/// Answers that a responder may owe: to a peer that keeps to the rules it owes 16 READs, what lies
/// between them, and one negative answer.
const RESPONSES_MAX: usize = 64;

/// Numbers that lie before one, and not after it.
const WINDOW_NUMBERS: u32 = WINDOW + 1;

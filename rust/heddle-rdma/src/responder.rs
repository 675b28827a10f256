//! What a responder does with requests from another node, and how it answers.
//! `docs/protocols/verbs-wire.md`.

use verbs_protocol::ibv;
use verbs_protocol::statistics::Reason;
use verbs_protocol::wire::{FIRST, FRAME_MAX, Header, Kind, LAST, PLACED, SOLICITED};
use verbs_qp::Service;

use crate::commands::MAX_MESSAGE;
use crate::link::{Inbound, Phase, Response, SEND_HIGH};
use crate::memory::{self, Fault};
use crate::objects::Objects;
use crate::placing::may_be_placed;
use crate::receiving::Taken;
use crate::remote::{Broken, frame_length, is_atomic, returns};
use crate::requests::{Told, gather};

impl Objects {
    /// A request of the peer.
    pub(crate) fn request(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        if header.flags & PLACED != 0 && !may_be_placed(link, header) {
            return Err(Broken);
        }
        if link.refuses {
            return Ok(());
        }
        let first = header.flags & FIRST != 0;
        if link.drops {
            if !first || header.number != link.expected {
                return Ok(());
            }
            link.drops = false;
        }
        if header.number != link.expected || first != link.inbound.is_none() {
            return Err(Broken);
        }
        if first && !self.begin_inbound(number, handle, header)? {
            return Ok(());
        }
        self.go_on_inbound(number, handle, header, bytes)
    }

    /// The first frame of a request: false if nothing of it is to be taken.
    fn begin_inbound(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        header: &Header,
    ) -> Result<bool, Broken> {
        let qp = self.qps.get(number).ok_or(Broken)?;
        let service = qp.service;
        let reliable = service == Service::ReliableConnection;
        let head = Inbound { head: *header, got: 0, dropped: false };
        let single = header.flags & LAST != 0 && header.length == 0;
        if !is_atomic(header.opcode) && header.total > MAX_MESSAGE.into()
            || returns(header.opcode) && !single
        {
            return Err(Broken);
        }
        if !service.has(header.opcode) {
            if !reliable {
                return Err(Broken);
            }
            return Ok(self.refuse(handle, header, ibv::WC_REM_INV_REQ_ERR));
        }
        if returns(header.opcode) {
            self.answer_request(number, handle, header);
            return Ok(false);
        }
        let mut inbound = head;
        if !matches!(header.opcode, ibv::WR_SEND | ibv::WR_SEND_WITH_IMM) && header.total > 0 {
            let all = usize::try_from(header.total).map_err(|_| Broken)?;
            let found = self.remote(number, ibv::ACCESS_REMOTE_WRITE).is_some_and(|usage| {
                memory::check(&self.regions, header.key, header.address, all, usage).is_ok()
            });
            if !found && reliable {
                self.refuse(handle, header, ibv::WC_REM_ACCESS_ERR);
                return Ok(false);
            }
            inbound.dropped = !found;
        }
        if header.opcode != ibv::WR_RDMA_WRITE
            && !inbound.dropped
            && !self.receive_inbound(number, handle, &mut inbound)?
        {
            return Ok(false);
        }
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        link.inbound = Some(inbound);
        Ok(true)
    }

    /// Takes a receive request for a message that needs one, or notes that it is dropped. False if
    /// nothing of it is to be taken.
    fn receive_inbound(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        inbound: &mut Inbound,
    ) -> Result<bool, Broken> {
        let (header, reliable) = (inbound.head, self.is_reliable(number));
        match self.take_receive(number) {
            Taken::Ready(receive) => {
                let written = header.opcode == ibv::WR_RDMA_WRITE_WITH_IMM;
                if !written && receive.length() < header.total {
                    if !reliable {
                        self.give_back(number, receive);
                        inbound.dropped = self.refuse(handle, &header, ibv::WC_REM_INV_REQ_ERR);
                        return Ok(inbound.dropped);
                    }
                    self.refuse(handle, &header, ibv::WC_REM_INV_REQ_ERR);
                    self.fail_receive(number, receive.wr_id, ibv::WC_LOC_LEN_ERR);
                    return Ok(false);
                }
                if let Some(qp) = self.qps.get_mut(number) {
                    qp.inbound = Some(receive);
                }
            }
            Taken::Empty if reliable => {
                let timer = self.qps.get(number).map_or(0, |qp| qp.attr.min_rnr_timer);
                let link = self.links.get_mut(handle).ok_or(Broken)?;
                link.drops = true;
                link.responses.push_back(Response::NotReady { number: header.number, timer });
                let endpoint = link.endpoint;
                self.note(endpoint, Reason::NotReady);
                return Ok(false);
            }
            Taken::Empty => inbound.dropped = true,
            Taken::Wrong => {
                inbound.dropped = self.refuse(handle, &header, ibv::WC_REM_OP_ERR);
                return Ok(inbound.dropped);
            }
        }
        Ok(true)
    }

    /// Writes the bytes of a frame to where they belong; the last one completes the message.
    fn go_on_inbound(
        self: &mut Box<Self>,
        number: u32,
        handle: u32,
        header: &Header,
        bytes: &[u8],
    ) -> Result<(), Broken> {
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        let inbound = link.inbound.as_mut().ok_or(Broken)?;
        let (head, done, dropped) = (inbound.head, inbound.got, inbound.dropped);
        let placed = header.flags & PLACED != 0;
        inbound.got += if placed { head.total } else { bytes.len() as u64 };
        let last = header.flags & LAST != 0;
        let whole = inbound.got == head.total;
        if header.opcode != head.opcode
            || inbound.got > head.total
            || last != whole
            || !last && bytes.len() != FRAME_MAX
        {
            return Err(Broken);
        }
        let sent = matches!(head.opcode, ibv::WR_SEND | ibv::WR_SEND_WITH_IMM);
        let epoch = self.epoch(number);
        let stored = dropped || self.store_inbound(number, sent, &head, done, bytes).is_ok();
        let number = self.still(number, epoch);
        if !stored {
            let taken = self.qps.get_mut(number).and_then(|q| q.inbound.take());
            let status = if sent { ibv::WC_REM_OP_ERR } else { ibv::WC_REM_ACCESS_ERR };
            self.refuse(handle, &head, status);
            let fails = taken.is_some();
            if let Some(receive) = taken {
                self.fail_receive(number, receive.wr_id, ibv::WC_LOC_PROT_ERR);
            }
            if fails || self.is_reliable(number) {
                return Ok(());
            }
        }
        if !last {
            return Ok(());
        }
        let link = self.links.get_mut(handle).ok_or(Broken)?;
        link.inbound = None;
        link.expected = link.expected.wrapping_add(1);
        let source = self.qps.get(number).map_or(0, |q| q.attr.dest_qp_num);
        if self.is_reliable(number) {
            self.acknowledge(handle, head.number);
        }
        if let Some(receive) = self.qps.get_mut(number).and_then(|q| q.inbound.take()) {
            let solicited = head.flags & SOLICITED != 0;
            let (opcode, imm, length) = (head.opcode, head.immediate, head.total);
            let told = Told { opcode, imm, solicited, source, length };
            self.complete_receive(number, told, receive.wr_id);
        } else if dropped {
            self.note_of(number, Reason::MessageDropped);
        } else {
            self.account_served(number, 0, head.total);
        }
        Ok(())
    }

    fn store_inbound(
        self: &mut Box<Self>,
        number: u32,
        sent: bool,
        head: &Header,
        done: u64,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.to.clear();
        if sent {
            let usage = self.local(number, ibv::ACCESS_LOCAL_WRITE);
            let receive = self.qps.get(number).and_then(|q| q.inbound.as_ref()).ok_or(Fault)?;
            let (entries, entry) = (receive.entries(), |i| receive.entry(i));
            gather(&self.regions, entries, entry, done, bytes.len(), usage, &mut self.to)?;
        } else {
            let usage = self.remote(number, ibv::ACCESS_REMOTE_WRITE).ok_or(Fault)?;
            let at = head.address.checked_add(done).ok_or(Fault)?;
            memory::find(&self.regions, head.key, at, bytes.len(), usage, &mut self.to)?;
        }
        self.store(bytes)
    }

    /// A READ or an atomic of the peer.
    fn answer_request(self: &mut Box<Self>, number: u32, handle: u32, header: &Header) {
        let Some(qp) = self.qps.get(number) else { return };
        let most = usize::from(qp.attr.max_dest_rd_atomic.max(1));
        let Some(link) = self.links.get(handle) else { return };
        let owed = |r: &&Response| matches!(r, Response::Read { .. } | Response::Atomic { .. });
        if link.responses.iter().filter(owed).count() >= most {
            self.refuse(handle, header, ibv::WC_REM_INV_REQ_ERR);
            return;
        }
        let response = if is_atomic(header.opcode) {
            self.do_atomic(number, header)
        } else {
            let all = usize::try_from(header.total).unwrap_or(usize::MAX);
            let found = self.remote(number, ibv::ACCESS_REMOTE_READ).is_some_and(|usage| {
                all == 0
                    || memory::check(&self.regions, header.key, header.address, all, usage).is_ok()
            });
            let Header { number, key, address, total, .. } = *header;
            let read = Response::Read { number, key, address, total, done: 0 };
            if found { Ok(read) } else { Err(ibv::WC_REM_ACCESS_ERR) }
        };
        match response {
            Ok(response) => {
                if let Some(link) = self.links.get_mut(handle) {
                    let waits = matches!(response, Response::NotReady { .. });
                    link.drops = waits;
                    link.expected = link.expected.wrapping_add(u32::from(!waits));
                    link.responses.push_back(response);
                }
            }
            Err(status) => {
                self.refuse(handle, header, status);
            }
        }
    }

    fn do_atomic(self: &mut Box<Self>, number: u32, header: &Header) -> Result<Response, u32> {
        if !header.address.is_multiple_of(8) {
            return Err(ibv::WC_REM_INV_REQ_ERR);
        }
        let usage = self.remote(number, ibv::ACCESS_REMOTE_ATOMIC);
        let usage = usage.ok_or(ibv::WC_REM_ACCESS_ERR)?;
        let place = (header.key, header.address, usage);
        memory::check(&self.regions, place.0, place.1, 8, usage)
            .map_err(|Fault| ibv::WC_REM_ACCESS_ERR)?;
        let Some(endpoint) = self.begin_atomic(number) else {
            let timer = self.qps.get(number).map_or(0, |q| q.attr.min_rnr_timer);
            return Ok(Response::NotReady { number: header.number, timer });
        };
        let changed = self.change(header.opcode, header.total, header.swap, place);
        self.end_atomic(endpoint);
        let old = changed.map_err(|Fault| ibv::WC_REM_OP_ERR)?;
        self.account_served(number, 8, 0);
        Ok(Response::Atomic { number: header.number, value: old })
    }

    /// Owes an answer for all requests up to one: the last one stands for those before.
    fn acknowledge(&mut self, handle: u32, number: u32) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let ack = Response::Ack { number, status: 0 };
        match link.responses.back_mut() {
            Some(last @ Response::Ack { status: 0, .. }) => *last = ack,
            _ => link.responses.push_back(ack),
        }
    }

    /// Fails the request that is expected, and serves none after it. Of UC it is dropped instead,
    /// and nobody is told: then its frames go on (true).
    fn refuse(&mut self, handle: u32, head: &Header, status: u32) -> bool {
        let number = self.links.get(handle).map_or(0, |l| l.qp);
        let reliable = self.is_reliable(number);
        let Some(link) = self.links.get_mut(handle) else { return false };
        if !reliable {
            let begun = Inbound { head: *head, got: 0, dropped: true };
            link.inbound.get_or_insert(begun).dropped = true;
            return true;
        }
        link.refuses = true;
        link.inbound = None;
        let number = link.expected;
        link.responses.push_back(Response::Ack { number, status });
        false
    }

    /// Says what is owed, as far as there is room.
    pub(crate) fn respond(self: &mut Box<Self>, handle: u32) {
        while let Some(read) = self.respond_briefly(handle) {
            self.respond_read(handle, read);
        }
    }

    /// The same, up to the next READ, whose bytes have to be fetched.
    pub(crate) fn respond_briefly(&mut self, handle: u32) -> Option<Response> {
        loop {
            let link = self.links.get_mut(handle)?;
            if link.unsent.len() >= SEND_HIGH || link.direct.is_full || link.phase == Phase::Closing
            {
                return None;
            }
            let response = link.responses.front().copied()?;
            let header = match response {
                Response::Ack { number, status } => {
                    Header { number, status, ..Header::new(Kind::Ack) }
                }
                Response::NotReady { number, timer } => {
                    Header { number, address: timer.into(), ..Header::new(Kind::Rnr) }
                }
                Response::Atomic { number, value } => {
                    Header { number, total: value, ..Header::new(Kind::AtomicResponse) }
                }
                Response::Key { key } => self.describe_key(handle, key),
                Response::Read { .. } => return (!link.direct.is_busy).then_some(response),
            };
            let link = self.links.get_mut(handle)?;
            link.say(&header);
            link.responses.pop_front();
        }
    }

    /// Sends the next frames of a READ's bytes.
    fn respond_read(self: &mut Box<Self>, handle: u32, read: Response) {
        let Response::Read { number, key, address, total, done } = read else { return };
        let Some(qp) = self.links.get(handle).map(|l| l.qp) else { return };
        let usage = self.remote(qp, ibv::ACCESS_REMOTE_READ);
        if usage.is_some_and(|usage| self.answer_mapped(handle, qp, usage)) {
            return;
        }
        let n = frame_length(total - done);
        self.from.clear();
        let found = usage.zip(address.checked_add(done)).ok_or(Fault);
        let header = read_header(number, (done, total), n);
        let loaded = found.and_then(|(usage, at)| {
            if n > 0 {
                memory::find(&self.regions, key, at, n, usage, &mut self.from)?;
            }
            self.say_pieces(handle, &header, n)
        });
        let Some(link) = self.links.get_mut(handle) else { return };
        if loaded.is_err() {
            // Taken away in the middle.
            link.refuses = true;
            let refused = Response::Ack { number, status: ibv::WC_REM_OP_ERR };
            if let Some(first) = link.responses.front_mut() {
                *first = refused;
            }
            return;
        }
        self.has_responded(handle, qp, n);
    }

    /// A frame with so many bytes of the first READ was sent.
    pub(crate) fn has_responded(&mut self, handle: u32, qp: u32, n: usize) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(Response::Read { total, done, .. }) = link.responses.front_mut() else { return };
        *done += n as u64;
        let total = *total;
        if *done == total {
            link.responses.pop_front();
            self.account_served(qp, total, 0);
        }
    }
}

/// The header of a frame with `n` bytes of a READ's `total`, from `done` on.
pub(crate) fn read_header(number: u32, (done, total): (u64, u64), n: usize) -> Header {
    let first = if done == 0 { FIRST } else { 0 };
    let last = if done + n as u64 == total { LAST } else { 0 };
    Header {
        number,
        length: u32::try_from(n).unwrap_or(0),
        flags: first | last,
        ..Header::new(Kind::ReadResponse)
    }
}

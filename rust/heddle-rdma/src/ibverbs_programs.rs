//! Queue pairs of the card that are a program's: their attributes, and what they are asked for, are
//! its own.

#![expect(unsafe_code, reason = "the node's libibverbs")]

use core::ffi::c_int;
use core::ptr::null_mut;
use std::io;
use std::sync::Arc;

use verbs_protocol::abi::{verbs_qp_attr, verbs_send};
use verbs_protocol::ibv;
use verbs_qp::Service;

use super::layout::{self, AhAttr, QpAttr, RecvWr, SendWr, Sge};
use super::{
    ACCESS_ALL, ACCESS_LOCAL_WRITE, Completions, Domain, MASK_ACCESS, MASK_AV, MASK_DEST_QP,
    MASK_DEST_RD_ATOMIC, MASK_MTU, MASK_PKEY, MASK_PORT, MASK_RD_ATOMIC, MASK_RETRIES,
    MASK_RNR_RETRIES, MASK_RNR_TIMER, MASK_RQ_PSN, MASK_SQ_PSN, MASK_STATE, MASK_TIMEOUT, PORT,
    Pair, Port, PostReceive, QPS_INIT, QPS_RTR, QPS_RTS, Region, SEND_SIGNALED, check,
};

/// Entries of a request at the card.
pub(crate) const PARTS: usize = 16;

const QPS_RESET: u32 = 0;

/// Bytes that the card knows.
#[derive(Clone, Copy)]
pub(crate) struct Part(Sge);

impl Region {
    /// Bytes from an address on by which the card knows them, if it has all of them.
    pub(crate) fn at(&self, address: u64, length: usize) -> Option<Part> {
        let length = u32::try_from(length).ok()?;
        self.covers(address, length.into())
            .then(|| Part(Sge { addr: address, length, lkey: self.lkey() }))
    }

    /// Bytes from an offset on, as far as they lie in it. Its first address is the router's own.
    pub(crate) fn slice(&self, at: usize, length: usize) -> Part {
        Part(self.part(at, length))
    }
}

impl Pair {
    /// One in RESET.
    pub(crate) fn of_program(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        service: Service,
        (sends, receives): (u32, u32),
    ) -> io::Result<Self> {
        let entries = u32::try_from(PARTS).unwrap_or(1);
        Self::create(domain, completions, service.number(), (sends, receives, entries))
    }

    /// Ends all that it has under way. The card touches no memory for it afterwards.
    pub(crate) fn reset(&self) -> io::Result<()> {
        self.modify(QpAttr { qp_state: QPS_RESET, ..QpAttr::default() }, MASK_STATE)
    }

    /// Takes what a mask names of the attributes of a program, in RTS: which rights of regions the
    /// peer may use, and the time for which it waits.
    pub(crate) fn change(
        &self,
        service: Service,
        attr: &verbs_qp_attr,
        mask: u32,
    ) -> io::Result<()> {
        self.modify(changed(attr), changes(service, mask))
    }

    /// To INIT: takes receive requests.
    pub(crate) fn init(&self, access: u32) -> io::Result<()> {
        let init = QpAttr {
            qp_state: QPS_INIT,
            port_num: PORT,
            qp_access_flags: rights(access),
            ..QpAttr::default()
        };
        self.modify(init, MASK_STATE | MASK_PKEY | MASK_PORT | MASK_ACCESS)
    }

    /// From INIT to RTR, by the attributes of a program, from the card's own GID.
    pub(crate) fn ready_to_receive(
        &self,
        service: Service,
        own: &Port,
        attr: &verbs_qp_attr,
    ) -> io::Result<()> {
        let address = &attr.address;
        let ah_attr = AhAttr {
            dgid: address.gid,
            flow_label: address.flow_label,
            sgid_index: own.gid_index,
            hop_limit: address.hop_limit,
            traffic_class: address.traffic_class,
            sl: address.sl,
            static_rate: address.static_rate,
            is_global: 1,
            port_num: PORT,
            ..AhAttr::default()
        };
        let receive = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: attr.path_mtu,
            rq_psn: attr.rq_psn & 0xff_ffff,
            dest_qp_num: attr.dest_qp_num,
            ah_attr,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            ..QpAttr::default()
        };
        let answers = when(service, MASK_DEST_RD_ATOMIC | MASK_RNR_TIMER);
        let mask = MASK_STATE | MASK_AV | MASK_MTU | MASK_DEST_QP | MASK_RQ_PSN;
        self.modify(receive, mask | answers)
    }

    /// From RTR to RTS, with what else a mask names.
    pub(crate) fn ready_to_send(
        &self,
        service: Service,
        attr: &verbs_qp_attr,
        mask: u32,
    ) -> io::Result<()> {
        let send = QpAttr {
            qp_state: QPS_RTS,
            sq_psn: attr.sq_psn & 0xff_ffff,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            max_rd_atomic: attr.max_rd_atomic,
            ..changed(attr)
        };
        let retries = MASK_TIMEOUT | MASK_RETRIES | MASK_RNR_RETRIES | MASK_RD_ATOMIC;
        let also = changes(service, mask);
        self.modify(send, MASK_STATE | MASK_SQ_PSN | when(service, retries) | also)
    }

    /// Asks for what a program does, with these bytes; it is always told of.
    pub(crate) fn ask(&self, id: u64, head: &verbs_send, parts: &[Part]) -> io::Result<()> {
        let mut entries = sges(parts)?;
        let flags = u32::from(head.flags) & (SEND_FENCE | SEND_SOLICITED);
        let mut wr = SendWr {
            wr_id: id,
            sg_list: entries.as_mut_ptr(),
            num_sge: count(parts),
            opcode: head.opcode.into(),
            send_flags: flags | SEND_SIGNALED,
            imm_data: head.imm,
            remote_addr: head.remote_address,
            rkey: head.rkey,
            ..SendWr::default()
        };
        if matches!(head.opcode, ibv::WR_ATOMIC_CMP_AND_SWP | ibv::WR_ATOMIC_FETCH_AND_ADD) {
            wr.set_atomic(head.compare_add, head.swap, head.rkey);
        }
        self.post(&mut wr)
    }

    /// Has the next message go to these bytes.
    pub(crate) fn expect(&self, id: u64, parts: &[Part]) -> io::Result<()> {
        let mut entries = sges(parts)?;
        let mut wr = RecvWr {
            wr_id: id,
            next: null_mut(),
            sg_list: entries.as_mut_ptr(),
            num_sge: count(parts),
        };
        let mut bad = null_mut();
        let op = self.domain.device.op(layout::POST_RECV);
        // SAFETY: the entry has this type, and a provider always has it.
        let post = unsafe { core::mem::transmute::<*const core::ffi::c_void, PostReceive>(op) };
        // SAFETY: the library reads the request and its entries, and writes one pointer.
        check(unsafe { post(self.qp.as_ptr(), &raw mut wr, &raw mut bad) })
    }
}

/// `enum ibv_send_flags`.
const SEND_FENCE: u32 = 1;
const SEND_SOLICITED: u32 = 4;

/// What a reliable queue pair alone has.
fn when(service: Service, mask: c_int) -> c_int {
    if service == Service::ReliableConnection { mask } else { 0 }
}

fn count(parts: &[Part]) -> c_int {
    c_int::try_from(parts.len()).unwrap_or(0)
}

/// What of a program's attributes a card in RTS takes.
fn changed(attr: &verbs_qp_attr) -> QpAttr {
    let (qp_access_flags, min_rnr_timer) = (rights(attr.access), attr.min_rnr_timer);
    QpAttr { qp_access_flags, min_rnr_timer, ..QpAttr::default() }
}

/// The mask of those that a program's names.
fn changes(service: Service, mask: u32) -> c_int {
    let of = |bit: u32, is: c_int| if mask & bit != 0 { is } else { 0 };
    of(ibv::QP_ACCESS_FLAGS, MASK_ACCESS) | when(service, of(ibv::QP_MIN_RNR_TIMER, MASK_RNR_TIMER))
}

fn rights(access: u32) -> u32 {
    access & ACCESS_ALL & !ACCESS_LOCAL_WRITE
}

fn sges(parts: &[Part]) -> io::Result<[Sge; PARTS]> {
    let mut all = [Sge::default(); PARTS];
    let room = all.get_mut(..parts.len());
    let room = room.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
    for (entry, part) in room.iter_mut().zip(parts) {
        *entry = part.0;
    }
    Ok(all)
}

//! Queue pairs of the card, and what the router itself asks of them.

#![expect(unsafe_code, reason = "the node's libibverbs")]

use core::ffi::{c_int, c_void};
use core::ptr::{NonNull, null_mut};
use std::io;
use std::sync::Arc;

use super::layout::{self, AhAttr, Cap, Qp, QpAttr, QpInitAttr, RecvWr, SendWr, Sge};
use super::{
    ACCESS_REMOTE_WRITE, Completions, Domain, MASK_ACCESS, MASK_AV, MASK_DEST_QP,
    MASK_DEST_RD_ATOMIC, MASK_MTU, MASK_PKEY, MASK_PORT, MASK_RD_ATOMIC, MASK_RETRIES,
    MASK_RNR_RETRIES, MASK_RNR_TIMER, MASK_RQ_PSN, MASK_SQ_PSN, MASK_STATE, MASK_TIMEOUT, PORT,
    Port, PostReceive, PostSend, QPS_INIT, QPS_RTR, QPS_RTS, QPT_RC, RD_ATOMIC, RETRIES,
    RNR_RETRIES, RNR_TIMER, Region, SEND_SIGNALED, TIMEOUT, WR_RDMA_WRITE, WR_SEND, check, made,
};

/// Where a queue pair of another card is, as its node says.
#[derive(Clone, Copy)]
pub(crate) struct Remote {
    pub(crate) number: u32,
    pub(crate) psn: u32,
    /// `enum ibv_mtu`.
    pub(crate) mtu: u8,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
}

/// A reliable queue pair of the card.
pub(crate) struct Pair {
    pub(super) domain: Arc<Domain>,
    #[expect(dead_code, reason = "kept for as long as the queue pair uses it")]
    pub(super) completions: Arc<Completions>,
    pub(super) qp: NonNull<Qp>,
}

// SAFETY: all functions of libibverbs may be called by any thread.
unsafe impl Send for Pair {}

impl Pair {
    /// One in INIT, for so many requests at a time.
    pub(crate) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        sends: u32,
        receives: u32,
    ) -> io::Result<Self> {
        let pair = Self::create(domain, completions, QPT_RC, (sends, receives, 1))?;
        let init = QpAttr { qp_state: QPS_INIT, port_num: PORT, ..QpAttr::default() };
        pair.modify(init, MASK_STATE | MASK_PKEY | MASK_PORT | MASK_ACCESS)?;
        Ok(pair)
    }

    /// One in RESET, of a type (`enum ibv_qp_type`), whose requests have so many entries at most.
    pub(super) fn create(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        qp_type: u32,
        (sends, receives, entries): (u32, u32, u32),
    ) -> io::Result<Self> {
        let cap = Cap {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: entries,
            max_recv_sge: entries,
            max_inline_data: 0,
        };
        let cq = completions.cq.as_ptr();
        let mut attr = QpInitAttr {
            qp_context: null_mut(),
            send_cq: cq,
            recv_cq: cq,
            srq: null_mut(),
            cap,
            qp_type,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queue are there; the library writes what it grants.
        let qp =
            unsafe { (domain.device.library.ibv_create_qp)(domain.pd.as_ptr(), &raw mut attr) };
        let (domain, completions) = (Arc::clone(domain), Arc::clone(completions));
        let pair = Self { domain, completions, qp: made(qp)? };
        // A number of 24 bits, which peers name it by.
        if pair.number() == 0 || pair.number() > 0xff_ffff {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        Ok(pair)
    }

    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is there as long as `self`.
        unsafe { self.qp.as_ref() }.qp_num
    }

    pub(super) fn modify(&self, mut attr: QpAttr, mask: c_int) -> io::Result<()> {
        let modify = self.domain.device.library.ibv_modify_qp;
        // SAFETY: the library reads one structure.
        check(unsafe { modify(self.qp.as_ptr(), &raw mut attr, mask) })
    }

    /// Says which rights of regions peers may use: `enum ibv_access_flags`.
    pub(crate) fn allow(&self, access: u32) -> io::Result<()> {
        let qp_access_flags = access & ACCESS_REMOTE_WRITE;
        self.modify(QpAttr { qp_access_flags, ..QpAttr::default() }, MASK_ACCESS)
    }

    /// Connects it, whose own first packet has the number `psn`: through RTR to RTS.
    pub(crate) fn connect(&self, psn: u32, own: &Port, to: &Remote) -> io::Result<()> {
        let ah_attr = AhAttr {
            dgid: to.gid,
            sgid_index: own.gid_index,
            hop_limit: 64,
            dlid: to.lid,
            is_global: 1,
            port_num: PORT,
            ..AhAttr::default()
        };
        let receive = QpAttr {
            qp_state: QPS_RTR,
            path_mtu: own.mtu.min(to.mtu).into(),
            rq_psn: to.psn & 0xff_ffff,
            dest_qp_num: to.number,
            ah_attr,
            max_dest_rd_atomic: RD_ATOMIC,
            min_rnr_timer: RNR_TIMER,
            ..QpAttr::default()
        };
        let mask = MASK_STATE
            | MASK_AV
            | MASK_MTU
            | MASK_DEST_QP
            | MASK_RQ_PSN
            | MASK_DEST_RD_ATOMIC
            | MASK_RNR_TIMER;
        self.modify(receive, mask)?;
        let send = QpAttr {
            qp_state: QPS_RTS,
            sq_psn: psn & 0xff_ffff,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_RETRIES,
            max_rd_atomic: RD_ATOMIC,
            ..QpAttr::default()
        };
        let mask = MASK_STATE
            | MASK_SQ_PSN
            | MASK_TIMEOUT
            | MASK_RETRIES
            | MASK_RNR_RETRIES
            | MASK_RD_ATOMIC;
        self.modify(send, mask)
    }

    /// Sends a part of a region.
    pub(crate) fn send(&self, id: u64, region: &Region, at: usize, n: usize) -> io::Result<()> {
        let mut sge = region.part(at, n);
        let mut wr = SendWr {
            wr_id: id,
            sg_list: &raw mut sge,
            num_sge: c_int::from(n > 0),
            opcode: WR_SEND,
            send_flags: SEND_SIGNALED,
            ..SendWr::default()
        };
        self.post(&mut wr)
    }

    /// Has the card write bytes of a region, from an address of it on, to where a peer's key and an
    /// address are.
    pub(crate) fn write(
        &self,
        id: u64,
        (region, from, length): (&Region, u64, u32),
        (rkey, to): (u32, u64),
    ) -> io::Result<()> {
        if !region.covers(from, length.into()) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut sge = Sge { addr: from, length, lkey: region.lkey() };
        let mut wr = SendWr {
            wr_id: id,
            sg_list: &raw mut sge,
            num_sge: 1,
            opcode: WR_RDMA_WRITE,
            send_flags: SEND_SIGNALED,
            remote_addr: to,
            rkey,
            ..SendWr::default()
        };
        self.post(&mut wr)
    }

    pub(super) fn post(&self, wr: &mut SendWr) -> io::Result<()> {
        let mut bad = null_mut();
        let op = self.domain.device.op(layout::POST_SEND);
        // SAFETY: the entry has this type, and a provider always has it.
        let post = unsafe { core::mem::transmute::<*const c_void, PostSend>(op) };
        // SAFETY: the library reads the request and its entry, and writes one pointer.
        check(unsafe { post(self.qp.as_ptr(), &raw mut *wr, &raw mut bad) })
    }

    /// Has the next message go into a part of a region.
    pub(crate) fn receive(&self, id: u64, region: &Region, at: usize, n: usize) -> io::Result<()> {
        let mut sge = region.part(at, n);
        let mut wr = RecvWr { wr_id: id, next: null_mut(), sg_list: &raw mut sge, num_sge: 1 };
        let mut bad = null_mut();
        let op = self.domain.device.op(layout::POST_RECV);
        // SAFETY: the entry has this type, and a provider always has it.
        let post = unsafe { core::mem::transmute::<*const c_void, PostReceive>(op) };
        // SAFETY: the library reads the request and its entry, and writes one pointer.
        check(unsafe { post(self.qp.as_ptr(), &raw mut wr, &raw mut bad) })
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: it is there, and not used any more.
        unsafe { (self.domain.device.library.ibv_destroy_qp)(self.qp.as_ptr()) };
    }
}

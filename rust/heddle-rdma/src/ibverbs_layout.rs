//! What of libibverbs's structures the router uses, as `infiniband/verbs.h` lays them out:
//! libibverbs keeps these layouts, which programs are compiled with. A test compares them with the
//! header.

#![allow(dead_code, reason = "fields that only the library reads")]
#![allow(clippy::struct_field_names, reason = "the names are the header's")]

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

/// `struct ibv_context`, as far as its descriptor of events.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut c_void,
    pub(super) ops: [*const c_void; 32],
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
}

/// Places in `struct ibv_context_ops` of what the header calls by inline functions.
pub(super) const POLL_CQ: usize = 11;
pub(super) const REQ_NOTIFY_CQ: usize = 12;
pub(super) const POST_SEND: usize = 25;
pub(super) const POST_RECV: usize = 26;

/// `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct Channel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut c_void,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_qp`, as far as its number.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) others: [*mut c_void; 5],
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct DeviceAttr {
    pub(super) first: [u32; 27],
    pub(super) max_qp: c_int,
    pub(super) others: [u32; 5],
    pub(super) max_cqe: c_int,
    pub(super) others_yet: [u32; 2],
    pub(super) max_qp_rd_atom: c_int,
    pub(super) rest: [u32; 21],
}

/// `struct ibv_port_attr`, with room for what later ones have.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortAttr {
    pub(super) state: u32,
    pub(super) max_mtu: u32,
    pub(super) active_mtu: u32,
    pub(super) gid_tbl_len: c_int,
    pub(super) others: [u32; 4],
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) room: [u32; 16],
}

/// `struct ibv_async_event`.
#[repr(C)]
pub(super) struct AsyncEvent {
    pub(super) element: *mut c_void,
    pub(super) event_type: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut c_void,
    pub(super) recv_cq: *mut c_void,
    pub(super) srq: *mut c_void,
    pub(super) cap: Cap,
    pub(super) qp_type: u32,
    pub(super) sq_sig_all: c_int,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Cap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_ah_attr`, with its `struct ibv_global_route`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) padding: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: u32,
    pub(super) cur_qp_state: u32,
    pub(super) path_mtu: u32,
    pub(super) path_mig_state: u32,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: u32,
    pub(super) cap: Cap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr`, with `wr.rdma` of its union.
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: u32,
    pub(super) send_flags: u32,
    pub(super) imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) rest: [u32; 19],
}

impl SendWr {
    /// Has `wr.atomic` of the union, and not `wr.rdma`.
    pub(super) fn set_atomic(&mut self, compare_add: u64, swap: u64, rkey: u32) {
        let number = |at: usize, bytes: &[u8; 8]| {
            let half = bytes[at..].first_chunk().copied();
            u32::from_ne_bytes(half.unwrap_or_default())
        };
        let (compare_add, swap) = (compare_add.to_ne_bytes(), swap.to_ne_bytes());
        self.rkey = number(0, &compare_add);
        self.rest[0] = number(4, &compare_add);
        self.rest[1..4].copy_from_slice(&[number(0, &swap), number(4, &swap), rkey]);
    }
}

impl Default for SendWr {
    fn default() -> Self {
        Self {
            wr_id: 0,
            next: null_mut(),
            sg_list: null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            rest: [0; 19],
        }
    }
}

/// `struct ibv_recv_wr`.
#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: u32,
    pub(super) opcode: u32,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: u32,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::fmt::Write;
    use core::mem::{offset_of, size_of};
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    /// The compiler of C agrees about each offset and size.
    #[test]
    fn layouts_are_those_of_the_header() {
        let mut asserts = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
        macro_rules! offsets {
            ($rust:ident, $c:literal: $($field:ident $name:literal),*) => {$(
                writeln!(asserts, "_Static_assert(offsetof({}, {}) == {}, \"{}\");",
                    $c, $name, offset_of!($rust, $field), $name).unwrap();
            )*};
        }
        macro_rules! sizes {
            ($($rust:ident $c:literal),*) => {$(
                writeln!(asserts, "_Static_assert(sizeof({}) == {}, \"{}\");",
                    $c, size_of::<$rust>(), $c).unwrap();
            )*};
        }
        offsets!(Context, "struct ibv_context": cmd_fd "cmd_fd", async_fd "async_fd");
        offsets!(Channel, "struct ibv_comp_channel": fd "fd");
        offsets!(Mr, "struct ibv_mr": lkey "lkey", rkey "rkey");
        offsets!(Qp, "struct ibv_qp": qp_num "qp_num");
        offsets!(DeviceAttr, "struct ibv_device_attr": max_qp "max_qp", max_cqe "max_cqe",
            max_qp_rd_atom "max_qp_rd_atom");
        offsets!(PortAttr, "struct ibv_port_attr": state "state", active_mtu "active_mtu",
            lid "lid");
        offsets!(AsyncEvent, "struct ibv_async_event": event_type "event_type");
        offsets!(QpInitAttr, "struct ibv_qp_init_attr": send_cq "send_cq", recv_cq "recv_cq",
            cap "cap", qp_type "qp_type", sq_sig_all "sq_sig_all");
        offsets!(AhAttr, "struct ibv_ah_attr": dgid "grh.dgid", sgid_index "grh.sgid_index",
            hop_limit "grh.hop_limit", dlid "dlid", is_global "is_global", port_num "port_num");
        offsets!(QpAttr, "struct ibv_qp_attr": qp_state "qp_state", path_mtu "path_mtu",
            rq_psn "rq_psn", sq_psn "sq_psn", dest_qp_num "dest_qp_num",
            qp_access_flags "qp_access_flags", cap "cap", ah_attr "ah_attr",
            pkey_index "pkey_index", max_rd_atomic "max_rd_atomic",
            max_dest_rd_atomic "max_dest_rd_atomic", sq_psn "sq_psn", min_rnr_timer "min_rnr_timer",
            port_num "port_num", timeout "timeout", retry_cnt "retry_cnt", rnr_retry "rnr_retry");
        offsets!(SendWr, "struct ibv_send_wr": sg_list "sg_list", num_sge "num_sge",
            opcode "opcode", send_flags "send_flags", remote_addr "wr.rdma.remote_addr",
            rkey "wr.rdma.rkey");
        // What `set_atomic` writes: compare_add, swap, rkey, in 32 bits each.
        offsets!(SendWr, "struct ibv_send_wr": remote_addr "wr.atomic.remote_addr",
            rkey "wr.atomic.compare_add");
        for (place, name) in [(1, "swap"), (3, "rkey")] {
            let at = offset_of!(SendWr, rest) + place * size_of::<u32>();
            writeln!(
                asserts,
                "_Static_assert(offsetof(struct ibv_send_wr, wr.atomic.{name}) == {at}, \"\");"
            )
            .unwrap();
        }
        offsets!(RecvWr, "struct ibv_recv_wr": sg_list "sg_list", num_sge "num_sge");
        offsets!(Wc, "struct ibv_wc": status "status", opcode "opcode", byte_len "byte_len",
            imm_data "imm_data", wc_flags "wc_flags", dlid_path_bits "dlid_path_bits");
        sizes!(DeviceAttr "struct ibv_device_attr", AhAttr "struct ibv_ah_attr",
            QpInitAttr "struct ibv_qp_init_attr", QpAttr "struct ibv_qp_attr",
            Cap "struct ibv_qp_cap", Sge "struct ibv_sge", SendWr "struct ibv_send_wr",
            RecvWr "struct ibv_recv_wr", Wc "struct ibv_wc");
        for (place, name) in [
            (POLL_CQ, "poll_cq"),
            (REQ_NOTIFY_CQ, "req_notify_cq"),
            (POST_SEND, "post_send"),
            (POST_RECV, "post_recv"),
        ] {
            let at = offset_of!(Context, ops) + place * size_of::<*const c_void>();
            writeln!(
                asserts,
                "_Static_assert(offsetof(struct ibv_context, ops.{name}) == {at}, \"{name}\");"
            )
            .unwrap();
        }
        assert!(compiles(&asserts));
    }

    fn compiles(source: &str) -> bool {
        let mut cc = Command::new("cc");
        let cc = cc.args(["-fsyntax-only", "-x", "c", "-"]).stdin(Stdio::piped());
        let mut child = cc.spawn().expect("a C compiler, and libibverbs-dev");
        child.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
        child.wait().unwrap().success()
    }
}

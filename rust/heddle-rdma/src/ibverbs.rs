//! The node's libibverbs, loaded when a card is to be used: nothing links with it. Each function
//! here is safe: what the card reads and writes lies in memory that the [`Region`] keeps mapped,
//! and whatever hangs on something else keeps that.

#![expect(unsafe_code, reason = "the node's libibverbs")]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::{self, NonNull, null_mut};

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::ibv;

#[path = "ibverbs_layout.rs"]
mod layout;
#[path = "ibverbs_pair.rs"]
mod pair;
#[path = "ibverbs_programs.rs"]
mod programs;

pub(crate) use pair::{Pair, Remote};
pub(crate) use programs::{PARTS, Part};

use layout::{
    AsyncEvent, Channel, Context, DeviceAttr, Mr, PortAttr, Qp, QpAttr, QpInitAttr, RecvWr, SendWr,
    Sge, Wc,
};

/// The port of a card that is used. Cards with two have two devices today.
const PORT: u8 = 1;

/// `enum ibv_qp_state`, `enum ibv_qp_attr_mask`, and others, as far as they are used here.
const QPS_INIT: u32 = 1;
const QPS_RTR: u32 = 2;
const QPS_RTS: u32 = 3;
const MASK_STATE: c_int = 1;
const MASK_ACCESS: c_int = 1 << 3;
const MASK_PKEY: c_int = 1 << 4;
const MASK_PORT: c_int = 1 << 5;
const MASK_AV: c_int = 1 << 7;
const MASK_MTU: c_int = 1 << 8;
const MASK_TIMEOUT: c_int = 1 << 9;
const MASK_RETRIES: c_int = 1 << 10;
const MASK_RNR_RETRIES: c_int = 1 << 11;
const MASK_RQ_PSN: c_int = 1 << 12;
const MASK_RD_ATOMIC: c_int = 1 << 13;
const MASK_RNR_TIMER: c_int = 1 << 15;
const MASK_SQ_PSN: c_int = 1 << 16;
const MASK_DEST_RD_ATOMIC: c_int = 1 << 17;
const MASK_DEST_QP: c_int = 1 << 20;
const QPT_RC: u32 = 2;
const WR_RDMA_WRITE: u32 = 0;
const WR_SEND: u32 = 2;
const SEND_SIGNALED: u32 = 2;
const PORT_ACTIVE: u32 = 4;
/// `IBV_MTU_4096`.
const MTU_MAX: u8 = 5;
/// The last of `enum ibv_wc_status`: programs look them up in tables.
const STATUS_MAX: u32 = 23;
/// Events of a channel that are taken at a time.
const CHANNEL_EVENTS: u32 = 64;
pub(crate) const EVENT_CQ_ERR: u32 = 0;
pub(crate) const EVENT_QP_FATAL: u32 = 1;
/// Something that the peer asked for was wrong: the queue pair has failed.
pub(crate) const EVENT_QP_REQ_ERR: u32 = 2;
pub(crate) const EVENT_QP_ACCESS_ERR: u32 = 3;
pub(crate) const EVENT_DEVICE_FATAL: u32 = 8;
pub(crate) const EVENT_PORT_ERR: u32 = 10;
/// After which its port may have another state, LID, MTU or GID: `IBV_EVENT_PORT_ACTIVE`,
/// `LID_CHANGE`, `PKEY_CHANGE`, `SM_CHANGE`, `CLIENT_REREGISTER` and `GID_CHANGE`.
pub(crate) const PORT_CHANGES: [u32; 6] = [9, 11, 12, 13, 17, 18];
/// READs that a queue pair of the card has under way, either way.
const RD_ATOMIC: u8 = 1;
/// How long the card waits for an answer (4.096 us * 2^16, 268 ms), and how often it tries again: 7
/// is for ever with some.
const TIMEOUT: u8 = 16;
const RETRIES: u8 = 6;
/// A receiver that has no room is asked again for ever, after 80 us (code 6): it is the router.
const RNR_RETRIES: u8 = 7;
const RNR_TIMER: u8 = 6;

// What the header calls by the context.
type Arm = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type Poll = unsafe extern "C" fn(*mut c_void, c_int, *mut Wc) -> c_int;
type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
type PostReceive = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of the library.
        struct Library {
            $($name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Library {
            fn load() -> Result<Self, String> {
                let file = c"libibverbs.so.1";
                // SAFETY: the name ends with a 0. The library is that of the node, and its
                // constructors are trusted as it is.
                let library = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW) };
                if library.is_null() {
                    return Err(format!("load libibverbs.so.1: {}", error()));
                }
                Ok(Self {$(
                    $name: {
                        let name = concat!(stringify!($name), "\0").as_ptr().cast();
                        // SAFETY: the name ends with a 0, and the library is loaded.
                        let at = unsafe { libc::dlsym(library, name) };
                        if at.is_null() {
                            return Err(format!("libibverbs.so.1: {}", error()));
                        }
                        // SAFETY: the library's function of this name has this type, as
                        // `infiniband/verbs.h` declares it.
                        unsafe { core::mem::transmute::<
                            *mut c_void, unsafe extern "C" fn($($argument),*) -> $result
                        >(at) }
                    },
                )*})
            }
        }
    };
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut c_void;
    ibv_free_device_list(*mut *mut c_void) -> ();
    ibv_get_device_name(*mut c_void) -> *const c_char;
    ibv_open_device(*mut c_void) -> *mut Context;
    ibv_close_device(*mut Context) -> c_int;
    ibv_query_device(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_port(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_get_async_event(*mut Context, *mut AsyncEvent) -> c_int;
    ibv_ack_async_event(*mut AsyncEvent) -> ();
    ibv_alloc_pd(*mut Context) -> *mut c_void;
    ibv_dealloc_pd(*mut c_void) -> c_int;
    ibv_reg_mr_iova(*mut c_void, *mut c_void, usize, u64, c_int) -> *mut Mr;
    ibv_dereg_mr(*mut Mr) -> c_int;
    ibv_create_comp_channel(*mut Context) -> *mut Channel;
    ibv_destroy_comp_channel(*mut Channel) -> c_int;
    ibv_create_cq(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut c_void;
    ibv_destroy_cq(*mut c_void) -> c_int;
    ibv_get_cq_event(*mut Channel, *mut *mut c_void, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut c_void, u32) -> ();
    ibv_create_qp(*mut c_void, *mut QpInitAttr) -> *mut Qp;
    ibv_modify_qp(*mut Qp, *mut QpAttr, c_int) -> c_int;
    ibv_destroy_qp(*mut Qp) -> c_int;
}

/// What the loader says of its last error.
fn error() -> String {
    // SAFETY: dlerror takes nothing.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".into();
    }
    // SAFETY: the loader's text ends with a 0, and stays until this thread calls it again.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        1.. => Err(io::Error::from_raw_os_error(result)),
        _ => Err(io::Error::last_os_error()),
    }
}

fn made<T>(result: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(result).ok_or_else(io::Error::last_os_error)
}

/// An open card.
pub(crate) struct Device {
    library: Library,
    context: NonNull<Context>,
    name: String,
}

// SAFETY: all functions of libibverbs may be called by any thread.
unsafe impl Send for Device {}
// SAFETY: and by several at once.
unsafe impl Sync for Device {}

/// What a card tells of itself.
pub(crate) struct Event {
    /// `enum ibv_event_type`.
    pub(crate) kind: u32,
    /// The number of the queue pair that it is about, of events of queue pairs.
    pub(crate) pair: u32,
    /// Of those of completion queues, which one it is about.
    queue: usize,
}

/// Where a card can be reached.
#[derive(Clone, Copy)]
pub(crate) struct Port {
    pub(crate) active: bool,
    /// `enum ibv_mtu`.
    pub(crate) mtu: u8,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
    gid_index: u8,
}

impl Device {
    /// Opens the card with a name.
    ///
    /// # Errors
    ///
    /// What it says: the library is not there, there is no such card, or it cannot be opened.
    pub(crate) fn open(name: &str) -> Result<Arc<Self>, String> {
        let library = Library::load()?;
        let mut count = 0;
        // SAFETY: the library writes one number.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(format!("list RDMA devices: {}", io::Error::last_os_error()));
        }
        let mut names = Vec::new();
        let mut found = null_mut();
        for i in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the list has as many entries as the library says, and a null one behind them.
            let entry = unsafe { list.add(i) };
            // SAFETY: as before.
            let device = unsafe { *entry };
            if device.is_null() {
                break;
            }
            // SAFETY: the device is one of the list, which is not freed yet.
            let its = unsafe { (library.ibv_get_device_name)(device) };
            if its.is_null() {
                continue;
            }
            // SAFETY: a name ends with a 0, and stays as long as the list.
            let its = unsafe { CStr::from_ptr(its) };
            if its.to_bytes() == name.as_bytes() {
                // SAFETY: as before.
                found = unsafe { (library.ibv_open_device)(device) };
                if found.is_null() {
                    return Err(format!("open {name}: {}", io::Error::last_os_error()));
                }
            }
            names.push(its.to_string_lossy().into_owned());
        }
        // SAFETY: nothing of the list is used any more; an open device does not need it.
        unsafe { (library.ibv_free_device_list)(list) };
        let Some(context) = NonNull::new(found) else {
            let all = if names.is_empty() { "none".into() } else { names.join(", ") };
            return Err(format!("there is no RDMA device {name}; there are: {all}"));
        };
        Ok(Arc::new(Self { library, context, name: name.into() }))
    }

    /// How many queue pairs, and how many completions of one queue, it can have.
    pub(crate) fn limits(&self) -> io::Result<(u32, u32)> {
        let attr = self.attributes()?;
        let number = |n: c_int| u32::try_from(n).unwrap_or(0);
        Ok((number(attr.max_qp), number(attr.max_cqe)))
    }

    /// How many READs and atomics of one queue pair it can have under way.
    pub(crate) fn reads(&self) -> io::Result<u8> {
        Ok(u8::try_from(self.attributes()?.max_qp_rd_atom).unwrap_or(u8::MAX))
    }

    fn attributes(&self) -> io::Result<DeviceAttr> {
        let mut attr = DeviceAttr::default();
        // SAFETY: the library fills one structure.
        let done = unsafe { (self.library.ibv_query_device)(self.context.as_ptr(), &raw mut attr) };
        check(done).map(|()| attr)
    }

    /// Its port as it is now. One without a GID, which it may get later, is not active: nobody
    /// reaches it.
    pub(crate) fn port(&self) -> io::Result<Port> {
        let mut attr = PortAttr::default();
        let context = self.context.as_ptr();
        // SAFETY: the library fills one structure, which has room for later ones.
        check(unsafe { (self.library.ibv_query_port)(context, PORT, &raw mut attr) })?;
        let own = self.gid();
        let (gid_index, gid) = own.unwrap_or_default();
        let mtu = u8::try_from(attr.active_mtu).unwrap_or(1).clamp(1, MTU_MAX);
        let active = attr.state == PORT_ACTIVE && own.is_some();
        Ok(Port { active, mtu, lid: attr.lid, gid, gid_index })
    }

    /// The GID that other nodes reach it by: of RoCE v2 and an IPv4 address if there is one, as
    /// that is routed; else the first of RoCE v2, else the first.
    fn gid(&self) -> Option<(u8, [u8; 16])> {
        let port = format!("/sys/class/infiniband/{}/ports/{PORT}", self.name);
        let mut best = None;
        for index in 0..=u8::MAX {
            let Ok(text) = std::fs::read_to_string(format!("{port}/gids/{index}")) else { break };
            let Some(gid) = parse_gid(text.trim()).filter(|g| *g != [0; 16]) else { continue };
            let kind = std::fs::read_to_string(format!("{port}/gid_attrs/types/{index}"));
            let is_v2 = kind.is_ok_and(|k| k.trim() == "RoCE v2");
            let is_ipv4 = gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];
            let rank = (is_v2, is_v2 && is_ipv4);
            if best.is_none_or(|(r, _, _)| rank > r) {
                best = Some((rank, index, gid));
            }
        }
        best.map(|(_, index, gid)| (index, gid))
    }

    /// The next of its events, if there is one.
    pub(crate) fn event(&self) -> Option<Event> {
        let mut event = AsyncEvent { element: null_mut(), event_type: 0 };
        let context = self.context.as_ptr();
        // SAFETY: the library fills one structure. The descriptor does not block.
        if unsafe { (self.library.ibv_get_async_event)(context, &raw mut event) } != 0 {
            return None;
        }
        let (kind, element) = (event.event_type, event.element);
        let of_pair = [EVENT_QP_FATAL, EVENT_QP_REQ_ERR, EVENT_QP_ACCESS_ERR];
        let pair = if of_pair.contains(&kind) && !element.is_null() {
            // SAFETY: the element of these events is a queue pair, which cannot be destroyed before
            // the event is acknowledged, whichever thread does that.
            unsafe { (*element.cast::<Qp>()).qp_num }
        } else {
            0
        };
        let queue = if kind == EVENT_CQ_ERR { element.addr() } else { 0 };
        // SAFETY: it is the event that the library has filled.
        unsafe { (self.library.ibv_ack_async_event)(&raw mut event) };
        Some(Event { kind, pair, queue })
    }

    fn op(&self, place: usize) -> *const c_void {
        // SAFETY: the context is open as long as `self` is there.
        unsafe { self.context.as_ref() }.ops[place]
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open as long as `self` is there.
        let descriptor = unsafe { self.context.as_ref() }.async_fd;
        // SAFETY: and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: all that hangs on the context has kept `self`, and is gone.
        unsafe { (self.library.ibv_close_device)(self.context.as_ptr()) };
    }
}

/// Reads `0000:...:0001`, as the kernel writes GIDs.
fn parse_gid(text: &str) -> Option<[u8; 16]> {
    let mut gid = [0; 16];
    let mut words = text.split(':');
    for place in gid.chunks_exact_mut(2) {
        place.copy_from_slice(&u16::from_str_radix(words.next()?, 16).ok()?.to_be_bytes());
    }
    words.next().is_none().then_some(gid)
}

/// A protection domain of the card: queue pairs of it reach the regions of it, and no others.
pub(crate) struct Domain {
    device: Arc<Device>,
    pd: NonNull<c_void>,
}

// SAFETY: all functions of libibverbs may be called by any thread, and by several at once.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(device: &Arc<Device>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let pd = made(unsafe { (device.library.ibv_alloc_pd)(device.context.as_ptr()) })?;
        Ok(Arc::new(Self { device: Arc::clone(device), pd }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: all that hangs on it has kept `self`, and is gone.
        unsafe { (self.device.library.ibv_dealloc_pd)(self.pd.as_ptr()) };
    }
}

/// Memory that the card reads and writes by itself.
pub(crate) struct Region {
    domain: Arc<Domain>,
    mr: NonNull<Mr>,
    memory: Arc<SharedMemory>,
    /// The address by which the card knows its first byte, and how many it has.
    pub(crate) iova: u64,
    pub(crate) length: u64,
}

/// `enum ibv_access_flags`.
pub(crate) const ACCESS_LOCAL_WRITE: u32 = 1;
pub(crate) const ACCESS_REMOTE_WRITE: u32 = 2;
/// With those to read by a peer, and to have atomics done by it.
const ACCESS_ALL: u32 = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | 4 | 8;

// SAFETY: all functions of libibverbs may be called by any thread.
unsafe impl Send for Region {}
// SAFETY: and by several at once. Its bytes are copied by whoever has the baton.
unsafe impl Sync for Region {}

impl Region {
    /// Registers memory that no peer may reach by itself.
    pub(crate) fn new(domain: &Arc<Domain>, memory: Arc<SharedMemory>) -> io::Result<Self> {
        let (iova, length) = (memory.as_ptr().as_ptr() as u64, memory.len() as u64);
        Self::register(domain, memory, (0, length), iova, ACCESS_LOCAL_WRITE)
    }

    /// Registers a part of memory, from an offset on and so long, that the card is to know by
    /// addresses of the caller's choice, with these rights.
    pub(crate) fn register(
        domain: &Arc<Domain>,
        memory: Arc<SharedMemory>,
        (at, length): (u64, u64),
        iova: u64,
        access: u32,
    ) -> io::Result<Self> {
        let wrong = || io::Error::from_raw_os_error(libc::EINVAL);
        let start = usize::try_from(at).map_err(|_| wrong())?;
        let bytes = usize::try_from(length).map_err(|_| wrong())?;
        if start.checked_add(bytes).is_none_or(|end| end > memory.len()) {
            return Err(wrong());
        }
        // SAFETY: the part lies in the mapping.
        let start = unsafe { memory.as_ptr().byte_add(start) }.as_ptr().cast();
        let access = access & ACCESS_ALL;
        let access = c_int::try_from(access).unwrap_or(0);
        let register = domain.device.library.ibv_reg_mr_iova;
        // SAFETY: the memory is mapped as long as it is kept here, after the card has let it go.
        let mr = unsafe { register(domain.pd.as_ptr(), start, bytes, iova, access) };
        Ok(Self { domain: Arc::clone(domain), mr: made(mr)?, memory, iova, length })
    }

    /// Whether it has all of these bytes.
    pub(crate) fn covers(&self, address: u64, length: u64) -> bool {
        let offset = address.checked_sub(self.iova);
        offset.and_then(|o| o.checked_add(length)).is_some_and(|end| end <= self.length)
    }

    /// The key by which peers name it.
    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: the region is registered as long as `self` is there.
        unsafe { self.mr.as_ref() }.rkey
    }

    fn lkey(&self) -> u32 {
        // SAFETY: the region is registered as long as `self` is there.
        unsafe { self.mr.as_ref() }.lkey
    }

    /// A part of it for a work request, as far as it lies in it.
    fn part(&self, at: usize, length: usize) -> Sge {
        let at = at.min(self.memory.len());
        let length = length.min(self.memory.len() - at);
        // SAFETY: the part lies in the mapping.
        let start = unsafe { self.memory.as_ptr().byte_add(at) };
        let length = u32::try_from(length).unwrap_or(0);
        Sge { addr: start.as_ptr() as u64, length, lkey: self.lkey() }
    }

    /// Copies bytes into it, as many as there is room for.
    pub(crate) fn fill(&self, at: usize, bytes: &[u8]) {
        let part = self.part(at, bytes.len());
        // SAFETY: the part lies in the mapping, and `bytes` has as many. Nobody but the card and
        // this thread, which has the baton, has the memory.
        unsafe { ptr::copy(bytes.as_ptr(), part.addr as *mut u8, part.length as usize) };
    }

    /// Copies bytes out of it.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) {
        let part = self.part(at, bytes.len());
        // SAFETY: as in `fill`, the other way round.
        unsafe { ptr::copy(part.addr as *const u8, bytes.as_mut_ptr(), part.length as usize) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: it is registered, and not used here any more.
        unsafe { (self.domain.device.library.ibv_dereg_mr)(self.mr.as_ptr()) };
    }
}

/// A completion queue of the card, with a channel that tells of completions.
pub(crate) struct Completions {
    device: Arc<Device>,
    channel: NonNull<Channel>,
    cq: NonNull<c_void>,
}

// SAFETY: all functions of libibverbs may be called by any thread.
unsafe impl Send for Completions {}
// SAFETY: and by several at once.
unsafe impl Sync for Completions {}

/// What the card has done.
#[derive(Clone, Copy, Default)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    /// `enum ibv_wc_status`.
    pub(crate) status: u32,
    pub(crate) length: u32,
    /// Of receive requests: `enum ibv_wc_opcode`, `enum ibv_wc_flags`, and what came with it.
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
}

impl Completions {
    pub(crate) fn new(device: &Arc<Device>, entries: u32) -> io::Result<Arc<Self>> {
        let (library, context) = (&device.library, device.context.as_ptr());
        // SAFETY: the context is open.
        let channel = made(unsafe { (library.ibv_create_comp_channel)(context) })?;
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: context and channel are there.
        let cq =
            unsafe { (library.ibv_create_cq)(context, entries, null_mut(), channel.as_ptr(), 0) };
        let cq = made(cq).inspect_err(|_| {
            // SAFETY: nothing uses the channel.
            unsafe { (library.ibv_destroy_comp_channel)(channel.as_ptr()) };
        })?;
        Ok(Arc::new(Self { device: Arc::clone(device), channel, cq }))
    }

    /// Takes what the channel has told, and has it tell of the next completion.
    pub(crate) fn arm(&self) -> io::Result<()> {
        let (mut cq, mut user) = (null_mut(), null_mut());
        let library = &self.device.library;
        for _ in 0..CHANNEL_EVENTS {
            let channel = self.channel.as_ptr();
            // SAFETY: the library writes two pointers. The descriptor does not block.
            if unsafe { (library.ibv_get_cq_event)(channel, &raw mut cq, &raw mut user) } != 0 {
                break;
            }
            // SAFETY: the event was of the only queue that the channel has.
            unsafe { (library.ibv_ack_cq_events)(self.cq.as_ptr(), 1) };
        }
        // SAFETY: the entry has this type, and a provider always has it.
        let arm = unsafe {
            core::mem::transmute::<*const c_void, Arm>(self.device.op(layout::REQ_NOTIFY_CQ))
        };
        // SAFETY: the queue is there.
        check(unsafe { arm(self.cq.as_ptr(), 0) })
    }

    /// Whether an event is about it.
    pub(crate) fn is_of(&self, event: &Event) -> bool {
        event.queue == self.cq.as_ptr().addr()
    }

    /// Takes completions, as many as there are, and as there is room for.
    pub(crate) fn poll(&self, into: &mut [Completion; 32]) -> usize {
        // SAFETY: the entry has this type, and a provider always has it.
        let poll =
            unsafe { core::mem::transmute::<*const c_void, Poll>(self.device.op(layout::POLL_CQ)) };
        let mut all = [Wc::default(); 32];
        // SAFETY: the queue is there, and the library fills at most 32 structures.
        let got = unsafe { poll(self.cq.as_ptr(), 32, all.as_mut_ptr()) };
        let got = usize::try_from(got).unwrap_or(0).min(all.len());
        for (into, wc) in into.iter_mut().zip(&all[..got]) {
            *into = Completion {
                id: wc.wr_id,
                status: if wc.status > STATUS_MAX { ibv::WC_GENERAL_ERR } else { wc.status },
                length: wc.byte_len,
                opcode: wc.opcode,
                flags: wc.wc_flags,
                imm: wc.imm_data,
            };
        }
        got
    }
}

impl AsFd for Completions {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is there as long as `self`.
        let descriptor = unsafe { self.channel.as_ref() }.fd;
        // SAFETY: and so is its descriptor.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: queue pairs have kept `self`, and are gone.
        unsafe { (self.device.library.ibv_destroy_cq)(self.cq.as_ptr()) };
        // SAFETY: its only queue is gone.
        unsafe { (self.device.library.ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

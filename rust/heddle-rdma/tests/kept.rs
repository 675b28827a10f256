//! What a program does with memory that the router has given it: it keeps it, and makes holes in
//! it. Attacks as in `attacks.rs`.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::any::Any;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use shared_ring::SharedMemory;
use support::{Router, attacked, eventually, node, punch, send};
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::Reason;
use verbs_protocol::{abi, ibv};

/// What an endpoint may have, in MiB, and bytes of what it asks for at a time.
const QUOTA: u32 = 8;
const PIECE: usize = 2 << 20;
/// Pieces that are more than the quota by far.
const MANY: usize = 20;

/// How a program keeps memory.
#[derive(Clone, Copy, Debug)]
enum Way {
    Descriptor,
    Mapping,
    /// A descriptor that is good for nothing but to open the file again.
    Path,
    /// A message that nobody receives.
    Message,
}

const WAYS: [Way; 4] = [Way::Descriptor, Way::Mapping, Way::Path, Way::Message];

/// Keeps the memory of a file.
fn keep(way: Way, file: OwnedFd) -> Box<dyn Any> {
    match way {
        Way::Descriptor => Box::new(file),
        Way::Mapping => {
            let length =
                usize::try_from(File::from(file.try_clone().unwrap()).metadata().unwrap().len());
            // Without the descriptor: that of the mapping is the kernel's.
            Box::new(Mapping::of(&file, length.unwrap()))
        }
        Way::Path => {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            Box::new(OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap())
        }
        Way::Message => {
            let (from, to) = std::os::unix::net::UnixDatagram::pair().unwrap();
            send(&from.into(), b"x", &[file.as_raw_fd()]).unwrap();
            Box::new(to)
        }
    }
}

/// A mapping of a file that nobody has open any more.
struct Mapping(*mut libc::c_void, usize);

impl Mapping {
    fn of(file: &OwnedFd, length: usize) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (null, fd) = (core::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: the kernel picks addresses that nothing uses.
        let at = unsafe { libc::mmap(null, length, protection, libc::MAP_SHARED, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: as many bytes are mapped.
        unsafe { at.cast::<u8>().write_bytes(1, length) };
        Self(at, length)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own.
        unsafe { libc::munmap(self.0, self.1) };
    }
}

/// What has the router forget memory.
#[derive(Clone, Copy, Debug)]
enum End {
    Destroy,
    Close,
    /// Memory of a ring.
    Ring,
}

/// One piece of memory that is the program's and no more the router's; none if it is refused.
fn piece(router: &Router, way: Way, end: End) -> Option<Box<dyn Any>> {
    let contexts = || router.account(1).used[0];
    let mut device = router.open(1);
    let made = if let End::Ring = end {
        let cqe = u32::try_from(PIECE / 64).unwrap();
        device.try_cq(cqe, 0).map(|cq| {
            let file = cq.memory.as_fd().try_clone_to_owned().unwrap();
            device.object(abi::VERBS_DESTROY_CQ, cq.handle).unwrap();
            keep(way, file)
        })
    } else {
        device.create_memory(PIECE as u64).map(|(memory, file)| {
            if let End::Destroy = end {
                device.object(abi::VERBS_DESTROY_MEMORY, memory).unwrap();
            }
            keep(way, file)
        })
    };
    drop(device);
    eventually("the end of the device", || (contexts() == 0).then_some(()));
    made.inspect_err(|errno| assert_eq!(*errno, libc::ENOMEM)).ok()
}

/// Has as much memory as it gets. Says whether that is more than the quota.
fn keeps(router: &Router) -> bool {
    router.add(1, Limits { memory_mib: QUOTA, ..Limits::default() });
    let mut gained = false;
    for end in [End::Destroy, End::Close, End::Ring] {
        for way in WAYS {
            let refused = router.times(1, Reason::QuotaMemory);
            let kept: Vec<_> = (0..MANY).map_while(|_| piece(router, way, end)).collect();
            let more = kept.len() * PIECE > QUOTA as usize * 1024 * 1024;
            assert_eq!(more, kept.len() == MANY, "{way:?} {end:?}");
            assert_eq!(u64::from(!more), router.times(1, Reason::QuotaMemory) - refused);
            gained |= more;
            drop(kept);
            // It may have all of it again.
            eventually("the end of the memory", || {
                let used = router.account(1).used;
                (used[8] == 0 && used[9] == 0).then_some(())
            });
        }
    }
    gained
}

/// A program lets the router forget its memory, and keeps it.
#[test]
fn memory_that_a_program_keeps_counts() {
    attacked("kept", keeps);
}

/// Small pieces take memory of the kernel's that is more than their own.
#[test]
fn pieces_that_a_program_keeps_are_few() {
    let router = node();
    let mut device = router.open(1);
    let mut kept = Vec::new();
    let errno = eventually("an end", || {
        let made = device.try_cq(1, 0).map(|cq| {
            kept.push(cq.memory.as_fd().try_clone_to_owned().unwrap());
            device.object(abi::VERBS_DESTROY_CQ, cq.handle).unwrap();
        });
        made.err()
    });
    assert_eq!((errno, kept.len()), (libc::ENOMEM, 1025));
    // Others are not concerned.
    router.open(2).cq(1, 0);
    kept.pop();
    device.cq(1, 0);
}

/// Makes holes in all kinds of memory that the router looks at. Says whether that can be.
fn holes(router: &Router) -> bool {
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    let (mut a, _b) = support::pair_of([router; 2], [1, 2], ibv::QPT_RC, 64, |_| ());
    let (_, _, mapped) = a.device.shared(a.pd, PIECE as u64);
    let all = [&mapped, &a.qp.memory, &a.sends.memory, &a.receives.memory];
    let made = all.map(|memory| punch(memory.as_fd(), memory.len()));
    assert!(made.iter().all(|m| *m == made[0]), "{made:?}");
    assert!(matches!(made[0], Ok(()) | Err(libc::EPERM)));
    made[0].is_ok()
}

/// Who touches memory in which a hole is being made waits for it, and may have others wait.
#[test]
fn nobody_makes_holes_in_memory_that_the_router_looks_at() {
    attacked("holes", holes);
}

/// A program that keeps the router from closing its memory to holes cannot use it.
#[test]
fn memory_that_stays_open_to_holes_is_not_looked_at() {
    let router = node();
    let mut device = router.open(1);
    let pd = device.pd();
    let (memory, file) = device.create_memory(PIECE as u64).unwrap();
    let seal = |file: &dyn AsRawFd| {
        // SAFETY: this takes numbers.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SEAL) }
    };
    assert_eq!(seal(&file), 0);
    let head = device.head(abi::VERBS_REG_MR);
    let request =
        abi::verbs_reg_mr_request { head, length: 4096, memory, pd, ..Default::default() };
    let refused = device.ask::<abi::verbs_reg_mr_reply>(&request);
    assert_eq!(refused.err(), Some(libc::EPERM));
    let (sends, receives) = (device.cq(1, 0), device.cq(1, 0));
    assert_eq!(seal(&sends.memory.as_fd()), 0);
    let head = device.head(abi::VERBS_CREATE_QP);
    let request = abi::verbs_create_qp_request {
        head,
        pd,
        send_cq: sends.handle,
        recv_cq: receives.handle,
        type_: ibv::QPT_RC,
        ..Default::default()
    };
    let refused = device.ask::<abi::verbs_create_qp_reply>(&request);
    assert_eq!(refused.err(), Some(libc::EPERM));
    // It is of no use for anything else.
    device.object(abi::VERBS_DESTROY_MEMORY, memory).unwrap();
    assert!(SharedMemory::open(file, PIECE).is_ok());
}

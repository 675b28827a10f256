//! Memory of the router's making that is part of a region, and what programs may do with it.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use std::os::fd::AsRawFd;

use shared_ring::SharedMemory;
use support::{Device, End, Router, node, nodes, pair, punch, readable, request, sending, sge};
use verbs_protocol::{abi, ibv};

/// Registers `bytes`, of which the memory begins `offset` bytes before the first one.
fn register(
    device: &mut Device,
    pd: u32,
    bytes: &[u8],
    memory: u32,
    offset: i64,
) -> Result<u32, i32> {
    let head = device.head(abi::VERBS_REG_MR);
    let address = bytes.as_ptr() as u64;
    let request = abi::verbs_reg_mr_request {
        head,
        address,
        length: bytes.len() as u64,
        iova: address,
        memory,
        memory_offset: offset.cast_unsigned(),
        pd,
        access: 15,
        ..Default::default()
    };
    device.ask::<abi::verbs_reg_mr_reply>(&request).map(|(reply, _)| reply.lkey)
}

fn create(device: &mut Device, length: usize) -> (u32, std::sync::Arc<SharedMemory>) {
    let (memory, fd) = device.create_memory(length as u64).unwrap();
    (memory, SharedMemory::open(fd, length).unwrap())
}

fn bytes_of(memory: &SharedMemory) -> Vec<u8> {
    let at = |i| {
        // SAFETY: `i` lies in the memory, which is mapped.
        let place = unsafe { memory.as_ptr().byte_add(i) };
        // SAFETY: as above.
        unsafe { place.read_volatile() }
    };
    (0..memory.len()).map(at).collect()
}

/// Writes `from` to all of what the other end registered.
fn write(a: &mut End, from: &[u8], own: u32, to: &[u8], key: u32) {
    let head = abi::verbs_send {
        remote_address: to.as_ptr() as u64,
        rkey: key,
        ..request(ibv::WR_RDMA_WRITE, 1)
    };
    a.send(&sending(head, &[sge(from, own)]));
    assert_eq!(a.sends.result(), (1, ibv::WC_SUCCESS));
}

#[test]
fn a_region_is_in_memory_where_it_lies_in_it_and_else_in_the_program() {
    let router = node();
    regions_of_parts([&router, &router]);
}

#[test]
fn it_is_so_between_nodes() {
    let (here, there) = nodes();
    regions_of_parts([&here, &there]);
}

fn regions_of_parts(routers: [&Router; 2]) {
    let (mut a, mut b) = pair(routers, ibv::QPT_RC, 64, |_| ());
    let counted: Vec<u8> = (0..200_000_u32).map(|i| i.to_le_bytes()[0]).collect();
    let mut from = counted.clone();
    let own = a.device.register(a.pd, &mut from, 15).unwrap();
    let (memory, shared) = create(&mut b.device, 65536);
    // Where the memory begins in the region, and how many bytes of it there are.
    for (offset, length) in [(0_i64, 65536), (100, 60000), (-1000, 80_000), (5000, 200_000)] {
        let to = vec![0_u8; length];
        let key = register(&mut b.device, b.pd, &to, memory, offset).unwrap();
        write(&mut a, &from[..length], own, &to, key);
        let mapped = bytes_of(&shared);
        for (i, wanted) in counted[..length].iter().enumerate() {
            let at = i64::try_from(i).unwrap() + offset;
            match usize::try_from(at).ok().and_then(|at| mapped.get(at)) {
                Some(there) => assert_eq!((there, to[i]), (wanted, 0), "{offset} {i}"),
                None => assert_eq!(&to[i], wanted, "{offset} {i}"),
            }
        }
        // And back, into another region of the same kind.
        let head = abi::verbs_send {
            remote_address: to.as_ptr() as u64,
            rkey: key,
            ..request(ibv::WR_RDMA_READ, 2)
        };
        from.fill(0);
        a.send(&sending(head, &[sge(&from[..length], own)]));
        assert_eq!(a.sends.result(), (2, ibv::WC_SUCCESS));
        assert_eq!(from[..length], counted[..length]);
        from.copy_from_slice(&counted);
        b.device.object(abi::VERBS_DEREG_MR, key).unwrap();
    }
    b.device.object(abi::VERBS_DESTROY_MEMORY, memory).unwrap();
}

/// Writes bytes to all of the memory that show where they are from.
fn fill(memory: &SharedMemory) {
    for (i, byte) in (0..memory.len()).zip((0_u8..=250).cycle()) {
        // SAFETY: `i` lies in the memory, which is mapped and this test's own.
        let place = unsafe { memory.as_ptr().byte_add(i) };
        // SAFETY: as above.
        unsafe { place.write_volatile(byte) };
    }
}

/// What is sent out of mapped memory faster than the connection takes it arrives in order.
#[test]
fn many_messages_of_mapped_memory_arrive_whole() {
    let (here, there) = nodes();
    let (mut a, mut b) = pair([&here, &there], ibv::QPT_RC, 64, |_| ());
    let (_, own, from) = a.device.shared(a.pd, 1 << 20);
    let mut to = vec![0_u8; 1 << 20];
    let key = b.device.register(b.pd, &mut to, 15).unwrap();
    fill(&from);
    let sent = bytes_of(&from);
    for round in 0..40_usize {
        to.fill(0);
        // Large ones and small ones: the last one says that all are there.
        for (i, length) in [1 << 20, 1, 5000, 4095, 300_000].into_iter().enumerate() {
            let at = round * 7;
            let length = length.min((1 << 20) - at);
            let head = abi::verbs_send {
                remote_address: to[at..].as_ptr() as u64,
                rkey: key,
                ..request(ibv::WR_RDMA_WRITE, i as u64)
            };
            let entry = (at as u64, u32::try_from(length).unwrap(), own);
            a.send(&sending(head, &[entry]));
        }
        for i in 0..5 {
            assert_eq!(a.sends.result(), (i, ibv::WC_SUCCESS));
        }
        assert_eq!(to[round * 7..], sent[round * 7..]);
    }
}

/// READs whose bytes are in mapped memory are answered several at a time, as far as there is room:
/// large ones and small ones, one that ends with too few bytes for that, and one that is wrong.
#[test]
fn many_reads_of_mapped_memory_arrive_whole() {
    let (here, there) = nodes();
    let (mut a, mut b) = pair([&here, &there], ibv::QPT_RC, 64, |_| ());
    let (_, key, from) = b.device.shared(b.pd, 1 << 20);
    fill(&from);
    let sent = bytes_of(&from);
    let lengths = [1 << 20, 1, 0, 5000, 8192, 65_536, 8192, 4095, 65_537, 300_000];
    let mut to = vec![0_u8; 2 << 20];
    let own = a.device.register(a.pd, &mut to, 15).unwrap();
    let head = |id, at: usize| abi::verbs_send {
        remote_address: at as u64,
        rkey: key,
        ..request(ibv::WR_RDMA_READ, id)
    };
    for round in 0..20_usize {
        to.fill(0);
        let (mut begin, mut id) = (0, 0);
        for length in lengths {
            let length = length.min((1 << 20) - round * 7);
            a.send(&sending(head(id, round * 7), &[sge(&to[begin..begin + length], own)]));
            (begin, id) = (begin + length, id + 1);
        }
        for i in 0..id {
            assert_eq!(a.sends.result(), (i, ibv::WC_SUCCESS), "{round}");
        }
        begin = 0;
        for length in lengths {
            let length = length.min((1 << 20) - round * 7);
            assert!(to[begin..begin + length] == sent[round * 7..round * 7 + length], "{length}");
            begin += length;
        }
        assert!(to[begin..].iter().all(|byte| *byte == 0));
    }
    let mut all = sending(head(0, 0), &[sge(&to[..100_000], own)]);
    all.append(&mut sending(head(1, (1 << 20) - 5000), &[sge(&to[..5001], own)]));
    a.send(&all);
    assert_eq!(a.sends.result(), (0, ibv::WC_SUCCESS));
    assert_eq!(a.sends.result(), (1, ibv::WC_REM_ACCESS_ERR));
}

/// Requests that are good go, together, before one with a wrong key or a wrong opcode. One that is
/// no request at all ends the queue pair at once.
#[test]
fn what_is_wrong_among_messages_of_mapped_memory_fails() {
    for wrong in 0..3 {
        let (here, there) = nodes();
        let (mut a, b) = pair([&here, &there], ibv::QPT_RC, 300_000, |_| ());
        let (_, own, _from) = a.device.shared(a.pd, 102_400);
        let mut all = Vec::new();
        for id in 0..4_u64 {
            let mut head = abi::verbs_send {
                remote_address: b.buffer.as_ptr() as u64 + 100_000 * (id % 3),
                rkey: b.key,
                ..request(ibv::WR_RDMA_WRITE, id)
            };
            let mut key = own;
            match (id, wrong) {
                (3, 0) => key ^= 1 << 30,
                (3, 1) => head.opcode = 99,
                (3, 2) => head.flags = 8,
                _ => {}
            }
            all.append(&mut sending(head, &[(0, 100_000, key)]));
        }
        a.send(&all);
        let mut ended = [0; 4].map(|_| a.sends.result());
        if wrong == 2 {
            ended.sort_unstable();
        } else {
            assert!(ended[..3].iter().all(|(_, status)| *status == ibv::WC_SUCCESS), "{wrong}");
        }
        assert_eq!(ended.map(|(id, _)| id), [0, 1, 2, 3], "{wrong}");
        assert_ne!(ended[3].1, ibv::WC_SUCCESS, "{wrong}");
    }
}

#[test]
fn memory_in_which_a_region_does_not_lie_is_refused() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 64, |_| ());
    let (memory, _shared) = create(&mut b.device, 8192);
    let (other, _) = create(&mut a.device, 8192);
    let bytes = vec![0_u8; 4096];
    for offset in [8192, 8193, 1 << 40, i64::MAX, i64::MIN, -4096, -5000, -(1 << 40)] {
        let refused = register(&mut b.device, b.pd, &bytes, memory, offset);
        assert_eq!(refused, Err(libc::EINVAL), "{offset}");
    }
    for unknown in [other, memory + 1, u32::MAX] {
        let refused = register(&mut b.device, b.pd, &bytes, unknown, 0);
        assert_eq!(refused, Err(libc::EINVAL), "{unknown}");
    }
    // What is not in the memory has to be in the program.
    let head = b.device.head(abi::VERBS_REG_MR);
    let request = abi::verbs_reg_mr_request {
        head,
        address: 4096,
        length: 16384,
        iova: 4096,
        memory,
        memory_offset: 0,
        pd: b.pd,
        access: 15,
        ..Default::default()
    };
    let refused = b.device.ask::<abi::verbs_reg_mr_reply>(&request);
    assert_eq!(refused.unwrap_err(), libc::EFAULT);
    b.device.object(abi::VERBS_DESTROY_MEMORY, memory).unwrap();
}

#[test]
fn memory_that_is_written_meanwhile_is_copied_all_the_same() {
    const LENGTH: usize = 1 << 20;
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, LENGTH, |_| ());
    let (memory, fd) = b.device.create_memory(LENGTH as u64).unwrap();
    let shared = SharedMemory::open(fd.try_clone().unwrap(), LENGTH).unwrap();
    // What the program does with it before it is registered is its own affair.
    assert_eq!(punch(&fd, LENGTH), Ok(()));
    // SAFETY: these take numbers.
    let [shrunk, grown] =
        [4096, 1 << 21].map(|size| unsafe { libc::ftruncate(fd.as_raw_fd(), size) });
    assert_eq!((shrunk, grown), (-1, -1));
    let bytes = vec![0_u8; LENGTH];
    let key = register(&mut b.device, b.pd, &bytes, memory, 0).unwrap();
    assert_eq!(punch(&fd, LENGTH), Err(libc::EPERM));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                // SAFETY: as many bytes are mapped. Nobody looks at them.
                unsafe { shared.as_ptr().write_bytes(9, LENGTH) };
            }
        });
        let (from, own) = (a.buffer.clone(), a.key);
        for _ in 0..200 {
            let head = abi::verbs_send {
                remote_address: bytes.as_ptr() as u64,
                rkey: key,
                ..request(ibv::WR_RDMA_WRITE, 3)
            };
            a.send(&sending(head, &[sge(&a.buffer, own)]));
            assert_eq!(a.sends.result(), (3, ibv::WC_SUCCESS));
        }
        assert_eq!(a.buffer, from);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(!readable(&b.device.events, std::time::Duration::ZERO));
}

#[test]
fn a_userfaultfd_can_be_made_by_what_the_router_gives() {
    let router = node();
    let mut a = router.open(1);
    let request = abi::verbs_plain_request { head: a.head(abi::VERBS_OPEN_USERFAULTFD) };
    match a.ask::<abi::verbs_reply>(&request) {
        Ok((_, fds)) => {
            // SAFETY: this takes numbers; the descriptor that it makes is closed with the process.
            let made = unsafe { libc::ioctl(fds[0].as_raw_fd(), 0xaa00, libc::O_CLOEXEC) };
            assert!(made >= 0);
        }
        Err(errno) => {
            assert_eq!(errno, libc::EOPNOTSUPP);
            assert!(!std::path::Path::new("/dev/userfaultfd").exists());
        }
    }
}

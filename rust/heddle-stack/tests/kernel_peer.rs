//! A module whose tenant has a TUN or TAP device, and the kernel's TCP as its peer. As root, in a
//! network namespace that ends with the test.

mod support;

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;

use heddle_stack::abi::*;
use support::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 9, 1];
const GATEWAY: [u8; 6] = [2, 0, 0, 0, 9, 2];

#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// A TUN or TAP device of this namespace, as the agent makes it.
fn device(ethernet: bool) -> OwnedFd {
    const NEW: libc::c_ulong = 0x4004_54ca;
    const OFFLOAD: libc::c_ulong = 0x4004_54d0;
    let file: File =
        OpenOptions::new().read(true).write(true).open("/dev/net/tun").expect("open /dev/net/tun");
    let kind = if ethernet { libc::IFF_TAP } else { libc::IFF_TUN };
    let flags = u16::try_from(kind | libc::IFF_NO_PI | libc::IFF_VNET_HDR).unwrap();
    let mut request = InterfaceRequest { name: [0; 16], flags, rest: [0; 22] };
    request.name[..3].copy_from_slice(b"hs1");
    // SAFETY: TUNSETIFF reads and writes one struct ifreq, which has 40 bytes.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), NEW, &raw mut request) };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    let offloads: libc::c_ulong = 1 | 2 | 4; // TUN_F_CSUM, _TSO4, _TSO6
    // SAFETY: TUNSETOFFLOAD takes a number.
    let set = unsafe { libc::ioctl(file.as_raw_fd(), OFFLOAD, offloads) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    file.into()
}

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(done.success(), "ip {arguments}");
}

/// Runs this in a namespace that has a module's tenant 1 at the device hs1, at 10.9.0.1 and
/// `fd00:9::1`, and the kernel at 10.9.0.2 and `fd00:9::2`.
fn in_namespace(ethernet: bool, test: impl FnOnce(Module) + Send + 'static) {
    // SAFETY: geteuid touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: a network namespace needs root");
        return;
    }
    let thread = std::thread::spawn(move || {
        // SAFETY: unshare takes a number; the thread ends with the namespace.
        let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(left, 0, "{}", std::io::Error::last_os_error());
        let device = device(ethernet);
        ip("addr add 10.9.0.2/24 dev hs1");
        ip("addr add fd00:9::2/64 dev hs1 nodad");
        if ethernet {
            ip("link set hs1 address 02:00:00:00:09:02");
        }
        ip("link set hs1 up");
        if ethernet {
            ip("neigh add 10.9.0.1 lladdr 02:00:00:00:09:01 dev hs1 nud permanent");
            ip("neigh add fd00:9::1 lladdr 02:00:00:00:09:01 dev hs1 nud permanent");
        }
        let mut module = Module::start();
        let mut one = tenant(1);
        (one.offloads, one.link) = (1, u32::from(ethernet));
        (one.mac, one.gateway) = (MAC, GATEWAY);
        module.tenant(one, device);
        test(module);
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Writes all bytes and ends its side, while it reads all that the other side writes.
fn exchange_tcp(stream: &TcpStream, bytes: &[u8]) -> Vec<u8> {
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (&*stream).write_all(bytes).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        (&*stream).read_to_end(&mut got).unwrap();
        got
    })
}

fn both_ways(ethernet: bool) {
    in_namespace(ethernet, |mut module| {
        let (there, back) = (pattern(10 << 20, 1), pattern(10 << 20, 2));
        for kernel in ["10.9.0.2", "fd00:9::2"] {
            let listener = TcpListener::bind((kernel, 0)).unwrap();
            let to = at(kernel, listener.local_addr().unwrap().port());
            let (id, program) =
                module.client.connect(1, to, stack_options::default()).unwrap().unwrap();
            let (stream, _) = listener.accept().unwrap();
            std::thread::scope(|scope| {
                let far = scope.spawn(|| exchange_tcp(&stream, &back));
                assert!(exchange(&program, &there) == back);
                assert!(far.join().unwrap() == there);
            });
            let end = module.client.ended(id).unwrap();
            assert_eq!((end.head.error, end.bytes_sent), (0, 10 << 20));
            assert!(end.rtt > 0, "{end:?}");
        }
        for own in ["10.9.0.1", "fd00:9::1"] {
            let (listener, address) = module.client.listen(1, at("::", 0), 0, 16).unwrap().unwrap();
            let stream = TcpStream::connect((own, address.port)).unwrap();
            let (accepted, program) = module.client.accept(listener).unwrap();
            assert_eq!(accepted.remote.port, stream.local_addr().unwrap().port());
            std::thread::scope(|scope| {
                let far = scope.spawn(|| exchange_tcp(&stream, &back));
                assert!(exchange(&program, &there) == back);
                assert!(far.join().unwrap() == there);
            });
        }
        let stats = module.client.stats(1).unwrap();
        assert_eq!(stats.drop_checksum + stats.drop_malformed + stats.drop_device, 0, "{stats:?}");
        // Large segments, or it would be 30,000.
        assert!(stats.segments_received < 20_000, "{}", stats.segments_received);
    });
}

#[test]
fn ten_megabytes_go_both_ways_by_a_tun_device() {
    both_ways(false);
}

#[test]
fn ten_megabytes_go_both_ways_by_a_tap_device() {
    both_ways(true);
}

#[test]
fn the_kernel_is_refused_and_refuses() {
    in_namespace(true, |mut module| {
        let err = TcpStream::connect(("10.9.0.1", 81)).unwrap_err();
        assert_eq!(err.kind(), std::io::ErrorKind::ConnectionRefused);
        let err = module.client.connect(1, at("10.9.0.2", 81), stack_options::default()).unwrap();
        assert_eq!(err.unwrap_err(), libc::ECONNREFUSED);
    });
}

#[test]
fn a_reset_of_the_kernel_is_the_programs() {
    in_namespace(true, |mut module| {
        let listener = TcpListener::bind(("10.9.0.2", 0)).unwrap();
        let to = at("10.9.0.2", listener.local_addr().unwrap().port());
        let (id, program) =
            module.client.connect(1, to, stack_options::default()).unwrap().unwrap();
        let (stream, _) = listener.accept().unwrap();
        (&program).write_all(b"left unread").unwrap();
        eventually("the data", || {
            let info = module.client.info(1, id).unwrap().unwrap();
            (info.bytes_sent == 11).then_some(())
        });
        drop(stream);
        assert_eq!(module.client.ended(id).unwrap().head.error, libc::ECONNRESET);
        program.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        let err = (&program).read(&mut [0]).unwrap_err();
        assert_eq!(err.kind(), std::io::ErrorKind::ConnectionReset);
    });
}

#[test]
fn the_kernels_peer_is_gone_with_the_module() {
    in_namespace(true, |mut module| {
        let (listener, address) = module.client.listen(1, at("::", 0), 0, 16).unwrap().unwrap();
        let _stream = TcpStream::connect(("10.9.0.1", address.port)).unwrap();
        let (_, program) = module.client.accept(listener).unwrap();
        module.kill();
        let err = (&program).read(&mut [0]).unwrap_err();
        assert_eq!(err.kind(), std::io::ErrorKind::ConnectionReset);
        // Its device is gone, so that nothing leads there any more.
        eventually("the end of the device", || {
            let found = Command::new("ip").args(["link", "show", "hs1"]).output().unwrap();
            (!found.status.success()).then_some(())
        });
    });
}

//! A module whose tenant has a TUN or TAP device, and the kernel's TCP as its peer. As root, in a
//! network namespace that ends with the test.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Command;

use heddle_stack::abi::*;
use support::namespace::in_namespace;
use support::*;

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

/// Packets that the module has written to the device.
fn written() -> u64 {
    let all = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    let line = all.lines().find_map(|l| l.trim().strip_prefix("hs1:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
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
            let before = written();
            std::thread::scope(|scope| {
                let far = scope.spawn(|| exchange_tcp(&stream, &back));
                assert!(exchange(&program, &there) == back);
                assert!(far.join().unwrap() == there);
            });
            // It would be 7,200, and acknowledgements.
            let packets = written() - before;
            assert!(packets < 3600, "{packets} packets to {kernel}");
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

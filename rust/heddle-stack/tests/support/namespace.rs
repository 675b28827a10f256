//! A network namespace of a test's own, with a device between a module and the kernel's TCP.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;

use super::{Module, tenant};

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
pub(crate) fn in_namespace(ethernet: bool, test: impl FnOnce(Module) + Send + 'static) {
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

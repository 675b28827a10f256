//! Modules as processes, the agent's side of them, and links between their tenants' devices.

#![allow(dead_code, reason = "each test takes what it needs")]

pub(crate) mod flood;
pub(crate) mod namespace;

use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use heddle_stack::abi::{STACK_BEGIN, STACK_END, stack_head, stack_options, stack_tenant};
use heddle_stack::client::Client;
use smoltcp::wire::IpEndpoint;

/// How long a test waits before it says that nothing comes any more.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits for a condition.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "{what} did not come");
        std::thread::yield_now();
    }
}

/// A module, which ends with its test.
pub(crate) struct Module {
    process: Child,
    pub(crate) path: PathBuf,
    pub(crate) client: Client,
}

/// The module's program: this crate's, or another one that speaks the protocol.
fn program() -> PathBuf {
    let other = std::env::var_os("HEDDLE_TEST_MODULE");
    other.map_or_else(|| env!("CARGO_BIN_EXE_heddle-stack").into(), PathBuf::from)
}

impl Module {
    pub(crate) fn start() -> Self {
        Self::start_without("")
    }

    /// Starts one that does without a protection, if it is built to (feature `attack`).
    pub(crate) fn start_without(protection: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("heddle-stack-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        let process = Command::new(program())
            .env("HEDDLE_WITHOUT", protection)
            .arg("--agent")
            .arg(&path)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut client = eventually("the module", || Client::open(&path).ok());
        client.plain(STACK_BEGIN, 0, 0).unwrap();
        client.plain(STACK_END, 0, 0).unwrap();
        Self { process, path, client }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Makes a tenant.
    pub(crate) fn tenant(&mut self, tenant: stack_tenant, device: OwnedFd) {
        assert_eq!(self.client.tenant(tenant, Some(&device)).unwrap(), 0);
        drop(device); // the module's alone, with which it ends
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A tenant of these numbers: its addresses are 10.9.0.N and `fd00:9::N`.
pub(crate) fn tenant(number: u8) -> stack_tenant {
    let mut address6 = [0; 16];
    address6[..4].copy_from_slice(&[0xfd, 0, 0, 9]);
    address6[15] = number;
    stack_tenant {
        head: stack_head { tenant: number.into(), ..stack_head::default() },
        generation: 1,
        address4: [10, 9, 0, number],
        address6,
        mtu: 1500,
        ..stack_tenant::default()
    }
}

pub(crate) fn at(address: &str, port: u16) -> IpEndpoint {
    IpEndpoint::new(address.parse::<IpAddr>().unwrap().into(), port)
}

/// Two modules, with a tenant each: 1 at the first and 2 at the second, and a link between them.
pub(crate) fn two(change: impl Fn(&mut stack_tenant)) -> (Module, Module) {
    let (mut a, mut b) = (Module::start(), Module::start());
    let (left, right) = Client::packet_pair().unwrap();
    let (mut one, mut two) = (tenant(1), tenant(2));
    change(&mut one);
    change(&mut two);
    a.tenant(one, left);
    b.tenant(two, right);
    (a, b)
}

/// A connection between them: what the connecting and the accepting side have.
pub(crate) struct Connected {
    pub(crate) from: (u64, UnixStream),
    pub(crate) to: (u64, UnixStream),
}

pub(crate) fn connected(a: &mut Module, b: &mut Module, options: stack_options) -> Connected {
    let (listener, address) = b.client.listen(2, at("::", 0), 0, 16).unwrap().unwrap();
    let from = a.client.connect(1, at("10.9.0.2", address.port), options).unwrap().unwrap();
    let (accepted, program) = b.client.accept(listener).unwrap();
    assert_eq!(accepted.local.port, address.port);
    for stream in [&from.1, &program] {
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(WAIT_TIMEOUT)).unwrap();
    }
    Connected { from, to: (accepted.head.id, program) }
}

/// So many bytes, which differ.
pub(crate) fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| u8::try_from((i * 31 + i / 251 + seed) % 256).unwrap()).collect()
}

/// Writes all bytes and ends its side, while it reads all that the other side writes.
pub(crate) fn exchange(stream: &UnixStream, bytes: &[u8]) -> Vec<u8> {
    let writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            (&writer).write_all(bytes).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        (&*stream).read_to_end(&mut got).unwrap();
        got
    })
}

//! Plays the agent of a router and the library of programs, by the pages and not by the router's
//! code.

#![allow(dead_code, reason = "each test takes what it needs")]

pub(crate) mod pages;

use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use shared_ring::{Consumer, Producer, Ringer, SharedMemory, Slot};
use verbs_protocol::abi::{self, verbs_completion, verbs_reply, verbs_request};
use verbs_protocol::agent::{Limits, Message};
use verbs_protocol::plain::{self, Plain};
use verbs_protocol::statistics::{self, Reason};
use verbs_protocol::{Gid, ibv};

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

fn check(result: libc::c_int) -> libc::c_int {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

fn address(path: &Path) -> (libc::sockaddr_un, libc::socklen_t) {
    let mut address = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
    for (to, from) in address.sun_path.iter_mut().zip(path.to_str().unwrap().bytes()) {
        *to = from.cast_signed();
    }
    (address, u32::try_from(size_of::<libc::sockaddr_un>()).unwrap())
}

fn packet_socket() -> OwnedFd {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: socket takes numbers.
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) });
    // SAFETY: the kernel has just made it for this process.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub(crate) fn connect(path: &Path) -> Option<OwnedFd> {
    let socket = packet_socket();
    let (address, size) = address(path);
    // SAFETY: the kernel reads one sockaddr_un.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) };
    (result == 0).then_some(socket)
}

fn listen(path: &Path) -> OwnedFd {
    let socket = packet_socket();
    let (address, size) = address(path);
    // SAFETY: the kernel reads one sockaddr_un.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) });
    // SAFETY: listen takes numbers.
    check(unsafe { libc::listen(socket.as_raw_fd(), 16) });
    socket
}

/// Sends a message with descriptors.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[i32]) -> io::Result<()> {
    let mut io = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = [0_u64; 8];
    // SAFETY: integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        let used = 16 + 4 * fds.len();
        control[0] = used as u64;
        control[1] = u64::from(1_u32) | u64::from(1_u32) << 32; // SOL_SOCKET, SCM_RIGHTS
        for (i, fd) in fds.iter().enumerate() {
            control[2 + i / 2] |= u64::from(fd.cast_unsigned()) << (32 * (i % 2));
        }
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = used.next_multiple_of(8);
    }
    // SAFETY: the message names bytes that outlive the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives a message and its descriptors; none at the end.
pub(crate) fn receive(socket: &OwnedFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 1 << 15];
    let mut control = [0_u64; 8];
    let mut io = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: integers and pointers, for which zero is a value.
    let mut message: libc::msghdr = unsafe { core::mem::zeroed() };
    message.msg_iov = &raw mut io;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message names memory that outlives the call.
    let got =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    bytes.truncate(got.cast_unsigned());
    let mut fds = Vec::new();
    if message.msg_controllen > 16 {
        for i in 0..(usize::try_from(control[0]).unwrap() - 16) / 4 {
            let fd = u32::try_from(control[2 + i / 2] >> (32 * (i % 2)) & 0xffff_ffff).unwrap();
            // SAFETY: the kernel has just made it for this process.
            fds.push(unsafe { OwnedFd::from_raw_fd(fd.cast_signed()) });
        }
    }
    Ok((bytes, fds))
}

/// Waits until a descriptor is readable; false if it is not in time.
pub(crate) fn readable(fd: &OwnedFd, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the kernel writes one pollfd.
    unsafe { libc::poll(&raw mut poll, 1, i32::try_from(timeout.as_millis()).unwrap()) == 1 }
}

/// The GID of an endpoint of the tests.
pub(crate) fn gid(n: u8) -> Gid {
    let mut gid = [0; 16];
    gid[10..12].fill(0xff);
    gid[12..].copy_from_slice(&[10, 9, 0, n]);
    gid
}

/// Its IPv6 one.
pub(crate) fn gid6(n: u8) -> Gid {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&[0xfd, 9]);
    gid[15] = n;
    gid
}

/// What connects the endpoints of a test: for each GID the agent's socket of its router, and its
/// number.
#[derive(Default)]
pub(crate) struct Net {
    ways: Mutex<HashMap<Gid, (Arc<OwnedFd>, u64)>>,
    connections: Mutex<Vec<TcpStream>>,
    refuses: AtomicU32,
    is_silent: AtomicBool,
}

impl Net {
    /// Ends all connections, as a policy that changed does.
    pub(crate) fn cut(&self) {
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Connections get this errno from now on.
    pub(crate) fn refuse(&self, errno: i32) {
        self.refuses.store(errno.unsigned_abs(), Ordering::SeqCst);
    }

    /// What a router asks for gets no answer from now on.
    pub(crate) fn be_silent(&self) {
        self.is_silent.store(true, Ordering::SeqCst);
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    /// Plays the agent for what a router asks.
    fn serve(&self, agent: &Arc<OwnedFd>, statistics: &Sender<Message>) {
        while let Ok((bytes, _)) = receive(agent) {
            if bytes.is_empty() {
                return;
            }
            let message = Message::parse(&bytes).unwrap();
            if matches!(message, Message::Statistics { .. }) {
                // A test that has ended does not wait for it.
                let _ = statistics.send(message);
                continue;
            }
            let Message::Connect { tag, endpoint, source, destination } = message else {
                panic!("the router says {message:?}");
            };
            if self.is_silent.load(Ordering::SeqCst) {
                continue;
            }
            let way = self.ways.lock().unwrap().get(&destination).cloned();
            let errno = match (self.refuses.load(Ordering::SeqCst), &way) {
                (0, None) => libc::EHOSTUNREACH.unsigned_abs(),
                (errno, _) => errno,
            };
            let answer = Message::Connected { tag, endpoint, errno }.encode();
            let Some((to, number)) = way.filter(|_| errno == 0) else {
                let _ = send(agent, &answer, &[]);
                continue;
            };
            let (a, b) = tcp_pair();
            let accepted = Message::Accepted { endpoint: number, source, destination };
            let _ = send(&to, &accepted.encode(), &[b.as_raw_fd()]);
            let _ = send(agent, &answer, &[a.as_raw_fd()]);
            self.connections.lock().unwrap().push(a);
        }
    }
}

/// A connection over loopback.
pub(crate) fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

/// A router, and the test as its agent.
pub(crate) struct Router {
    // Dropped in this order, also when the start fails: the router, then its folder.
    child: Running,
    pub(crate) agent: Arc<OwnedFd>,
    pub(crate) net: Arc<Net>,
    statistics: Receiver<Message>,
    dir: Folder,
}

/// A folder of a test's own, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let mut template = std::env::temp_dir().join("heddle-rdma-XXXXXX").into_os_string();
        template.push("\0");
        let mut bytes = template.into_encoded_bytes();
        // SAFETY: the kernel's library replaces six bytes of a string that ends with a 0.
        let made = unsafe { libc::mkdtemp(bytes.as_mut_ptr().cast()) };
        assert!(!made.is_null(), "{}", io::Error::last_os_error());
        bytes.pop();
        Self(PathBuf::from(String::from_utf8(bytes).unwrap()))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program that is killed when nobody holds it any more.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Router {
    pub(crate) fn start() -> Self {
        Self::start_in(&Arc::default())
    }

    pub(crate) fn start_in(net: &Arc<Net>) -> Self {
        Self::start_without("", net)
    }

    /// A router that does without a protection, if it is built so that it can.
    pub(crate) fn start_without(protection: &str, net: &Arc<Net>) -> Self {
        let dir = Folder::new();
        let path = dir.0.join("agent");
        let program = env!("CARGO_BIN_EXE_heddle-rdma");
        let mut command = Command::new(program);
        command.env("HEDDLE_WITHOUT", protection).arg("--agent").arg(&path);
        let child = Running(command.spawn().unwrap());
        let agent = Arc::new(eventually("the router", || connect(&path)));
        let (told, statistics) = channel();
        let router = Self { child, agent, net: Arc::clone(net), statistics, dir };
        let hello = Message::parse(&receive(&router.agent).unwrap().0).unwrap();
        assert_eq!(hello, Message::Hello { version: 1 });
        router.tell(&Message::Hello { version: 1 }, &[]);
        let (net, agent) = (Arc::clone(net), Arc::clone(&router.agent));
        std::thread::spawn(move || net.serve(&agent, &told));
        router
    }

    pub(crate) fn tell(&self, message: &Message, fds: &[i32]) {
        send(&self.agent, &message.encode(), fds).unwrap();
    }

    /// Adds an endpoint; its number is the last part of its address.
    pub(crate) fn add(&self, n: u8, limits: Limits) {
        self.add_listening(n, limits, &self.listen(n));
    }

    /// A folder of the test's own.
    pub(crate) fn folder(&self) -> &Path {
        &self.dir.0
    }

    /// The socket that an endpoint's control connections come by.
    pub(crate) fn listen(&self, n: u8) -> OwnedFd {
        let path = self.path(n);
        let _ = std::fs::remove_file(&path);
        listen(&path)
    }

    pub(crate) fn path(&self, n: u8) -> PathBuf {
        self.dir.0.join(format!("endpoint{n}"))
    }

    pub(crate) fn add_listening(&self, n: u8, limits: Limits, listener: &OwnedFd) {
        self.add_with([gid(n), [0; 16]], n, limits, listener);
    }

    /// The same, with an IPv6 address, too.
    pub(crate) fn add6(&self, n: u8) {
        self.add_with([gid(n), gid6(n)], n, Limits::default(), &self.listen(n));
    }

    fn add_with(&self, gids: [Gid; 2], n: u8, limits: Limits, listener: &OwnedFd) {
        let endpoint = u64::from(n);
        let name = format!("test/{n}");
        for gid in gids.into_iter().filter(|gid| *gid != [0; 16]) {
            self.net.ways.lock().unwrap().insert(gid, (Arc::clone(&self.agent), endpoint));
        }
        let message = Message::Endpoint { endpoint, gids, limits, name };
        self.tell(&message, &[listener.as_raw_fd()]);
    }

    /// A connection of an endpoint's control socket.
    pub(crate) fn connect(&self, n: u8) -> OwnedFd {
        connect(&self.path(n)).unwrap()
    }

    /// An open device of an endpoint.
    pub(crate) fn open(&self, n: u8) -> Device {
        Device::open(self.connect(n), n)
    }

    /// All records of a kind, and how many messages they came in.
    pub(crate) fn records(&self, kind: u32, endpoint: u64) -> (Vec<Vec<u8>>, usize) {
        let (mut all, mut from, mut messages) = (Vec::new(), 0, 0);
        loop {
            messages += 1;
            let tag = u32::try_from(messages).unwrap();
            self.tell(&Message::Stats { tag, endpoint, kind, cursor: from }, &[]);
            let answer = self.statistics.recv_timeout(WAIT_TIMEOUT).expect("statistics");
            assert!(answer.encode().len() <= statistics::MESSAGE_MAX);
            let Message::Statistics { tag: t, endpoint: e, kind: k, cursor, size, records } =
                answer
            else {
                panic!("{answer:?}");
            };
            assert_eq!((t, e, k), (tag, endpoint, kind));
            all.extend(records.chunks(usize::try_from(size).unwrap()).map(<[u8]>::to_vec));
            from = cursor;
            if from == 0 {
                return (all, messages);
            }
        }
    }

    /// What an endpoint has done.
    pub(crate) fn account(&self, n: u8) -> statistics::Endpoint {
        let (records, _) = self.records(statistics::KIND_ENDPOINTS, n.into());
        statistics::Endpoint::parse(&records[0]).unwrap()
    }

    /// What a queue pair of an endpoint has done.
    pub(crate) fn qp_account(&self, (n, qp): (u8, u32)) -> statistics::Qp {
        let (records, _) = self.records(statistics::KIND_QPS, n.into());
        let mut all = records.iter().map(|r| statistics::Qp::parse(r).unwrap());
        all.find(|r| r.number == qp).expect("the queue pair")
    }

    /// How often something was refused an endpoint, dropped or held up.
    pub(crate) fn times(&self, n: u8, reason: Reason) -> u64 {
        self.account(n).reasons[reason as usize]
    }

    /// Whether the router runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }

    /// Descriptors that the router has open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.0.id())).unwrap().count()
    }

    /// How many descriptors the router may have from now on.
    pub(crate) fn limit_descriptors(&self, most: u64) {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        let pid = libc::pid_t::try_from(self.child.0.id()).unwrap();
        let old = core::ptr::null_mut();
        // SAFETY: the kernel reads one rlimit, and writes none.
        let done = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, old) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }

    /// Mappings of memory that the router shares with programs.
    pub(crate) fn mappings(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.0.id())).unwrap();
        maps.lines().filter(|l| l.contains("memfd:")).count()
    }
}

/// An open device.
pub(crate) struct Device {
    pub(crate) socket: OwnedFd,
    pub(crate) number: u8,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) ringer: Ringer,
    pub(crate) events: OwnedFd,
    pub(crate) limits: abi::verbs_hello_reply,
    tag: u32,
}

/// Asks for something on a socket: the reply's bytes and descriptors, or the errno.
pub(crate) fn ask(socket: &OwnedFd, request: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>), i32> {
    send(socket, request, &[]).unwrap();
    let (bytes, fds) = receive(socket).unwrap();
    assert!(!bytes.is_empty(), "the router has closed the connection");
    let head: verbs_reply = plain::read(&bytes[..16]).unwrap();
    assert_eq!(head.command.to_ne_bytes(), request[..4]);
    assert_eq!(head.tag.to_ne_bytes(), request[4..8]);
    if head.error != 0 {
        assert_eq!((bytes.len(), fds.len()), (16, 0));
        return Err(head.error);
    }
    Ok((bytes, fds))
}

pub(crate) fn hello(version: u32, kind: u32) -> abi::verbs_hello_request {
    let head = verbs_request { command: abi::VERBS_HELLO, tag: 1 };
    abi::verbs_hello_request { head, version, kind }
}

impl Device {
    fn open(socket: OwnedFd, number: u8) -> Self {
        let answer = ask(&socket, plain::bytes(&hello(1, 0))).unwrap();
        Self::of(socket, number, answer)
    }

    /// The device of a connection that somebody has said hello on.
    pub(crate) fn of(socket: OwnedFd, number: u8, answer: (Vec<u8>, Vec<OwnedFd>)) -> Self {
        let (bytes, mut fds) = answer;
        let limits: abi::verbs_hello_reply = plain::read(&bytes).unwrap();
        assert_eq!(fds.len(), 3);
        let events = fds.pop().unwrap();
        let ring = fds.pop().unwrap();
        let size = usize::try_from(limits.context_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let ringer = Ringer::attach(&memory, 0, ring).unwrap();
        let mut device = Self { socket, number, memory, ringer, events, limits, tag: 1 };
        // A process that did not connect itself cannot show that it did: it has no memory then.
        let _ = device.show(device.memory.as_ptr().as_ptr() as u64);
        device
    }

    /// Shows the router that it has the memory of this process.
    pub(crate) fn show(&mut self, address: u64) -> Result<(), i32> {
        let head = self.head(abi::VERBS_SHOW_MEMORY);
        let request = abi::verbs_show_memory_request { head, address };
        self.ask::<verbs_reply>(&request).map(drop)
    }

    pub(crate) fn head(&mut self, command: u32) -> verbs_request {
        self.tag += 1;
        verbs_request { command, tag: self.tag }
    }

    pub(crate) fn ask<R: Plain>(&self, request: &impl Plain) -> Result<(R, Vec<OwnedFd>), i32> {
        let (bytes, fds) = ask(&self.socket, plain::bytes(request))?;
        Ok((plain::read(&bytes).expect("the reply has its length"), fds))
    }

    /// A command that names an object, or none if `object` is 0.
    pub(crate) fn object(&mut self, command: u32, object: u32) -> Result<(), i32> {
        let head = self.head(command);
        let request = abi::verbs_object_request { head, object, reserved: 0 };
        self.ask::<verbs_reply>(&request).map(drop)
    }

    pub(crate) fn pd(&mut self) -> u32 {
        let head = self.head(abi::VERBS_ALLOC_PD);
        let request = abi::verbs_plain_request { head };
        self.ask::<abi::verbs_object_reply>(&request).unwrap().0.object
    }

    pub(crate) fn channel(&mut self) -> (u32, OwnedFd) {
        let head = self.head(abi::VERBS_CREATE_CHANNEL);
        let request = abi::verbs_plain_request { head };
        let (reply, mut fds) = self.ask::<abi::verbs_object_reply>(&request).unwrap();
        (reply.object, fds.pop().unwrap())
    }

    pub(crate) fn cq(&mut self, cqe: u32, channel: u32) -> Cq {
        self.try_cq(cqe, channel).unwrap()
    }

    pub(crate) fn try_cq(&mut self, cqe: u32, channel: u32) -> Result<Cq, i32> {
        let head = self.head(abi::VERBS_CREATE_CQ);
        let user = 0xc0_0000 + u64::from(self.tag);
        let request = abi::verbs_create_cq_request { head, user, cqe, channel };
        let (reply, mut fds) = self.ask::<abi::verbs_create_cq_reply>(&request)?;
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let ring = Consumer::attach(&memory, 128, reply.capacity).unwrap();
        Ok(Cq { handle: reply.cq, user, memory, ring })
    }

    pub(crate) fn qp(&mut self, kind: u32, pd: u32, send_cq: &Cq, recv_cq: &Cq, srq: u32) -> Qp {
        let head = self.head(abi::VERBS_CREATE_QP);
        let request = abi::verbs_create_qp_request {
            head,
            user: 0x9000,
            pd,
            send_cq: send_cq.handle,
            recv_cq: recv_cq.handle,
            srq,
            type_: kind,
            max_send_wr: 32,
            max_recv_wr: 32,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 200,
            ..Default::default()
        };
        let (reply, mut fds) = self.ask::<abi::verbs_create_qp_reply>(&request).unwrap();
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let send = Producer::attach(&memory, 0, reply.send_capacity).unwrap();
        let receive = (reply.receive_capacity > 0).then(|| {
            let at = usize::try_from(reply.receive_offset).unwrap();
            Producer::attach(&memory, at, reply.receive_capacity).unwrap()
        });
        Qp { number: reply.qp, memory, send, receive }
    }

    pub(crate) fn srq(&mut self, pd: u32, max_wr: u32, limit: u32) -> (u32, Producer) {
        let head = self.head(abi::VERBS_CREATE_SRQ);
        let request =
            abi::verbs_create_srq_request { head, user: 0x5000, pd, max_wr, max_sge: 4, limit };
        let (reply, mut fds) = self.ask::<abi::verbs_create_srq_reply>(&request).unwrap();
        let size = usize::try_from(reply.memory_size).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        (reply.srq, Producer::attach(&memory, 0, reply.capacity).unwrap())
    }

    pub(crate) fn modify(
        &mut self,
        qp: u32,
        mask: u32,
        attr: abi::verbs_qp_attr,
    ) -> Result<u32, i32> {
        let head = self.head(abi::VERBS_MODIFY_QP);
        let request = abi::verbs_modify_qp_request { head, qp, mask, attr };
        Ok(self.ask::<abi::verbs_modify_qp_reply>(&request)?.0.qp_state)
    }

    pub(crate) fn state(&mut self, qp: u32) -> u32 {
        let head = self.head(abi::VERBS_QUERY_QP);
        let request = abi::verbs_object_request { head, object: qp, reserved: 0 };
        self.ask::<abi::verbs_query_qp_reply>(&request).unwrap().0.attr.qp_state
    }

    /// Brings a connected queue pair to RTS; `edit` changes attributes.
    pub(crate) fn connect(
        &mut self,
        qp: u32,
        kind: u32,
        to: (u8, u32),
        edit: impl Fn(&mut abi::verbs_qp_attr),
    ) {
        let reliable = kind == ibv::QPT_RC;
        let when = |mask| if reliable { mask } else { 0 };
        let mut attr = abi::verbs_qp_attr {
            qp_state: 1,
            port: 1,
            access: 15,
            path_mtu: 5,
            dest_qp_num: to.1,
            address: abi::verbs_address {
                gid: gid(to.0),
                is_global: 1,
                port: 1,
                ..Default::default()
            },
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        edit(&mut attr);
        let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_ACCESS_FLAGS;
        assert_eq!(self.modify(qp, init, attr), Ok(1));
        attr.qp_state = 2;
        let receive = ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER;
        let path = ibv::QP_AV | ibv::QP_PATH_MTU | ibv::QP_DEST_QPN | ibv::QP_RQ_PSN;
        assert_eq!(self.modify(qp, ibv::QP_STATE | path | when(receive), attr), Ok(2));
        attr.qp_state = 3;
        let retry = ibv::QP_TIMEOUT | ibv::QP_RETRY_CNT | ibv::QP_RNR_RETRY;
        let send = when(retry | ibv::QP_MAX_QP_RD_ATOMIC) | ibv::QP_SQ_PSN;
        assert_eq!(self.modify(qp, ibv::QP_STATE | send, attr), Ok(3));
    }

    /// Brings a queue pair of datagrams to RTS.
    pub(crate) fn connect_datagrams(&mut self, qp: u32, qkey: u32) {
        let mut attr = abi::verbs_qp_attr { qp_state: 1, port: 1, qkey, ..Default::default() };
        let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_QKEY;
        assert_eq!(self.modify(qp, init, attr), Ok(1));
        attr.qp_state = 2;
        assert_eq!(self.modify(qp, ibv::QP_STATE, attr), Ok(2));
        attr.qp_state = 3;
        assert_eq!(self.modify(qp, ibv::QP_STATE | ibv::QP_SQ_PSN, attr), Ok(3));
    }

    pub(crate) fn ah(&mut self, pd: u32, to: u8) -> u32 {
        self.ah_to(pd, gid(to), 0)
    }

    pub(crate) fn ah_to(&mut self, pd: u32, gid: Gid, sgid_index: u8) -> u32 {
        let head = self.head(abi::VERBS_CREATE_AH);
        let address = abi::verbs_address {
            gid,
            sgid_index,
            is_global: 1,
            port: 1,
            hop_limit: 7,
            ..Default::default()
        };
        let request = abi::verbs_create_ah_request { head, pd, reserved: 0, address };
        self.ask::<abi::verbs_object_reply>(&request).unwrap().0.object
    }

    pub(crate) fn register(&mut self, pd: u32, bytes: &mut [u8], access: u32) -> Result<u32, i32> {
        self.register_at(pd, bytes.as_mut_ptr() as u64, bytes.len() as u64, access)
    }

    pub(crate) fn register_at(
        &mut self,
        pd: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> Result<u32, i32> {
        let request = self.registration(pd, address, length, access);
        let (reply, _) = self.ask::<abi::verbs_reg_mr_reply>(&request)?;
        assert_eq!(reply.lkey, reply.rkey);
        Ok(reply.lkey)
    }

    fn registration(
        &mut self,
        pd: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> abi::verbs_reg_mr_request {
        let head = self.head(abi::VERBS_REG_MR);
        abi::verbs_reg_mr_request {
            head,
            address,
            length,
            iova: address,
            pd,
            access,
            ..Default::default()
        }
    }

    /// Asks for a region, and does not wait for the answer.
    pub(crate) fn ask_to_register(&mut self, pd: u32, address: u64, length: u64) {
        let request = self.registration(pd, address, length, 15);
        send(&self.socket, plain::bytes(&request), &[]).unwrap();
    }

    /// Waits for the answer, and says whether it is a region.
    pub(crate) fn is_registered(&self) -> bool {
        let bytes = receive(&self.socket).unwrap().0;
        bytes.len() == size_of::<abi::verbs_reg_mr_reply>()
    }

    /// Memory of the router's making, registered as a whole, from address 0 on.
    pub(crate) fn shared(&mut self, pd: u32, length: u64) -> (u32, u32, Arc<SharedMemory>) {
        let head = self.head(abi::VERBS_CREATE_MEMORY);
        let request = abi::verbs_create_memory_request { head, length };
        let (reply, mut fds) = self.ask::<abi::verbs_create_memory_reply>(&request).unwrap();
        let size = usize::try_from(length).unwrap();
        let memory = SharedMemory::open(fds.pop().unwrap(), size).unwrap();
        let head = self.head(abi::VERBS_REG_MR);
        let request = abi::verbs_reg_mr_request {
            head,
            length,
            memory: reply.memory,
            pd,
            access: 15,
            ..Default::default()
        };
        let (mr, _) = self.ask::<abi::verbs_reg_mr_reply>(&request).unwrap();
        (reply.memory, mr.lkey, memory)
    }

    pub(crate) fn post(&mut self, ring: &mut Producer, slots: &[Slot]) {
        eventually("room in the ring", || {
            (ring.room().unwrap() as usize >= slots.len()).then_some(())
        });
        assert_eq!(ring.push(slots).unwrap(), slots.len());
        self.ringer.ring().unwrap();
    }

    /// The next asynchronous event.
    pub(crate) fn event(&self) -> abi::verbs_async_event {
        assert!(readable(&self.events, WAIT_TIMEOUT), "no event");
        plain::read(&receive(&self.events).unwrap().0).expect("an event")
    }
}

pub(crate) struct Cq {
    pub(crate) handle: u32,
    pub(crate) user: u64,
    memory: Arc<SharedMemory>,
    ring: Consumer,
}

impl Cq {
    pub(crate) fn poll(&mut self) -> Option<verbs_completion> {
        let mut slot = [Slot::default()];
        (self.ring.pop(&mut slot).unwrap() == 1).then(|| plain::read(&slot[0].to_bytes()).unwrap())
    }

    pub(crate) fn next(&mut self) -> verbs_completion {
        eventually("a completion", || self.poll())
    }

    /// The next completion: its request and status.
    pub(crate) fn result(&mut self) -> (u64, u32) {
        let completion = self.next();
        (completion.wr_id, completion.status)
    }

    pub(crate) fn arm(&self, wish: u32) {
        // SAFETY: the memory begins with the word, and is mapped as long as `self` is.
        let word = unsafe { self.memory.as_ptr().cast::<AtomicU32>().as_ref() };
        word.store(wish, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

pub(crate) struct Qp {
    pub(crate) number: u32,
    pub(crate) memory: Arc<SharedMemory>,
    pub(crate) send: Producer,
    pub(crate) receive: Option<Producer>,
}

pub(crate) type Sge = (u64, u32, u32);

/// The entry of a buffer.
pub(crate) fn sge(bytes: &[u8], key: u32) -> Sge {
    (bytes.as_ptr() as u64, u32::try_from(bytes.len()).unwrap(), key)
}

fn entries(sges: &[Sge]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, length, lkey) in sges {
        let entry = abi::verbs_sge { address: *address, length: *length, lkey: *lkey };
        bytes.extend_from_slice(plain::bytes(&entry));
    }
    bytes
}

fn slots(mut bytes: Vec<u8>) -> Vec<Slot> {
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.as_chunks::<64>().0.iter().map(Slot::from_bytes).collect()
}

/// The slots of a send request; `head` has what is not about its payload.
pub(crate) fn sending(mut head: abi::verbs_send, sges: &[Sge]) -> Vec<Slot> {
    head.sge_count = u8::try_from(sges.len()).unwrap();
    payload(head, &entries(sges))
}

pub(crate) fn inline(mut head: abi::verbs_send, data: &[u8]) -> Vec<Slot> {
    head.flags |= 8;
    head.inline_length = u32::try_from(data.len()).unwrap();
    payload(head, data)
}

fn payload(mut head: abi::verbs_send, payload: &[u8]) -> Vec<Slot> {
    head.slots = u8::try_from(1 + payload.len().saturating_sub(16).div_ceil(64)).unwrap();
    let mut bytes = plain::bytes(&head)[..48].to_vec();
    bytes.extend_from_slice(payload);
    slots(bytes)
}

pub(crate) fn receiving(wr_id: u64, sges: &[Sge]) -> Vec<Slot> {
    let count = u8::try_from(1 + sges.len().saturating_sub(3).div_ceil(4)).unwrap();
    let head = abi::verbs_receive {
        wr_id,
        slots: count,
        sge_count: u8::try_from(sges.len()).unwrap(),
        ..Default::default()
    };
    let mut bytes = plain::bytes(&head)[..16].to_vec();
    bytes.extend_from_slice(&entries(sges));
    slots(bytes)
}

/// A signalled request.
pub(crate) fn request(opcode: u8, wr_id: u64) -> abi::verbs_send {
    abi::verbs_send { wr_id, opcode, flags: 2, ..Default::default() }
}

/// One end of a connection: a device with a queue pair and a registered buffer.
pub(crate) struct End {
    pub(crate) device: Device,
    pub(crate) pd: u32,
    pub(crate) sends: Cq,
    pub(crate) receives: Cq,
    pub(crate) qp: Qp,
    pub(crate) buffer: Vec<u8>,
    pub(crate) key: u32,
}

impl End {
    pub(crate) fn new(router: &Router, n: u8, kind: u32, fill: u8, length: usize) -> Self {
        let mut device = router.open(n);
        let pd = device.pd();
        let sends = device.cq(64, 0);
        let receives = device.cq(64, 0);
        let qp = device.qp(kind, pd, &sends, &receives, 0);
        let mut buffer = vec![fill; length];
        let key = device.register(pd, &mut buffer, 15).unwrap();
        Self { device, pd, sends, receives, qp, buffer, key }
    }

    pub(crate) fn address(&self) -> (u8, u32) {
        (self.device.number, self.qp.number)
    }

    pub(crate) fn whole(&self) -> Sge {
        sge(&self.buffer, self.key)
    }

    /// A part of the buffer.
    pub(crate) fn part(&self, from: usize, length: usize) -> Sge {
        sge(&self.buffer[from..from + length], self.key)
    }

    pub(crate) fn send(&mut self, slots: &[Slot]) {
        self.device.post(&mut self.qp.send, slots);
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, sges: &[Sge]) {
        let slots = receiving(wr_id, sges);
        self.device.post(self.qp.receive.as_mut().unwrap(), &slots);
    }
}

/// Two connected ends.
pub(crate) fn pair(
    routers: [&Router; 2],
    kind: u32,
    length: usize,
    edit: impl Fn(&mut abi::verbs_qp_attr) + Copy,
) -> (End, End) {
    pair_of(routers, [1, 2], kind, length, edit)
}

/// The same, of these endpoints.
pub(crate) fn pair_of(
    routers: [&Router; 2],
    [one, two]: [u8; 2],
    kind: u32,
    length: usize,
    edit: impl Fn(&mut abi::verbs_qp_attr) + Copy,
) -> (End, End) {
    let mut a = End::new(routers[0], one, kind, 1, length);
    let mut b = End::new(routers[1], two, kind, 2, length);
    a.device.connect(a.qp.number, kind, b.address(), edit);
    b.device.connect(b.qp.number, kind, a.address(), edit);
    (a, b)
}

/// A router with two endpoints.
pub(crate) fn node() -> Router {
    let router = Router::start();
    for n in [1, 2] {
        router.add(n, Limits::default());
    }
    router
}

/// Two nodes with an endpoint each.
pub(crate) fn nodes() -> (Router, Router) {
    let net = Arc::default();
    let (one, two) = (Router::start_in(&net), Router::start_in(&net));
    one.add(1, Limits::default());
    two.add(2, Limits::default());
    (one, two)
}

/// A request for the peer's memory.
pub(crate) fn at(opcode: u8, wr_id: u64, remote: &[u8], key: u32) -> abi::verbs_send {
    abi::verbs_send { remote_address: remote.as_ptr() as u64, rkey: key, ..request(opcode, wr_id) }
}

/// Runs an attack with all protections, then without one.
pub(crate) fn attacked(protection: &str, attack: impl Fn(&Router) -> bool) {
    let with = Router::start_without("", &Arc::default());
    assert!(!attack(&with), "the attack succeeds although {protection} is in force");
    let without = Router::start_without(protection, &Arc::default());
    let gained = attack(&without);
    assert_eq!(gained, cfg!(feature = "attack"), "without {protection}");
}

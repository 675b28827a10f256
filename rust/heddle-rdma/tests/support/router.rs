//! Runs the router, and tells it of endpoints.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use verbs_protocol::Gid;
use verbs_protocol::agent::{self, Limits, Message};
use verbs_protocol::statistics::{self, Reason};

use super::agent::Net;
use super::device::Device;
use super::wire::{self, connect, receive, send};
use super::{WAIT_TIMEOUT, eventually, gid, gid6};

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
        Self::start_with(protection, net, &[])
    }

    /// A router that takes any copy for one of a page that does not come.
    pub(crate) fn start_impatient(net: &Arc<Net>) -> Self {
        Self::start_with("", net, &["--patience-us", "0"])
    }

    /// A router that looks for work for so many microseconds before it sleeps at most.
    pub(crate) fn start_spinning(micros: u32) -> Self {
        let micros = micros.to_string();
        let arguments = ["--spin-us", &micros, "--patience-us", "200000"];
        Self::start_with("", &Arc::default(), &arguments)
    }

    fn start_with(protection: &str, net: &Arc<Net>, arguments: &[&str]) -> Self {
        Self::start_changed(protection, net, |command, _| {
            command.args(arguments);
        })
    }

    /// The same; `change` has the command, and the test's folder.
    pub(crate) fn start_changed(
        protection: &str,
        net: &Arc<Net>,
        change: impl FnOnce(&mut Command, &Path),
    ) -> Self {
        let dir = Folder::new();
        let path = dir.0.join("agent");
        let program = env!("CARGO_BIN_EXE_heddle-rdma");
        let mut command = Command::new(program);
        command.env("HEDDLE_WITHOUT", protection).arg("--agent").arg(&path);
        // Endpoints go from one router to another, so the folders of all tests.
        command.arg("--sockets").arg(std::env::temp_dir());
        change(&mut command, &dir.0);
        let child = Running(command.spawn().unwrap());
        let agent = Arc::new(eventually("the router", || connect(&path)));
        let (told, statistics) = channel();
        let router = Self { child, agent, net: Arc::clone(net), statistics, dir };
        let hello = Message::parse(&receive(&router.agent).unwrap().0).unwrap();
        assert_eq!(hello, Message::Hello { version: agent::VERSION });
        router.tell(&hello, &[]);
        let (net, agent) = (Arc::clone(net), Arc::clone(&router.agent));
        std::thread::spawn(move || net.serve(&agent, &told));
        router
    }

    pub(crate) fn tell(&self, message: &Message, fds: &[i32]) {
        send(&self.agent, &message.encode(), fds).unwrap();
    }

    /// Another agent takes the place of this one.
    pub(crate) fn reconnect(&mut self) {
        self.agent = Arc::new(connect(&self.dir.0.join("agent")).unwrap());
        let hello = Message::parse(&receive(&self.agent).unwrap().0).unwrap();
        self.tell(&hello, &[]);
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
        wire::listen(&path)
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

    /// The next endpoint that it gives back: number, what it did, its socket.
    pub(crate) fn released(&self) -> (u64, statistics::Endpoint, OwnedFd) {
        let next = || self.net.released.lock().unwrap().pop();
        let (number, last, listener) = eventually("an endpoint that is given back", next);
        let Message::Statistics { endpoint, records, .. } = last else { panic!("{last:?}") };
        assert_eq!(endpoint, number);
        (number, statistics::Endpoint::parse(&records).unwrap(), listener)
    }

    /// The agent hangs up; whether the router ends well of it, for which it has time.
    pub(crate) fn ends_without_agent(&mut self) -> bool {
        // SAFETY: shutdown takes numbers.
        unsafe { libc::shutdown(self.agent.as_raw_fd(), libc::SHUT_WR) };
        eventually("the router's end", || self.child.0.try_wait().unwrap()).success()
    }

    fn signal(&self, number: libc::c_int) {
        let pid = self.pid();
        // SAFETY: kill takes numbers; nobody has waited for the child.
        assert_eq!(unsafe { libc::kill(pid, number) }, 0);
    }

    /// What is done meanwhile comes to the router at once.
    pub(crate) fn while_stopped<R>(&self, work: impl FnOnce() -> R) -> R {
        self.signal(libc::SIGSTOP);
        let state = || self.state().filter(|s| *s == 'T');
        eventually("the router to stop", state);
        let result = work();
        self.signal(libc::SIGCONT);
        result
    }

    fn state(&self) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.0.id())).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    /// Whether the first thread, which serves the first endpoint that got a thread, waits for
    /// events, for as long as it takes.
    pub(crate) fn first_thread_sleeps(&self) -> bool {
        let call = std::fs::read_to_string(format!("/proc/{}/syscall", self.child.0.id())).unwrap();
        let words: Vec<_> = call.split(' ').collect();
        // The fourth argument is the time, of which all bits of an int are set.
        words.len() > 4
            && words[0] == libc::SYS_epoll_wait.to_string()
            && words[4].ends_with("ffffffff")
    }

    pub(crate) fn pid(&self) -> libc::pid_t {
        libc::pid_t::try_from(self.child.0.id()).unwrap()
    }

    /// The process that opens files for it.
    pub(crate) fn opener(&self) -> libc::pid_t {
        let children = format!("/proc/{0}/task/{0}/children", self.pid());
        let children = std::fs::read_to_string(children).unwrap();
        children.trim().parse().unwrap()
    }

    /// Waits until its first thread waits for events.
    pub(crate) fn await_sleep(&self) {
        eventually("the router to sleep", || self.first_thread_sleeps().then_some(()));
    }

    /// Waits until its first thread looks for nothing any more, if only for a time.
    pub(crate) fn await_rest(&self) {
        eventually("the router to rest", || self.state().filter(|s| *s == 'S'));
    }

    /// Whether the router has ended by itself.
    pub(crate) fn has_died(&self) -> bool {
        self.state() == Some('Z')
    }

    /// Whether the router runs.
    pub(crate) fn runs(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_none()
    }

    pub(crate) fn kill(&mut self) {
        self.child.0.kill().unwrap();
        self.child.0.wait().unwrap();
    }

    /// Threads that serve in the router.
    pub(crate) fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.0.id())).unwrap().count()
    }

    /// Descriptors that the router has open.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.0.id())).unwrap().count()
    }

    /// A router that may have so many descriptors.
    pub(crate) fn start_with_descriptors(most: u64) -> Self {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        let router = Self::start_changed("", &Arc::default(), |command, _| {
            let set = move || {
                // SAFETY: the kernel reads one rlimit.
                unix_io::check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
                Ok(())
            };
            // SAFETY: it makes one system call.
            unsafe { command.pre_exec(set) };
        });
        let pid = router.pid();
        let old = core::ptr::null_mut();
        // One that may raise its limits has done so; then this process may do it as well.
        // SAFETY: the kernel reads one rlimit, and writes none.
        unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, old) };
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let files = limits.lines().find(|l| l.starts_with("Max open files")).unwrap();
        assert_eq!(files.split_whitespace().nth(3), Some(most.to_string().as_str()));
        router
    }

    /// Mappings of memory that the router shares with programs.
    pub(crate) fn mappings(&self) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.child.0.id())).unwrap();
        maps.lines().filter(|l| l.contains("memfd:")).count()
    }
}

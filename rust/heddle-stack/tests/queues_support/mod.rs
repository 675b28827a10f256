//! A service in a thread of its own, and an agent that gives it sockets of the machine's loopback.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]
#![allow(dead_code, reason = "each test uses some of it")]

use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use heddle_stack::queues::abi::*;
use heddle_stack::queues::guest::{Connection, Guest};
use heddle_stack::queues::{Service, proto};
use unix_io::epoll::wait_readable;
use unix_io::{packets, plain};

pub(crate) const SLOTS: u32 = 64;
pub(crate) const STREAMS: u32 = 8;
pub(crate) const CAPACITY: u32 = 65536;

pub(crate) struct Agent {
    socket: OwnedFd,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Service>>,
    tag: u32,
    /// Of the service's own accord.
    pub(crate) gone: Vec<u64>,
}

impl Agent {
    pub(crate) fn new() -> Self {
        let (ours, theirs) = packets::packet_pair().unwrap();
        unix_io::set_nonblocking(&theirs).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut service = Service::new().unwrap();
            service.connect(theirs).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                service.step(Some(Duration::from_millis(20))).unwrap();
            }
            service
        });
        let mut agent = Self { socket: ours, stop, thread: Some(thread), tag: 0, gone: Vec::new() };
        let hello = agent.ask(QUEUES_HELLO, 0, QUEUES_VERSION.into());
        assert_eq!((hello.head.error, hello.value), (0, 1 | QUEUES_OWNERS));
        agent
    }

    /// The service, which does nothing by itself any more.
    pub(crate) fn stopped(&mut self) -> Service {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }

    fn head(&mut self, kind: u32, region: u64) -> queues_head {
        self.tag += 1;
        queues_head { type_: kind, tag: self.tag, region, error: 0, reserved: 0 }
    }

    fn say<T: plain::Plain>(&self, message: &T, fd: Option<&OwnedFd>) {
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        packets::send(&self.socket, plain::bytes(message), &fds).unwrap();
    }

    /// Hears one message of the service's; answers it if it is MAKE.
    pub(crate) fn hear(&mut self, most: Duration) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        if !wait_readable(self.socket.as_fd(), most) {
            return None;
        }
        let (mut bytes, mut fds) = (vec![0; 512], Vec::new());
        let n = packets::receive(&self.socket, &mut bytes, &mut fds).unwrap();
        assert!(n > 0, "the service has hung up");
        bytes.truncate(n);
        let head: queues_head = plain::read(&bytes[..size_of::<queues_head>()]).unwrap();
        match head.type_ {
            QUEUES_MAKE => {
                let asked: queues_make = plain::read(&bytes).unwrap();
                let answer = queues_make { head: proto::answer_to(&head, 0), ..asked };
                let fd = tcp_socket(asked.family);
                self.say(&answer, Some(&fd));
            }
            QUEUES_GONE => self.gone.push(head.region),
            _ => return Some((bytes, fds)),
        }
        Some((Vec::new(), Vec::new()))
    }

    fn answer<T: plain::Plain>(&mut self, kind: u32) -> (T, Vec<OwnedFd>) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while Instant::now() < deadline {
            let Some((bytes, fds)) = self.hear(Duration::from_secs(1)) else { continue };
            if bytes.is_empty() {
                continue;
            }
            let head: queues_head = plain::read(&bytes[..size_of::<queues_head>()]).unwrap();
            assert_eq!(head.type_, kind | QUEUES_ANSWER);
            return (plain::read(&bytes).unwrap(), fds);
        }
        panic!("no answer to {kind}");
    }

    pub(crate) fn ask(&mut self, kind: u32, region: u64, value: u64) -> queues_plain {
        let head = self.head(kind, region);
        self.say(&queues_plain { head, value }, None);
        self.answer(kind).0
    }

    pub(crate) fn stats(&mut self, region: u64) -> queues_stats {
        let head = self.head(QUEUES_STATS, region);
        self.say(&queues_plain { head, value: 0 }, None);
        self.answer(QUEUES_STATS).0
    }

    /// Makes a region, and gives the guest's end of its socket.
    pub(crate) fn region(&mut self, region: u64, flags: u32) -> OwnedFd {
        self.region_of(0, region, flags)
    }

    /// The same, of an owner.
    pub(crate) fn region_of(&mut self, owner: u32, region: u64, flags: u32) -> OwnedFd {
        let (guest, service) = packets::packet_pair().unwrap();
        let head = self.head(QUEUES_REGION, region);
        let (slots, streams, capacity) = (SLOTS, STREAMS, CAPACITY);
        let asked = queues_region { head, flags, slots, streams, capacity, sockets: 32, owner };
        self.say(&asked, Some(&service));
        let (made, fds): (queues_plain, _) = self.answer(QUEUES_REGION);
        assert_eq!((made.head.error, fds.len()), (0, 1));
        guest
    }

    /// Gives a connection to a region: its stream.
    pub(crate) fn give(&mut self, region: u64, fd: &OwnedFd) -> io::Result<Connection> {
        let head = self.head(QUEUES_GIVE, region);
        self.say(&queues_give { head, ..Default::default() }, Some(fd));
        let given: queues_give = self.answer(QUEUES_GIVE).0;
        if given.head.error != 0 {
            return Err(io::Error::from_raw_os_error(given.head.error));
        }
        let (stream, generation) = (u16::try_from(given.stream).unwrap(), given.generation);
        Ok(Connection { socket: given.stream + 1, stream, generation, sent: 0, received: 0 })
    }

    /// Waits until a region is gone.
    pub(crate) fn await_gone(&mut self, region: u64) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.gone.contains(&region) {
            assert!(Instant::now() < deadline, "region {region} is not gone");
            self.hear(Duration::from_millis(100));
        }
    }

    /// A job, and its completion; sockets are made meanwhile.
    pub(crate) fn call(&mut self, guest: &mut Guest, job: queues_nqe) -> io::Result<queues_nqe> {
        let sequence = guest.push(job)?;
        if u32::from(job.operation) == QUEUES_SOCKET {
            self.hear(Duration::from_millis(200));
        }
        let done = guest.wait(|n| n.sequence == sequence && n.operation & proto::DONE != 0)?;
        match done.error {
            0 => Ok(done),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn tcp_socket(family: u32) -> OwnedFd {
    let family = if family == 4 { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: socket takes numbers.
    let fd = unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: the kernel has just made it.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

pub(crate) fn job(operation: u32, socket: u32) -> queues_nqe {
    queues_nqe { operation: u8::try_from(operation).unwrap(), socket, ..Default::default() }
}

pub(crate) fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Two ends of a TCP connection.
pub(crate) fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (a, listener.accept().unwrap().0)
}

/// Bytes that are all different from their neighbours'.
pub(crate) fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| u8::try_from((i * 31 + i / 251) % 256).unwrap()).collect()
}

//! A service in this process, and a guest that writes what it likes.

#![allow(dead_code, reason = "each test uses some of it")]

use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use heddle_machine::nqe;
use heddle_machine::region::{Layout, Met};
use heddle_machine::service::Service;
use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::{SharedMemory, Slot};

pub(crate) const CAPACITY: u32 = QUEUES_CAPACITY_MIN;
const SIZE: usize = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// A service, and the guest that it has.
pub(crate) struct Machine {
    pub(crate) service: Service,
    pub(crate) guest: Met,
    pub(crate) memory: Arc<SharedMemory>,
    heard: VecDeque<queues_nqe>,
    sequence: u32,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let memory = SharedMemory::create(c"test", SIZE).unwrap();
        let layout = Layout::of(SIZE, CAPACITY).unwrap();
        let service = Service::new(&memory, layout).unwrap();
        let guest = Met::meet(&memory).unwrap();
        Self { service, guest, memory, heard: VecDeque::new(), sequence: 0 }
    }

    /// Another guest, after the service has begun anew.
    pub(crate) fn meet_again(&mut self) {
        self.guest = Met::meet(&self.memory).unwrap();
        self.heard.clear();
    }

    pub(crate) fn step(&mut self) {
        self.service.step(Duration::ZERO).unwrap();
        let mut slots = [Slot::default(); 64];
        if let Ok(count) = self.guest.completions.pop(&mut slots) {
            self.heard.extend(slots[..count].iter().map(proto::nqe));
        }
    }

    /// Steps until something is so; `None`: it is not.
    pub(crate) fn until<T>(&mut self, mut is: impl FnMut(&mut Self) -> Option<T>) -> Option<T> {
        let begun = Instant::now();
        loop {
            if let Some(value) = is(self) {
                return Some(value);
            }
            if begun.elapsed() > PATIENCE {
                return None;
            }
            self.step();
        }
    }

    pub(crate) fn push(&mut self, job: queues_nqe) -> u32 {
        self.sequence += 1;
        let job = queues_nqe { sequence: self.sequence, ..job };
        while self.guest.jobs.push(&[proto::slot(&job)]).unwrap() == 0 {
            self.step();
        }
        self.sequence
    }

    /// What the guest is told that is so.
    pub(crate) fn told(&mut self, is: impl Fn(&queues_nqe) -> bool) -> queues_nqe {
        let found = self.until(|m| {
            let at = m.heard.iter().position(&is)?;
            m.heard.remove(at)
        });
        found.unwrap_or_else(|| panic!("the guest is not told; it was: {:?}", self.heard))
    }

    /// Has a job done.
    pub(crate) fn ask(&mut self, job: queues_nqe) -> queues_nqe {
        let sequence = self.push(job);
        self.told(|n| nqe::operation(n) & QUEUES_DONE != 0 && n.sequence == sequence)
    }

    pub(crate) fn socket(&mut self, number: u32) -> i32 {
        self.ask(queues_nqe { length: 4, ..nqe::job(QUEUES_SOCKET, number) }).error
    }

    /// A listener of the guest's at 127.0.0.1.
    pub(crate) fn listen(&mut self, number: u32) -> SocketAddr {
        assert_eq!(self.socket(number), 0);
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        assert_eq!(self.ask(nqe::named(nqe::job(QUEUES_BIND, number), any)).error, 0);
        let done = self.ask(queues_nqe { credit: 8, ..nqe::job(QUEUES_LISTEN, number) });
        assert_eq!(done.error, 0);
        nqe::address(&done, 4).unwrap()
    }

    /// A connection with a peer, whose number is 2: what the completion says, and the peer.
    pub(crate) fn connection(&mut self) -> (queues_nqe, TcpStream) {
        let at = self.listen(1);
        let peer = TcpStream::connect(at).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let done = self.ask(queues_nqe { length: 2, ..nqe::job(QUEUES_ACCEPT, 1) });
        assert_eq!(done.error, 0);
        (done, peer)
    }

    /// What a guest can do at any time: writes a word.
    pub(crate) fn poke32(&self, at: usize, value: u32) {
        self.changer()(at, value);
    }

    /// The same, for another thread.
    pub(crate) fn changer(&self) -> impl Fn(usize, u32) + Send + 'static {
        let memory = Arc::clone(&self.memory);
        move |at, value| {
            memory.word32(at).unwrap().store(value, Ordering::SeqCst);
        }
    }

    pub(crate) fn poke64(&self, at: usize, value: u64) {
        self.memory.word64(at).unwrap().store(value, Ordering::SeqCst);
    }

    pub(crate) fn peek64(&self, at: usize) -> u64 {
        self.memory.word64(at).unwrap().load(Ordering::SeqCst)
    }

    /// Where a stream's words lie.
    pub(crate) fn stream_at(&self, number: u16) -> usize {
        let streams = core::mem::offset_of!(queues_header, streams_at);
        let at = usize::try_from(self.peek64(streams)).unwrap();
        at + usize::from(number) * size_of::<queues_stream>()
    }
}

/// Runs an attack with all protections, then without one: there it has to succeed, or it proves
/// nothing. Each is a process, because it cannot be without a protection for a moment.
pub(crate) fn attacked(test: &str, protection: &str, attack: impl Fn() -> bool) {
    const VARIABLE: &str = "HEDDLE_ATTACK";
    if std::env::var_os(VARIABLE).is_some() {
        println!("\nthe attack {}", if attack() { "succeeds" } else { "fails" });
        return;
    }
    for (without, succeeds) in [("", false), (protection, cfg!(feature = "attack"))] {
        let out = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(VARIABLE, test)
            .env("HEDDLE_WITHOUT", without)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let want = if succeeds { "the attack succeeds" } else { "the attack fails" };
        let errors = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(said.contains(want), "without {without:?}, want {want:?}: {said}{errors}");
    }
}

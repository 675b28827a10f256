//! Plays the agent for what routers ask it.

use std::collections::HashMap;
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};

use verbs_protocol::Gid;
use verbs_protocol::agent::{Marks, Message};

use super::wire::{receive, send, tcp_pair};

/// What connects the endpoints of a test: for each GID the agent's socket of its router, and its
/// number.
#[derive(Default)]
pub(crate) struct Net {
    pub(super) ways: Mutex<HashMap<Gid, (Arc<OwnedFd>, u64)>>,
    connections: Mutex<Vec<TcpStream>>,
    refuses: AtomicU32,
    is_silent: AtomicBool,
    /// What of packets to peers without Heddle is the operator's.
    pub(crate) marks: Mutex<Marks>,
    busy: Mutex<()>,
    /// Groups of endpoints, as routers have said.
    groups: Mutex<HashMap<u64, Vec<Gid>>>,
    /// Endpoints that routers have given back, with what they did and their sockets.
    pub(crate) released: Mutex<Vec<(u64, Message, OwnedFd)>>,
    /// Routers that have given back what they could at once.
    pub(crate) drained: AtomicU32,
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

    /// No agent hears its router for as long as this is kept.
    pub(crate) fn be_busy(&self) -> std::sync::MutexGuard<'_, ()> {
        self.busy.lock().unwrap()
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.lock().unwrap().len()
    }

    /// The groups that a router has said an endpoint is in.
    pub(crate) fn groups(&self, n: u8) -> Vec<Gid> {
        self.groups.lock().unwrap().get(&n.into()).cloned().unwrap_or_default()
    }

    /// An endpoint is in these groups, as its router says: others hear of it.
    fn spread(&self, from: &Arc<OwnedFd>, endpoint: u64, groups: &[Gid]) {
        let ways = self.ways.lock().unwrap();
        let is = |(to, number): &(Arc<OwnedFd>, u64)| *number == endpoint && Arc::ptr_eq(to, from);
        for gid in ways.iter().filter(|(_, way)| is(way)).map(|(gid, _)| *gid) {
            let mut told: Vec<&Arc<OwnedFd>> = vec![from];
            for (to, _) in ways.values() {
                if !told.iter().any(|t| Arc::ptr_eq(t, to)) {
                    let (gids, groups) = ([gid, [0; 16]], groups.to_vec());
                    let named = Message::Groups { endpoint: 0, gids, groups };
                    let _ = send(to, &named.encode(), &[]);
                    told.push(to);
                }
            }
        }
        self.groups.lock().unwrap().insert(endpoint, groups.to_vec());
    }

    /// Plays the agent for what a router asks.
    pub(super) fn serve(&self, agent: &Arc<OwnedFd>, statistics: &Sender<Message>) {
        let mut last = None;
        while let Ok((bytes, mut fds)) = receive(agent) {
            if bytes.is_empty() {
                return;
            }
            drop(self.busy.lock().unwrap());
            let message = Message::parse(&bytes).unwrap();
            if matches!(message, Message::Statistics { tag: 0, .. }) {
                last = Some(message);
                continue;
            }
            if let Message::Released { endpoint } = message {
                let (last, listener) = (last.take().unwrap(), fds.pop().unwrap());
                self.released.lock().unwrap().push((endpoint, last, listener));
                continue;
            }
            if message == Message::Drain {
                self.drained.fetch_add(1, Ordering::SeqCst);
                continue;
            }
            if let Message::Groups { endpoint, groups, .. } = message {
                self.spread(agent, endpoint, &groups);
                continue;
            }
            if matches!(message, Message::Statistics { .. }) {
                // A test that has ended does not wait for it.
                let _ = statistics.send(message);
                continue;
            }
            if let Message::Ask { tag, endpoint, destination, .. } = message {
                let marks = *self.marks.lock().unwrap();
                let answer = Message::Answer { tag, endpoint, destination, errno: 0, marks };
                let _ = send(agent, &answer.encode(), &[]);
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
            // Whoever cuts it has to find it as soon as it is used.
            let ours = a.as_raw_fd();
            self.connections.lock().unwrap().push(a);
            let _ = send(&to, &accepted.encode(), &[b.as_raw_fd()]);
            let _ = send(agent, &answer, &[ours]);
        }
    }
}

//! A whole service, driven by bytes: what its guest pushes, writes anywhere, and what peers do.

#[path = "../support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use heddle_machine::nqe;
use heddle_stack::queues::abi::*;
use heddle_stack::queues::proto;
use shared_ring::Slot;
use support::Machine;

/// For how long a peer tries to connect.
const REACHABLE: Duration = Duration::from_millis(10);

/// What a run has reached.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) jobs: u64,
    pub(crate) accepted: u64,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    pub(crate) refused: u64,
    pub(crate) broken_streams: u64,
    pub(crate) broken_regions: u64,
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u64> {
        let (eight, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*eight))
    }
}

/// A job that is nearly right: numbers are small, so that they meet.
fn job(bytes: &mut Bytes<'_>) -> Option<queues_nqe> {
    let any = bytes.word()?;
    let small = |shift: u32| u32::from(any.to_le_bytes()[shift as usize] % 8);
    let at: SocketAddr = "127.0.0.1:0".parse().ok()?;
    Some(queues_nqe {
        flags: u8::try_from(small(1)).ok()?,
        generation: small(2),
        length: small(3),
        credit: small(4),
        offset: u64::from(small(5)),
        option: u16::try_from(small(6) * 2).ok()?,
        ..nqe::named(nqe::job(1 + u32::from(any.to_le_bytes()[0] % 14), small(7)), at)
    })
}

/// Drives a service until the bytes are over. What the guest does may end anything of its own, and
/// the service has to be there for the next one.
pub(crate) fn drive(bytes: &[u8], all: &mut Outcomes) {
    let mut bytes = Bytes(bytes);
    let mut machine = Machine::new();
    let (done, peer) = machine.connection();
    let port = machine.ask(nqe::job(QUEUES_NAME, 1)).port;
    let mut peers = vec![peer];
    let stream = machine.stream_at(done.stream);
    let jobs = core::mem::offset_of!(queues_header, jobs_at);
    let jobs = usize::try_from(machine.peek64(jobs)).unwrap();
    while let Some(what) = bytes.byte() {
        match what % 8 {
            0..3 => {
                let Some(job) = job(&mut bytes) else { break };
                let _ = machine.guest.jobs.push(&[proto::slot(&job)]);
            }
            3 => {
                let Some(any) = bytes.word() else { break };
                let mut slot = Slot::default();
                slot.0.fill(any);
                let _ = machine.guest.jobs.push(&[slot]);
            }
            4 => {
                // Words of the stream's, little beside what is there, or anything.
                let (Some(at), Some(value)) = (bytes.byte(), bytes.word()) else { break };
                let value = if at & 128 == 0 { value % 4096 } else { value };
                machine.poke64(stream + usize::from(at % 32) * 8, value);
                let generation = done.generation;
                let send = queues_nqe { generation, ..nqe::job(QUEUES_SEND, 2) };
                let _ = machine.guest.jobs.push(&[proto::slot(&send)]);
            }
            5 => {
                let (Some(at), Some(value)) = (bytes.word(), bytes.byte()) else { break };
                let words = machine.memory.len() as u64 / 8;
                // An index of the rings of nqes, now and then; the rest is mostly bytes of rings.
                if value % 32 == 0 {
                    machine
                        .poke32(jobs + 128, u32::from_le_bytes([value, 0, at.to_le_bytes()[0], 0]));
                    machine.step();
                    break;
                }
                let at = usize::try_from(at % words).unwrap_or(0) * 8;
                machine.poke64(at, u64::from(value));
            }
            6 => {
                let to = SocketAddr::from(([127, 0, 0, 1], port));
                if peers.len() < 8
                    // The guest may have made the backlog small, and then nobody answers.
                    && let Ok(peer) = TcpStream::connect_timeout(&to, REACHABLE)
                {
                    peers.push(peer);
                }
            }
            _ => {
                if let Some(peer) = peers.last_mut() {
                    let _ = peer.set_nonblocking(true);
                    let _ = peer.write(&[what; 300]);
                    let _ = peer.read(&mut [0; 300]);
                }
            }
        }
        machine.step();
        if machine.guest.is_over() {
            break;
        }
    }
    let counts = machine.service.counts;
    all.jobs += counts.jobs;
    all.accepted += counts.accepted;
    all.sent += counts.sent;
    all.received += counts.received;
    all.refused += counts.refused_job;
    all.broken_streams += counts.broken_streams;
    all.broken_regions += counts.broken_regions;
    machine.service.begin_anew().unwrap();
    machine.meet_again();
    assert_eq!(machine.socket(1), 0, "the next guest has nothing of the one before");
}

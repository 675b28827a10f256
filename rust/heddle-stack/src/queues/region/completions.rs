//! What a guest is told.

use shared_ring::Slot;

use super::{JOBS, Region};
use crate::queues::abi::*;
use crate::queues::proto::{self, Errno};

impl Region {
    pub(super) fn push(&mut self, nqe: queues_nqe) {
        self.stats.completions += 1;
        if !self.gone {
            self.waiting.push_back(nqe);
        }
    }

    pub(super) fn complete(&mut self, job: &queues_nqe, result: Result<(), Errno>) {
        let error = result.err().map_or(0, |e| e.0);
        self.complete_with(job, proto::done(job, error));
    }

    pub(super) fn complete_with(&mut self, job: &queues_nqe, done: queues_nqe) {
        if u32::from(job.flags) & QUEUES_QUIET == 0 {
            self.push(done);
        }
    }

    /// Says what there is room for. An error: the guest does not keep to the rules.
    pub(super) fn flush(&mut self) -> Result<bool, shared_ring::PeerBroken> {
        let mut said = false;
        while !self.waiting.is_empty() {
            let slots: Vec<Slot> = self.waiting.iter().take(JOBS).map(proto::slot).collect();
            let pushed = self.completions.push(&slots)?;
            self.waiting.drain(..pushed);
            said |= pushed > 0;
            if pushed < slots.len() {
                break;
            }
        }
        Ok(said)
    }
}

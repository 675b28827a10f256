//! The end of a guest, and of what it has.

use core::sync::atomic::Ordering;
use std::os::fd::AsFd;

use unix_io::random;

use super::jobs::CLOSE;
use super::{Context, Kind, Region, Socket, rings};
use crate::queues::abi::*;
use crate::queues::memory::HeaderWord;

impl Region {
    /// The guest of a polled region has ended, and another one may come.
    pub(super) fn renew(&mut self, context: &Context<'_>) {
        self.close_all(context, true);
        self.waiting.clear();
        self.guest_beat = (0, 0);
        match rings(self.view.memory(), &self.view.layout) {
            Ok((jobs, completions)) => {
                self.jobs = jobs;
                self.completions = completions;
                self.view.describe(self.flags, random().max(1));
            }
            Err(_) => self.gone = true,
        }
    }

    /// Nobody has the other end of the region's socket any more, or the agent says so.
    pub(in crate::queues) fn guest_gone(&mut self, context: &Context<'_>) {
        if self.gone {
            return;
        }
        self.gone = true;
        context.epoll.remove(self.life.as_fd());
        if let Some(bells) = &self.bells {
            context.epoll.remove(bells.jobs.as_fd());
        }
        self.view.header(HeaderWord::Ended).store(QUEUES_ENDED_GIVEN_UP, Ordering::Release);
        self.close_all(context, false);
    }

    /// Closes what there is; connections when they have sent what was given them, unless at once.
    pub(in crate::queues) fn close_all(&mut self, context: &Context<'_>, at_once: bool) {
        let numbers: Vec<u32> = self.by_number.keys().copied().collect();
        for socket in numbers {
            let flags =
                u8::try_from(QUEUES_QUIET | if at_once { QUEUES_ABORT } else { 0 }).unwrap_or(0);
            let Some(index) = self.by_number.get(&socket).copied() else { continue };
            let mut job = queues_nqe { operation: CLOSE, flags, socket, ..Default::default() };
            if let Some(Some(Socket { kind: Kind::Connection(stream), .. })) =
                self.sockets.get_mut(index)
            {
                job.generation = stream.generation;
                if stream.close.is_some() && !at_once {
                    continue;
                }
                job.offset = stream.produced(&self.view);
                stream.close = None;
            }
            // Each is there, and takes this, but for a connection whose counter cannot be.
            if self.close(&job, context).is_err() {
                job.flags |= u8::try_from(QUEUES_ABORT).unwrap_or(0);
                let _ = self.close(&job, context);
            }
            if at_once && let Some(index) = self.by_number.get(&socket).copied() {
                self.remove(index, context);
            }
        }
    }
}

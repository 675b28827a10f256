//! Memory that the router has forgotten and programs may have: as long as somebody has it open,
//! mapped, or under way in a message, it counts for its endpoint. The kernel tells when nobody has
//! it any more. `docs/decisions/0079-memory-counts-until-it-is-gone.md`.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use shared_ring::SharedMemory;

use crate::endpoint::Quota;
use crate::objects::{Objects, Source};
use crate::protection::{Protection, protects};
use crate::sys::{self, Epoll, Watches};

/// Memory that may be there without the router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    /// Handle of the endpoint that it counts for.
    endpoint: u32,
    bytes: u64,
}

/// All of it.
pub(crate) struct Kept {
    watches: Watches,
    by_watch: HashMap<i32, Memory>,
    /// What the kernel has had no room to watch: it is kept here, too, until it has.
    unwatched: Vec<(Arc<SharedMemory>, Memory)>,
}

impl Kept {
    pub(crate) fn new(epoll: &Epoll) -> io::Result<Self> {
        let kept = Self::of(Watches::new()?);
        epoll.add(kept.watches.as_fd(), sys::READABLE, Source::Kept.id(0))?;
        Ok(kept)
    }

    fn of(watches: Watches) -> Self {
        Self { watches, by_watch: HashMap::new(), unwatched: Vec::new() }
    }

    /// Watches memory of which the router has no other use.
    fn add(&mut self, shared: Arc<SharedMemory>, memory: Memory) {
        match sys::watch_end(&self.watches, shared.as_fd()) {
            Ok(watch) => {
                self.by_watch.insert(watch, memory);
            }
            Err(_) => self.unwatched.push((shared, memory)),
        }
    }

    /// What nobody has any more.
    fn gone(&mut self) -> Vec<Memory> {
        for (shared, memory) in std::mem::take(&mut self.unwatched) {
            self.add(shared, memory);
        }
        let mut gone = Vec::new();
        // Also if nothing is watched: the kernel tells of the end of a watch apart from that of
        // its file, perhaps later, and what is not read has the loop turn without end.
        while let Ok(ended) = sys::ended(&self.watches) {
            gone.extend(ended.iter().filter_map(|watch| self.by_watch.remove(watch)));
            if ended.contains(&-1)
                && let Ok(left) = sys::watched(&self.watches)
            {
                let lost = self.by_watch.extract_if(|watch, _| !left.contains(watch));
                gone.extend(lost.map(|(_, memory)| memory));
            }
        }
        gone
    }
}

impl Objects {
    /// The router does without memory that a program was given, and that its endpoint is charged
    /// for. Nothing of it may be left in the objects.
    pub(crate) fn let_go(&mut self, endpoint: u32, shared: Arc<SharedMemory>) {
        let bytes = shared.len() as u64;
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.hold(Quota::Memories);
        }
        let memory = Memory { endpoint, bytes };
        match &mut self.kept {
            Some(kept) if protects(Protection::Kept) => kept.add(shared, memory),
            _ => self.forget(memory),
        }
        self.take_gone();
    }

    /// The same, of the endpoint of a context.
    pub(crate) fn let_go_of(&mut self, context: u32, shared: Arc<SharedMemory>) {
        let endpoint = self.contexts.get(context).map_or(0, |c| c.endpoint);
        self.let_go(endpoint, shared);
    }

    /// Gives endpoints back what nobody has any more.
    pub(crate) fn take_gone(&mut self) {
        for memory in self.kept.as_mut().map(Kept::gone).unwrap_or_default() {
            self.forget(memory);
        }
    }

    fn forget(&mut self, memory: Memory) {
        self.pooled -= memory.bytes;
        if let Some(endpoint) = self.endpoints.get_mut(memory.endpoint) {
            endpoint.refund(Quota::Memory, memory.bytes);
            endpoint.refund(Quota::Memories, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Arc<SharedMemory> {
        SharedMemory::create(c"test", 8192).unwrap()
    }

    const OURS: Memory = Memory { endpoint: 1, bytes: 8192 };

    /// Memory is gone when the last descriptor is, of whatever kind.
    #[test]
    fn it_is_told_when_nobody_has_it() {
        let mut kept = Kept::of(Watches::new().unwrap());
        let shared = memory();
        let other = shared.as_fd().try_clone_to_owned().unwrap();
        kept.add(shared, OURS);
        assert_eq!(kept.gone(), []);
        drop(other);
        assert_eq!((kept.gone(), kept.gone()), (vec![OURS], vec![]));
    }

    /// The end of a watch is told after that of its file, when nothing may be known of it any more.
    #[test]
    fn all_that_is_told_is_read() {
        let mut kept = Kept::of(Watches::new().unwrap());
        kept.add(memory(), OURS);
        kept.by_watch.clear();
        assert_eq!(kept.gone(), []);
        assert!(sys::would_block(&sys::ended(&kept.watches).unwrap_err()));
    }

    #[test]
    fn what_the_kernel_does_not_watch_stays() {
        // No such thing: each call fails.
        let mut kept = Kept::of(Watches::of(sys::eventfd().unwrap()).unwrap());
        kept.add(memory(), OURS);
        assert_eq!(kept.gone(), []);
        kept.watches = Watches::new().unwrap();
        assert_eq!(kept.gone(), [OURS]);
    }

    /// More ends than the kernel keeps messages of: it says so, and which files are left.
    #[test]
    fn what_was_lost_is_found() {
        let most = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let most: usize = most.trim().parse().unwrap();
        let mut kept = Kept::of(Watches::new().unwrap());
        let stays = memory();
        kept.add(Arc::clone(&stays), OURS);
        for _ in 0..most / 2 + 10 {
            kept.add(memory(), OURS);
        }
        assert_eq!(kept.gone().len(), most / 2 + 10);
        assert_eq!(kept.by_watch.len(), 1);
        drop(stays);
        assert_eq!(kept.gone(), [OURS]);
    }
}

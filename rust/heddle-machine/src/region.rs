//! Regions: the memory that a machine and its service share, and where what is in it.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use heddle_stack::queues::abi::*;
use shared_ring::{ALIGNMENT, Consumer, Producer, SharedMemory, ring, ring_size};

/// Where what is in a region, as this side has it: nothing of it is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the region.
    pub size: usize,
    /// Of each ring of nqes.
    pub slots: u32,
    /// Pairs of byte rings.
    pub streams: u32,
    /// Bytes of each byte ring.
    pub capacity: u32,
    pub(crate) jobs_at: usize,
    pub(crate) completions_at: usize,
    pub(crate) streams_at: usize,
    pub(crate) bytes_at: usize,
}

const PAGE: usize = 4096;
const SLOTS: u32 = 1024;

impl Layout {
    /// A region of this size with byte rings of this capacity, and as many streams as find room.
    ///
    /// # Errors
    ///
    /// It cannot be; a sentence says why.
    pub fn of(size: usize, capacity: u32) -> Result<Self, String> {
        let possible = QUEUES_CAPACITY_MIN..=QUEUES_CAPACITY_MAX;
        if !possible.contains(&capacity) || !capacity.is_power_of_two() {
            return Err(format!(
                "a byte ring has {QUEUES_CAPACITY_MIN} to {QUEUES_CAPACITY_MAX} bytes, a power of two, and not {capacity}"
            ));
        }
        let jobs_at = PAGE;
        let completions_at = (jobs_at + ring_size(SLOTS)).next_multiple_of(ALIGNMENT);
        let streams_at = (completions_at + ring_size(SLOTS)).next_multiple_of(PAGE);
        let each = 2 * capacity as usize + size_of::<queues_stream>();
        let room = size.saturating_sub(streams_at + PAGE);
        let streams = u32::try_from(room / each).unwrap_or(u32::MAX).min(QUEUES_STREAMS_MAX);
        if streams == 0 || !size.is_power_of_two() {
            return Err(format!(
                "a machine's memory has a power of two of bytes, room for a pair of byte rings, and not {size}"
            ));
        }
        let bytes_at =
            (streams_at + streams as usize * size_of::<queues_stream>()).next_multiple_of(PAGE);
        Ok(Self {
            size,
            slots: SLOTS,
            streams,
            capacity,
            jobs_at,
            completions_at,
            streams_at,
            bytes_at,
        })
    }

    /// What a service says of its region. The numbers are checked here, once.
    ///
    /// # Errors
    ///
    /// There is no region, or one of another version; a sentence says which.
    pub fn read(memory: &SharedMemory) -> Result<Self, String> {
        let word = |at| usize::try_from(word64(memory, at).load(Ordering::Relaxed)).unwrap_or(0);
        let half = |at| word32(memory, at).load(Ordering::Relaxed);
        let magic = word64(memory, offset_of!(queues_header, magic)).load(Ordering::Relaxed);
        if magic != QUEUES_MAGIC {
            return Err("nobody serves this memory".to_string());
        }
        let version = half(offset_of!(queues_header, version));
        let flags = half(offset_of!(queues_header, flags));
        if version != QUEUES_VERSION || flags != QUEUES_CONTROL | QUEUES_POLLED {
            return Err(format!("the service is of version {version}, flags {flags:#x}"));
        }
        let layout = Self {
            size: word(offset_of!(queues_header, size)),
            slots: half(offset_of!(queues_header, slots)),
            streams: half(offset_of!(queues_header, streams)),
            capacity: half(offset_of!(queues_header, capacity)),
            jobs_at: word(offset_of!(queues_header, jobs_at)),
            completions_at: word(offset_of!(queues_header, completions_at)),
            streams_at: word(offset_of!(queues_header, streams_at)),
            bytes_at: word(offset_of!(queues_header, bytes_at)),
        };
        if layout.size > memory.len()
            || Self::of(layout.size, layout.capacity).as_ref() != Ok(&layout)
        {
            return Err(format!("the service's layout is another one: {layout:?}"));
        }
        Ok(layout)
    }
}

fn word32(memory: &SharedMemory, at: usize) -> &AtomicU32 {
    memory.word32(at).expect("`is_possible` has seen that there is a header")
}

fn word64(memory: &SharedMemory, at: usize) -> &AtomicU64 {
    memory.word64(at).expect("`is_possible` has seen that there is a header")
}

fn is_possible(memory: Arc<SharedMemory>) -> io::Result<Arc<SharedMemory>> {
    if memory.len() < 2 * PAGE {
        return Err(io::Error::other("the memory is too small for a region"));
    }
    Ok(memory)
}

/// Maps a sealed memfd: the service's own, or, in tests, the machine's.
///
/// # Errors
///
/// It is none, or the kernel's.
pub fn map(file: OwnedFd) -> io::Result<Arc<SharedMemory>> {
    let size = File::from(file.try_clone()?).metadata()?.len();
    let size = usize::try_from(size).unwrap_or(0);
    is_possible(SharedMemory::open(file, size).map_err(io::Error::other)?)
}

/// Maps the memory of a PCI device.
///
/// # Errors
///
/// The kernel's.
pub fn map_device(resource: File) -> io::Result<Arc<SharedMemory>> {
    is_possible(SharedMemory::of_device(resource).map_err(io::Error::other)?)
}

/// The service's side of a region: makes it, anew each time that another guest begins.
#[derive(Debug)]
pub struct Made {
    /// All of it.
    pub memory: Arc<SharedMemory>,
    /// Where what is.
    pub layout: Layout,
    /// Jobs of the guest's.
    pub jobs: Consumer,
    /// What it is told.
    pub completions: Producer,
}

impl Made {
    /// Makes the region, in memory that a guest may have, and may write to at any time: what it had
    /// of an earlier generation leads nowhere.
    ///
    /// # Errors
    ///
    /// The guest is writing to it just now: to be tried again.
    pub fn make(memory: &Arc<SharedMemory>, layout: Layout) -> io::Result<Self> {
        let last = word64(memory, offset_of!(queues_header, generation)).load(Ordering::Relaxed);
        word32(memory, offset_of!(queues_header, ended)).store(1, Ordering::SeqCst);
        for at in [layout.jobs_at, layout.completions_at] {
            ring::create(memory, at, layout.slots).map_err(io::Error::other)?;
        }
        for (at, value) in [
            (offset_of!(queues_header, version), QUEUES_VERSION),
            (offset_of!(queues_header, flags), QUEUES_CONTROL | QUEUES_POLLED),
            (offset_of!(queues_header, slots), layout.slots),
            (offset_of!(queues_header, streams), layout.streams),
            (offset_of!(queues_header, capacity), layout.capacity),
            (offset_of!(queues_header, guest_beat), 0),
            (offset_of!(queues_header, stop), 0),
        ] {
            word32(memory, at).store(value, Ordering::Relaxed);
        }
        for (at, value) in [
            (offset_of!(queues_header, size), layout.size),
            (offset_of!(queues_header, jobs_at), layout.jobs_at),
            (offset_of!(queues_header, completions_at), layout.completions_at),
            (offset_of!(queues_header, streams_at), layout.streams_at),
            (offset_of!(queues_header, bytes_at), layout.bytes_at),
        ] {
            word64(memory, at).store(value as u64, Ordering::Relaxed);
        }
        let jobs = Consumer::attach(memory, layout.jobs_at, layout.slots);
        let completions = Producer::attach(memory, layout.completions_at, layout.slots);
        let jobs = jobs.map_err(io::Error::other)?;
        let completions = completions.map_err(io::Error::other)?;
        // The last one may be the guest's own joke; one that it had never comes again by chance.
        let mut generation = last.wrapping_add(unix_io::random() | 1);
        if generation == 0 || generation == last {
            generation = last.wrapping_add(1).max(1);
        }
        word64(memory, offset_of!(queues_header, generation)).store(generation, Ordering::Relaxed);
        word32(memory, offset_of!(queues_header, ended)).store(0, Ordering::Relaxed);
        word64(memory, offset_of!(queues_header, magic)).store(QUEUES_MAGIC, Ordering::Release);
        Ok(Self { memory: Arc::clone(memory), layout, jobs, completions })
    }

    /// Shows the guest that somebody serves it.
    pub fn beat(&self) {
        word32(&self.memory, offset_of!(queues_header, beat)).fetch_add(1, Ordering::Relaxed);
    }

    /// What the guest shows.
    #[must_use]
    pub fn guest_beat(&self) -> u32 {
        word32(&self.memory, offset_of!(queues_header, guest_beat)).load(Ordering::Relaxed)
    }
}

/// The guest's side of a region.
#[derive(Debug)]
pub struct Met {
    /// All of it.
    pub memory: Arc<SharedMemory>,
    /// Where what is.
    pub layout: Layout,
    /// What the guest asks for.
    pub jobs: Producer,
    /// What it is told.
    pub completions: Consumer,
    generation: u64,
}

impl Met {
    /// Takes the guest's side of a region that nobody has used yet.
    ///
    /// # Errors
    ///
    /// A sentence: nobody serves it, or another guest has it.
    pub fn meet(memory: &Arc<SharedMemory>) -> Result<Self, String> {
        let generation = generation(memory);
        let layout = Layout::read(memory)?;
        let jobs = Producer::attach(memory, layout.jobs_at, layout.slots);
        let completions = Consumer::attach(memory, layout.completions_at, layout.slots);
        let jobs = jobs.map_err(|err| format!("the job ring: {err}"))?;
        let completions = completions.map_err(|err| format!("the completion ring: {err}"))?;
        let met = Self { memory: Arc::clone(memory), layout, jobs, completions, generation };
        if met.is_over() || generation == 0 {
            return Err("the service is making the region anew".to_string());
        }
        met.show_beat();
        Ok(met)
    }

    /// Whether the service has given the region up, or made it anew.
    #[must_use]
    pub fn is_over(&self) -> bool {
        word32(&self.memory, offset_of!(queues_header, ended)).load(Ordering::Acquire) != 0
            || generation(&self.memory) != self.generation
    }

    /// What the service shows.
    #[must_use]
    pub fn beat(&self) -> u32 {
        word32(&self.memory, offset_of!(queues_header, beat)).load(Ordering::Relaxed)
    }

    /// Shows the service that the guest is there.
    pub fn show_beat(&self) {
        let beat = word32(&self.memory, offset_of!(queues_header, guest_beat));
        beat.fetch_add(1, Ordering::Relaxed);
    }
}

fn generation(memory: &SharedMemory) -> u64 {
    word64(memory, offset_of!(queues_header, generation)).load(Ordering::Acquire)
}

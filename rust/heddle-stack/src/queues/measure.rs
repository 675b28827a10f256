//! What an nqe costs, and what small writes gain: `heddle-stack --measure`, which `heddle bench
//! stacks` runs.

use core::hint::black_box;
use core::sync::atomic::{AtomicBool, Ordering};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shared_ring::{Consumer, Producer, SharedMemory, Slot, ring, ring_size};
use unix_io::epoll::wait_readable;
use unix_io::{packets, plain};

use super::Service;
use super::abi::*;
use super::guest::{Connection, Guest};
use super::memory::Way;
use super::proto;

const BATCHES: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];
const CHUNKS: [usize; 3] = [1024, 4096, 65536];
const SLOTS: u32 = 1024;
const REGION: u64 = 1;

/// Prints a line for each of what is measured: `nqe THREADS BATCH NANOSECONDS`, and `write
/// CHUNK queues|kernel GIGABITS`, each for about so long.
///
/// # Errors
///
/// The kernel's.
pub fn run(time: Duration, out: &mut impl Write) -> io::Result<()> {
    for batch in BATCHES {
        writeln!(out, "nqe 1 {batch} {:.2}", one_thread(batch, time)?)?;
        writeln!(out, "nqe 2 {batch} {:.2}", two_threads(batch, time)?)?;
    }
    for chunk in CHUNKS {
        writeln!(out, "write {chunk} kernel {:.3}", native(chunk, time)?)?;
        writeln!(out, "write {chunk} queues {:.3}", by_ring(chunk, time)?)?;
    }
    Ok(())
}

fn bad(err: impl std::fmt::Display) -> io::Error {
    io::Error::other(err.to_string())
}

fn ends() -> io::Result<(Producer, Consumer)> {
    let memory = SharedMemory::create(c"measure", ring_size(SLOTS)).map_err(bad)?;
    ring::create(&memory, 0, SLOTS).map_err(bad)?;
    let producer = Producer::attach(&memory, 0, SLOTS).map_err(bad)?;
    Ok((producer, Consumer::attach(&memory, 0, SLOTS).map_err(bad)?))
}

fn make(slots: &mut [Slot], sequence: &mut u32) {
    let operation = u8::try_from(QUEUES_NOTHING).unwrap_or(0);
    for slot in slots {
        *sequence = sequence.wrapping_add(1);
        *slot = proto::slot(&queues_nqe { operation, sequence: *sequence, ..Default::default() });
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn per(time: Duration, n: u64) -> f64 {
    time.as_nanos() as f64 / n as f64
}

/// Nanoseconds of processor to make an nqe, push it, pop and read it: others that want the
/// processor, too, do not count.
fn one_thread(batch: usize, time: Duration) -> io::Result<f64> {
    let (mut producer, mut consumer) = ends()?;
    let (mut n, mut sequence, mut seen) = (0_u64, 0, 0_u32);
    let (mut slots, mut copies) = ([Slot::default(); 64], [Slot::default(); 64]);
    let (begun, used) = (Instant::now(), unix_io::clock(libc::CLOCK_THREAD_CPUTIME_ID));
    while n % 65536 != 0 || n == 0 || begun.elapsed() < time {
        make(&mut slots[..batch], &mut sequence);
        producer.push(&slots[..batch]).map_err(bad)?;
        let got = consumer.pop(&mut copies[..batch]).map_err(bad)?;
        for slot in &copies[..got] {
            seen = seen.wrapping_add(proto::nqe(slot).sequence);
        }
        n += batch as u64;
    }
    black_box(seen);
    let used = unix_io::clock(libc::CLOCK_THREAD_CPUTIME_ID) - used;
    Ok(per(Duration::from_nanos(used), n))
}

/// The same, of a ring whose ends are two threads'.
fn two_threads(batch: usize, time: Duration) -> io::Result<f64> {
    let (mut producer, mut consumer) = ends()?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let reader = std::thread::spawn(move || {
        let (mut n, mut seen, mut copies) = (0_u64, 0_u32, [Slot::default(); 64]);
        loop {
            let last = stopped.load(Ordering::Acquire);
            let got = consumer.pop(&mut copies[..batch]).unwrap_or(0);
            for slot in &copies[..got] {
                seen = seen.wrapping_add(proto::nqe(slot).sequence);
            }
            n += got as u64;
            if got == 0 && last {
                black_box(seen);
                return n;
            }
            if got == 0 {
                core::hint::spin_loop();
            }
        }
    });
    let (begun, mut sequence, mut rounds) = (Instant::now(), 0, 0_u32);
    let mut slots = [Slot::default(); 64];
    while rounds % 1024 != 0 || rounds == 0 || begun.elapsed() < time {
        rounds += 1;
        make(&mut slots[..batch], &mut sequence);
        let mut at = 0;
        while at < batch {
            let pushed = producer.push(&slots[at..batch]).map_err(bad)?;
            at += pushed;
            if pushed == 0 {
                core::hint::spin_loop();
            }
        }
    }
    stop.store(true, Ordering::Release);
    let n = reader.join().map_err(|_| bad("the reader"))?;
    Ok(per(begun.elapsed(), n.max(1)))
}

/// A connection over the machine's loopback, whose other end reads all, and how to wait for that.
fn sink() -> io::Result<(TcpStream, std::thread::JoinHandle<io::Result<u64>>)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let ours = TcpStream::connect(listener.local_addr()?)?;
    let (mut theirs, _) = listener.accept()?;
    let reads = std::thread::spawn(move || {
        let (mut buffer, mut all) = (vec![0; 256 << 10], 0);
        loop {
            match theirs.read(&mut buffer)? {
                0 => return Ok(all),
                n => all += n as u64,
            }
        }
    });
    Ok((ours, reads))
}

fn rate(bytes: u64, time: Duration) -> f64 {
    8.0 / per(time, bytes.max(1))
}

/// Gigabits a second of writes by system calls.
fn native(chunk: usize, time: Duration) -> io::Result<f64> {
    let (mut to, reads) = sink()?;
    let (bytes, begun) = (vec![1; chunk], Instant::now());
    while begun.elapsed() < time {
        for _ in 0..16 {
            to.write_all(&bytes)?;
        }
    }
    to.shutdown(Shutdown::Write)?;
    let all = reads.join().map_err(|_| bad("the reader"))??;
    Ok(rate(all, begun.elapsed()))
}

/// The same by a guest of the service.
fn by_ring(chunk: usize, time: Duration) -> io::Result<f64> {
    let (agent, theirs) = packets::packet_pair()?;
    unix_io::set_nonblocking(&theirs)?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let service = std::thread::spawn(move || -> io::Result<()> {
        let mut service = Service::new()?;
        service.connect(theirs)?;
        while !stopped.load(Ordering::Relaxed) {
            service.step(Some(Duration::from_millis(20)))?;
        }
        Ok(())
    });
    let (to, reads) = sink()?;
    let fd = OwnedFd::from(to);
    let (mut guest, mut c, life) = guest_of(&agent, &fd)?;
    let (mut bytes, begun) = (vec![1; chunk], Instant::now());
    while begun.elapsed() < time {
        for _ in 0..16 {
            write_all(&mut guest, &mut c, &mut bytes)?;
        }
    }
    drop((guest, life, fd)); // the service sends the rest
    let all = reads.join().map_err(|_| bad("the reader"))??;
    let took = begun.elapsed();
    stop.store(true, Ordering::Relaxed);
    service.join().map_err(|_| bad("the service"))??;
    Ok(rate(all, took))
}

/// As the library of containers does.
fn write_all(guest: &mut Guest, c: &mut Connection, bytes: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        let n = guest.room(c).min(bytes.len() - at);
        if n == 0 {
            guest.wait_for_room(c);
            continue;
        }
        guest.view.copy(c.stream, Way::Out, c.sent, &mut bytes[at..at + n]);
        guest.show(c, n)?;
        at += n;
    }
    Ok(())
}

fn say<T: plain::Plain, A: plain::Plain>(
    agent: &OwnedFd,
    message: &T,
    fd: Option<&OwnedFd>,
) -> io::Result<A> {
    let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
    packets::send(agent, plain::bytes(message), &fds)?;
    if !wait_readable(agent.as_fd(), Duration::from_secs(10)) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let (mut bytes, mut got) = ([0; proto::MESSAGE_MAX], Vec::new());
    let n = packets::receive(agent, &mut bytes, &mut got)?;
    bytes.get(..n).and_then(plain::read).ok_or_else(|| bad("another answer"))
}

/// What an agent says to have a guest, with a connection.
fn guest_of(agent: &OwnedFd, fd: &OwnedFd) -> io::Result<(Guest, Connection, OwnedFd)> {
    let head = |type_, region| queues_head { type_, tag: 1, region, error: 0, reserved: 0 };
    let hello = queues_plain { head: head(QUEUES_HELLO, 0), value: QUEUES_VERSION.into() };
    let _: queues_plain = say(agent, &hello, None)?;
    let (life, theirs) = packets::packet_pair()?;
    let asked = queues_region {
        head: head(QUEUES_REGION, REGION),
        slots: 256,
        streams: 1,
        capacity: QUEUES_CAPACITY_MAX,
        ..Default::default()
    };
    let _: queues_plain = say(agent, &asked, Some(&theirs))?;
    drop(theirs);
    let guest = Guest::open(&life)?;
    let give = queues_give { head: head(QUEUES_GIVE, REGION), ..Default::default() };
    let given: queues_give = say(agent, &give, Some(fd))?;
    if given.head.error != 0 {
        return Err(io::Error::from_raw_os_error(given.head.error));
    }
    let (socket, stream) = (given.stream + 1, u16::try_from(given.stream).map_err(bad)?);
    let c = Connection { socket, stream, generation: given.generation, sent: 0, received: 0 };
    Ok((guest, c, life))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_figure() {
        let mut out = Vec::new();
        run(Duration::from_millis(2), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert_eq!(text.lines().count(), 2 * BATCHES.len() + 2 * CHUNKS.len());
        for line in text.lines() {
            let value: f64 = line.rsplit(' ').next().unwrap().parse().unwrap();
            assert!(value > 0.0, "{line}");
        }
    }
}

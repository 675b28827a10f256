//! Outside: makes a machine's memory, starts its monitor with it, and a service, which is a process
//! of its own: it may die, and another one takes its place.

#![expect(unsafe_code, reason = "system calls that the standard library does not have")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use shared_ring::SharedMemory;
use unix_io::check;

use crate::guest::Guest;
use crate::region::{self, Layout};
use crate::service::Service;

/// The descriptor of the memory in the monitor, and in a service.
pub const DESCRIPTOR: RawFd = 3;
/// Services that end sooner than this are started again with a pause.
const WELL: Duration = Duration::from_secs(1);
/// For how long a side looks for work before it sleeps, with a processor to spare.
const SPIN: Duration = Duration::from_micros(20);
/// How often it looks otherwise.
const LOOK: Duration = Duration::from_millis(1);
/// How often a guest looks to which nothing can come.
const IDLE: Duration = Duration::from_millis(100);

/// Has a command have the memory as [`DESCRIPTOR`], and end when this process does, by a signal.
fn with_memory(command: &mut Command, memory: &OwnedFd, signal: i32) {
    let memory = memory.as_raw_fd();
    let prepare = move || {
        // SAFETY: prctl takes numbers.
        check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) })?;
        // SAFETY: dup2 takes numbers; the memory's is another one than DESCRIPTOR, see `run`.
        check(unsafe { libc::dup2(memory, DESCRIPTOR) }).map(drop)
    };
    // SAFETY: between fork and exec it makes two system calls, and nothing else.
    unsafe { command.pre_exec(prepare) };
}

/// The monitor's process, and a signal that came before there was one; 0: none.
static MONITOR: AtomicI32 = AtomicI32::new(0);
static EARLY: AtomicI32 = AtomicI32::new(0);

extern "C" fn pass_on(signal: libc::c_int) {
    let monitor = MONITOR.load(Ordering::SeqCst);
    if monitor == 0 {
        EARLY.store(signal, Ordering::SeqCst);
    } else {
        // SAFETY: kill takes numbers; until `run` has waited for it, nobody else has the number.
        unsafe { libc::kill(monitor, signal) };
    }
}

/// Has the monitor get what an engine says to this process: the first one of a container gets no
/// signal that it does not ask for, so that a machine would be killed where it was to be stopped.
fn pass_signals_on() -> io::Result<()> {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: a sigaction consists of integers, for which zero is a value.
        let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
        action.sa_sigaction = pass_on as *const () as usize;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler makes one system call, which handlers may.
        check(unsafe { libc::sigaction(signal, &raw const action, core::ptr::null_mut()) })?;
    }
    Ok(())
}

fn start_service(memory: &OwnedFd, capacity: u32) -> io::Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["serve", &capacity.to_string()]);
    with_memory(&mut command, memory, libc::SIGKILL);
    command.spawn()
}

/// Runs a machine's monitor with memory of this size, in which byte rings have this capacity, and
/// serves the machine until the monitor ends.
///
/// # Errors
///
/// The kernel's: the monitor cannot be started, say.
pub fn run(size: usize, capacity: u32, monitor: &[String]) -> io::Result<ExitStatus> {
    Layout::of(size, capacity).map_err(io::Error::other)?;
    let Some((program, arguments)) = monitor.split_first() else {
        return Err(io::Error::other("no monitor to run"));
    };
    let memory = SharedMemory::create(c"heddle-machine", size).map_err(io::Error::other)?;
    // SAFETY: F_DUPFD_CLOEXEC takes numbers, and the descriptor that it gives is nobody's yet.
    let number =
        check(unsafe { libc::fcntl(memory.as_fd().as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10) })?;
    // SAFETY: as above.
    let file = unsafe { OwnedFd::from_raw_fd(number) };
    pass_signals_on()?;
    let mut service = start_service(&file, capacity)?;
    let mut began = Instant::now();
    let mut command = Command::new(program);
    command.args(arguments);
    with_memory(&mut command, &file, libc::SIGTERM);
    let monitor = command.spawn().map_err(|err| {
        let _ = service.kill();
        io::Error::new(err.kind(), format!("{program}: {err}"))
    })?;
    MONITOR.store(monitor.id().cast_signed(), Ordering::SeqCst);
    match EARLY.swap(0, Ordering::SeqCst) {
        0 => {}
        signal => pass_on(signal),
    }
    loop {
        let (ended, status) = wait()?;
        if ended == monitor.id() {
            MONITOR.store(0, Ordering::SeqCst);
            // Its connections are reset: each has SO_LINGER 0.
            service.kill()?;
            service.wait()?;
            return Ok(status);
        }
        if ended != service.id() {
            continue;
        }
        eprintln!("heddle-machine: the service ended ({status}); another one begins");
        if began.elapsed() < WELL {
            std::thread::sleep(WELL);
        }
        service = start_service(&file, capacity)?;
        began = Instant::now();
    }
}

/// Waits for any child to end.
fn wait() -> io::Result<(u32, ExitStatus)> {
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes one int, and `status` is one.
        match check(unsafe { libc::waitpid(-1, &raw mut status, 0) }) {
            Ok(pid) => return Ok((pid.unsigned_abs(), ExitStatus::from_raw(status))),
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
}

/// Calls a step again and again, with how long it may wait: not at all after it did something.
fn forever(mut step: impl FnMut(Duration) -> io::Result<(bool, Duration)>) -> io::Result<()> {
    let spare = std::thread::available_parallelism().is_ok_and(|n| n.get() > 1);
    let mut last = Instant::now();
    let mut pause = Duration::ZERO;
    loop {
        let (busy, idle) = step(pause)?;
        if busy {
            last = Instant::now();
            pause = Duration::ZERO;
        } else if !spare || last.elapsed() > SPIN {
            pause = idle;
        } else {
            std::thread::yield_now();
        }
    }
}

/// Serves the machine whose memory [`DESCRIPTOR`] is, for ever: what [`run`] starts does, and once.
///
/// # Errors
///
/// The kernel's, or the memory is not of a machine.
pub fn serve(capacity: u32) -> io::Result<()> {
    unix_io::raise_descriptors();
    // SAFETY: `with_memory` has put the memory there, and nothing in this process has used it.
    let memory = region::map(unsafe { OwnedFd::from_raw_fd(DESCRIPTOR) })?;
    let layout = Layout::of(memory.len(), capacity).map_err(io::Error::other)?;
    let mut service = Service::new(&memory, layout)?;
    forever(|pause| Ok((service.step(pause)?, LOOK)))
}

/// Serves the programs of this machine by its memory, for ever.
///
/// # Errors
///
/// The kernel's: the path is in use, say.
pub fn guest(memory: std::sync::Arc<SharedMemory>, path: &std::path::Path) -> io::Result<()> {
    unix_io::raise_descriptors();
    // Whoever had the path before is no more, or has the memory, which is found out below.
    match std::fs::remove_file(path) {
        Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
        _ => {}
    }
    let mut guest = Guest::new(memory, path)?;
    forever(|pause| {
        let busy = guest.step(pause)?;
        let nothing_comes = guest.is_served() && !guest.has_sockets();
        Ok((busy, if nothing_comes { IDLE } else { LOOK }))
    })
}

/// The memory at a path: a sealed memfd of another process (`/proc/PID/fd/N`).
///
/// # Errors
///
/// The kernel's, or it is none.
pub fn open(path: &str) -> io::Result<std::sync::Arc<SharedMemory>> {
    region::map(File::options().read(true).write(true).open(path)?.into())
}

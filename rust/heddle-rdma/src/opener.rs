//! Who opens what the router may not: a process of its own, which has the rights for it and hears
//! nothing that containers say. It has no rights but these, and so many system calls as they need.
//! `docs/decisions/0090-the-router-opens-nothing.md`.
//!
//! What it opens is memory of programs that have connected to a control socket, as the kernel says
//! of the connection, and what the kernel says of the router's own threads. A router that somebody
//! else has taken over gets no other file by it.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, parent_id};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use unix_io::epoll::wait_readable;
use unix_io::packets;

use crate::{sandbox, sys};

/// The first argument of the process.
pub const FLAG: &str = "--opener";

/// A message either way: what is wanted and of which thread; or an errno and a process.
type Words = [i32; 2];

/// The memory of the program that has made the connection which goes with it.
const MEMORY: i32 = 1;
/// What the kernel says of a thread of the router.
const STAT: i32 = 2;

/// How long either waits at a time: it goes on.
const LONG: Duration = Duration::from_hours(1);

/// The router's end.
#[derive(Default)]
pub(crate) enum Opener {
    /// The router does it: it has its rights, or never had any.
    #[default]
    Own,
    /// Whoever is at the other end of this socket does.
    Process(Mutex<OwnedFd>),
}

impl Opener {
    /// Starts the process. Control sockets are below `sockets`.
    pub(crate) fn start(sockets: &Path) -> io::Result<Self> {
        let (ours, theirs) = packets::packet_pair()?;
        // Whatever has been put in the place of the router's file since: it is this program.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("heddle-rdma").arg(FLAG).arg(sockets);
        command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).current_dir("/");
        // It ends when the router does.
        command.spawn()?;
        Ok(Self::Process(Mutex::new(ours)))
    }

    /// The process that made a connection to a control socket: its number, and its memory as it is
    /// now.
    pub(crate) fn memory_of(&self, connection: &OwnedFd) -> io::Result<(libc::pid_t, OwnedFd)> {
        match self {
            Self::Own => sys::peer(connection),
            Self::Process(socket) => ask(socket, [MEMORY, 0], &[connection.as_fd()]),
        }
    }

    /// What the kernel says of a thread of the router.
    pub(crate) fn stat_of(&self, thread: i32) -> io::Result<OwnedFd> {
        match self {
            Self::Own => sys::open_stat(std::process::id(), thread),
            Self::Process(socket) => ask(socket, [STAT, thread], &[]).map(|(_, stat)| stat),
        }
    }
}

fn ask(
    socket: &Mutex<OwnedFd>,
    words: Words,
    with: &[BorrowedFd<'_>],
) -> io::Result<(libc::pid_t, OwnedFd)> {
    let socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
    let mut got = Vec::new();
    let answer = match packets::send(&socket, &to_bytes(words), with) {
        // No more descriptors can be under way for the router's user: that passes.
        Err(err) if err.raw_os_error() == Some(libc::ETOOMANYREFS) => return Err(err),
        sent => sent.and_then(|()| hear(&socket, &mut got)),
    };
    match answer {
        Ok(Some([0, process])) => {
            // It was cut off where the router has no room for it.
            let file = got.pop().ok_or_else(|| io::Error::from_raw_os_error(libc::EMFILE));
            file.map(|file| (process, file))
        }
        Ok(Some([errno, _])) => Err(io::Error::from_raw_os_error(errno)),
        Ok(None) | Err(_) => {
            // Nobody could open the device any more. The agent starts both again.
            eprintln!("heddle-rdma: the process that opens files has ended");
            std::process::exit(1);
        }
    }
}

/// The next message, waiting for it; None at the end.
fn hear(socket: &OwnedFd, descriptors: &mut Vec<OwnedFd>) -> io::Result<Option<Words>> {
    let mut bytes = [0; size_of::<Words>()];
    loop {
        // For longer, if nothing came or a signal did.
        let _ = wait_readable(socket.as_fd(), LONG);
        match packets::receive(socket, &mut bytes, descriptors) {
            Err(err) if unix_io::would_block(&err) => {}
            Err(err) => return Err(err),
            Ok(0) => return Ok(None),
            Ok(length) if length == bytes.len() => return Ok(Some(from_bytes(bytes))),
            Ok(_) => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

fn to_bytes([a, b]: Words) -> [u8; size_of::<Words>()] {
    let mut bytes = [0; size_of::<Words>()];
    bytes[..4].copy_from_slice(&a.to_ne_bytes());
    bytes[4..].copy_from_slice(&b.to_ne_bytes());
    bytes
}

fn from_bytes(bytes: [u8; size_of::<Words>()]) -> Words {
    let word = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    [word(0), word(4)]
}

/// Opens for the router, which is this process's parent and at the other end of its input, what it
/// asks for, until it ends. Control sockets are below `sockets`.
///
/// # Errors
///
/// The kernel's: rights cannot be given up. Or the router says what it never says.
pub fn serve(sockets: &Path) -> io::Result<()> {
    let router = parent_id();
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    sandbox::keep_opening()?;
    let mut descriptors = Vec::new();
    while let Some(words) = hear(&socket, &mut descriptors)? {
        let opened = match (words, descriptors.pop()) {
            ([MEMORY, _], Some(connection)) => memory_of(sockets, &connection),
            ([STAT, thread], None) => sys::open_stat(router, thread).map(|stat| (0, stat)),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        descriptors.clear();
        let sent = match opened {
            Ok((process, file)) => packets::send(&socket, &to_bytes([0, process]), &[file.as_fd()]),
            Err(err) => {
                let errno = err.raw_os_error().unwrap_or(libc::EACCES);
                packets::send(&socket, &to_bytes([errno, 0]), &[])
            }
        };
        sent?;
    }
    Ok(())
}

/// The process that made a connection to one of the control sockets, and its memory.
///
/// Whoever has taken over the router has any socket that a container passes on: one connected to a
/// service of the node, whose end that is; or the control socket itself, which the agent has made.
fn memory_of(sockets: &Path, connection: &OwnedFd) -> io::Result<(libc::pid_t, OwnedFd)> {
    let refused = || io::Error::from_raw_os_error(libc::EACCES);
    if !packets::is_connection(connection.as_fd()) {
        return Err(refused());
    }
    let bound = File::from(packets::bound_file(connection.as_fd())?);
    let path = fs::read_link(format!("/proc/self/fd/{}", bound.as_raw_fd()))?;
    if !path.starts_with(fs::canonicalize(sockets)?) {
        return Err(refused());
    }
    // A container has mounts of its own, where the path may be what it likes: the file is not.
    let (is, ours) = (bound.metadata()?, fs::symlink_metadata(&path)?);
    if (is.dev(), is.ino()) != (ours.dev(), ours.ino()) {
        return Err(refused());
    }
    sys::peer(connection)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    /// A folder of a test's own, with one for control sockets in it.
    fn folders(name: &str) -> (std::path::PathBuf, std::path::PathBuf) {
        let all = std::env::temp_dir().join(format!("heddle-{name}-{}", std::process::id()));
        let sockets = all.join("sockets");
        let _ = fs::remove_dir_all(&all);
        fs::create_dir_all(&sockets).unwrap();
        (all, sockets)
    }

    /// For this thread only, the other file is in the place of the first.
    #[expect(unsafe_code, reason = "system calls that the standard library does not have")]
    fn mount_over(first: &Path, other: &Path) {
        let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
        let done = |result| assert_eq!(result, 0, "{}", io::Error::last_os_error());
        let (first, other, none) = (text(first), text(other), core::ptr::null());
        // SAFETY: unshare takes a number.
        done(unsafe { libc::unshare(libc::CLONE_NEWNS) });
        let private = libc::MS_REC | libc::MS_PRIVATE;
        // SAFETY: the kernel reads strings that end with a 0.
        done(unsafe { libc::mount(none, c"/".as_ptr(), none, private, none.cast()) });
        let (from, to) = (other.as_ptr(), first.as_ptr());
        // SAFETY: as above.
        done(unsafe { libc::mount(from, to, none, libc::MS_BIND, none.cast()) });
    }

    /// Only what has come by a control socket that is there names a process.
    #[test]
    fn memory_of_who_connected_to_a_control_socket_is_opened() {
        if !sys::is_root() {
            eprintln!("needs root: the kernel tells nobody else where a socket is bound");
            return;
        }
        let (all, sockets) = folders("opener");
        let (control, other) = (sockets.join("control"), all.join("other"));
        let listener = packets::listen_packets(&control).unwrap();
        let client = packets::connect_packets(&control).unwrap();
        let accepted = packets::accept(&listener).unwrap();
        let (process, memory) = memory_of(&sockets, &accepted).unwrap();
        assert_eq!(u32::try_from(process).unwrap(), std::process::id());
        assert!(fs::read_link(format!("/proc/self/fd/{}", memory.as_raw_fd())).is_ok());

        let refused = |socket: &OwnedFd, errno| {
            let err = memory_of(&sockets, socket).unwrap_err();
            assert_eq!(err.raw_os_error(), Some(errno), "{err}");
        };
        // Its peer, as the kernel has it, is who listens there: the agent.
        refused(&listener, libc::EACCES);
        // The end that connected: its peer is who accepts. It is bound to nothing.
        refused(&client, libc::ENOENT);
        let elsewhere = packets::listen_packets(&other).unwrap();
        let _second = packets::connect_packets(&other).unwrap();
        refused(&packets::accept(&elsewhere).unwrap(), libc::EACCES);
        // No connections at all.
        refused(&sys::eventfd().unwrap(), libc::EACCES);
        refused(&sys::stream_pair().unwrap().0, libc::EACCES);
        // The path is right, and the file is another one: so it is where a container has mounts.
        std::thread::scope(|threads| {
            threads.spawn(|| {
                mount_over(&control, &other);
                refused(&accepted, libc::EACCES);
            });
        });
        fs::remove_file(&control).unwrap();
        refused(&accepted, libc::ENOENT);
        fs::remove_dir_all(&all).unwrap();
    }
}

//! A card that says what a test wants: a libibverbs of the tests' own (liar.c), which the router
//! loads in the place of the node's.

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use unix_io::packets;

use super::router::Router;
use super::wire::{listen, receive, send};
use super::{WAIT_TIMEOUT, eventually, readable};

/// The GID of the card.
pub(crate) const GID: &str = "0000:0000:0000:0000:0000:ffff:0a01:0002";

/// What the card is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) id: u64,
    pub(crate) address: u64,
    /// None of a receive request, else the opcode of a send request.
    pub(crate) opcode: Option<u32>,
    pub(crate) length: u32,
}

/// What it says of something.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Done {
    pub(crate) id: u64,
    pub(crate) status: u32,
    /// `enum ibv_wc_opcode`.
    pub(crate) opcode: u32,
    pub(crate) length: u32,
}

/// The ends of the card that the test has.
pub(crate) struct Liar {
    listeners: [OwnedFd; 3],
    modified: PathBuf,
    log: Option<OwnedFd>,
    events: Option<OwnedFd>,
    /// Completion queues, in the order in which they were made.
    cqs: Vec<OwnedFd>,
}

impl Liar {
    /// A router with such a card, which lies about this, without a protection.
    pub(crate) fn start(protection: &str, lie: &str) -> (Router, Self) {
        let (mut listeners, mut modified) = (None, PathBuf::new());
        let router = Router::start_changed(protection, &Arc::default(), |command, folder| {
            listeners = Some(["log", "events", "cq"].map(|name| {
                let listener = listen(&folder.join(name));
                for_all(&folder.join(name), 0o666);
                listener
            }));
            prepare(command, folder, lie);
            modified = folder.join("modified");
        });
        let listeners = listeners.unwrap();
        (router, Self { listeners, modified, log: None, events: None, cqs: Vec::new() })
    }

    /// The router has opened the card.
    pub(crate) fn opened(&mut self) {
        self.log = Some(joined(&self.listeners[0]));
        self.events = Some(joined(&self.listeners[1]));
        self.has_queue();
    }

    /// It has another completion queue.
    pub(crate) fn has_queue(&mut self) {
        self.cqs.push(joined(&self.listeners[2]));
    }

    /// How a queue pair was changed; of 0, looks at the port.
    pub(crate) fn modified(&self, number: u32) -> Vec<String> {
        let all = std::fs::read_to_string(&self.modified).unwrap();
        let of = format!("{number:#x}: ");
        all.lines().filter_map(|l| l.strip_prefix(&of)).map(str::to_owned).collect()
    }

    /// The next request that the card gets.
    pub(crate) fn asked(&self) -> Asked {
        let socket = self.log.as_ref().unwrap();
        assert!(readable(socket, WAIT_TIMEOUT), "the card is asked for nothing");
        let bytes = receive(socket).unwrap().0;
        let long = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
        let word = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap());
        let (id, address, length) = (long(0), long(8), word(20));
        Asked { id, address, opcode: word(16).checked_sub(1), length }
    }

    /// Whether there is one.
    pub(crate) fn has_asked(&self) -> bool {
        readable(self.log.as_ref().unwrap(), Duration::ZERO)
    }

    /// The next send request, and the receive requests before it.
    pub(crate) fn sends(&self) -> (Asked, Vec<Asked>) {
        let mut receives = Vec::new();
        loop {
            let asked = self.asked();
            if asked.opcode.is_some() {
                return (asked, receives);
            }
            receives.push(asked);
        }
    }

    /// The card says that something is done, having written bytes somewhere.
    pub(crate) fn says(&self, queue: usize, done: Done, address: u64, bytes: &[u8]) {
        let mut said = Vec::with_capacity(64 + bytes.len());
        said.extend(done.id.to_ne_bytes());
        for word in [done.status, done.opcode, 0, done.length, 0, 0, 0, 0, 0, 0] {
            said.extend(word.to_ne_bytes());
        }
        for long in [address, bytes.len() as u64] {
            said.extend(long.to_ne_bytes());
        }
        said.extend(bytes);
        tell(&self.cqs[queue], &said);
    }

    /// The next queue pair that is being destroyed, or region, of a card that is stuck, is gone.
    pub(crate) fn lets_go(&self) {
        tell(self.log.as_ref().unwrap(), &[0]);
    }

    /// It reports an event (`enum ibv_event_type`) of a queue pair, 0: of none; of 0, a
    /// queue that has failed, which one it is, from 1 on.
    pub(crate) fn reports(&self, event: u32, number: u32) {
        let said = [event, number].map(u32::to_ne_bytes);
        tell(self.events.as_ref().unwrap(), said.as_flattened());
    }
}

/// Sends as soon as there is room.
fn tell(socket: &OwnedFd, bytes: &[u8]) {
    eventually("room for the card's word", || match send(socket, bytes, &[]) {
        Ok(()) => Some(()),
        Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(err) => panic!("{err}"),
    });
}

fn joined(listener: &OwnedFd) -> OwnedFd {
    eventually("the card", || packets::accept(listener).ok())
}

/// The library, compiled in a test's folder for the first one that asks.
fn library(folder: &Path) -> &'static [u8] {
    static COMPILED: OnceLock<Vec<u8>> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/liar.c");
        let library = folder.join("compiled");
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]);
        let made = cc.arg(&library).arg(source).status();
        assert!(made.expect("a C compiler, and libibverbs-dev").success());
        std::fs::read(library).unwrap()
    })
}

/// Lets everybody use a file: the router is another user when it opens its card.
fn for_all(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Has the router find the library, and a card of it where the kernel has cards.
fn prepare(command: &mut Command, folder: &Path, lie: &str) {
    let file = folder.join("libibverbs.so.1");
    std::fs::write(&file, library(folder)).unwrap();
    for_all(folder, 0o755);
    std::fs::write(folder.join("modified"), "").unwrap();
    for_all(&folder.join("modified"), 0o666);
    let port = folder.join("card/ports/1");
    std::fs::create_dir_all(port.join("gids")).unwrap();
    std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
    if lie != "early" {
        std::fs::write(port.join("gids/0"), GID).unwrap();
    }
    std::fs::write(port.join("gid_attrs/types/0"), "RoCE v2").unwrap();
    // Preloaded, too, for what it says of files.
    command.env("LD_LIBRARY_PATH", folder).env("LD_PRELOAD", file);
    command.env("LIAR", folder).env("LIAR_LIE", lie).args(["--device", "liar"]);
}

//! What a router is worth to whoever has taken it over, and its process that opens files; with the
//! protection and without. `cargo test --features attack`.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

mod support;

use support::taken_over::{TEXT, TakenOver};
use support::{Router, attacked, connect, hello, receive, send};
use verbs_protocol::agent::Limits;
use verbs_protocol::plain;

/// As another user than root it has nothing to give up, and these tests may not look.
fn is_root() -> bool {
    // SAFETY: geteuid takes nothing.
    let root = unsafe { libc::geteuid() == 0 };
    if !root {
        eprintln!("needs root");
    }
    root
}

const HERE: u64 = libc::AT_FDCWD.cast_unsigned() as u64;
const NONE: &str = "";

/// What it tries: a call, its text, its arguments, and whether the kernel's answer means that it
/// may. {} is the process of the test. Nothing of this harms the machine.
type Try = (&'static str, i64, &'static str, &'static [u64], fn(i64) -> bool);

const TRIES: &[Try] = &[
    ("read files", libc::SYS_openat, "/etc/shadow", &[HERE, TEXT, 0], |fd| fd >= 0),
    ("write files", libc::SYS_openat, "/etc/shadow", &[HERE, TEXT, 2], |fd| fd >= 0),
    ("memory of processes", libc::SYS_openat, "/proc/{}/mem", &[HERE, TEXT, 2], |fd| fd >= 0),
    // There is no such program.
    ("execute", libc::SYS_execve, "/nowhere", &[TEXT], |e| e == -i64::from(libc::ENOENT)),
    ("connect", libc::SYS_socket, NONE, &[2, 1, 0], |fd| fd >= 0),
    ("packets", libc::SYS_socket, NONE, &[17, 3, 0], |fd| fd >= 0),
    ("address a datagram", libc::SYS_socketpair, NONE, &[1, 2, 0, TEXT], |e| e == 0),
    ("processes", libc::SYS_pidfd_open, NONE, &[1, 0], |fd| fd >= 0),
    ("signal", libc::SYS_kill, NONE, &[0, 0], |e| e == 0),
    ("mounts", libc::SYS_unshare, NONE, &[0x20000], |e| e == 0),
    ("root", libc::SYS_setresuid, NONE, &[0, 0, 0], |e| e == 0),
    // Bytes that are executed and written to.
    ("code", libc::SYS_mmap, NONE, &[0, 4096, 7, 0x22], |at| at > 0),
];

/// Whoever can have the router make any call reaches no file, process or network by it.
#[test]
fn a_router_that_is_taken_over_reaches_nothing_more() {
    if !is_root() {
        return;
    }
    attacked("sandbox", |router| {
        router.add(1, Limits::default());
        let _device = router.open(1);
        router.await_sleep();
        let taken = TakenOver::new(router.pid());
        let tried = TRIES.iter().map(|(what, number, text, arguments, may)| {
            let text = text.replace("{}", &std::process::id().to_string());
            let answer = taken.call(*number, &text, arguments);
            println!("{what}: {answer}");
            let refused = answer == -i64::from(libc::EPERM);
            assert!(may(answer) != refused, "{what}: {answer}");
            may(answer)
        });
        let gained = tried.filter(|may| *may).count();
        assert!(gained == 0 || gained == TRIES.len(), "{gained} of {}", TRIES.len());
        gained > 0
    });
}

/// It goes on with the rest: what is refused is what it does not need.
#[test]
fn a_router_is_nobody() {
    if !is_root() {
        return;
    }
    let router = Router::start();
    let status = std::fs::read_to_string(format!("/proc/{}/status", router.pid())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name)).unwrap();
        line.trim_start_matches(':').split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for rights in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        assert_eq!(field(rights), ["0000000000000000"], "{rights}");
    }
    assert!(field("Uid").iter().chain(&field("Gid")).all(|id| id != "0"), "{status}");
    assert!(field("Groups").is_empty(), "{status}");
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1".into()], vec!["2".into()]));
}

/// Somebody who has taken over the router asks for the memory of a process that has not come by a
/// control socket, which a listening socket elsewhere stands for here.
#[test]
fn memory_of_processes_that_came_otherwise_is_not_opened() {
    if !is_root() {
        return;
    }
    let path = std::path::PathBuf::from(format!("/dev/shm/heddle-rdma-{}", std::process::id()));
    attacked("sandbox", |router| {
        let _ = std::fs::remove_file(&path);
        let listener = unix_io::packets::listen_packets(&path).unwrap();
        router.add_listening(1, Limits::default(), &listener);
        let socket = connect(&path).unwrap();
        let asked = send(&socket, plain::bytes(&hello(1, 0)), &[]);
        let answer = asked.and_then(|()| receive(&socket)).unwrap_or_default();
        std::fs::remove_file(&path).unwrap();
        answer.1.len() == 3
    });
}

/// Without who opens files the router ends: the agent starts both.
#[test]
fn a_router_ends_with_its_opener_and_its_opener_with_it() {
    if !is_root() {
        return;
    }
    let mut router = Router::start();
    router.add(1, Limits::default());
    let opener = router.opener();
    // SAFETY: kill takes numbers.
    assert_eq!(unsafe { libc::kill(opener, libc::SIGKILL) }, 0);
    let socket = router.connect(1);
    support::eventually("the router's end", || router.has_died().then_some(()));
    drop(socket);
    router.kill();

    let mut router = Router::start();
    let opener = router.opener();
    router.kill();
    let ended = || !is_running(opener);
    support::eventually("the opener's end", || ended().then_some(()));
}

fn is_running(pid: libc::pid_t) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    let state = stat.ok().and_then(|s| s.rsplit_once(") ").and_then(|(_, r)| r.chars().next()));
    state.is_some_and(|state| state != 'Z')
}

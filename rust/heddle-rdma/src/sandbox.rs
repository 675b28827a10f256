//! The router gives up what it does not need to move bytes between what it has, or gets from its
//! agent and from containers: its user, its rights, and all system calls that lead to files, other
//! processes and the network. `docs/decisions/0090-the-router-opens-nothing.md`.

use std::collections::BTreeMap;
use std::io;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use crate::sys;

/// Users of the router, each router another one by chance, so that nobody foresees which: no
/// program of the node has one of them, nor has a container (systemd calls them unused). Whoever
/// has the same user may signal the router, and use up what the kernel allows a user.
const FIRST_USER: u32 = 0x7000_0000;
const USERS: u32 = 1 << 24;
/// What is left in a user namespace that does not have them.
const NOBODY: u32 = 65534;

const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_NET_ADMIN: u32 = 12;
const CAP_SYS_PTRACE: u32 = 19;

/// Has this process, which has one thread, be another user's, and have no rights.
pub(crate) fn give_up_rights() -> io::Result<()> {
    // A card's library pins memory, for which this process has no right any more.
    sys::raise_locked_memory();
    let user = FIRST_USER + u32::try_from(sys::random() >> 40).unwrap_or(0) % USERS;
    sys::become_user(user).or_else(|_| sys::become_user(NOBODY))
}

/// A system call that is let through, where all of these hold of its arguments.
type Call = (i64, Vec<Condition>);
/// An argument, as the kernel's int, of which these bits have this value.
type Condition = (u8, u32, u32);

const ANY: u32 = u32::MAX;

/// What moves bytes, and what the standard library and the C library need while they run. No call
/// opens, creates, connects, executes, or looks at another process.
const MOVING: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_accept4,
    libc::SYS_shutdown,
    libc::SYS_close,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_inotify_add_watch,
    libc::SYS_memfd_create,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getrandom,
    libc::SYS_membarrier,
    libc::SYS_rseq,
    libc::SYS_set_robust_list,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Refused by another filter, with the errno that has the C library take clone().
    libc::SYS_clone3,
];

#[cfg(target_arch = "x86_64")]
const MOVING_HERE: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const MOVING_HERE: &[i64] = &[];

/// What the library of a card needs beside that once the card is open: its device's calls, and
/// files that everybody may read.
const BY_CARD: &[i64] = &[
    libc::SYS_ioctl,
    libc::SYS_readlinkat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
];

fn bits(of: libc::c_int) -> u32 {
    of.cast_unsigned()
}

/// What the router calls once it serves.
fn router_calls(card: bool) -> Vec<Call> {
    let stream = bits(libc::SOCK_STREAM);
    let kind = !bits(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    let threads = bits(libc::CLONE_VM | libc::CLONE_THREAD);
    let exec = bits(libc::PROT_EXEC);
    let mut calls: Vec<Call> = [MOVING, MOVING_HERE].concat().into_iter().map(any).collect();
    calls.extend([
        // Neither kind takes an address when it sends.
        (libc::SYS_socketpair, vec![(0, ANY, bits(libc::AF_UNIX)), (1, kind, stream)]),
        (
            libc::SYS_socketpair,
            vec![(0, ANY, bits(libc::AF_UNIX)), (1, kind, bits(libc::SOCK_SEQPACKET))],
        ),
        // Without an address.
        (libc::SYS_sendto, vec![(4, ANY, 0), (5, ANY, 0)]),
        (libc::SYS_clone, vec![(0, threads, threads)]),
        (libc::SYS_mmap, vec![(2, exec, 0)]),
        (libc::SYS_mprotect, vec![(2, exec, 0)]),
        (libc::SYS_prctl, vec![(0, ANY, bits(libc::PR_SET_NAME))]),
        (libc::SYS_tgkill, vec![(0, ANY, std::process::id())]),
        (libc::SYS_ioctl, vec![(1, ANY, u32::try_from(libc::FIONBIO).unwrap_or(0))]),
    ]);
    if card {
        calls.extend(BY_CARD.iter().copied().map(any));
        let writing = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
        calls.push((libc::SYS_openat, vec![(2, bits(writing), 0)]));
    }
    calls
}

/// What the process calls that opens files for the router.
fn opener_calls() -> Vec<Call> {
    const SIOCUNIXFILE: u32 = 0x89e0;
    let all = [
        libc::SYS_recvmsg,
        libc::SYS_sendmsg,
        libc::SYS_getsockopt,
        libc::SYS_openat,
        libc::SYS_readlinkat,
        libc::SYS_statx,
        libc::SYS_newfstatat,
        libc::SYS_fstat,
        libc::SYS_fcntl,
        libc::SYS_close,
        libc::SYS_ppoll,
        libc::SYS_write,
        libc::SYS_brk,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_futex,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_sigaltstack,
        libc::SYS_getrandom,
        libc::SYS_restart_syscall,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ];
    let mut calls: Vec<Call> = all.into_iter().map(any).collect();
    #[cfg(target_arch = "x86_64")]
    calls.extend([libc::SYS_poll, libc::SYS_readlink].map(any));
    calls.push((libc::SYS_mmap, vec![(2, bits(libc::PROT_EXEC), 0)]));
    calls.push((libc::SYS_ioctl, vec![(1, ANY, SIOCUNIXFILE)]));
    calls
}

fn any(number: i64) -> Call {
    (number, Vec::new())
}

/// Has all other system calls of the router fail with EPERM, also those of threads that are yet to
/// come. With a card, its library needs some more.
pub(crate) fn filter_calls(card: bool) -> io::Result<()> {
    only(router_calls(card))
}

/// Has this process do nothing more but open what the router asks for.
pub(crate) fn keep_opening() -> io::Result<()> {
    sys::rename_thread(c"rdma-opener");
    // Memory of other users' programs; and to ask where a container's socket is bound.
    sys::keep_capabilities(&[CAP_SYS_PTRACE, CAP_DAC_OVERRIDE, CAP_NET_ADMIN])?;
    only(opener_calls())
}

fn only(calls: Vec<Call>) -> io::Result<()> {
    let refused = |errno: i32| SeccompAction::Errno(errno.unsigned_abs());
    // What it is to make lies in memory, where no filter looks. It comes first: the other one lets
    // no more filters be made, and where two see a call the stricter one has its way.
    apply(vec![any(libc::SYS_clone3)], SeccompAction::Allow, refused(libc::ENOSYS))?;
    apply(calls, refused(libc::EPERM), SeccompAction::Allow)
}

fn apply(calls: Vec<Call>, others: SeccompAction, these: SeccompAction) -> io::Result<()> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for (number, conditions) in calls {
        let of_call = rules.entry(number).or_default();
        if conditions.is_empty() {
            // Without a rule it is let through whatever its arguments are.
            of_call.clear();
            continue;
        }
        let conditions = conditions.into_iter().map(|(argument, mask, value)| {
            let compare = SeccompCmpOp::MaskedEq(mask.into());
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value.into())
        });
        let rule = conditions.collect::<Result<_, _>>().and_then(SeccompRule::new);
        of_call.push(rule.map_err(io::Error::other)?);
    }
    let machine = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, others, these, machine).map_err(io::Error::other)?;
    let program: BpfProgram = filter.try_into().map_err(io::Error::other)?;
    apply_filter_all_threads(&program).map_err(io::Error::other)
}

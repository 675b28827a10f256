//! What whoever has taken over a process can have it do: its first thread makes system calls of the
//! test's, by ptrace, with all that the process is and is not allowed.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A process whose first thread, which waits in a system call, is the test's meanwhile.
pub(crate) struct TakenOver {
    pid: libc::pid_t,
    registers: libc::user_regs_struct,
    memory: File,
}

/// The bytes of the instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

impl TakenOver {
    pub(crate) fn new(pid: libc::pid_t) -> Self {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
        trace(libc::PTRACE_ATTACH, pid, 0);
        wait(pid);
        let mut taken = Self { pid, registers: registers(pid), memory: memory.unwrap() };
        let mut instruction = [0; 2];
        taken.registers.rip -= 2;
        taken.memory.read_exact_at(&mut instruction, taken.registers.rip).unwrap();
        assert_eq!(instruction, SYSCALL, "it waits in no system call");
        taken
    }

    /// What the kernel answers to a call of the thread. `text` is where the first argument says.
    pub(crate) fn call(&self, number: i64, text: &str, arguments: &[u64]) -> i64 {
        let at = (self.registers.rsp - 4096) & !15;
        self.memory.write_all_at(format!("{text}\0").as_bytes(), at).unwrap();
        let mut now = self.registers;
        now.rax = number.cast_unsigned();
        // No call is under way that would be made again.
        now.orig_rax = u64::MAX;
        let get = |i: usize| match arguments.get(i) {
            Some(&TEXT) => at,
            argument => argument.copied().unwrap_or(0),
        };
        (now.rdi, now.rsi, now.rdx) = (get(0), get(1), get(2));
        (now.r10, now.r8, now.r9) = (get(3), get(4), get(5));
        set(self.pid, &now);
        trace(libc::PTRACE_SINGLESTEP, self.pid, 0);
        wait(self.pid);
        registers(self.pid).rax.cast_signed()
    }
}

/// An argument that is the address of the text.
pub(crate) const TEXT: u64 = u64::MAX - 1;

impl Drop for TakenOver {
    fn drop(&mut self) {
        // The call that it was in is made again.
        let mut before = self.registers;
        before.rip += 2;
        before.rax = (-i64::from(libc::EINTR)).cast_unsigned();
        before.orig_rax = u64::MAX;
        set(self.pid, &before);
        trace(libc::PTRACE_DETACH, self.pid, 0);
    }
}

fn trace(request: libc::c_uint, pid: libc::pid_t, data: usize) {
    let none = core::ptr::null_mut::<libc::c_void>();
    // SAFETY: none of these requests takes an address; `data` is 0, or that of registers.
    let done = unsafe { libc::ptrace(request, pid, none, data) };
    assert_eq!(done, 0, "ptrace {request}: {}", io::Error::last_os_error());
}

fn registers(pid: libc::pid_t) -> libc::user_regs_struct {
    // SAFETY: integers, for which zero is a value.
    let mut registers: libc::user_regs_struct = unsafe { core::mem::zeroed() };
    trace(libc::PTRACE_GETREGS, pid, (&raw mut registers).addr());
    registers
}

fn set(pid: libc::pid_t, registers: &libc::user_regs_struct) {
    trace(libc::PTRACE_SETREGS, pid, (&raw const *registers).addr());
}

/// Waits until the thread stands still.
fn wait(pid: libc::pid_t) {
    let mut status = 0;
    // SAFETY: the kernel writes one number.
    let got = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
    assert!(got == pid && libc::WIFSTOPPED(status), "{got}, {status:#x}");
}

//! What an engine says to the process that has started a monitor.

#![expect(unsafe_code, reason = "what hostile programs do, and system calls")]

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

#[test]
fn the_monitor_gets_the_signal_to_stop_and_says_how_it_ended() {
    let monitor = "trap 'exit 7' TERM; echo runs; read line";
    let mut machine = Command::new(env!("CARGO_BIN_EXE_heddle-machine"))
        .args(["run", "--", "sh", "-c", monitor])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(machine.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "runs\n");
    let stdin = machine.stdin.take();
    // SAFETY: kill takes numbers, and the child is not waited for yet.
    assert_eq!(unsafe { libc::kill(machine.id().cast_signed(), libc::SIGTERM) }, 0);
    assert_eq!(machine.wait().unwrap().code(), Some(7));
    drop(stdin);
}

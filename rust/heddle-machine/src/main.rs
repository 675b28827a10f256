//! `heddle-machine run` outside of a virtual machine, `heddle-machine guest` inside.

use std::io;
use std::path::Path;
use std::process::ExitCode;

use heddle_machine::{device, run};

const USAGE: &str = "usage: heddle-machine run [--memory MIB] [--ring KIB] -- MONITOR...
           runs a virtual machine's monitor, with memory of the machine's as descriptor 3
       heddle-machine guest [--socket PATH] [--memory FILE]
           inside: gives programs that preload libheddle-machine.so connections";

const SOCKET: &str = "/run/heddle-machine.sock";

/// Takes an option and its value, if it is there.
fn option(arguments: &mut Vec<String>, name: &str) -> Option<String> {
    let own = arguments.iter().position(|a| a == "--").unwrap_or(arguments.len());
    let at = arguments[..own].iter().position(|a| a == name).filter(|at| at + 1 < own)?;
    arguments.remove(at);
    Some(arguments.remove(at))
}

fn number(text: Option<String>, default: usize, unit: usize) -> Option<usize> {
    let Some(text) = text else { return Some(default * unit) };
    text.parse::<usize>().ok()?.checked_mul(unit)
}

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let what = if arguments.is_empty() { String::new() } else { arguments.remove(0) };
    let done = match what.as_str() {
        "run" => outside(&mut arguments),
        "serve" => serve(&arguments).map(|()| ExitCode::SUCCESS),
        "guest" => guest(&mut arguments),
        _ => Ok(usage()),
    };
    done.unwrap_or_else(|err| {
        eprintln!("heddle-machine: {err}");
        ExitCode::FAILURE
    })
}

fn usage() -> ExitCode {
    eprintln!("{USAGE}");
    ExitCode::from(2)
}

fn outside(arguments: &mut Vec<String>) -> io::Result<ExitCode> {
    let size = number(option(arguments, "--memory"), 64, 1 << 20);
    let ring = number(option(arguments, "--ring"), 256, 1 << 10);
    let (Some(size), Some(ring)) = (size, ring) else { return Ok(usage()) };
    if arguments.len() < 2 || arguments[0] != "--" {
        return Ok(usage());
    }
    let ring = u32::try_from(ring).unwrap_or(u32::MAX);
    let status = run::run(size, ring, &arguments[1..])?;
    let code = status.code().and_then(|c| u8::try_from(c).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

/// What `run` starts, with the memory as a descriptor.
fn serve(arguments: &[String]) -> io::Result<()> {
    let ring = arguments.first().and_then(|a| a.parse().ok()).unwrap_or(0);
    run::serve(ring)
}

fn guest(arguments: &mut Vec<String>) -> io::Result<ExitCode> {
    let socket = option(arguments, "--socket").unwrap_or_else(|| SOCKET.to_string());
    let memory = option(arguments, "--memory");
    if !arguments.is_empty() {
        return Ok(usage());
    }
    let memory = match memory {
        Some(path) => run::open(&path)?,
        None => device::map(&device::find(Path::new(device::DEVICES))?)?,
    };
    run::guest(memory, Path::new(&socket))?;
    Ok(ExitCode::SUCCESS)
}

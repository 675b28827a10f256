//! `heddle-stack --agent PATH`: the module host, one on a node. With `--queues` it is the service
//! of queues instead, one on a node, too.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (flag, path, what) = (arguments.next(), arguments.next(), arguments.next());
    let run = match what.as_deref() {
        None => heddle_stack::run,
        Some("--queues") => heddle_stack::queues::run,
        Some(_) => return usage(),
    };
    let (Some("--agent"), Some(path), None) = (flag.as_deref(), path, arguments.next()) else {
        return usage();
    };
    let path = PathBuf::from(path);
    match run(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("heddle-stack: {}: {err}", path.display());
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: heddle-stack --agent PATH [--queues]");
    ExitCode::from(2)
}

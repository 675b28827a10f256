//! `heddle-stack --agent PATH`: the module host, one on a node.

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (flag, path, more) = (arguments.next(), arguments.next(), arguments.next());
    let (Some("--agent"), Some(path), None) = (flag.as_deref(), path, more) else {
        eprintln!("usage: heddle-stack --agent PATH");
        return ExitCode::from(2);
    };
    let path = PathBuf::from(path);
    match heddle_stack::run(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("heddle-stack: {}: {err}", path.display());
            ExitCode::FAILURE
        }
    }
}

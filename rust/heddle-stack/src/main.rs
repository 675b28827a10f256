//! `heddle-stack --agent PATH`: the module host, one on a node. With `--queues` it is the service
//! of queues instead, one on a node, too. `--measure MILLISECONDS` measures that service.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (flag, path, what) = (arguments.next(), arguments.next(), arguments.next());
    if let (Some("--measure"), Some(Ok(time)), None) =
        (flag.as_deref(), path.as_deref().map(str::parse), what.as_deref())
    {
        let time = Duration::from_millis(time);
        return exit("measure", heddle_stack::queues::measure::run(time, &mut std::io::stdout()));
    }
    let run = match what.as_deref() {
        None => heddle_stack::run,
        Some("--queues") => heddle_stack::queues::run,
        Some(_) => return usage(),
    };
    let (Some("--agent"), Some(path), None) = (flag.as_deref(), path, arguments.next()) else {
        return usage();
    };
    exit(&path, run(Path::new(&path)))
}

fn exit(what: &str, result: std::io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("heddle-stack: {what}: {err}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: heddle-stack --agent PATH [--queues] | --measure MILLISECONDS");
    ExitCode::from(2)
}

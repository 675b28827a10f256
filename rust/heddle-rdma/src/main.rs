//! `heddle-rdma --agent PATH --sockets DIR [--device NAME] [--spin-us N] [--patience-us N]`: the
//! router of the verbs plane, one on a node. `heddle-rdma --opener DIR` is what it starts to have
//! files opened.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use heddle_rdma::{Options, opener, run};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if std::env::args().nth(1).is_some_and(|first| first == opener::FLAG) {
        return opens(Path::new(&arguments.nth(1).unwrap_or_default()));
    }
    let options = match options(arguments) {
        Ok(options) => options,
        Err(why) => {
            eprintln!("heddle-rdma: {why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let Err(err) = run(&options);
    eprintln!("heddle-rdma: {}: {err}", options.agent.display());
    ExitCode::FAILURE
}

const USAGE: &str = "usage: heddle-rdma --agent PATH --sockets DIR [--device NAME] [--spin-us N] \
    [--patience-us N]";

/// Opens files for the router, until it ends.
fn opens(sockets: &Path) -> ExitCode {
    match opener::serve(sockets) {
        Ok(()) => ExitCode::SUCCESS,
        Err(err) => {
            eprintln!("heddle-rdma: open files for the router: {err}");
            ExitCode::FAILURE
        }
    }
}

/// The default of `--patience-us`.
const PATIENCE: Duration = Duration::from_millis(5);

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let (mut agent, mut sockets, mut device) = (None, None, None);
    let (mut spin, mut patience) = (Duration::ZERO, PATIENCE);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--agent" => agent = Some(PathBuf::from(value)),
            "--sockets" => sockets = Some(PathBuf::from(value)),
            "--device" => device = Some(value),
            "--spin-us" | "--patience-us" => {
                let time = value.parse().map_err(|err| format!("{flag} {value}: {err}"))?;
                let time = Duration::from_micros(time);
                *(if flag == "--spin-us" { &mut spin } else { &mut patience }) = time;
            }
            _ => return Err(format!("unknown flag {flag}")),
        }
    }
    let agent = agent.ok_or("--agent is missing")?;
    let sockets = sockets.ok_or("--sockets is missing: the directory of the control sockets")?;
    Ok(Options { agent, sockets, spin, patience, device })
}

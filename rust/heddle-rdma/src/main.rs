//! `heddle-rdma --agent PATH [--device NAME] [--spin-us N] [--patience-us N]`: the router of the
//! verbs plane, one on a node.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use heddle_rdma::{Options, run};

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
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

const USAGE: &str =
    "usage: heddle-rdma --agent PATH [--device NAME] [--spin-us N] [--patience-us N]";

/// The default of `--patience-us`.
const PATIENCE: Duration = Duration::from_millis(5);

fn options(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let (mut agent, mut device) = (None, None);
    let (mut spin, mut patience) = (Duration::ZERO, PATIENCE);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--agent" => agent = Some(PathBuf::from(value)),
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
    Ok(Options { agent, spin, patience, device })
}

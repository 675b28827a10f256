//! What a module moves between a program's pair and the kernel's TCP at a TAP device of the same
//! machine: `cargo bench -p heddle-stack`, as root. A first look: `heddle bench stacks` is what
//! compares.

#[path = "../tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use heddle_stack::abi::{STACK_SET_NO_DELAY, stack_options};
use support::namespace::in_namespace;
use support::{Module, at};

const SPAN: Duration = Duration::from_secs(2);

/// Copies for so long; says gigabits a second.
fn rate(mut from: impl Write + Send, mut to: impl Read + Send, chunk: usize) -> f64 {
    let mut got = 0_u64;
    let start = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let bytes = vec![1; chunk];
            while start.elapsed() < SPAN && from.write_all(&bytes).is_ok() {}
        });
        let mut bytes = vec![0; 256 << 10];
        while start.elapsed() < SPAN {
            match to.read(&mut bytes) {
                Ok(n @ 1..) => got += n as u64,
                _ => break,
            }
        }
        drop(to); // the writer may wait for it
    });
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let bits = got as f64 * 8.0;
    bits / start.elapsed().as_secs_f64() / 1e9
}

fn main() {
    in_namespace(true, |mut module| {
        let listener = TcpListener::bind(("10.9.0.2", 0)).unwrap();
        let to = at("10.9.0.2", listener.local_addr().unwrap().port());
        let no_delay =
            stack_options { mask: STACK_SET_NO_DELAY, no_delay: 1, ..stack_options::default() };
        let connect = |module: &mut Module| {
            let (id, program) = module.client.connect(1, to, no_delay).unwrap().unwrap();
            (id, program, listener.accept().unwrap().0)
        };
        for chunk in [64 << 10, 8 << 10, 4 << 10, 512] {
            let (_, program, stream) = connect(&mut module);
            let sent = rate(program, stream, chunk);
            let (_, program, stream) = connect(&mut module);
            let received = rate(stream, program, chunk);
            println!("writes of {chunk:6} bytes: {sent:6.2} Gb/s sent, {received:6.2} received");
        }
        let (id, mut program, mut stream) = connect(&mut module);
        stream.set_nodelay(true).unwrap();
        let mut bytes = [0; 64];
        let mut times: Vec<Duration> = (0..5000)
            .map(|_| {
                let start = Instant::now();
                program.write_all(&bytes).unwrap();
                stream.read_exact(&mut bytes).unwrap();
                stream.write_all(&bytes).unwrap();
                program.read_exact(&mut bytes).unwrap();
                start.elapsed()
            })
            .collect();
        times.sort_unstable();
        println!("64 bytes there and back: {:?} median, {:?} p99", times[2500], times[4950]);
        let info = module.client.info(1, id).unwrap().unwrap();
        println!("the module's round-trip time: {} us", info.rtt);
        let (start, mut count) = (Instant::now(), 0_u32);
        while start.elapsed() < SPAN {
            let (_, mut program, mut stream) = connect(&mut module);
            program.write_all(&bytes).unwrap();
            stream.read_exact(&mut bytes).unwrap();
            count += 1;
        }
        println!("connections a second: {:.0}", f64::from(count) / SPAN.as_secs_f64());
        let stats = module.client.stats(1).unwrap();
        let seconds = Duration::from_nanos(stats.processor);
        println!("processor time of the tenant {seconds:?}; retransmits {}", stats.retransmits);
        drop(TcpStream::connect(("10.9.0.1", 9)));
    });
}

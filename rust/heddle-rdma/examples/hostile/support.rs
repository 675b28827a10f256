//! What plays the library of programs in tests.

use std::time::{Duration, Instant};

use verbs_protocol::Gid;

#[path = "../../tests/support/device.rs"]
mod device;
#[path = "../../tests/support/requests.rs"]
mod requests;
#[path = "../../tests/support/wire.rs"]
pub(crate) mod wire;

pub(crate) use device::{Cq, Device, Qp};
pub(crate) use requests::{inline, receiving, request};

pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < WAIT_TIMEOUT, "{what} did not come");
        std::thread::yield_now();
    }
}

pub(crate) fn gid(n: u8) -> Gid {
    [n; 16]
}

//! Messages of the agent's, and nqes, out of bytes: `docs/protocols/stack-queues.md`.

#![expect(unsafe_code, reason = "layouts that C shares, as bytes")]

use core::net::{IpAddr, Ipv6Addr, SocketAddr};

use shared_ring::Slot;
use unix_io::plain::{self, Plain};

use super::abi::*;
pub use crate::proto::{Errno, Malformed};

macro_rules! plain {
    ($($name:ident)*) => {
        // SAFETY: made of the header, in which everything is an integer, and padding an error.
        $(unsafe impl Plain for queues_abi::$name {})*
    };
}
use super::abi as queues_abi;

plain!(
    queues_nqe queues_head queues_plain queues_region queues_give queues_make queues_made
    queues_stats
);

/// An answer to MAKE.
const MADE: u32 = QUEUES_MAKE | QUEUES_ANSWER;
/// Bytes of the longest message.
pub const MESSAGE_MAX: usize = QUEUES_MESSAGE_MAX as usize;

/// What the agent says, without its descriptor.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the page describes the messages")]
pub enum Message {
    Hello {
        version: u64,
    },
    Region(queues_region),
    RegionGone,
    Give,
    Stop(bool),
    Stats,
    /// An answer to MAKE.
    Made,
}

/// Reads a message of the agent's, which came with this many descriptors.
///
/// # Errors
///
/// [`Malformed`] if it breaks the rules of the page: the connection is to be closed.
pub fn parse(bytes: &[u8], descriptors: usize) -> Result<(queues_head, Message), Malformed> {
    let head: queues_head =
        bytes.get(..size_of::<queues_head>()).and_then(plain::read).ok_or(Malformed)?;
    if head.reserved != 0 {
        return Err(Malformed);
    }
    let (message, wanted) = match head.type_ {
        QUEUES_HELLO => (Message::Hello { version: value(bytes)? }, descriptors == 0),
        QUEUES_REGION => {
            let m: queues_region = plain::read(bytes).ok_or(Malformed)?;
            if m.flags & !(QUEUES_CONTROL | QUEUES_POLLED) != 0 {
                return Err(Malformed);
            }
            (Message::Region(m), descriptors == 1)
        }
        QUEUES_REGION_GONE => (nothing(bytes, Message::RegionGone)?, descriptors == 0),
        QUEUES_GIVE => {
            plain::read::<queues_give>(bytes).ok_or(Malformed)?;
            (Message::Give, descriptors == 1)
        }
        QUEUES_STOP => (Message::Stop(value(bytes)? != 0), descriptors == 0),
        QUEUES_STATS => (nothing(bytes, Message::Stats)?, descriptors == 0),
        MADE => {
            plain::read::<queues_make>(bytes).ok_or(Malformed)?;
            // A socket, or why there is none.
            (Message::Made, descriptors == usize::from(head.error == 0))
        }
        _ => return Err(Malformed),
    };
    let of_a_region = !matches!(message, Message::Hello { .. } | Message::Stats);
    let answers = matches!(message, Message::Made);
    if !wanted || (of_a_region && head.region == 0) || (!answers && head.error != 0) {
        return Err(Malformed);
    }
    Ok((head, message))
}

fn value(bytes: &[u8]) -> Result<u64, Malformed> {
    plain::read::<queues_plain>(bytes).map(|m| m.value).ok_or(Malformed)
}

fn nothing(bytes: &[u8], message: Message) -> Result<Message, Malformed> {
    if value(bytes)? == 0 { Ok(message) } else { Err(Malformed) }
}

/// The head of the answer to a request.
#[must_use]
pub fn answer_to(asked: &queues_head, error: i32) -> queues_head {
    queues_head { type_: asked.type_ | QUEUES_ANSWER, error, ..*asked }
}

/// An nqe out of a slot, which is a copy by now.
#[must_use]
pub fn nqe(slot: &Slot) -> queues_nqe {
    // SAFETY: both have 64 bytes (`memory` asserts that), and any bytes are an nqe.
    unsafe { core::mem::transmute::<[u64; 8], queues_nqe>(slot.0) }
}

/// A slot of an nqe.
#[must_use]
pub fn slot(nqe: &queues_nqe) -> Slot {
    // SAFETY: as in `nqe`; an nqe has no padding.
    Slot(unsafe { core::mem::transmute::<queues_nqe, [u64; 8]>(*nqe) })
}

/// The completion of a job.
#[must_use]
pub fn done(job: &queues_nqe, error: i32) -> queues_nqe {
    queues_nqe {
        operation: job.operation | DONE,
        error,
        socket: job.socket,
        sequence: job.sequence,
        stamp: job.stamp,
        ..queues_nqe::default()
    }
}

/// In the operation of a completion.
pub const DONE: u8 = 128;

/// The address in an nqe.
#[must_use]
pub fn address(nqe: &queues_nqe) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(nqe.address).to_canonical(), nqe.port)
}

/// Puts an address into an nqe.
pub fn name(nqe: &mut queues_nqe, at: SocketAddr) {
    nqe.address = match at.ip() {
        IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
        IpAddr::V6(a) => a.octets(),
    };
    nqe.port = at.port();
}

/// The bytes of a message.
#[must_use]
pub fn bytes<T: Plain>(message: &T) -> Vec<u8> {
    plain::bytes(message).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(kind: u32) -> queues_head {
        queues_head { type_: kind, tag: 1, region: 2, error: 0, reserved: 0 }
    }

    #[test]
    fn malformed_messages_are_refused() {
        let gone = queues_plain { head: head(QUEUES_REGION_GONE), value: 0 };
        assert!(parse(&bytes(&gone), 0).is_ok());
        assert!(parse(&bytes(&gone), 1).is_err());
        assert!(parse(&bytes(&gone)[1..], 0).is_err());
        assert!(parse(&[], 0).is_err());
        let mut bad = gone;
        bad.value = 1;
        assert!(parse(&bytes(&bad), 0).is_err());
        bad = gone;
        bad.head.region = 0;
        assert!(parse(&bytes(&bad), 0).is_err());
        bad = gone;
        bad.head.type_ = 77;
        assert!(parse(&bytes(&bad), 0).is_err());
        let region = queues_region { head: head(QUEUES_REGION), flags: 4, ..Default::default() };
        assert!(parse(&bytes(&region), 1).is_err());
        let made = queues_make { head: head(QUEUES_MAKE | QUEUES_ANSWER), ..Default::default() };
        assert!(parse(&bytes(&made), 1).is_ok());
        assert!(parse(&bytes(&made), 0).is_err());
    }

    #[test]
    fn an_nqe_is_a_slot() {
        let mut n = queues_nqe { operation: 4, socket: 9, stamp: 11, ..Default::default() };
        name(&mut n, "10.0.0.1:80".parse().unwrap());
        let back = nqe(&slot(&n));
        assert_eq!(address(&back), "10.0.0.1:80".parse().unwrap());
        assert_eq!((back.operation, back.socket, back.stamp), (4, 9, 11));
        let d = done(&back, libc::EINVAL);
        assert_eq!((d.operation, d.socket, d.error), (132, 9, libc::EINVAL));
    }
}

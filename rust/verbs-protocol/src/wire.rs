//! Greeting and frames between routers. `docs/protocols/verbs-wire.md`.

use crate::{Gid, cm_message};

/// Bytes of a greeting.
pub const GREETING: usize = 64;
/// Bytes of a frame's header.
pub const HEADER: usize = 48;
/// The most bytes that follow a header.
pub const FRAME_MAX: usize = 65536;
/// The version of the page.
pub const VERSION: u16 = 1;

const MAGIC: [u8; 8] = *b"HDLVERBS";

/// What a connection is for: its kind.
pub const PAIR: u16 = 1;
/// The other kind.
pub const DATAGRAMS: u16 = 2;
/// The third kind: two ids of RDMA-CM.
pub const RDMA_CM: u16 = 3;

/// First frame of a message.
pub const FIRST: u16 = 1;
/// Last frame of a message.
pub const LAST: u16 = 2;
/// The receiver's program wants an event.
pub const SOLICITED: u16 = 4;
/// The card has placed the message's bytes already.
pub const PLACED: u16 = 8;

/// What an end of a connection says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Greeting {
    pub version: u16,
    pub kind: u16,
    pub status: u32,
    pub source_qp: u32,
    pub destination_qp: u32,
    pub source: Gid,
    pub destination: Gid,
    pub qp_type: u8,
    /// Of a pair: the node has a card.
    pub card: bool,
}

/// Bytes that break the rules: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Greeting {
    /// The bytes of it.
    #[must_use]
    pub fn encode(&self) -> [u8; GREETING] {
        let mut out = [0; GREETING];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&self.version.to_be_bytes());
        out[10..12].copy_from_slice(&self.kind.to_be_bytes());
        out[12..16].copy_from_slice(&self.status.to_be_bytes());
        out[16..20].copy_from_slice(&self.source_qp.to_be_bytes());
        out[20..24].copy_from_slice(&self.destination_qp.to_be_bytes());
        out[24..40].copy_from_slice(&self.source);
        out[40..56].copy_from_slice(&self.destination);
        out[56] = self.qp_type;
        out[57] = self.card.into();
        out
    }

    /// Reads a greeting. Versions, GIDs and QPs are the caller's to check.
    ///
    /// # Errors
    ///
    /// [`Malformed`] if it does not begin as greetings do, or, in the version that is known, a
    /// field has a value that is not there.
    pub fn parse(bytes: &[u8; GREETING]) -> Result<Self, Malformed> {
        let greeting = Self {
            version: short(bytes, 8),
            kind: short(bytes, 10),
            status: word(bytes, 12),
            source_qp: word(bytes, 16),
            destination_qp: word(bytes, 20),
            source: gid(bytes, 24),
            destination: gid(bytes, 40),
            qp_type: bytes[56],
            card: bytes[57] == 1,
        };
        let good = bytes[..8] == MAGIC
            && (greeting.version != VERSION
                || matches!(greeting.kind, PAIR | DATAGRAMS | RDMA_CM)
                    && bytes[57] <= u8::from(greeting.kind == PAIR)
                    && bytes[58..] == [0; 6]);
        good.then_some(greeting).ok_or(Malformed)
    }
}

/// Which frame it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the page describes the types")]
pub enum Kind {
    Request = 1,
    Ack = 2,
    ReadResponse = 3,
    AtomicResponse = 4,
    Rnr = 5,
    Datagram = 6,
    Close = 7,
    Cm = 8,
    Card = 9,
    CardReady = 10,
    CardAsk = 11,
    CardKey = 12,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Header {
    pub kind: Kind,
    pub opcode: u8,
    pub flags: u16,
    pub length: u32,
    pub number: u32,
    pub status: u32,
    pub immediate: u32,
    pub key: u32,
    pub address: u64,
    pub total: u64,
    pub swap: u64,
}

impl Header {
    /// A header in which everything but its type is 0.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            opcode: 0,
            flags: 0,
            length: 0,
            number: 0,
            status: 0,
            immediate: 0,
            key: 0,
            address: 0,
            total: 0,
            swap: 0,
        }
    }

    /// The bytes of it.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0] = self.kind as u8;
        out[1] = self.opcode;
        out[2..4].copy_from_slice(&self.flags.to_be_bytes());
        out[4..8].copy_from_slice(&self.length.to_be_bytes());
        out[8..12].copy_from_slice(&self.number.to_be_bytes());
        out[12..16].copy_from_slice(&self.status.to_be_bytes());
        // The program's own bytes, whatever their order.
        out[16..20].copy_from_slice(&self.immediate.to_ne_bytes());
        out[20..24].copy_from_slice(&self.key.to_be_bytes());
        out[24..32].copy_from_slice(&self.address.to_be_bytes());
        out[32..40].copy_from_slice(&self.total.to_be_bytes());
        out[40..48].copy_from_slice(&self.swap.to_be_bytes());
        out
    }

    /// Reads a header.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for an unknown type or flag, and for more bytes than may follow.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, Malformed> {
        let kind = match bytes[0] {
            1 => Kind::Request,
            2 => Kind::Ack,
            3 => Kind::ReadResponse,
            4 => Kind::AtomicResponse,
            5 => Kind::Rnr,
            6 => Kind::Datagram,
            7 => Kind::Close,
            8 => Kind::Cm,
            9 => Kind::Card,
            10 => Kind::CardReady,
            11 => Kind::CardAsk,
            12 => Kind::CardKey,
            _ => return Err(Malformed),
        };
        let header = Self {
            kind,
            opcode: bytes[1],
            flags: short(bytes, 2),
            length: word(bytes, 4),
            number: word(bytes, 8),
            status: word(bytes, 12),
            immediate: u32::from_ne_bytes([bytes[16], bytes[17], bytes[18], bytes[19]]),
            key: word(bytes, 20),
            address: long(bytes, 24),
            total: long(bytes, 32),
            swap: long(bytes, 40),
        };
        let most = match kind {
            Kind::Request | Kind::ReadResponse | Kind::Datagram => FRAME_MAX,
            Kind::Cm => cm_message::MESSAGE_MAX,
            Kind::Card => 16,
            _ => 0,
        };
        if header.flags > 15 || header.length as usize > most {
            return Err(Malformed);
        }
        Ok(header)
    }
}

fn short(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}

fn gid(bytes: &[u8], at: usize) -> Gid {
    let mut gid = [0; 16];
    gid.copy_from_slice(&bytes[at..at + 16]);
    gid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_comes_back() {
        let greeting = Greeting {
            version: 1,
            kind: PAIR,
            status: 0,
            source_qp: 0x0001_0203,
            destination_qp: 9,
            source: [1; 16],
            destination: [2; 16],
            qp_type: 2,
            card: true,
        };
        let mut bytes = greeting.encode();
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));
        bytes[63] = 1;
        assert_eq!(Greeting::parse(&bytes), Err(Malformed));
        // What another version means is not ours to judge.
        bytes[9] = 2;
        assert_eq!(Greeting::parse(&bytes).unwrap().version, 2);
        bytes[0] = 0;
        assert_eq!(Greeting::parse(&bytes), Err(Malformed));
    }

    #[test]
    fn headers_come_back_and_are_bounded() {
        let header = Header {
            opcode: 3,
            flags: 7,
            length: 65536,
            number: u32::MAX,
            status: 4,
            immediate: 0x1234,
            key: 6,
            address: u64::MAX,
            total: 8,
            swap: 9,
            ..Header::new(Kind::Request)
        };
        let bytes = header.encode();
        assert_eq!(Header::parse(&bytes), Ok(header));
        for (at, value) in [(0, 0), (0, 13), (0, 8), (3, 16), (2, 1), (7, 1), (0, 2)] {
            let mut bad = bytes;
            bad[at] = value;
            assert_eq!(Header::parse(&bad), Err(Malformed), "{at} {value}");
        }
    }
}

//! What two ids of RDMA-CM say to each other, in CM frames. `docs/protocols/verbs-wire.md`.

use crate::cm::{PS_TCP, PS_UDP, Param, Private};
use crate::wire::{Header, Kind, Malformed};

/// Bytes of a message in front of private data.
pub const FIXED: usize = 32;
/// The most bytes of private data in a message.
pub const PRIVATE_MAX: usize = 196;
/// The most bytes of a message.
pub const MESSAGE_MAX: usize = FIXED + PRIVATE_MAX;

/// The endpoint has as many ids as it may: a reason of REJ.
pub const NO_RESOURCES: u32 = 3;
/// Nobody listens: a reason of REJ.
pub const NO_LISTENER: u32 = 8;
/// The program says no: a reason of REJ.
pub const BY_CONSUMER: u32 = 28;
/// Nobody listens: a status of `SIDR_REP`.
pub const SIDR_UNSUPPORTED: u32 = 1;
/// The program says no: a status of `SIDR_REP`.
pub const SIDR_REJECTED: u32 = 2;

/// Which message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the page describes them")]
pub enum What {
    Request = 1,
    Reply = 2,
    ReadyToUse = 3,
    Reject = 4,
    DisconnectRequest = 5,
    DisconnectReply = 6,
    ServiceRequest = 7,
    ServiceReply = 8,
}

/// A message. What it does not have is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the fields")]
pub struct Message {
    pub what: What,
    pub space: u16,
    pub source_port: u16,
    pub destination_port: u16,
    pub status: u32,
    pub param: Param,
}

impl Message {
    /// One in which everything else is 0.
    #[must_use]
    pub fn new(what: What) -> Self {
        let param = Param::default();
        Self { what, space: 0, source_port: 0, destination_port: 0, status: 0, param }
    }

    /// The header of its frame, and the bytes that follow it.
    #[must_use]
    pub fn encode(&self) -> (Header, Vec<u8>) {
        let p = &self.param;
        let mut out = Vec::with_capacity(MESSAGE_MAX);
        out.extend_from_slice(&self.space.to_be_bytes());
        out.extend_from_slice(&self.source_port.to_be_bytes());
        out.extend_from_slice(&self.destination_port.to_be_bytes());
        out.extend_from_slice(&[
            p.responder_resources,
            p.initiator_depth,
            p.flow_control,
            p.retry_count,
            p.rnr_retry_count,
            p.srq,
        ]);
        out.extend_from_slice(&p.qp.to_be_bytes());
        out.extend_from_slice(&p.qkey.to_be_bytes());
        out.extend_from_slice(&self.status.to_be_bytes());
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(p.private.bytes());
        let length = u32::try_from(out.len()).unwrap_or(0);
        (Header { opcode: self.what as u8, length, ..Header::new(Kind::Cm) }, out)
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for an unknown message, a field that it does not have or that has a value that
    /// is not there, or too many bytes.
    pub fn parse(header: &Header, bytes: &[u8]) -> Result<Self, Malformed> {
        let (fixed, private) = bytes.split_first_chunk::<FIXED>().ok_or(Malformed)?;
        let what = match header.opcode {
            1 => What::Request,
            2 => What::Reply,
            3 => What::ReadyToUse,
            4 => What::Reject,
            5 => What::DisconnectRequest,
            6 => What::DisconnectReply,
            7 => What::ServiceRequest,
            8 => What::ServiceReply,
            _ => return Err(Malformed),
        };
        let short = |at: usize| u16::from_be_bytes([fixed[at], fixed[at + 1]]);
        let word = |at: usize| u32::from(short(at)) << 16 | u32::from(short(at + 2));
        let private = Some(private).filter(|p| p.len() <= PRIVATE_MAX).and_then(Private::new);
        let message = Self {
            what,
            space: short(0),
            source_port: short(2),
            destination_port: short(4),
            status: word(20),
            param: Param {
                qp: word(12),
                qkey: word(16),
                private: private.ok_or(Malformed)?,
                srq: fixed[11],
                responder_resources: fixed[6],
                initiator_depth: fixed[7],
                flow_control: fixed[8],
                retry_count: fixed[9],
                rnr_retry_count: fixed[10],
            },
        };
        let plain =
            Header { opcode: header.opcode, length: header.length, ..Header::new(Kind::Cm) };
        let good = *header == plain && fixed[24..] == [0; 8] && message.has_only_its_fields();
        good.then_some(message).ok_or(Malformed)
    }

    fn has_only_its_fields(&self) -> bool {
        let p = &self.param;
        let request = matches!(self.what, What::Request | What::ServiceRequest);
        let space = match self.what {
            What::Request => PS_TCP,
            What::ServiceRequest => PS_UDP,
            _ => 0,
        };
        let connects = matches!(self.what, What::Request | What::Reply);
        let depths = [p.responder_resources, p.initiator_depth, p.flow_control, p.rnr_retry_count];
        self.space == space
            && (request || [self.source_port, self.destination_port] == [0; 2])
            && (connects || depths == [0; 4] && p.srq == 0)
            && (self.what == What::Request || p.retry_count == 0)
            && (connects || self.what == What::ServiceReply || p.qp == 0)
            && (self.what == What::ServiceReply || p.qkey == 0)
            && (matches!(self.what, What::Reject | What::ServiceReply) || self.status == 0)
            && p.qp < 1 << 24
            && p.srq < 2
            && p.flow_control < 2
            && p.retry_count < 8
            && p.rnr_retry_count < 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_with_only_their_fields() {
        let mut request = Message {
            space: PS_TCP,
            source_port: 1,
            destination_port: 7174,
            ..Message::new(What::Request)
        };
        request.param.qp = 77;
        request.param.private = Private::new(b"hello").unwrap();
        let (header, bytes) = request.encode();
        assert_eq!(header.length as usize, bytes.len());
        assert_eq!(Message::parse(&header, &bytes), Ok(request));
        assert_eq!(Message::parse(&header, &bytes[..31]), Err(Malformed));
        for opcode in [0, 3, 5, 7, 9] {
            let other = Header { opcode, ..header };
            assert_eq!(Message::parse(&other, &bytes), Err(Malformed), "{opcode}");
        }
        assert_eq!(Message::parse(&Header { key: 1, ..header }, &bytes), Err(Malformed));
        let long = [bytes, vec![0; PRIVATE_MAX - 4]].concat();
        assert_eq!(Message::parse(&header, &long), Err(Malformed));
        request.param.qp = 1 << 24;
        let (header, bytes) = request.encode();
        assert_eq!(Message::parse(&header, &bytes), Err(Malformed));
    }
}

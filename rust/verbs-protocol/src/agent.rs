//! Messages between the router and its agent. `docs/protocols/verbs-agent.md`.

use crate::Gid;

/// The version of the page.
pub const VERSION: u32 = 3;
/// GIDs of a card that a CARD tells at most.
pub const CARD_GIDS_MAX: usize = 8;
/// Groups that an endpoint may be in.
pub const GROUPS_MAX: usize = 256;
/// Bytes of the longest message of an agent's: a GROUPS. STATISTICS of a router are longer.
pub const MESSAGE_MAX: usize = HEAD + 32 + 16 * GROUPS_MAX;

const HEAD: usize = 16;
const NAME: usize = 64;

/// What an endpoint may have; 0 is the router's own default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the limits")]
pub struct Limits {
    pub contexts: u32,
    pub qps: u32,
    pub cqs: u32,
    pub mrs: u32,
    pub pds: u32,
    pub srqs: u32,
    pub ahs: u32,
    pub channels: u32,
    pub memory_mib: u32,
    pub sends_per_second: u32,
    pub spin_us: u32,
    pub egress_kbit: u32,
    pub ingress_kbit: u32,
    /// It may have peers without Heddle.
    pub outside: bool,
}

/// A message, without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the page describes the messages")]
pub enum Message {
    Hello { version: u32 },
    Begin,
    End,
    Endpoint { endpoint: u64, gids: [Gid; 2], limits: Limits, name: String },
    Remove { endpoint: u64 },
    Connect { tag: u32, endpoint: u64, source: Gid, destination: Gid },
    Connected { tag: u32, endpoint: u64, errno: u32 },
    Accepted { endpoint: u64, source: Gid, destination: Gid },
    Refused { endpoint: u64, errno: u32 },
    Stats { tag: u32, endpoint: u64, kind: u32, cursor: u32 },
    Statistics { tag: u32, endpoint: u64, kind: u32, cursor: u32, size: u32, records: Vec<u8> },
    Drain,
    Released { endpoint: u64 },
    Groups { endpoint: u64, gids: [Gid; 2], groups: Vec<Gid> },
    Ask { tag: u32, endpoint: u64, source: Gid, destination: Gid },
    Answer { tag: u32, endpoint: u64, destination: Gid, errno: u32 },
    AskAnew,
    Card { endpoint: u64, lid: u32, gids: Vec<Gid> },
}

/// Bytes that break the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Message {
    /// The bytes of it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, tag, endpoint) = match self {
            Self::Hello { .. } => (1, 0, 0),
            Self::Begin => (2, 0, 0),
            Self::End => (3, 0, 0),
            Self::Endpoint { endpoint, .. } => (4, 0, *endpoint),
            Self::Remove { endpoint } => (5, 0, *endpoint),
            Self::Connect { tag, endpoint, .. } => (6, *tag, *endpoint),
            Self::Connected { tag, endpoint, .. } => (7, *tag, *endpoint),
            Self::Accepted { endpoint, .. } => (8, 0, *endpoint),
            Self::Refused { endpoint, .. } => (9, 0, *endpoint),
            Self::Stats { tag, endpoint, .. } => (10, *tag, *endpoint),
            Self::Statistics { tag, endpoint, .. } => (11, *tag, *endpoint),
            Self::Drain => (12, 0, 0),
            Self::Released { endpoint } => (13, 0, *endpoint),
            Self::Groups { endpoint, .. } => (14, 0, *endpoint),
            Self::Ask { tag, endpoint, .. } => (18, *tag, *endpoint),
            Self::Answer { tag, endpoint, .. } => (15, *tag, *endpoint),
            Self::AskAnew => (16, 0, 0),
            Self::Card { endpoint, .. } => (17, 0, *endpoint),
        };
        let mut out = Vec::with_capacity(MESSAGE_MAX);
        out.extend_from_slice(&u32::to_ne_bytes(kind));
        out.extend_from_slice(&u32::to_ne_bytes(tag));
        out.extend_from_slice(&u64::to_ne_bytes(endpoint));
        match self {
            Self::Hello { version: number }
            | Self::Connected { errno: number, .. }
            | Self::Refused { errno: number, .. } => {
                out.extend_from_slice(&number.to_ne_bytes());
                out.extend_from_slice(&[0; 4]);
            }
            Self::Begin
            | Self::End
            | Self::Remove { .. }
            | Self::Drain
            | Self::Released { .. }
            | Self::AskAnew => {}
            Self::Endpoint { gids, limits, name, .. } => {
                out.extend_from_slice(gids.as_flattened());
                for number in numbers(limits) {
                    out.extend_from_slice(&number.to_ne_bytes());
                }
                let mut field = [0; NAME];
                let length = name.len().min(NAME);
                field[..length].copy_from_slice(&name.as_bytes()[..length]);
                out.extend_from_slice(&field);
            }
            Self::Groups { gids, groups, .. } => {
                out.extend_from_slice(gids.as_flattened());
                out.extend_from_slice(groups.as_flattened());
            }
            Self::Answer { destination, errno, .. } => {
                out.extend_from_slice(destination);
                out.extend_from_slice(&errno.to_ne_bytes());
                out.extend_from_slice(&[0; 4]);
            }
            Self::Ask { source, destination, .. }
            | Self::Connect { source, destination, .. }
            | Self::Accepted { source, destination, .. } => {
                out.extend_from_slice(source);
                out.extend_from_slice(destination);
            }
            Self::Card { lid, gids, .. } => {
                let count = u32::try_from(gids.len()).unwrap_or(u32::MAX);
                for number in [*lid, count] {
                    out.extend_from_slice(&number.to_ne_bytes());
                }
                out.extend_from_slice(gids.as_flattened());
            }
            Self::Stats { kind, cursor, .. } => {
                out.extend_from_slice(&kind.to_ne_bytes());
                out.extend_from_slice(&cursor.to_ne_bytes());
            }
            Self::Statistics { kind, cursor, size, records, .. } => {
                let count = records.len() / (*size).max(1) as usize;
                let count = u32::try_from(count).unwrap_or(u32::MAX);
                for number in [*kind, *cursor, count, *size] {
                    out.extend_from_slice(&number.to_ne_bytes());
                }
                out.extend_from_slice(records);
            }
        }
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for an unknown type, another length, or fields that are not as the page says.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let (kind, tag, endpoint) = (fields.word()?, fields.word()?, fields.long()?);
        let message = match kind {
            1 => Self::Hello { version: fields.padded()? },
            2 => Self::Begin,
            3 => Self::End,
            4 => {
                let gids = [fields.take()?, fields.take()?];
                let limits = fields.limits()?;
                let name: [u8; NAME] = fields.take()?;
                let length = name.iter().position(|b| *b == 0).unwrap_or(NAME);
                let name = str::from_utf8(&name[..length]).map_err(|_| Malformed)?.to_owned();
                Self::Endpoint { endpoint, gids, limits, name }
            }
            5 => Self::Remove { endpoint },
            6 => {
                let (source, destination) = (fields.take()?, fields.take()?);
                Self::Connect { tag, endpoint, source, destination }
            }
            7 => Self::Connected { tag, endpoint, errno: fields.padded()? },
            8 => {
                let (source, destination) = (fields.take()?, fields.take()?);
                Self::Accepted { endpoint, source, destination }
            }
            9 => Self::Refused { endpoint, errno: fields.padded()? },
            10 => Self::Stats { tag, endpoint, kind: fields.word()?, cursor: fields.word()? },
            11 => {
                let (kind, cursor) = (fields.word()?, fields.word()?);
                let (count, size) = (fields.word()?, fields.word()?);
                let records = std::mem::take(&mut fields.0).to_vec();
                if size == 0 || u64::from(count) * u64::from(size) != records.len() as u64 {
                    return Err(Malformed);
                }
                Self::Statistics { tag, endpoint, kind, cursor, size, records }
            }
            12 => Self::Drain,
            13 => Self::Released { endpoint },
            14 => {
                let gids = [fields.take()?, fields.take()?];
                let groups = std::mem::take(&mut fields.0).as_chunks();
                if !groups.1.is_empty() || groups.0.len() > GROUPS_MAX {
                    return Err(Malformed);
                }
                Self::Groups { endpoint, gids, groups: groups.0.to_vec() }
            }
            15 => {
                let destination = fields.take()?;
                Self::Answer { tag, endpoint, destination, errno: fields.padded()? }
            }
            16 => Self::AskAnew,
            18 => {
                let (source, destination) = (fields.take()?, fields.take()?);
                Self::Ask { tag, endpoint, source, destination }
            }
            17 => {
                let (lid, count) = (fields.word()?, fields.word()?);
                let (gids, rest) = fields.0.as_chunks();
                if gids.len() > CARD_GIDS_MAX
                    || u32::try_from(gids.len()) != Ok(count)
                    || !rest.is_empty()
                {
                    return Err(Malformed);
                }
                fields.0 = rest;
                Self::Card { endpoint, lid, gids: gids.to_vec() }
            }
            _ => return Err(Malformed),
        };
        let names_one = match kind {
            1..=3 | 12 | 16 => endpoint == 0,
            // Statistics are of one or of all, groups of an endpoint here or elsewhere.
            10 | 11 | 14 => true,
            _ => endpoint != 0,
        };
        let good = fields.0.is_empty() && names_one;
        good.then_some(message).ok_or(Malformed)
    }
}

fn numbers(l: &Limits) -> [u32; 16] {
    [
        l.contexts,
        l.qps,
        l.cqs,
        l.mrs,
        l.pds,
        l.srqs,
        l.ahs,
        l.channels,
        l.memory_mib,
        l.sends_per_second,
        l.spin_us,
        l.egress_kbit,
        l.ingress_kbit,
        l.outside.into(),
        0,
        0,
    ]
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*first)
    }

    fn word(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_ne_bytes)
    }

    fn long(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_ne_bytes)
    }

    /// A number and a reserved one.
    fn padded(&mut self) -> Result<u32, Malformed> {
        let number = self.word()?;
        if self.word()? == 0 { Ok(number) } else { Err(Malformed) }
    }

    fn limits(&mut self) -> Result<Limits, Malformed> {
        let mut n = [0; 16];
        for number in &mut n {
            *number = self.word()?;
        }
        if n[13] > 1 || n[14..] != [0; 2] {
            return Err(Malformed);
        }
        Ok(Limits {
            contexts: n[0],
            qps: n[1],
            cqs: n[2],
            mrs: n[3],
            pds: n[4],
            srqs: n[5],
            ahs: n[6],
            channels: n[7],
            memory_mib: n[8],
            sends_per_second: n[9],
            spin_us: n[10],
            egress_kbit: n[11],
            ingress_kbit: n[12],
            outside: n[13] == 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_have_one_length() {
        let limits =
            Limits { qps: 7, spin_us: 3, ingress_kbit: 8, outside: true, ..Limits::default() };
        for message in [
            Message::Hello { version: VERSION },
            Message::Begin,
            Message::End,
            Message::Endpoint { endpoint: 4, gids: [[1; 16], [0; 16]], limits, name: "a/b".into() },
            Message::Remove { endpoint: 4 },
            Message::Connect { tag: 3, endpoint: 4, source: [1; 16], destination: [2; 16] },
            Message::Connected { tag: 3, endpoint: 4, errno: 111 },
            Message::Accepted { endpoint: 4, source: [1; 16], destination: [2; 16] },
            Message::Refused { endpoint: 4, errno: 12 },
            Message::Stats { tag: 3, endpoint: 0, kind: 1, cursor: 7 },
            Message::Statistics {
                tag: 3,
                endpoint: 4,
                kind: 2,
                cursor: 8,
                size: 2,
                records: vec![1, 2, 3, 4],
            },
            Message::Drain,
            Message::Released { endpoint: 4 },
            Message::Groups { endpoint: 0, gids: [[1; 16], [2; 16]], groups: vec![[3; 16]; 2] },
            Message::Ask { tag: 3, endpoint: 4, source: [1; 16], destination: [2; 16] },
            Message::Answer { tag: 3, endpoint: 4, destination: [2; 16], errno: 13 },
            Message::AskAnew,
            Message::Card { endpoint: 4, lid: 9, gids: vec![[7; 16]; CARD_GIDS_MAX] },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_MAX);
            assert_eq!(Message::parse(&bytes), Ok(message));
            assert_eq!(Message::parse(&bytes[..bytes.len() - 1]), Err(Malformed));
            assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), Err(Malformed));
        }
        assert_eq!(Message::parse(&Message::Remove { endpoint: 0 }.encode()), Err(Malformed));
        let groups = |n| {
            let groups =
                Message::Groups { endpoint: 1, gids: [[0; 16]; 2], groups: vec![[3; 16]; n] };
            Message::parse(&groups.encode()).map(|_| groups.encode().len())
        };
        assert_eq!(groups(GROUPS_MAX), Ok(MESSAGE_MAX));
        assert_eq!(groups(GROUPS_MAX + 1), Err(Malformed));
        let many = Message::Card { endpoint: 4, lid: 9, gids: vec![[7; 16]; CARD_GIDS_MAX + 1] };
        assert_eq!(Message::parse(&many.encode()), Err(Malformed));
    }
}

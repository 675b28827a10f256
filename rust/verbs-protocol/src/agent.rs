//! Messages between the router and its agent. `docs/protocols/verbs-agent.md`.

use crate::Gid;
#[allow(clippy::wildcard_imports, reason = "it has nothing but these messages")]
use crate::agent_abi::*;
use crate::plain::{Plain, bytes, read};

/// The version of the page.
pub const VERSION: u32 = VERBS_AGENT_VERSION;
/// GIDs of a card that a CARD tells at most.
pub const CARD_GIDS_MAX: usize = VERBS_AGENT_CARD_GIDS as usize;
/// Groups that an endpoint may be in.
pub const GROUPS_MAX: usize = VERBS_AGENT_GROUPS_MAX as usize;
/// Bytes of the longest message of an agent's: a GROUPS. STATISTICS of a router are longer.
pub const MESSAGE_MAX: usize = size_of::<verbs_agent_groups>() + size_of::<Gid>() * GROUPS_MAX;

/// What an endpoint may have; 0 is the router's own default.
pub use crate::agent_abi::verbs_agent_limits as Limits;

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
    Answer { tag: u32, endpoint: u64, destination: Gid, errno: u32, marks: Marks },
    AskAnew,
    Card { endpoint: u64, lid: u32, gids: Vec<Gid> },
}

/// What of the packets of a queue pair with a peer without Heddle is the operator's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    /// The differentiated services code point.
    pub dscp: Option<u8>,
    /// The program has no say in the priority.
    pub priority: bool,
}

impl Marks {
    fn encode(self) -> u32 {
        self.dscp.map_or(0, |dscp| VERBS_AGENT_MARK_DSCP | u32::from(dscp))
            | if self.priority { VERBS_AGENT_MARK_PRIORITY } else { 0 }
    }

    fn parse(marks: u32) -> Result<Self, Malformed> {
        let dscp = marks & (VERBS_AGENT_MARK_DSCP - 1);
        let has = marks & VERBS_AGENT_MARK_DSCP != 0;
        if marks >= 2 * VERBS_AGENT_MARK_PRIORITY || dscp != 0 && !has {
            return Err(Malformed);
        }
        let dscp = u8::try_from(dscp).map_err(|_| Malformed)?;
        let priority = marks & VERBS_AGENT_MARK_PRIORITY != 0;
        Ok(Self { dscp: has.then_some(dscp), priority })
    }
}

/// Bytes that break the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl Message {
    /// The bytes of it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { version } => number(VERBS_AGENT_HELLO, 0, 0, *version),
            Self::Begin => plain(VERBS_AGENT_BEGIN, 0),
            Self::End => plain(VERBS_AGENT_END, 0),
            Self::Endpoint { endpoint, gids, limits, name } => {
                let head = head(VERBS_AGENT_ENDPOINT, 0, *endpoint);
                let mut field = [0; VERBS_AGENT_NAME as usize];
                let length = name.len().min(field.len());
                field[..length].copy_from_slice(&name.as_bytes()[..length]);
                whole(&verbs_agent_endpoint { head, gids: *gids, limits: *limits, name: field })
            }
            Self::Remove { endpoint } => plain(VERBS_AGENT_REMOVE, *endpoint),
            Self::Connect { tag, endpoint, source, destination } => {
                ends(VERBS_AGENT_CONNECT, *tag, *endpoint, *source, *destination)
            }
            Self::Connected { tag, endpoint, errno } => {
                number(VERBS_AGENT_CONNECTED, *tag, *endpoint, *errno)
            }
            Self::Accepted { endpoint, source, destination } => {
                ends(VERBS_AGENT_ACCEPTED, 0, *endpoint, *source, *destination)
            }
            Self::Refused { endpoint, errno } => number(VERBS_AGENT_REFUSED, 0, *endpoint, *errno),
            Self::Stats { tag, endpoint, kind, cursor } => {
                let head = head(VERBS_AGENT_STATS, *tag, *endpoint);
                whole(&verbs_agent_stats { head, kind: *kind, cursor: *cursor })
            }
            Self::Statistics { tag, endpoint, kind, cursor, size, records } => {
                let head = head(VERBS_AGENT_STATISTICS, *tag, *endpoint);
                let count = count(records.len() / (*size).max(1) as usize);
                let (kind, cursor, size) = (*kind, *cursor, *size);
                followed(&verbs_agent_statistics { head, kind, cursor, count, size }, records)
            }
            Self::Drain => plain(VERBS_AGENT_DRAIN, 0),
            Self::Released { endpoint } => plain(VERBS_AGENT_RELEASED, *endpoint),
            Self::Groups { endpoint, gids, groups } => {
                let head = head(VERBS_AGENT_GROUPS, 0, *endpoint);
                followed(&verbs_agent_groups { head, gids: *gids }, groups.as_flattened())
            }
            Self::Ask { tag, endpoint, source, destination } => {
                ends(VERBS_AGENT_ASK, *tag, *endpoint, *source, *destination)
            }
            Self::Answer { tag, endpoint, destination, errno, marks } => {
                let head = head(VERBS_AGENT_ANSWER, *tag, *endpoint);
                let (destination, number) = (*destination, *errno);
                whole(&verbs_agent_answer { head, destination, number, marks: marks.encode() })
            }
            Self::AskAnew => plain(VERBS_AGENT_ASK_ANEW, 0),
            Self::Card { endpoint, lid, gids } => {
                let head = head(VERBS_AGENT_CARD, 0, *endpoint);
                let card = verbs_agent_card { head, lid: *lid, count: count(gids.len()) };
                followed(&card, gids.as_flattened())
            }
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// [`Malformed`] for an unknown type, another length, or fields that are not as the page says.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let (verbs_agent_head { type_: kind, tag, endpoint }, rest) = first(bytes)?;
        let message = match kind {
            VERBS_AGENT_HELLO => Self::Hello { version: parse_number(bytes)? },
            VERBS_AGENT_ENDPOINT => {
                let m: verbs_agent_endpoint = exactly(bytes)?;
                let length = m.name.iter().position(|b| *b == 0).unwrap_or(m.name.len());
                let name = str::from_utf8(&m.name[..length]).map_err(|_| Malformed)?.to_owned();
                if m.limits.outside > 1 || m.limits.reserved != [0; 2] {
                    return Err(Malformed);
                }
                Self::Endpoint { endpoint, gids: m.gids, limits: m.limits, name }
            }
            VERBS_AGENT_CONNECT => {
                let verbs_agent_ends { source, destination, .. } = exactly(bytes)?;
                Self::Connect { tag, endpoint, source, destination }
            }
            VERBS_AGENT_CONNECTED => Self::Connected { tag, endpoint, errno: parse_number(bytes)? },
            VERBS_AGENT_ACCEPTED => {
                let verbs_agent_ends { source, destination, .. } = exactly(bytes)?;
                Self::Accepted { endpoint, source, destination }
            }
            VERBS_AGENT_REFUSED => Self::Refused { endpoint, errno: parse_number(bytes)? },
            VERBS_AGENT_STATS => {
                let verbs_agent_stats { kind, cursor, .. } = exactly(bytes)?;
                Self::Stats { tag, endpoint, kind, cursor }
            }
            VERBS_AGENT_STATISTICS => {
                let (m, records) = first::<verbs_agent_statistics>(bytes)?;
                let (kind, cursor, size) = (m.kind, m.cursor, m.size);
                if size == 0 || u64::from(m.count) * u64::from(size) != records.len() as u64 {
                    return Err(Malformed);
                }
                Self::Statistics { tag, endpoint, kind, cursor, size, records: records.to_vec() }
            }
            VERBS_AGENT_GROUPS => {
                let (m, groups) = first::<verbs_agent_groups>(bytes)?;
                Self::Groups { endpoint, gids: m.gids, groups: gids(groups, GROUPS_MAX)? }
            }
            VERBS_AGENT_ANSWER => {
                let m: verbs_agent_answer = exactly(bytes)?;
                let (destination, errno, marks) = (m.destination, m.number, Marks::parse(m.marks)?);
                Self::Answer { tag, endpoint, destination, errno, marks }
            }
            VERBS_AGENT_ASK => {
                let verbs_agent_ends { source, destination, .. } = exactly(bytes)?;
                Self::Ask { tag, endpoint, source, destination }
            }
            VERBS_AGENT_CARD => {
                let (m, rest) = first::<verbs_agent_card>(bytes)?;
                let gids = gids(rest, CARD_GIDS_MAX)?;
                if count(gids.len()) != m.count {
                    return Err(Malformed);
                }
                Self::Card { endpoint, lid: m.lid, gids }
            }
            _ if !rest.is_empty() => return Err(Malformed),
            VERBS_AGENT_BEGIN => Self::Begin,
            VERBS_AGENT_END => Self::End,
            VERBS_AGENT_REMOVE => Self::Remove { endpoint },
            VERBS_AGENT_DRAIN => Self::Drain,
            VERBS_AGENT_RELEASED => Self::Released { endpoint },
            VERBS_AGENT_ASK_ANEW => Self::AskAnew,
            _ => return Err(Malformed),
        };
        message.may_name(endpoint).then_some(message).ok_or(Malformed)
    }

    /// Whether a message of this kind may be of an endpoint with that number; 0 is none.
    const fn may_name(&self, endpoint: u64) -> bool {
        match self {
            Self::Hello { .. } | Self::Begin | Self::End | Self::Drain | Self::AskAnew => {
                endpoint == 0
            }
            // Statistics are of one or of all, groups of an endpoint here or elsewhere.
            Self::Stats { .. } | Self::Statistics { .. } | Self::Groups { .. } => true,
            _ => endpoint != 0,
        }
    }
}

fn head(kind: verbs_agent_type, tag: u32, endpoint: u64) -> verbs_agent_head {
    verbs_agent_head { type_: kind, tag, endpoint }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn whole<T: Plain>(message: &T) -> Vec<u8> {
    bytes(message).to_vec()
}

fn followed<T: Plain>(message: &T, rest: &[u8]) -> Vec<u8> {
    [bytes(message), rest].concat()
}

fn plain(kind: verbs_agent_type, endpoint: u64) -> Vec<u8> {
    whole(&head(kind, 0, endpoint))
}

fn number(kind: verbs_agent_type, tag: u32, endpoint: u64, number: u32) -> Vec<u8> {
    whole(&verbs_agent_number { head: head(kind, tag, endpoint), number, reserved: 0 })
}

fn ends(kind: verbs_agent_type, tag: u32, endpoint: u64, source: Gid, destination: Gid) -> Vec<u8> {
    whole(&verbs_agent_ends { head: head(kind, tag, endpoint), source, destination })
}

fn exactly<T: Plain>(bytes: &[u8]) -> Result<T, Malformed> {
    read(bytes).ok_or(Malformed)
}

/// What a message begins with, and the rest.
fn first<T: Plain>(bytes: &[u8]) -> Result<(T, &[u8]), Malformed> {
    let (begin, rest) = bytes.split_at_checked(size_of::<T>()).ok_or(Malformed)?;
    Ok((exactly(begin)?, rest))
}

fn parse_number(bytes: &[u8]) -> Result<u32, Malformed> {
    let m: verbs_agent_number = exactly(bytes)?;
    unreserved(m.number, m.reserved)
}

fn unreserved(number: u32, reserved: u32) -> Result<u32, Malformed> {
    if reserved == 0 { Ok(number) } else { Err(Malformed) }
}

fn gids(bytes: &[u8], most: usize) -> Result<Vec<Gid>, Malformed> {
    let (gids, rest) = bytes.as_chunks();
    if rest.is_empty() && gids.len() <= most { Ok(gids.to_vec()) } else { Err(Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_have_one_length() {
        let limits =
            Limits { qps: 7, spin_us: 3, ingress_kbit: 8, outside: 1, ..Limits::default() };
        let answered = |marks| {
            let (tag, endpoint, destination) = (3, 4, [2; 16]);
            Message::Answer { tag, endpoint, destination, errno: 13, marks }
        };
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
            answered(Marks::default()),
            answered(Marks { dscp: Some(0), priority: false }),
            answered(Marks { dscp: Some(63), priority: true }),
            answered(Marks { dscp: None, priority: true }),
            Message::AskAnew,
            Message::Card { endpoint: 4, lid: 9, gids: vec![[7; 16]; CARD_GIDS_MAX] },
        ] {
            let bytes = message.encode();
            assert!(bytes.len() <= MESSAGE_MAX);
            assert_eq!(Message::parse(&bytes), Ok(message));
            assert_eq!(Message::parse(&bytes[..bytes.len() - 1]), Err(Malformed));
            assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), Err(Malformed));
        }
        for marks in [1_u32, 256] {
            let mut bytes = answered(Marks::default()).encode();
            let at = bytes.len() - 4;
            bytes[at..].copy_from_slice(&marks.to_ne_bytes());
            assert_eq!(Message::parse(&bytes), Err(Malformed));
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

    /// What is on the wire is what it was: agents and routers of other builds are met.
    #[test]
    fn the_wire_is_as_fixed() {
        const SOURCE: Gid = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
        const DESTINATION: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 244, 0, 2];
        const GROUP: Gid = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 232, 0, 0, 1];
        const GROUP6: Gid = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];
        let (tag, endpoint, source, destination) =
            (0x11, 0x0102_0304_0506_0708, SOURCE, DESTINATION);
        let gids = [destination, source];
        let limits = Limits {
            contexts: 1,
            qps: 2,
            cqs: 3,
            mrs: 4,
            pds: 5,
            srqs: 6,
            ahs: 7,
            channels: 8,
            memory_mib: 9,
            sends_per_second: 10,
            spin_us: 11,
            egress_kbit: 12,
            ingress_kbit: 13,
            outside: 1,
            reserved: [0; 2],
        };
        let fixed = include_str!("../tests/agent-messages.txt");
        for line in fixed.lines().filter(|l| !l.starts_with('#')) {
            let (name, hex) = line.split_once(' ').unwrap();
            let octet = |i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
            let wire: Vec<u8> = (0..hex.len()).step_by(2).map(octet).collect();
            let statistics = |endpoint, kind, cursor, size| {
                let records = wire[32..].to_vec();
                Message::Statistics { tag, endpoint, kind, cursor, size, records }
            };
            let want = match name {
                "hello" => Message::Hello { version: 3 },
                "begin" => Message::Begin,
                "end" => Message::End,
                "endpoint" => Message::Endpoint { endpoint, gids, limits, name: "n1/c1".into() },
                "remove" => Message::Remove { endpoint },
                "connect" => Message::Connect { tag, endpoint, source, destination },
                "connected" => Message::Connected { tag, endpoint, errno: 111 },
                "accepted" => Message::Accepted { endpoint, source, destination },
                "refused" => Message::Refused { endpoint, errno: 12 },
                "stats" => Message::Stats { tag, endpoint: 0, kind: 2, cursor: 0x21 },
                "statistics-endpoints" => statistics(0, 1, 0x21, 784),
                "statistics-qps" => statistics(0, 2, 0, 96),
                "statistics-ids" => statistics(endpoint, 3, 0, 64),
                "drain" => Message::Drain,
                "released" => Message::Released { endpoint },
                "groups" => {
                    Message::Groups { endpoint, gids: [[0; 16]; 2], groups: vec![GROUP, GROUP6] }
                }
                "groups-elsewhere" => Message::Groups { endpoint: 0, gids, groups: vec![GROUP] },
                "answer" => {
                    let marks = Marks::default();
                    Message::Answer { tag, endpoint, destination, errno: 13, marks }
                }
                "ask-anew" => Message::AskAnew,
                "card" => Message::Card { endpoint, lid: 7, gids: gids.to_vec() },
                "ask" => Message::Ask { tag, endpoint, source, destination },
                _ => panic!("no message {name}"),
            };
            assert_eq!(Message::parse(&wire).as_ref(), Ok(&want), "{name}");
            assert_eq!(want.encode(), wire, "{name}");
        }
        assert_eq!(fixed.lines().count(), 24);
    }
}

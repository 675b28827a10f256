//! The state machine of queue pairs: which change of state is allowed with which attributes, and
//! which values they may have. Pure; the tables are those of the InfiniBand specification (10.3.1),
//! as Linux's `ib_modify_qp_is_ok` reads them.

use std::time::Duration;

use verbs_protocol::abi::{verbs_address, verbs_qp_attr};
use verbs_protocol::ibv;

/// Where a queue pair is: `enum ibv_qp_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
#[repr(u8)]
pub enum State {
    Reset = 0,
    Init = 1,
    ReadyToReceive = 2,
    ReadyToSend = 3,
    SendQueueDrained = 4,
    SendQueueError = 5,
    Error = 6,
}

impl State {
    /// The number of libibverbs.
    #[must_use]
    pub fn number(self) -> u32 {
        self as u32
    }

    /// Whether messages of the peer are taken.
    #[must_use]
    pub fn receives(self) -> bool {
        use State::{ReadyToReceive, ReadyToSend, SendQueueDrained, SendQueueError};
        matches!(self, ReadyToReceive | ReadyToSend | SendQueueDrained | SendQueueError)
    }
}

/// What kind of service: `enum ibv_qp_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the specification's names")]
pub enum Service {
    ReliableConnection,
    UnreliableConnection,
    UnreliableDatagram,
}

impl Service {
    /// The service of a number of libibverbs, if it is one that the router has.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        match number {
            ibv::QPT_RC => Some(Self::ReliableConnection),
            ibv::QPT_UC => Some(Self::UnreliableConnection),
            ibv::QPT_UD => Some(Self::UnreliableDatagram),
            _ => None,
        }
    }

    /// The number of libibverbs.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::ReliableConnection => ibv::QPT_RC,
            Self::UnreliableConnection => ibv::QPT_UC,
            Self::UnreliableDatagram => ibv::QPT_UD,
        }
    }

    /// Whether a queue pair of this service has one peer.
    #[must_use]
    pub fn is_connected(self) -> bool {
        self != Self::UnreliableDatagram
    }

    /// Whether it can be asked for this (`enum ibv_wr_opcode`).
    #[must_use]
    pub fn has(self, opcode: u8) -> bool {
        match opcode {
            ibv::WR_SEND | ibv::WR_SEND_WITH_IMM => true,
            ibv::WR_RDMA_WRITE | ibv::WR_RDMA_WRITE_WITH_IMM => self.is_connected(),
            ibv::WR_RDMA_READ | ibv::WR_ATOMIC_CMP_AND_SWP | ibv::WR_ATOMIC_FETCH_AND_ADD => {
                self == Self::ReliableConnection
            }
            _ => false,
        }
    }
}

/// EINVAL: the change, an attribute, or a value is not allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// What the values of attributes are checked against.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries of the table of GIDs.
    pub gid_count: u32,
    /// READs and atomics under way of one queue pair.
    pub max_rd_atomic: u8,
    /// The largest `enum ibv_mtu`.
    pub mtu: u32,
}

struct Rule {
    from: State,
    to: State,
    /// Attributes that are needed, and that are allowed: of UD, UC, RC. A service that does not
    /// have the change needs [`NEVER`].
    needed: [u32; 3],
    allowed: [u32; 3],
}

const PATH: u32 = ibv::QP_AV | ibv::QP_PATH_MTU | ibv::QP_DEST_QPN | ibv::QP_RQ_PSN;
const KEYED: u32 = ibv::QP_PKEY_INDEX | ibv::QP_PORT | ibv::QP_QKEY;
const ACCESSED: u32 = ibv::QP_PKEY_INDEX | ibv::QP_PORT | ibv::QP_ACCESS_FLAGS;
const RETRIES: u32 = ibv::QP_TIMEOUT | ibv::QP_RETRY_CNT | ibv::QP_RNR_RETRY;
const LIVE: [u32; 3] = [
    ibv::QP_CUR_STATE | ibv::QP_QKEY,
    ibv::QP_CUR_STATE | ibv::QP_ACCESS_FLAGS | ibv::QP_ALT_PATH | ibv::QP_PATH_MIG_STATE,
    ibv::QP_CUR_STATE
        | ibv::QP_ACCESS_FLAGS
        | ibv::QP_ALT_PATH
        | ibv::QP_PATH_MIG_STATE
        | ibv::QP_MIN_RNR_TIMER,
];

/// No attribute.
const NEVER: u32 = 1 << 31;
const NOTIFY: [u32; 3] = [ibv::QP_EN_SQD_ASYNC_NOTIFY; 3];
const DRAINED: [u32; 3] = [
    ibv::QP_PKEY_INDEX | ibv::QP_QKEY,
    ibv::QP_AV
        | ibv::QP_ALT_PATH
        | ibv::QP_ACCESS_FLAGS
        | ibv::QP_PKEY_INDEX
        | ibv::QP_PATH_MIG_STATE,
    ibv::QP_PORT
        | ibv::QP_AV
        | RETRIES
        | ibv::QP_MAX_QP_RD_ATOMIC
        | ibv::QP_MAX_DEST_RD_ATOMIC
        | ibv::QP_ALT_PATH
        | ibv::QP_ACCESS_FLAGS
        | ibv::QP_PKEY_INDEX
        | ibv::QP_MIN_RNR_TIMER
        | ibv::QP_PATH_MIG_STATE,
];

const RULES: [Rule; 9] = [
    Rule {
        from: State::Reset,
        to: State::Init,
        needed: [KEYED, ACCESSED, ACCESSED],
        allowed: [0; 3],
    },
    Rule {
        from: State::Init,
        to: State::Init,
        needed: [0; 3],
        allowed: [KEYED, ACCESSED, ACCESSED],
    },
    Rule {
        from: State::Init,
        to: State::ReadyToReceive,
        needed: [0, PATH, PATH | ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER],
        allowed: [
            ibv::QP_PKEY_INDEX | ibv::QP_QKEY,
            ibv::QP_ALT_PATH | ibv::QP_ACCESS_FLAGS | ibv::QP_PKEY_INDEX,
            ibv::QP_ALT_PATH | ibv::QP_ACCESS_FLAGS | ibv::QP_PKEY_INDEX,
        ],
    },
    Rule {
        from: State::ReadyToReceive,
        to: State::ReadyToSend,
        needed: [
            ibv::QP_SQ_PSN,
            ibv::QP_SQ_PSN,
            ibv::QP_SQ_PSN | RETRIES | ibv::QP_MAX_QP_RD_ATOMIC,
        ],
        allowed: LIVE,
    },
    Rule { from: State::ReadyToSend, to: State::ReadyToSend, needed: [0; 3], allowed: LIVE },
    Rule { from: State::ReadyToSend, to: State::SendQueueDrained, needed: [0; 3], allowed: NOTIFY },
    Rule {
        from: State::SendQueueDrained,
        to: State::SendQueueDrained,
        needed: [0; 3],
        allowed: DRAINED,
    },
    Rule { from: State::SendQueueDrained, to: State::ReadyToSend, needed: [0; 3], allowed: LIVE },
    Rule {
        from: State::SendQueueError,
        to: State::ReadyToSend,
        needed: [0, 0, NEVER],
        allowed: [ibv::QP_CUR_STATE | ibv::QP_QKEY, ibv::QP_CUR_STATE | ibv::QP_ACCESS_FLAGS, 0],
    },
];

/// Says which state a queue pair in `from` has after a change with `mask` (`enum ibv_qp_attr_mask`)
/// and `attr`, and that the attributes may be taken.
///
/// # Errors
///
/// [`Refused`], and nothing has to change.
pub fn modify(
    from: State,
    service: Service,
    mask: u32,
    attr: &verbs_qp_attr,
    limits: Limits,
) -> Result<State, Refused> {
    if mask & ibv::QP_CUR_STATE != 0 && attr.cur_qp_state != from.number() {
        return Err(Refused);
    }
    let to = if mask & ibv::QP_STATE == 0 { from } else { state(attr.qp_state)? };
    let given = mask & !ibv::QP_STATE;
    if matches!(to, State::Reset | State::Error) {
        // From everywhere, and attributes mean nothing any more.
        return if given == 0 { Ok(to) } else { Err(Refused) };
    }
    let rule = RULES.iter().find(|r| r.from == from && r.to == to).ok_or(Refused)?;
    let of = match service {
        Service::UnreliableDatagram => 0,
        Service::UnreliableConnection => 1,
        Service::ReliableConnection => 2,
    };
    let needed = rule.needed[of];
    if given & needed != needed || given & !(needed | rule.allowed[of]) != 0 {
        return Err(Refused);
    }
    check_values(given, attr, limits)?;
    Ok(to)
}

fn state(number: u32) -> Result<State, Refused> {
    match number {
        0 => Ok(State::Reset),
        1 => Ok(State::Init),
        2 => Ok(State::ReadyToReceive),
        3 => Ok(State::ReadyToSend),
        4 => Ok(State::SendQueueDrained),
        6 => Ok(State::Error),
        // SQE among them: an error of the send queue is the only way there.
        _ => Err(Refused),
    }
}

fn check_values(mask: u32, a: &verbs_qp_attr, limits: Limits) -> Result<(), Refused> {
    let access = ibv::ACCESS_LOCAL_WRITE
        | ibv::ACCESS_REMOTE_WRITE
        | ibv::ACCESS_REMOTE_READ
        | ibv::ACCESS_REMOTE_ATOMIC
        | ibv::ACCESS_OPTIONAL;
    let good = |bit: u32, is: bool| mask & bit == 0 || is;
    let all = good(ibv::QP_PORT, a.port == 1)
        && good(ibv::QP_PKEY_INDEX, a.pkey_index == 0)
        && good(ibv::QP_ACCESS_FLAGS, a.access & !access == 0)
        && good(ibv::QP_PATH_MTU, (1..=limits.mtu).contains(&a.path_mtu))
        && good(ibv::QP_DEST_QPN, a.dest_qp_num < 1 << 24)
        && good(ibv::QP_MAX_QP_RD_ATOMIC, a.max_rd_atomic <= limits.max_rd_atomic)
        && good(ibv::QP_MAX_DEST_RD_ATOMIC, a.max_dest_rd_atomic <= limits.max_rd_atomic)
        && good(ibv::QP_TIMEOUT, a.timeout < 32)
        && good(ibv::QP_MIN_RNR_TIMER, a.min_rnr_timer < 32)
        && good(ibv::QP_RETRY_CNT, a.retry_cnt < 8)
        && good(ibv::QP_RNR_RETRY, a.rnr_retry < 8)
        && good(ibv::QP_ALT_PATH, false)
        && good(ibv::QP_PATH_MIG_STATE, a.path_mig_state == 0)
        && good(ibv::QP_AV, is_address(&a.address, limits.gid_count));
    if all { Ok(()) } else { Err(Refused) }
}

/// Whether an address vector is one that the router can send to.
#[must_use]
pub fn is_address(address: &verbs_address, gid_count: u32) -> bool {
    address.is_global == 1 && address.port <= 1 && u32::from(address.sgid_index) < gid_count
}

/// Takes the attributes that `mask` names from `new` into `attr`.
pub fn take(attr: &mut verbs_qp_attr, mask: u32, new: &verbs_qp_attr) {
    let has = |bit| mask & bit != 0;
    macro_rules! fields {
        ($($bit:ident $field:ident),*) => {
            $(if has(ibv::$bit) { attr.$field = new.$field; })*
        };
    }
    fields!(
        QP_ACCESS_FLAGS access,
        QP_PKEY_INDEX pkey_index,
        QP_PORT port,
        QP_QKEY qkey,
        QP_AV address,
        QP_PATH_MTU path_mtu,
        QP_TIMEOUT timeout,
        QP_RETRY_CNT retry_cnt,
        QP_RNR_RETRY rnr_retry,
        QP_RQ_PSN rq_psn,
        QP_SQ_PSN sq_psn,
        QP_MAX_QP_RD_ATOMIC max_rd_atomic,
        QP_MAX_DEST_RD_ATOMIC max_dest_rd_atomic,
        QP_MIN_RNR_TIMER min_rnr_timer,
        QP_DEST_QPN dest_qp_num
    );
}

/// For how long a requester waits after a negative answer with this timer (InfiniBand's table 45).
#[must_use]
pub fn rnr_time(code: u8) -> Duration {
    const MICROSECONDS: [u64; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
        5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840,
        245_760, 327_680, 491_520,
    ];
    Duration::from_micros(MICROSECONDS[usize::from(code & 31)])
}

/// After how long without an answer a requester gives up; `None`: never.
#[must_use]
pub fn give_up_after(attr: &verbs_qp_attr) -> Option<Duration> {
    if attr.timeout == 0 {
        return None;
    }
    let once = Duration::from_nanos(4096 << (attr.timeout & 31));
    let all = once * (u32::from(attr.retry_cnt) + 1);
    // Time for a connection to be made, which a card need not make.
    Some(all.max(Duration::from_secs(2)))
}

/// For how long a requester tries while its peer has no receive request; `None`: for ever.
#[must_use]
pub fn rnr_give_up_after(attr: &verbs_qp_attr, peers_timer: u8) -> Option<Duration> {
    (attr.rnr_retry < 7).then(|| rnr_time(peers_timer) * u32::from(attr.rnr_retry))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { gid_count: 1, max_rd_atomic: 16, mtu: 5 };
    const ALL: [State; 7] = [
        State::Reset,
        State::Init,
        State::ReadyToReceive,
        State::ReadyToSend,
        State::SendQueueDrained,
        State::SendQueueError,
        State::Error,
    ];
    const SERVICES: [Service; 3] =
        [Service::UnreliableDatagram, Service::UnreliableConnection, Service::ReliableConnection];

    fn attr(to: State) -> verbs_qp_attr {
        verbs_qp_attr {
            qp_state: to.number(),
            path_mtu: 5,
            port: 1,
            address: verbs_address { is_global: 1, port: 1, ..Default::default() },
            ..Default::default()
        }
    }

    #[test]
    fn each_change_needs_its_attributes_and_takes_no_others() {
        for rule in &RULES {
            for (i, service) in SERVICES.into_iter().enumerate() {
                let to = |mask| {
                    let mask = mask | ibv::QP_STATE;
                    let mut attr = attr(rule.to);
                    attr.cur_qp_state = rule.from.number();
                    modify(rule.from, service, mask, &attr, LIMITS)
                };
                let needed = rule.needed[i];
                if needed == NEVER {
                    assert_eq!(to(0), Err(Refused));
                    continue;
                }
                assert_eq!(to(needed), Ok(rule.to), "{:?} {:?} {service:?}", rule.from, rule.to);
                for bit in (0..21).map(|b| 1_u32 << b).filter(|b| *b != ibv::QP_STATE) {
                    let want = if needed & bit != 0 {
                        Err(Refused)
                    } else if rule.allowed[i] & bit != 0 && bit != ibv::QP_ALT_PATH {
                        Ok(rule.to)
                    } else {
                        Err(Refused)
                    };
                    assert_eq!(to(needed ^ bit), want, "{:?} {service:?} {bit:#x}", rule.from);
                }
            }
        }
    }

    #[test]
    fn every_other_change_is_refused() {
        for from in ALL {
            for to in ALL {
                let known = RULES.iter().any(|r| r.from == from && r.to == to)
                    || matches!(to, State::Reset | State::Error);
                for service in SERVICES {
                    if known {
                        continue;
                    }
                    for mask in [0, KEYED, ACCESSED, PATH, PATH | 0x28000, RETRIES | 0x12000] {
                        let got = modify(from, service, mask | ibv::QP_STATE, &attr(to), LIMITS);
                        assert_eq!(got, Err(Refused), "{from:?} {to:?} {mask:#x}");
                    }
                }
            }
            for state in [5, 7] {
                let attr = verbs_qp_attr { qp_state: state, ..attr(from) };
                let got = modify(from, SERVICES[2], ibv::QP_STATE, &attr, LIMITS);
                assert_eq!(got, Err(Refused));
            }
        }
    }

    #[test]
    fn values_are_bounded() {
        let change = |edit: fn(&mut verbs_qp_attr)| {
            let mut attr = attr(State::ReadyToReceive);
            edit(&mut attr);
            let mask = PATH | ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER | ibv::QP_STATE;
            modify(State::Init, SERVICES[2], mask, &attr, LIMITS).is_ok()
        };
        assert!(change(|_| ()));
        assert!(!change(|a| a.path_mtu = 6));
        assert!(!change(|a| a.path_mtu = 0));
        assert!(!change(|a| a.dest_qp_num = 1 << 24));
        assert!(!change(|a| a.max_dest_rd_atomic = 17));
        assert!(!change(|a| a.min_rnr_timer = 32));
        assert!(!change(|a| a.address.is_global = 0));
        assert!(!change(|a| a.address.sgid_index = 1));
        assert!(!change(|a| a.address.port = 2));
    }

    #[test]
    fn times() {
        assert_eq!(rnr_time(1), Duration::from_micros(10));
        let attr = verbs_qp_attr { timeout: 20, retry_cnt: 1, ..Default::default() };
        assert_eq!(give_up_after(&attr), Some(Duration::from_nanos(2 * 4096 * (1 << 20))));
        assert_eq!(give_up_after(&verbs_qp_attr::default()), None);
        let attr = verbs_qp_attr { rnr_retry: 7, ..attr };
        assert_eq!(rnr_give_up_after(&attr, 1), None);
        let attr = verbs_qp_attr { rnr_retry: 2, ..attr };
        assert_eq!(rnr_give_up_after(&attr, 1), Some(Duration::from_micros(20)));
    }
}

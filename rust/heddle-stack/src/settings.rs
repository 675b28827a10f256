//! Options of a connection.

use smoltcp::socket::tcp;
use smoltcp::time::Duration;

use crate::abi::*;
use crate::proto::Errno;

/// The options in force for a connection, or for those that a listener or tenant will have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) congestion: tcp::CongestionControl,
    pub(crate) no_delay: bool,
    pub(crate) keepalive: bool,
    pub(crate) keepalive_idle: u32,
    pub(crate) keepalive_interval: u32,
    pub(crate) keepalive_count: u32,
    /// Milliseconds.
    pub(crate) user_timeout: u32,
    pub(crate) linger: Option<u32>,
    /// Milliseconds.
    pub(crate) ack_delay: u32,
    pub(crate) send_buffer: u32,
    pub(crate) receive_buffer: u32,
    pub(crate) hop_limit: u8,
}

/// How long data may stay unacknowledged: Linux's `tcp_retries2`.
const USER_TIMEOUT: u32 = 924_600;
/// And a SYN: Linux's `tcp_syn_retries`.
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_secs(127);

pub(crate) const BUFFER_MIN: u32 = 4 << 10;
const BUFFER_MAX: u32 = 64 << 20;

impl Default for Settings {
    fn default() -> Self {
        Self {
            congestion: tcp::CongestionControl::Cubic,
            no_delay: false,
            keepalive: false,
            keepalive_idle: 7200,
            keepalive_interval: 75,
            keepalive_count: 9,
            user_timeout: USER_TIMEOUT,
            linger: None,
            ack_delay: 10,
            send_buffer: 1 << 20,
            receive_buffer: 1 << 20,
            hop_limit: 64,
        }
    }
}

impl Settings {
    /// These, changed as the mask says.
    pub(crate) fn with(mut self, o: &stack_options) -> Result<Self, Errno> {
        let set = |bit: u32| o.mask & bit != 0;
        if set(STACK_SET_CONGESTION) {
            self.congestion = congestion(o.congestion)?;
        }
        if set(STACK_SET_NO_DELAY) {
            self.no_delay = switch(o.no_delay)?;
        }
        if set(STACK_SET_KEEPALIVE) {
            self.keepalive = switch(o.keepalive)?;
        }
        if set(STACK_SET_KEEPALIVE_IDLE) {
            self.keepalive_idle = within(o.keepalive_idle, 1, 32_767)?;
        }
        if set(STACK_SET_KEEPALIVE_INTV) {
            self.keepalive_interval = within(o.keepalive_interval, 1, 32_767)?;
        }
        if set(STACK_SET_KEEPALIVE_CNT) {
            self.keepalive_count = within(o.keepalive_count, 1, 127)?;
        }
        if set(STACK_SET_USER_TIMEOUT) {
            self.user_timeout = if o.user_timeout == 0 { USER_TIMEOUT } else { o.user_timeout };
        }
        if set(STACK_SET_LINGER) {
            self.linger = (o.linger != STACK_LINGER_OFF).then_some(o.linger);
        }
        if set(STACK_SET_ACK_DELAY) {
            self.ack_delay = within(o.ack_delay, 0, 500)?;
        }
        if set(STACK_SET_SEND_BUFFER) {
            self.send_buffer = within(o.send_buffer, BUFFER_MIN, BUFFER_MAX)?;
        }
        if set(STACK_SET_RECEIVE_BUFFER) {
            self.receive_buffer = within(o.receive_buffer, BUFFER_MIN, BUFFER_MAX)?;
        }
        if set(STACK_SET_HOP_LIMIT) {
            let limit = within(o.hop_limit, 1, 255)?;
            self.hop_limit = u8::try_from(limit).unwrap_or(u8::MAX);
        }
        Ok(self)
    }

    pub(crate) fn to_abi(self) -> stack_options {
        stack_options {
            mask: STACK_SET_ALL,
            congestion: match self.congestion {
                tcp::CongestionControl::None => STACK_CONGESTION_NONE,
                tcp::CongestionControl::Reno => STACK_CONGESTION_RENO,
                tcp::CongestionControl::Cubic => STACK_CONGESTION_CUBIC,
            },
            no_delay: self.no_delay.into(),
            keepalive: self.keepalive.into(),
            keepalive_idle: self.keepalive_idle,
            keepalive_interval: self.keepalive_interval,
            keepalive_count: self.keepalive_count,
            user_timeout: self.user_timeout,
            linger: self.linger.unwrap_or(STACK_LINGER_OFF),
            ack_delay: self.ack_delay,
            send_buffer: self.send_buffer,
            receive_buffer: self.receive_buffer,
            hop_limit: self.hop_limit.into(),
            reserved: [0; 3],
        }
    }

    /// Brings them into force, but for the congestion control.
    pub(crate) fn apply(&self, socket: &mut tcp::Socket<'_>) {
        socket.set_nagle_enabled(!self.no_delay);
        let idle = Duration::from_secs(self.keepalive_idle.into());
        socket.set_keep_alive(self.keepalive.then_some(idle));
        socket.set_hop_limit(Some(self.hop_limit));
    }

    /// For how long the peer may be silent. smoltcp has one time for all that can go wrong.
    pub(crate) fn patience(&self, state: tcp::State, unacknowledged: bool) -> Option<Duration> {
        let user = Duration::from_millis(self.user_timeout.into());
        match state {
            tcp::State::SynSent | tcp::State::SynReceived => Some(user.min(CONNECT_TIMEOUT)),
            _ if unacknowledged => Some(user),
            _ if self.keepalive => {
                let tries = u64::from(self.keepalive_interval) * u64::from(self.keepalive_count);
                Some(Duration::from_secs(u64::from(self.keepalive_idle) + tries))
            }
            _ => None,
        }
    }
}

fn congestion(number: u32) -> Result<tcp::CongestionControl, Errno> {
    match number {
        STACK_CONGESTION_NONE => Ok(tcp::CongestionControl::None),
        STACK_CONGESTION_RENO => Ok(tcp::CongestionControl::Reno),
        STACK_CONGESTION_DEFAULT | STACK_CONGESTION_CUBIC => Ok(tcp::CongestionControl::Cubic),
        STACK_CONGESTION_BBR => Err(Errno(libc::ENOENT)),
        _ => Err(Errno(libc::EINVAL)),
    }
}

fn switch(number: u32) -> Result<bool, Errno> {
    within(number, 0, 1).map(|n| n == 1)
}

fn within(number: u32, least: u32, most: u32) -> Result<u32, Errno> {
    if (least..=most).contains(&number) { Ok(number) } else { Err(Errno(libc::EINVAL)) }
}

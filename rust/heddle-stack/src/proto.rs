//! Messages of the agent's out of bytes, and the module's as bytes:
//! `docs/protocols/stack-module.md`.

#![expect(unsafe_code, reason = "layouts that C shares, as bytes")]

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::wire::{IpAddress, IpEndpoint};
use unix_io::plain::{self, Plain};

use crate::abi::*;

macro_rules! plain {
    ($($name:ident)*) => {
        // SAFETY: made of the header, in which everything is an integer, and padding an error.
        $(unsafe impl Plain for crate::abi::$name {})*
    };
}

plain!(
    stack_plain stack_hello stack_tenant stack_bind stack_listen stack_connect stack_named stack_set
    stack_close stack_accepted stack_info stack_stats stack_head
);

/// Bytes of the longest message.
pub const MESSAGE_MAX: usize = STACK_MESSAGE_MAX as usize;
/// The bit that numbers have that the module gives.
pub const ID_OF_MODULE: u64 = STACK_ID_OF_MODULE.cast_unsigned();

/// Bytes that break the rules of the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// A positive errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// What the agent asks for, without its descriptor.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "the page describes the messages")]
pub enum Request {
    Hello { version: u32 },
    Begin,
    End,
    Tenant(stack_tenant),
    TenantGone,
    Bind { address: IpEndpoint, flags: u32 },
    Listen { address: IpEndpoint, flags: u32, backlog: u32, options: stack_options },
    Connect { remote: IpEndpoint, skip: u32, options: stack_options },
    Taken,
    Set(stack_options),
    Info,
    Close { abort: bool },
    Stats,
    List,
    TellSent,
}

/// Reads a message of the agent's, which came with this many descriptors.
///
/// # Errors
///
/// [`Malformed`] if it breaks the rules of the page: the connection is to be closed.
pub fn parse(bytes: &[u8], descriptors: usize) -> Result<(stack_head, Request), Malformed> {
    let head: stack_head =
        bytes.get(..size_of::<stack_head>()).and_then(plain::read).ok_or(Malformed)?;
    if head.reserved != 0 || head.error != 0 {
        return Err(Malformed);
    }
    let request = body(head.type_, bytes)?;
    // Who a message is about.
    let good = match request {
        Request::Hello { .. } | Request::Begin | Request::End | Request::TellSent => {
            head.tenant == 0 && head.id == 0
        }
        Request::Stats => head.id == 0,
        Request::Tenant(_) | Request::TenantGone | Request::List => {
            head.tenant != 0 && head.id == 0
        }
        // These make an id, which has to be one of the agent's.
        Request::Bind { .. } | Request::Listen { .. } | Request::Connect { .. } => {
            head.tenant != 0 && head.id != 0 && head.id & ID_OF_MODULE == 0
        }
        _ => head.tenant != 0 && head.id != 0,
    };
    let wanted = match request {
        Request::Connect { .. } => descriptors == 1,
        Request::Tenant(_) => descriptors <= 1,
        _ => descriptors == 0,
    };
    if good && wanted { Ok((head, request)) } else { Err(Malformed) }
}

fn body(kind: u32, bytes: &[u8]) -> Result<Request, Malformed> {
    Ok(match kind {
        STACK_HELLO => {
            let m: stack_hello = whole(bytes)?;
            refuse(m.features != 0 || m.name != [0; 32])?;
            Request::Hello { version: m.version }
        }
        STACK_BEGIN => nothing(bytes, Request::Begin)?,
        STACK_END => nothing(bytes, Request::End)?,
        STACK_TENANT => {
            let m: stack_tenant = whole(bytes)?;
            refuse(m.reserved != 0 || m.limits.reserved != 0 || m.offloads > 1)?;
            known(&m.options)?;
            Request::Tenant(m)
        }
        STACK_TENANT_GONE => nothing(bytes, Request::TenantGone)?,
        STACK_BIND => {
            let m: stack_bind = whole(bytes)?;
            refuse(m.reserved != 0 || m.flags & !FLAGS != 0)?;
            Request::Bind { address: endpoint(&m.address)?, flags: m.flags }
        }
        STACK_LISTEN => {
            let m: stack_listen = whole(bytes)?;
            refuse(m.flags & !FLAGS != 0)?;
            known(&m.options)?;
            let address = endpoint(&m.address)?;
            Request::Listen { address, flags: m.flags, backlog: m.backlog, options: m.options }
        }
        STACK_CONNECT => {
            let m: stack_connect = whole(bytes)?;
            refuse(m.reserved != 0 || m.skip == 0 || m.skip > SKIP_MAX)?;
            known(&m.options)?;
            Request::Connect { remote: endpoint(&m.remote)?, skip: m.skip, options: m.options }
        }
        STACK_TAKEN => nothing(bytes, Request::Taken)?,
        STACK_SET => {
            let m: stack_set = whole(bytes)?;
            known(&m.options)?;
            Request::Set(m.options)
        }
        STACK_INFO => nothing(bytes, Request::Info)?,
        STACK_CLOSE => {
            let m: stack_close = whole(bytes)?;
            refuse(m.reserved != 0 || m.flags & !STACK_ABORT != 0)?;
            Request::Close { abort: m.flags & STACK_ABORT != 0 }
        }
        STACK_STATS => nothing(bytes, Request::Stats)?,
        STACK_LIST => nothing(bytes, Request::List)?,
        STACK_TELL_SENT => nothing(bytes, Request::TellSent)?,
        _ => return Err(Malformed),
    })
}

const FLAGS: u32 = STACK_REUSE_ADDRESS | STACK_REUSE_PORT | STACK_V6_ONLY;
const SKIP_MAX: u32 = 1 << 20;

fn whole<T: Plain>(bytes: &[u8]) -> Result<T, Malformed> {
    plain::read(bytes).ok_or(Malformed)
}

fn nothing(bytes: &[u8], request: Request) -> Result<Request, Malformed> {
    whole::<stack_plain>(bytes).map(|_| request)
}

fn refuse(bad: bool) -> Result<(), Malformed> {
    if bad { Err(Malformed) } else { Ok(()) }
}

fn known(o: &stack_options) -> Result<(), Malformed> {
    refuse(o.mask & !STACK_SET_ALL != 0 || o.reserved != [0; 3])
}

fn endpoint(a: &stack_address) -> Result<IpEndpoint, Malformed> {
    refuse(a.reserved != [0; 3])?;
    Ok(IpEndpoint::new(address(a.address), a.port))
}

/// An address of a message: IPv4 ones are mapped into IPv6.
#[must_use]
pub fn address(bytes: [u8; 16]) -> IpAddress {
    let v6 = Ipv6Addr::from(bytes);
    v6.to_ipv4_mapped().map_or(IpAddress::Ipv6(v6), IpAddress::Ipv4)
}

/// The form that an address and port have in messages.
#[must_use]
pub fn named(e: IpEndpoint) -> stack_address {
    let address = match e.addr {
        IpAddress::Ipv4(a) => a.to_ipv6_mapped(),
        IpAddress::Ipv6(a) => a,
    };
    stack_address { address: address.octets(), port: e.port, reserved: [0; 3] }
}

/// Nothing: the address of what has none.
#[must_use]
pub fn nowhere() -> IpEndpoint {
    IpEndpoint::new(IpAddress::Ipv4(Ipv4Addr::UNSPECIFIED), 0)
}

/// The head of the answer to a request.
#[must_use]
pub fn answer_to(asked: &stack_head) -> stack_head {
    stack_head { type_: asked.type_ | STACK_ANSWER, error: 0, reserved: 0, ..*asked }
}

/// An answer without anything else: done, or why not.
#[must_use]
pub fn plain_answer(asked: &stack_head, result: Result<(), Errno>) -> Vec<u8> {
    let error = result.err().map_or(0, |e| e.0);
    bytes(&stack_plain { head: stack_head { error, ..answer_to(asked) } })
}

/// The bytes of a message.
#[must_use]
pub fn bytes<T: Plain>(message: &T) -> Vec<u8> {
    plain::bytes(message).to_vec()
}

//! Requests on the control socket. `docs/protocols/verbs-control.md`.

use crate::abi::{self, verbs_request};
use crate::cm::Command;
use crate::plain::{self, Plain};

/// An errno, as it is answered.
pub type Errno = i32;

/// EINVAL.
pub const EINVAL: Errno = 22;
/// EOPNOTSUPP.
pub const EOPNOTSUPP: Errno = 95;

/// What is asked for. A request that is here has its right length, and its reserved fields are 0;
/// the numbers in it are not checked.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the page describes the commands")]
pub enum Request {
    Hello(abi::verbs_hello_request),
    AllocPd,
    DeallocPd(u32),
    CreateChannel,
    DestroyChannel(u32),
    CreateCq(abi::verbs_create_cq_request),
    ResizeCq(abi::verbs_resize_cq_request),
    DestroyCq(u32),
    CreateQp(abi::verbs_create_qp_request),
    ModifyQp(abi::verbs_modify_qp_request),
    QueryQp(u32),
    DestroyQp(u32),
    CreateSrq(abi::verbs_create_srq_request),
    ModifySrq(abi::verbs_modify_srq_request),
    QuerySrq(u32),
    DestroySrq(u32),
    CreateAh(abi::verbs_create_ah_request),
    DestroyAh(u32),
    CreateMemory(abi::verbs_create_memory_request),
    DestroyMemory(u32),
    RegMr(abi::verbs_reg_mr_request),
    DeregMr(u32),
    AttachMcast(abi::verbs_mcast_request),
    DetachMcast(abi::verbs_mcast_request),
    /// The address.
    ShowMemory(u64),
    OpenUserfaultfd,
    QueryOutside,
    RdmaCm {
        response_max: u32,
        command: Result<Box<Command>, Errno>,
    },
}

/// Bytes that are shorter than the head of a request: the connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRequest;

/// Reads a request: its head, and what is asked for or the errno to answer.
///
/// # Errors
///
/// [`NoRequest`] if there is not even a head, so that nothing can be answered.
pub fn parse(bytes: &[u8]) -> Result<(verbs_request, Result<Request, Errno>), NoRequest> {
    let head = bytes.get(..size_of::<verbs_request>()).and_then(plain::read::<verbs_request>);
    let head = head.ok_or(NoRequest)?;
    Ok((head, body(head.command, bytes)))
}

fn body(command: u32, bytes: &[u8]) -> Result<Request, Errno> {
    Ok(match command {
        abi::VERBS_HELLO => Request::Hello(exactly(bytes)?),
        abi::VERBS_ALLOC_PD => {
            exactly::<abi::verbs_plain_request>(bytes)?;
            Request::AllocPd
        }
        abi::VERBS_DEALLOC_PD => Request::DeallocPd(object(bytes)?),
        abi::VERBS_CREATE_CHANNEL => {
            exactly::<abi::verbs_plain_request>(bytes)?;
            Request::CreateChannel
        }
        abi::VERBS_DESTROY_CHANNEL => Request::DestroyChannel(object(bytes)?),
        abi::VERBS_CREATE_CQ => Request::CreateCq(exactly(bytes)?),
        abi::VERBS_RESIZE_CQ => Request::ResizeCq(exactly(bytes)?),
        abi::VERBS_DESTROY_CQ => Request::DestroyCq(object(bytes)?),
        abi::VERBS_CREATE_QP => {
            let request: abi::verbs_create_qp_request = exactly(bytes)?;
            Request::CreateQp(unreserved(request, request.reserved == 0)?)
        }
        abi::VERBS_MODIFY_QP => {
            let request: abi::verbs_modify_qp_request = exactly(bytes)?;
            let a = &request.attr;
            let zero = a.reserved == [0; 5]
                && a.address.reserved == [0; 2]
                && a.alt_address.reserved == [0; 2];
            Request::ModifyQp(unreserved(request, zero)?)
        }
        abi::VERBS_QUERY_QP => Request::QueryQp(object(bytes)?),
        abi::VERBS_DESTROY_QP => Request::DestroyQp(object(bytes)?),
        abi::VERBS_CREATE_SRQ => Request::CreateSrq(exactly(bytes)?),
        abi::VERBS_MODIFY_SRQ => Request::ModifySrq(exactly(bytes)?),
        abi::VERBS_QUERY_SRQ => Request::QuerySrq(object(bytes)?),
        abi::VERBS_DESTROY_SRQ => Request::DestroySrq(object(bytes)?),
        abi::VERBS_CREATE_AH => {
            let request: abi::verbs_create_ah_request = exactly(bytes)?;
            let zero = request.reserved == 0 && request.address.reserved == [0; 2];
            Request::CreateAh(unreserved(request, zero)?)
        }
        abi::VERBS_DESTROY_AH => Request::DestroyAh(object(bytes)?),
        abi::VERBS_CREATE_MEMORY => Request::CreateMemory(exactly(bytes)?),
        abi::VERBS_DESTROY_MEMORY => Request::DestroyMemory(object(bytes)?),
        abi::VERBS_REG_MR => {
            let request: abi::verbs_reg_mr_request = exactly(bytes)?;
            Request::RegMr(unreserved(request, request.reserved == 0)?)
        }
        abi::VERBS_DEREG_MR => Request::DeregMr(object(bytes)?),
        abi::VERBS_SHOW_MEMORY => {
            Request::ShowMemory(exactly::<abi::verbs_show_memory_request>(bytes)?.address)
        }
        abi::VERBS_ATTACH_MCAST => Request::AttachMcast(mcast(bytes)?),
        abi::VERBS_DETACH_MCAST => Request::DetachMcast(mcast(bytes)?),
        abi::VERBS_OPEN_USERFAULTFD => {
            exactly::<abi::verbs_plain_request>(bytes)?;
            Request::OpenUserfaultfd
        }
        abi::VERBS_QUERY_OUTSIDE => {
            exactly::<abi::verbs_plain_request>(bytes)?;
            Request::QueryOutside
        }
        abi::VERBS_RDMA_CM => rdma_cm(bytes)?,
        _ => return Err(EOPNOTSUPP),
    })
}

fn mcast(bytes: &[u8]) -> Result<abi::verbs_mcast_request, Errno> {
    let request: abi::verbs_mcast_request = exactly(bytes)?;
    unreserved(request, request.reserved == 0)
}

fn rdma_cm(bytes: &[u8]) -> Result<Request, Errno> {
    let (head, command) = bytes.split_at_checked(RDMA_CM_HEAD).ok_or(EINVAL)?;
    let head: abi::verbs_rdma_cm_request = exactly(head)?;
    if head.length as usize != command.len() {
        return Err(EINVAL);
    }
    let command = Command::parse(command).map(Box::new);
    Ok(Request::RdmaCm { response_max: head.response_max, command })
}

const RDMA_CM_HEAD: usize = size_of::<abi::verbs_rdma_cm_request>();

fn exactly<T: Plain>(bytes: &[u8]) -> Result<T, Errno> {
    plain::read(bytes).ok_or(EINVAL)
}

fn unreserved<T>(request: T, zero: bool) -> Result<T, Errno> {
    if zero { Ok(request) } else { Err(EINVAL) }
}

fn object(bytes: &[u8]) -> Result<u32, Errno> {
    let request: abi::verbs_object_request = exactly(bytes)?;
    unreserved(request.object, request.reserved == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_exactly_its_length() {
        let request = abi::verbs_object_request {
            head: verbs_request { command: abi::VERBS_DESTROY_CQ, tag: 7 },
            object: 9,
            reserved: 0,
        };
        let bytes = plain::bytes(&request);
        let (head, body) = parse(bytes).unwrap();
        assert_eq!(head.tag, 7);
        assert!(matches!(body, Ok(Request::DestroyCq(9))));
        assert_eq!(parse(&bytes[..15]).unwrap().1.unwrap_err(), EINVAL);
        assert_eq!(parse(&[bytes, &[0]].concat()).unwrap().1.unwrap_err(), EINVAL);
        assert_eq!(parse(&bytes[..7]).unwrap_err(), NoRequest);
    }

    #[test]
    fn reserved_fields_are_zero_and_commands_known() {
        let mut request = abi::verbs_object_request {
            head: verbs_request { command: abi::VERBS_DESTROY_CQ, tag: 7 },
            object: 9,
            reserved: 1,
        };
        assert_eq!(parse(plain::bytes(&request)).unwrap().1.unwrap_err(), EINVAL);
        request.head.command = 77;
        assert_eq!(parse(plain::bytes(&request)).unwrap().1.unwrap_err(), EOPNOTSUPP);
    }
}

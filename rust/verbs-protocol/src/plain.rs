//! Values of the shared layouts out of bytes, and as bytes. The only unsafe code of the crate.

use crate::abi;

/// A struct of integers without padding, for which any bytes are a value.
///
/// # Safety
///
/// The type is `repr(C)`, consists of integers and arrays of them, and has no padding.
/// `generate.sh` has the C compiler refuse padding in the header.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ident)*) => {
        // SAFETY: made of the header, in which everything is an integer, and padding an error.
        $(unsafe impl Plain for abi::$name {})*
    };
}

plain!(
    verbs_request verbs_reply verbs_object_request verbs_plain_request verbs_object_reply
    verbs_hello_request verbs_hello_reply verbs_create_cq_request verbs_create_cq_reply
    verbs_create_qp_request verbs_create_qp_reply verbs_modify_qp_request verbs_modify_qp_reply
    verbs_query_qp_reply verbs_create_srq_request verbs_create_srq_reply verbs_modify_srq_request
    verbs_query_srq_reply verbs_create_ah_request verbs_create_memory_request
    verbs_create_memory_reply verbs_show_memory_request verbs_reg_mr_request verbs_reg_mr_reply verbs_mcast_request
    verbs_rdma_cm_request verbs_rdma_cm_reply verbs_completion_event verbs_async_event verbs_sge
    verbs_send verbs_receive verbs_completion
);

/// The value that `bytes` are; `None` if there are more or fewer than it has.
#[must_use]
pub fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: there are as many bytes as a T has, and any bytes are one.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// The bytes of a value.
#[must_use]
pub fn bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: a T has no padding, so that all of its bytes are initialised.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}

//! Which of the shared layouts are integers without padding. The only unsafe code of the crate.

#![expect(unsafe_code, reason = "layouts that C shares, as bytes")]

use crate::{abi, agent_abi};
pub use unix_io::plain::{Plain, bytes, read};

macro_rules! plain {
    ($of:ident: $($name:ident)*) => {
        // SAFETY: made of the header, in which everything is an integer, and padding an error.
        $(unsafe impl Plain for $of::$name {})*
    };
}

plain!(abi:
    verbs_request verbs_reply verbs_object_request verbs_plain_request verbs_object_reply
    verbs_hello_request verbs_hello_reply verbs_create_cq_request verbs_create_cq_reply verbs_resize_cq_request
    verbs_create_qp_request verbs_create_qp_reply verbs_modify_qp_request verbs_modify_qp_reply
    verbs_query_qp_reply verbs_create_srq_request verbs_create_srq_reply verbs_modify_srq_request
    verbs_query_srq_reply verbs_create_ah_request verbs_create_memory_request
    verbs_query_outside_reply verbs_create_memory_reply verbs_show_memory_request verbs_reg_mr_request verbs_reg_mr_reply verbs_mcast_request
    verbs_rdma_cm_request verbs_rdma_cm_reply verbs_completion_event verbs_async_event verbs_sge
    verbs_send verbs_receive verbs_completion
);

plain!(agent_abi:
    verbs_agent_head verbs_agent_number verbs_agent_endpoint verbs_agent_ends verbs_agent_answer verbs_agent_groups
    verbs_agent_card verbs_agent_stats verbs_agent_statistics verbs_agent_endpoint_record verbs_agent_qp_record verbs_agent_id_record
);

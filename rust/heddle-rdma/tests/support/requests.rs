//! The requests that programs write into their rings.

use shared_ring::Slot;
use verbs_protocol::abi;
use verbs_protocol::plain;

pub(crate) type Sge = (u64, u32, u32);

/// The entry of a buffer.
pub(crate) fn sge(bytes: &[u8], key: u32) -> Sge {
    (bytes.as_ptr() as u64, u32::try_from(bytes.len()).unwrap(), key)
}

fn entries(sges: &[Sge]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, length, lkey) in sges {
        let entry = abi::verbs_sge { address: *address, length: *length, lkey: *lkey };
        bytes.extend_from_slice(plain::bytes(&entry));
    }
    bytes
}

fn slots(mut bytes: Vec<u8>) -> Vec<Slot> {
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.as_chunks::<64>().0.iter().map(Slot::from_bytes).collect()
}

/// The slots of a send request; `head` has what is not about its payload.
pub(crate) fn sending(mut head: abi::verbs_send, sges: &[Sge]) -> Vec<Slot> {
    head.sge_count = u8::try_from(sges.len()).unwrap();
    payload(head, &entries(sges))
}

pub(crate) fn inline(mut head: abi::verbs_send, data: &[u8]) -> Vec<Slot> {
    head.flags |= 8;
    head.inline_length = u32::try_from(data.len()).unwrap();
    payload(head, data)
}

fn payload(mut head: abi::verbs_send, payload: &[u8]) -> Vec<Slot> {
    head.slots = u8::try_from(1 + payload.len().saturating_sub(16).div_ceil(64)).unwrap();
    let mut bytes = plain::bytes(&head)[..48].to_vec();
    bytes.extend_from_slice(payload);
    slots(bytes)
}

pub(crate) fn receiving(wr_id: u64, sges: &[Sge]) -> Vec<Slot> {
    let count = u8::try_from(1 + sges.len().saturating_sub(3).div_ceil(4)).unwrap();
    let head = abi::verbs_receive {
        wr_id,
        slots: count,
        sge_count: u8::try_from(sges.len()).unwrap(),
        ..Default::default()
    };
    let mut bytes = plain::bytes(&head)[..16].to_vec();
    bytes.extend_from_slice(&entries(sges));
    slots(bytes)
}

/// A signalled request.
pub(crate) fn request(opcode: u8, wr_id: u64) -> abi::verbs_send {
    abi::verbs_send { wr_id, opcode, flags: 2, ..Default::default() }
}

/// A request for the peer's memory.
pub(crate) fn at(opcode: u8, wr_id: u64, remote: &[u8], key: u32) -> abi::verbs_send {
    abi::verbs_send { remote_address: remote.as_ptr() as u64, rkey: key, ..request(opcode, wr_id) }
}

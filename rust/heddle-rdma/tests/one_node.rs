//! Two endpoints on one node, through a real router: sockets, rings and the memory of this process.

mod support;

use support::{inline, node, pair, request, sending};
use verbs_protocol::ibv;

#[test]
fn a_send_goes_from_buffer_to_buffer() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 300_000, |_| ());
    b.post_receive(7, &[b.whole()]);
    let slots = sending(request(ibv::WR_SEND, 5), &[a.part(0, 100), a.part(100, 199_900)]);
    a.send(&slots);
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.wr_id, completion.status), (7, ibv::WC_SUCCESS));
    assert_eq!((completion.byte_len, completion.opcode), (200_000, ibv::WC_RECV));
    assert_eq!((completion.qp_num, completion.src_qp), (b.qp.number, a.qp.number));
    assert!(b.buffer[..200_000].iter().all(|v| *v == 1));
    assert!(b.buffer[200_000..].iter().all(|v| *v == 2));
}

#[test]
fn inline_data_and_immediate_data() {
    let router = node();
    let (mut a, mut b) = pair([&router, &router], ibv::QPT_RC, 4096, |_| ());
    b.post_receive(7, &[b.part(0, 10), b.part(50, 100)]);
    let mut head = request(ibv::WR_SEND_WITH_IMM, 5);
    head.imm = 0x1122_3344;
    a.send(&inline(head, &[9; 77]));
    assert_eq!(a.sends.result(), (5, ibv::WC_SUCCESS));
    let completion = b.receives.next();
    assert_eq!((completion.byte_len, completion.imm), (77, 0x1122_3344));
    assert_eq!(completion.flags, ibv::WC_WITH_IMM);
    assert_eq!(
        [b.buffer[9], b.buffer[10], b.buffer[50], b.buffer[116], b.buffer[117]],
        [9, 2, 9, 9, 2]
    );
}

//! What reaches containers only, of endpoints that may have peers without Heddle: as the page lists
//! it, by a card that is the tests' own.

mod support;

use support::channel::{Channel, UNREACHABLE, param, v4};
use support::liar::Liar;
use support::{End, Router, eventually, gid, node};
use verbs_protocol::agent::Limits;
use verbs_protocol::statistics::Reason;
use verbs_protocol::{abi, cm, ibv};

/// The card's own address, and that of a peer of it, for `sockaddr_in`.
const CARD: [u8; 4] = [10, 1, 0, 2];
const PEER: [u8; 4] = [10, 1, 0, 1];

fn mapped(address: [u8; 4]) -> [u8; 16] {
    let mut gid = gid(0);
    gid[12..].copy_from_slice(&address);
    gid
}

/// A queue pair with a shared receive queue, whose address is by the GID with an index.
fn with_shared_queue(router: &Router, index: u8) -> Result<u32, i32> {
    let mut end = End::new(router, 2, ibv::QPT_RC, 1, 64);
    let (srq, _requests) = end.device.srq(end.pd, 8, 0);
    let qp = end.device.qp(ibv::QPT_RC, end.pd, &end.sends, &end.receives, srq).number;
    let address = abi::verbs_address {
        gid: mapped(PEER),
        sgid_index: index,
        is_global: 1,
        port: 1,
        ..Default::default()
    };
    let mut attr = abi::verbs_qp_attr {
        qp_state: 1,
        port: 1,
        path_mtu: 5,
        dest_qp_num: 9,
        max_dest_rd_atomic: 4,
        address,
        ..Default::default()
    };
    let init = ibv::QP_STATE | ibv::QP_PORT | ibv::QP_PKEY_INDEX | ibv::QP_ACCESS_FLAGS;
    end.device.modify(qp, init, attr).unwrap();
    attr.qp_state = 2;
    let receive = ibv::QP_MAX_DEST_RD_ATOMIC | ibv::QP_MIN_RNR_TIMER;
    let path = ibv::QP_AV | ibv::QP_PATH_MTU | ibv::QP_DEST_QPN | ibv::QP_RQ_PSN;
    end.device.modify(qp, ibv::QP_STATE | path | receive, attr)
}

fn address_handle(router: &Router, sgid_index: u8) -> Result<u32, i32> {
    let mut end = End::new(router, 2, ibv::QPT_UD, 1, 64);
    let head = end.device.head(abi::VERBS_CREATE_AH);
    let address = abi::verbs_address {
        gid: mapped(PEER),
        sgid_index,
        is_global: 1,
        port: 1,
        ..Default::default()
    };
    let request = abi::verbs_create_ah_request { head, pd: end.pd, reserved: 0, address };
    end.device.ask::<abi::verbs_object_reply>(&request).map(|(reply, _)| reply.object)
}

fn socket_address(address: [u8; 4], port: u16) -> [u8; 28] {
    let mut out = v4(1, port);
    out[4..8].copy_from_slice(&address);
    out
}

/// What a function of the page's list answers.
fn answer(router: &Router, function: &str) -> &'static str {
    let by_errno = |result: Result<(), i32>| match result {
        Err(libc::EINVAL) => "EINVAL",
        Err(libc::EADDRNOTAVAIL) => "EADDRNOTAVAIL",
        other => panic!("{function}: {other:?}"),
    };
    let channel = Channel::open(router, 2);
    match function {
        "ibv_create_ah" => by_errno(address_handle(router, 1).map(drop)),
        "ibv_modify_qp" => by_errno(with_shared_queue(router, 1).map(drop)),
        "rdma_bind_addr" => {
            let id = channel.create(1, cm::PS_TCP).unwrap();
            by_errno(channel.bind(id, socket_address(CARD, 0)))
        }
        "rdma_connect" => {
            let id = channel.resolved_to(1, cm::PS_TCP, socket_address(PEER, 99));
            channel.connect(id, &param(1, &[])).unwrap();
            // The agent of these tests knows no way there.
            assert_eq!(channel.expect(UNREACHABLE).status, -libc::EHOSTUNREACH);
            "RDMA_CM_EVENT_UNREACHABLE with the errno of connect()"
        }
        _ => panic!("{function} is not tried"),
    }
}

fn counted(router: &Router) -> [u64; 2] {
    [Reason::OutsideRefused, Reason::ConnectRefused].map(|reason| router.times(2, reason))
}

#[test]
fn what_is_refused_outside_is_what_the_page_says() {
    let page = include_str!("../../../docs/howto/rdma-card.md");
    let (_, list) = page.split_once("<!-- refused outside -->").unwrap();
    let (list, _) = list.split_once("<!-- end -->").unwrap();
    let rows: Vec<Vec<&str>> =
        list.trim().lines().skip(2).map(|row| row.split('|').map(str::trim).collect()).collect();
    assert_eq!(rows.len(), 4);
    let (router, mut liar) = Liar::start("", "");
    liar.opened();
    router.add(2, Limits { outside: 1, ..Limits::default() });
    for row in rows {
        let function = row[1].split('`').nth(1).unwrap();
        let before = counted(&router);
        assert_eq!(answer(&router, function), row[2], "{function}");
        let more = match row[3] {
            "`verbs_outside_refused`" => [1, 0],
            "`verbs_connect_refused`" => [0, 1],
            "" => [0, 0],
            other => panic!("{other}"),
        };
        let want = [before[0] + more[0], before[1] + more[1]];
        eventually(function, || (counted(&router) == want).then_some(()));
    }
}

#[test]
fn the_same_reaches_containers() {
    let (router, mut liar) = Liar::start("", "");
    liar.opened();
    router.add(2, Limits { outside: 1, ..Limits::default() });
    assert!(address_handle(&router, 0).is_ok());
    assert!(with_shared_queue(&router, 0).is_ok());
    assert_eq!(counted(&router), [0, 0]);
    // Who is not let outside has no such GID, and nothing is counted for it.
    let router = node();
    assert_eq!(address_handle(&router, 1), Err(libc::EINVAL));
    assert_eq!(with_shared_queue(&router, 1), Err(libc::EINVAL));
    assert_eq!(counted(&router), [0, 0]);
}

//! Addresses and ports of ids of RDMA-CM, and the ways between two of them.

use verbs_protocol::cm::{self, Address, EventKind, Param, Path};
use verbs_protocol::control::{EINVAL, Errno};
use verbs_protocol::ibv;

use crate::cm::{BACKLOG, Id, PORTS, QKEY, State, own_gid};
use crate::commands::MAX_RD_ATOMIC;
use crate::endpoint::Endpoint;
use crate::objects::Objects;

impl Objects {
    pub(crate) fn cm_bind(&mut self, handle: u32, address: Address) -> Result<(), Errno> {
        let id = self.cm.table.get(handle).ok_or(libc::ENOENT)?;
        if id.state != State::Idle {
            return Err(EINVAL);
        }
        let endpoint = self.endpoints.get(id.endpoint).ok_or(EINVAL)?;
        // Loopback is the endpoint's own address as well.
        let gid = own_gid(endpoint, &address).or(address.is_wildcard().then_some(address.gid));
        let address = Address { gid: gid.ok_or(libc::EADDRNOTAVAIL)?, ..address };
        let port = match address.port {
            0 => self.cm_any_port(handle, &address)?,
            port if self.cm_port_is_free(handle, &Address { port, ..address }) => port,
            _ => return Err(libc::EADDRINUSE),
        };
        let id = self.cm_get(handle)?;
        id.source = Some(Address { port, ..address });
        id.state = State::Bound;
        Ok(())
    }

    fn cm_any_port(&mut self, handle: u32, address: &Address) -> Result<u16, Errno> {
        let endpoint = self.cm_get(handle)?.endpoint;
        for _ in PORTS {
            let usage = &mut self.endpoints.get_mut(endpoint).ok_or(EINVAL)?.cm;
            let next = usage.last_port + 1;
            usage.last_port = if PORTS.contains(&next) { next } else { PORTS.start };
            let port = u16::try_from(usage.last_port).unwrap_or(0);
            if self.cm_port_is_free(handle, &Address { port, ..*address }) {
                return Ok(port);
            }
        }
        Err(libc::EADDRNOTAVAIL)
    }

    fn cm_port_is_free(&self, handle: u32, address: &Address) -> bool {
        let Some(id) = self.cm.table.get(handle) else { return false };
        !self.cm.table.iter().any(|(other, o)| {
            other != handle
                && (o.endpoint, o.space) == (id.endpoint, id.space)
                && o.source.is_some_and(|s| {
                    let overlaps = s.gid == address.gid
                        || (s.is_wildcard() || address.is_wildcard())
                            && (s.is_ipv6 == address.is_ipv6 || !id.only_family && !o.only_family);
                    let shares = id.reuses_port && o.reuses_port && o.state != State::Listening;
                    s.port == address.port && overlaps && !shares
                })
                // Which shares the port of its listener.
                && !o.is_incoming
        })
    }

    pub(crate) fn cm_resolve(
        &mut self,
        handle: u32,
        source: Option<Address>,
        mut destination: Address,
    ) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        if !matches!(id.state, State::Idle | State::Bound) || destination.is_wildcard() {
            return Err(EINVAL);
        }
        let (state, endpoint) = (id.state, id.endpoint);
        let endpoint = self.endpoints.get(endpoint).ok_or(EINVAL)?;
        let gid = endpoint.gid_like(&destination.gid);
        if destination.is_loopback() {
            destination.gid = gid;
        }
        if gid == [0; 16] {
            return Err(libc::ENETUNREACH);
        }
        let is_ipv6 = destination.is_ipv6;
        if state == State::Idle {
            let any = Address { gid, port: 0, is_ipv6 };
            let source = source.unwrap_or(any);
            let source = if source.is_wildcard() { Address { gid, ..source } } else { source };
            self.cm_bind(handle, source)?;
        }
        let id = self.cm_get(handle)?;
        let port = id.source.map_or(0, |s| s.port);
        id.source = Some(Address { gid, port, is_ipv6 });
        id.destination = Some(destination);
        id.state = State::AddressResolved;
        self.cm_tell(handle, EventKind::AddrResolved, 0, &Param::default());
        Ok(())
    }

    pub(crate) fn cm_listen(&mut self, handle: u32, backlog: u32) -> Result<(), Errno> {
        let id = self.cm_get(handle)?;
        if id.state == State::Idle {
            self.cm_bind(handle, Address { gid: [0; 16], port: 0, is_ipv6: true })?;
        }
        let id = self.cm_get(handle)?;
        let Some(source) = id.source.filter(|_| id.state == State::Bound) else {
            return Err(EINVAL);
        };
        id.state = State::Listening;
        id.backlog = if backlog == 0 || backlog > BACKLOG { BACKLOG } else { backlog };
        // A port that is shared can have one listener.
        if !self.cm_port_is_free_to_listen(handle, &source) {
            self.cm_get(handle)?.state = State::Bound;
            return Err(libc::EADDRINUSE);
        }
        Ok(())
    }

    fn cm_port_is_free_to_listen(&self, handle: u32, source: &Address) -> bool {
        let Some(id) = self.cm.table.get(handle) else { return false };
        !self.cm.table.iter().any(|(other, o)| {
            other != handle
                && o.state == State::Listening
                && (o.endpoint, o.space) == (id.endpoint, id.space)
                && o.source.is_some_and(|s| s.port == source.port && s.gid == source.gid)
        })
    }

    pub(crate) fn cm_path(&self, id: &Id) -> Option<Path> {
        let source = id.source.filter(|s| !s.is_wildcard())?;
        let endpoint = self.endpoints.get(id.endpoint)?;
        let own = own_gid(endpoint, &source)?;
        let index = u8::from(own == endpoint.gids[1]);
        Some(Path { own: (own, index), peer: id.destination.map_or([0; 16], |d| d.gid) })
    }

    /// The path to the peer, as events tell it.
    pub(crate) fn cm_peer_path(&self, id: &Id) -> Option<Path> {
        self.cm_path(id).filter(|_| id.destination.is_some())
    }

    pub(crate) fn cm_route(&self, handle: u32) -> Result<cm::Route, Errno> {
        let id = self.cm.table.get(handle).ok_or(libc::ENOENT)?;
        let node_guid = self.endpoints.get(id.endpoint).map_or(0, Endpoint::guid);
        let path = self.cm_path(id);
        Ok(cm::Route { node_guid, path, source: id.source, destination: id.destination })
    }

    pub(crate) fn cm_attributes(&self, handle: u32, state: u32) -> Result<cm::QpAttr, Errno> {
        const INIT: u32 = 1;
        const RTR: u32 = 2;
        const RTS: u32 = 3;
        let id = self.cm.table.get(handle).ok_or(libc::ENOENT)?;
        let path = self.cm_path(id).ok_or(EINVAL)?;
        let attr = cm::QpAttr { state, ..Default::default() };
        let init = ibv::QP_STATE | ibv::QP_PKEY_INDEX | ibv::QP_PORT;
        if id.has_datagrams() {
            let attr = cm::QpAttr { qkey: QKEY, ..attr };
            return match state {
                INIT => Ok(cm::QpAttr { mask: init | ibv::QP_QKEY, ..attr }),
                RTR => Ok(cm::QpAttr { mask: ibv::QP_STATE, ..attr }),
                RTS => Ok(cm::QpAttr { mask: ibv::QP_STATE | ibv::QP_SQ_PSN, ..attr }),
                _ => Err(EINVAL),
            };
        }
        let knows_peer = matches!(
            id.state,
            State::Requested | State::Answered | State::Accepted | State::Connected
        );
        match state {
            INIT => {
                let far =
                    ibv::ACCESS_REMOTE_WRITE | ibv::ACCESS_REMOTE_READ | ibv::ACCESS_REMOTE_ATOMIC;
                // As of a card: none before there is a peer.
                let access = if knows_peer { far } else { 0 };
                Ok(cm::QpAttr { mask: init | ibv::QP_ACCESS_FLAGS, access, ..attr })
            }
            RTR if knows_peer => Ok(cm::QpAttr {
                mask: ibv::QP_STATE
                    | ibv::QP_AV
                    | ibv::QP_PATH_MTU
                    | ibv::QP_DEST_QPN
                    | ibv::QP_RQ_PSN
                    | ibv::QP_MAX_DEST_RD_ATOMIC
                    | ibv::QP_MIN_RNR_TIMER,
                dest_qp_num: id.peer.qp,
                path: Some(path),
                max_dest_rd_atomic: id.peer.responder_resources.min(MAX_RD_ATOMIC),
                ..attr
            }),
            RTS if knows_peer => Ok(cm::QpAttr {
                mask: ibv::QP_STATE
                    | ibv::QP_SQ_PSN
                    | ibv::QP_TIMEOUT
                    | ibv::QP_RETRY_CNT
                    | ibv::QP_RNR_RETRY
                    | ibv::QP_MAX_QP_RD_ATOMIC,
                max_rd_atomic: id.peer.initiator_depth.min(MAX_RD_ATOMIC),
                retry_count: id.peer.retry_count,
                rnr_retry_count: id.peer.rnr_retry_count,
                ..attr
            }),
            _ => Err(EINVAL),
        }
    }
}

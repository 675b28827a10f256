//! RDMA-CM: multicast groups that ids join. `docs/protocols/verbs-control.md`. Only an event comes
//! of it, by which librdmacm has the id's queue pair join (`multicast`).

use verbs_protocol::cm::{Address, EventKind, Param, Path};
use verbs_protocol::control::{EINVAL, Errno};
use verbs_protocol::statistics::Reason;

use crate::cm::{Id, QKEY};
use crate::multicast::{GROUP_QP, MEMBERSHIPS, is_multicast};
use crate::objects::Objects;

/// A group that an id has joined.
pub(crate) struct Joined {
    /// By which its program leaves it.
    pub(crate) number: u32,
    /// Events that were got.
    pub(crate) reported: u32,
}

impl Objects {
    /// `rdma_join_multicast()`: the number by which it is left again.
    pub(crate) fn cm_join(
        &mut self,
        handle: u32,
        uid: u64,
        address: Address,
    ) -> Result<u32, Errno> {
        let id = self.cm.table.get(handle).ok_or(libc::ENOENT)?;
        if !id.has_datagrams() || !is_multicast(&address.gid) {
            return Err(EINVAL);
        }
        // It has a device once it is bound to one of the endpoint's addresses.
        let path = self.cm_path(id).ok_or(EINVAL)?;
        let path = Path { peer: address.gid, ..path };
        let usage = self.endpoints.get_mut(id.endpoint).ok_or(EINVAL)?;
        if usage.cm.joined >= MEMBERSHIPS {
            usage.account.note(Reason::QuotaObjects);
            return Err(libc::ENOMEM);
        }
        usage.cm.joined += 1;
        usage.cm.last_joined = usage.cm.last_joined.wrapping_add(1).max(1);
        let number = usage.cm.last_joined;
        self.cm_get(handle)?.groups.push(Joined { number, reported: 0 });
        let param = Param { qp: GROUP_QP, qkey: QKEY, ..Param::default() };
        self.cm_tell_joined(handle, (uid, number), EventKind::MulticastJoin, &param, path);
        Ok(number)
    }

    /// `rdma_leave_multicast()`: how many of its events were got.
    pub(crate) fn cm_leave_group(&mut self, context: u32, number: u32) -> Result<u32, Errno> {
        let has = |id: &Id| id.context == context && id.groups.iter().any(|g| g.number == number);
        let found = self.cm.table.iter().find(|(_, id)| has(id)).map(|(handle, _)| handle);
        let handle = found.ok_or(libc::ENOENT)?;
        let id = self.cm_get(handle)?;
        let at = id.groups.iter().position(|g| g.number == number).ok_or(libc::ENOENT)?;
        let (joined, endpoint) = (id.groups.swap_remove(at), id.endpoint);
        self.cm_drop_joined(context, handle, number);
        if let Some(endpoint) = self.endpoints.get_mut(endpoint) {
            endpoint.cm.joined -= 1;
        }
        Ok(joined.reported)
    }
}

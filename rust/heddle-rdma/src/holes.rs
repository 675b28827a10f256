//! Memory that a program and the router share, in which nobody makes holes any more.
//!
//! Who touches a page in the range of a hole that is being made waits until all of it is made, for
//! as long as the range is large; when that happens for the second time in a row, with the address
//! space locked, which holds up whoever maps something. So the router touches no memory before it
//! is closed to holes. The program has mapped it by then: nobody can afterwards.

use std::sync::Arc;

use shared_ring::SharedMemory;
use verbs_protocol::control::Errno;

use crate::objects::Objects;

impl Objects {
    /// Closes memory of a context's, before the router is to touch it. That waits for holes that
    /// are being made, so that what was looked up before has to be looked up again.
    pub(crate) fn close_to_holes(
        self: &mut Box<Self>,
        context: u32,
        all: impl IntoIterator<Item = Arc<SharedMemory>>,
    ) -> Result<(), Errno> {
        let open: Vec<_> = all.into_iter().filter(|m| !m.is_closed_to_holes()).collect();
        if open.is_empty() {
            return Ok(());
        }
        let endpoint = self.contexts.get(context).map_or(0, |c| c.endpoint);
        let closed = self.without_baton(|worker| {
            worker.touches(endpoint);
            open.iter().try_for_each(|memory| memory.close_to_holes())
        });
        closed.map_err(|_| libc::EPERM)
    }
}

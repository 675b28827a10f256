//! The router of the verbs plane: it serves the queue pairs of a node's containers.
//!
//! One thread runs a loop over sockets, doorbells and queue pairs. It owns everything; there is no lock,
//! and nothing is allocated while requests are served. Containers are hostile: what they write into their
//! rings and say on their sockets is copied before it is looked at.
//!
//! | module | what it owns |
//! |---|---|
//! | [`router`] | the loop, the agent's socket, and sleep |
//! | `control` | the control sockets of contexts |
//! | `commands` | what a library asks for: objects are made, changed and destroyed |
//! | `objects` | what there is, quotas, events |
//! | `requests` | turns of queue pairs: work requests from memory to memory |
//! | `link` | connections between endpoints: asked for, greeted, matched, ended |
//! | `remote` | work requests between nodes, and datagrams: the requester |
//! | `responder` | requests of other nodes, and answers |
//! | `queues` | requests out of rings, completions into them |
//! | `memory` | which bytes a key names, and how they are copied |
//! | `table` | handles |
//! | `sys` | the system calls that the standard library does not have |

mod commands;
mod control;
mod link;
mod memory;
mod objects;
mod queues;
mod remote;
mod requests;
mod responder;
pub mod router;
mod sys;
mod table;

pub use router::{Options, run};

//! The router of the verbs plane: it serves the queue pairs of a node's containers.
//!
//! One thread at a time runs a loop over sockets, doorbells and queue pairs and owns everything;
//! nothing is allocated while requests are served. Containers are hostile: what they write into
//! their rings and say on their sockets is copied before it is looked at.
//!
//! | module | what it owns |
//! |---|---|
//! | [`router`] | the loop, the agent's socket, and sleep |
//! | `baton` | who has all of it while a program's memory is copied |
//! | `bucket` | limits in a time |
//! | `shards` | endpoints that are served by a thread of their own |
//! | `control` | the control sockets of contexts |
//! | `commands` | what a library asks for: objects are made, changed and destroyed |
//! | `queue_commands`, `queue_pairs` | the same, of queues |
//! | `accounts` | what was moved and refused, for the agent |
//! | `objects` | what there is, and quotas |
//! | `events` | what programs are told |
//! | `endings` | how queue pairs, contexts and endpoints end |
//! | `requests`, `completing` | turns of queue pairs: requests taken, waiting, completed |
//! | `receiving` | receive requests taken for messages |
//! | `local` | requests whose peer is on this node |
//! | `remote`, `responder` | requests between nodes |
//! | `datagrams` | both, for UD |
//! | `multicast` | groups of UD queue pairs |
//! | `elsewhere` | members of groups at other routers |
//! | `cm`, `cm_routes` | RDMA-CM: ids and commands, addresses and ways |
//! | `cm_events`, `cm_groups`, `cm_link` | and events, groups, talk |
//! | `connect` | connections between endpoints are asked for |
//! | `card` | pairs whose bytes go by a card |
//! | `card_loss` | and what becomes of them without |
//! | `card_drops` | what of the card has ended is destroyed |
//! | `card_home` | where a peer's queue pair of the card may be |
//! | `greeting` | they are greeted and matched |
//! | `link` | and read, written and ended |
//! | `queues` | requests out of rings, completions into them |
//! | `memory`, `pieces` | which bytes a key names, and where they are |
//! | `process` | memory of programs |
//! | `copying` | bytes from one side to the other |
//! | `under_way` | which memory is being copied |
//! | `holes` | memory is closed to holes before it is looked at |
//! | `kept` | memory that was forgotten here, and that programs have |
//! | `table` | handles |
//! | `sandbox` | the router gives up its rights |
//! | [`opener`] | a process that opens for it what needs them |
//! | `protection` | protections by name, for attacks |
//! | `placing` | WRITEs that the card does by itself |
//! | `outside`, `native`, `bounce` | peers without Heddle: who may have some, requests, bytes |
//! | `ibverbs` | the node's libibverbs, loaded if there is to be a card |
//! | `sys` | system calls beside those of `unix-io` |

mod accounts;
mod baton;
mod bounce;
mod bucket;
mod card;
mod card_drops;
mod card_home;
mod card_loss;
mod cm;
mod cm_events;
mod cm_groups;
mod cm_link;
mod cm_routes;
mod commands;
mod completing;
mod connect;
mod control;
mod copying;
mod datagrams;
mod direct;
mod elsewhere;
mod endings;
mod endpoint;
mod events;
mod greeting;
mod holes;
mod ibverbs;
mod kept;
mod link;
mod local;
mod memory;
mod multicast;
mod native;
mod objects;
pub mod opener;
mod outside;
mod pieces;
mod placing;
mod process;
mod protection;
mod queue_commands;
mod queue_pairs;
mod queues;
mod receiving;
mod remote;
mod requests;
mod responder;
pub mod router;
mod sandbox;
mod shards;
mod sys;
mod table;
mod together;
mod under_way;

pub use router::{Options, run};

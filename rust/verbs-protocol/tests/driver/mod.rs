//! Reads bytes as everything that the router reads. What is read has to be what the bytes say, and
//! no bytes may make it panic: the fuzz target chooses them, and `random.rs` makes them of seeds.

use verbs_protocol::slots::{self, Receive, SLOT, Send};
use verbs_protocol::wire::{GREETING, Greeting, HEADER, Header};
use verbs_protocol::{agent, cm, cm_message, control};

/// What came of the bytes, so that a run can show that it reached all of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcomes {
    pub(crate) requests: u64,
    pub(crate) refused: u64,
    pub(crate) sends: u64,
    pub(crate) receives: u64,
    pub(crate) greetings: u64,
    pub(crate) frames: u64,
    pub(crate) messages: u64,
    pub(crate) cm_commands: u64,
    pub(crate) cm_messages: u64,
}

/// Reads the bytes. The first one says as what.
pub(crate) fn drive(data: &[u8], outcomes: &mut Outcomes) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 7 {
        0 => match control::parse(bytes) {
            Ok((head, request)) => {
                assert_eq!(head.command.to_ne_bytes(), bytes[..4]);
                outcomes.requests += u64::from(request.is_ok());
                outcomes.refused += u64::from(request.is_err());
            }
            Err(control::NoRequest) => assert!(bytes.len() < 8),
        },
        1 => work_requests(bytes, outcomes),
        2 => {
            if let Some(bytes) = bytes.first_chunk::<GREETING>()
                && let Ok(greeting) = Greeting::parse(bytes)
            {
                // What another version has in its reserved bytes is not kept.
                assert!(greeting.version != 1 || greeting.encode() == *bytes);
                outcomes.greetings += 1;
            }
        }
        3 => {
            if let Some(bytes) = bytes.first_chunk::<HEADER>()
                && let Ok(header) = Header::parse(bytes)
            {
                assert_eq!(header.encode(), *bytes);
                outcomes.frames += 1;
            }
        }
        4 => {
            if let Ok(message) = agent::Message::parse(bytes) {
                assert_eq!(agent::Message::parse(&message.encode()), Ok(message));
                outcomes.messages += 1;
            }
        }
        5 => outcomes.cm_commands += u64::from(cm::Command::parse(bytes).is_ok()),
        _ => {
            if let Some((head, bytes)) = bytes.split_first_chunk::<HEADER>()
                && let Ok(header) = Header::parse(head)
                && let Ok(message) = cm_message::Message::parse(&header, bytes)
            {
                let (again, same) = message.encode();
                assert_eq!(same, bytes);
                assert_eq!(cm_message::Message::parse(&again, &same), Ok(message));
                outcomes.cm_messages += 1;
            }
        }
    }
}

fn work_requests(bytes: &[u8], outcomes: &mut Outcomes) {
    let Some(first) = bytes.first_chunk::<SLOT>() else { return };
    if let Some(count) = slots::send_slots(first)
        && let Some(slots) = bytes.get(..count * SLOT)
        && let Ok(send) = Send::parse(slots)
    {
        let sum: u64 = (0..send.entries()).map(|i| u64::from(send.entry(i).length)).sum();
        let inline = if send.is_inline() { send.inline().len() as u64 } else { 0 };
        assert_eq!(send.length(), sum + inline);
        outcomes.sends += 1;
    }
    if let Some(count) = slots::receive_slots(first)
        && let Some(slots) = bytes.get(..count * SLOT)
        && let Ok(receive) = Receive::parse(slots)
    {
        let sum: u64 = (0..receive.entries()).map(|i| u64::from(receive.entry(i).length)).sum();
        assert_eq!(receive.length(), sum);
        outcomes.receives += 1;
    }
}

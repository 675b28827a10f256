//! The agent's side of the protocol, for tests (feature `client`): the agent itself is in Go.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use smoltcp::wire::IpEndpoint;
use unix_io::epoll::wait_readable;
use unix_io::plain::{self, Plain};
use unix_io::{packets, would_block};

use crate::abi::*;
use crate::proto::{self, MESSAGE_MAX};

/// For how long a module may take to answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// A message of the module's.
#[derive(Debug)]
pub struct Heard {
    /// Its head.
    pub head: stack_head,
    /// All of it.
    pub bytes: Vec<u8>,
    /// What came with it.
    pub descriptor: Option<OwnedFd>,
}

impl Heard {
    /// The message as this type.
    ///
    /// # Panics
    ///
    /// If it has another length: the module says an error, say.
    #[must_use]
    pub fn read<T: Plain>(&self) -> T {
        plain::read(&self.bytes).unwrap_or_else(|| panic!("another message: {:?}", self.head))
    }
}

/// Sends a message, never waiting.
///
/// # Errors
///
/// The socket's.
pub fn send(socket: &OwnedFd, bytes: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
    packets::send(socket, bytes, descriptor.map(AsFd::as_fd).as_slice())
}

/// The next message, if there is one; never waits.
#[must_use]
pub fn receive(socket: &OwnedFd) -> Option<Heard> {
    let mut bytes = [0; MESSAGE_MAX];
    let mut descriptors = Vec::new();
    let length = packets::receive(socket, &mut bytes, &mut descriptors).ok()?;
    let bytes = bytes.get(..length)?.to_vec();
    let head = plain::read(bytes.first_chunk::<{ size_of::<stack_head>() }>()?)?;
    Some(Heard { head, bytes, descriptor: descriptors.pop() })
}

/// An agent's connection. Messages that nobody asked for are kept until somebody wants them.
#[derive(Debug)]
pub struct Client {
    socket: OwnedFd,
    tag: u32,
    last_id: u64,
    kept: VecDeque<Heard>,
}

impl Client {
    /// Says HELLO on a connection, and that there are no tenants yet.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let mut client = Self::greet(socket)?;
        client.plain(STACK_BEGIN, 0, 0)?;
        client.plain(STACK_END, 0, 0)?;
        Ok(client)
    }

    /// Says HELLO, and nothing of tenants.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn greet(socket: OwnedFd) -> io::Result<Self> {
        let mut client = Self::over(socket);
        let head = client.head(STACK_HELLO, 0, 0);
        let hello = stack_hello { head, version: STACK_VERSION, ..stack_hello::default() };
        client.ask(&hello, None)?;
        Ok(client)
    }

    /// Connects to a module at a path, as [`Client::greet`].
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::greet(packets::connect_packets(path)?)
    }

    /// Connects to a module at a path, and says nothing.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn dial(path: &Path) -> io::Result<Self> {
        packets::connect_packets(path).map(Self::over)
    }

    fn over(socket: OwnedFd) -> Self {
        Self { socket, tag: 0, last_id: 0, kept: VecDeque::new() }
    }

    /// A connected pair of packet sockets: a link, or an agent's connection.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
        packets::packet_pair()
    }

    /// The head of a request.
    pub fn head(&mut self, kind: u32, tenant: u64, id: u64) -> stack_head {
        self.tag += 1;
        stack_head { type_: kind, tag: self.tag, tenant, id, error: 0, reserved: 0 }
    }

    /// A number for a new socket.
    pub fn id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Sends bytes as they are. While the module reads no more, its messages are read.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn send(&mut self, bytes: &[u8], descriptor: Option<&OwnedFd>) -> io::Result<()> {
        loop {
            match send(&self.socket, bytes, descriptor) {
                Err(err) if would_block(&err) => {
                    if wait_readable(self.socket.as_fd(), Duration::from_millis(1)) {
                        let heard = self.hear()?;
                        self.kept.push_back(heard);
                    }
                }
                done => return done,
            }
        }
    }

    /// Sends a request of a head alone, and does not wait.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn plain(&mut self, kind: u32, tenant: u64, id: u64) -> io::Result<u32> {
        let head = self.head(kind, tenant, id);
        self.send(&proto::bytes(&stack_plain { head }), None)?;
        Ok(head.tag)
    }

    /// Sends a request and waits for its answer, whatever it says.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn ask<T: Plain>(&mut self, request: &T, fd: Option<&OwnedFd>) -> io::Result<Heard> {
        let tag = self.tag;
        self.send(&proto::bytes(request), fd)?;
        self.wait(|h| h.head.type_ & STACK_ANSWER != 0 && h.head.tag == tag)
    }

    /// Waits for a message.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn wait(&mut self, wanted: impl Fn(&Heard) -> bool) -> io::Result<Heard> {
        if let Some(at) = self.kept.iter().position(&wanted)
            && let Some(heard) = self.kept.remove(at)
        {
            return Ok(heard);
        }
        loop {
            let heard = self.hear()?;
            if wanted(&heard) {
                return Ok(heard);
            }
            self.kept.push_back(heard);
        }
    }

    /// What came that nobody has wanted yet.
    pub fn kept(&self) -> impl Iterator<Item = &Heard> {
        self.kept.iter()
    }

    fn hear(&mut self) -> io::Result<Heard> {
        if !wait_readable(self.socket.as_fd(), PATIENCE) {
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        receive(&self.socket).ok_or(io::Error::from(io::ErrorKind::UnexpectedEof))
    }

    /// Whether the module has ended the connection.
    #[must_use]
    pub fn is_closed(&mut self) -> bool {
        self.hear().is_err_and(|err| err.kind() == io::ErrorKind::UnexpectedEof)
    }

    /// Makes a tenant, or changes it. Gives the errno.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn tenant(&mut self, mut t: stack_tenant, device: Option<&OwnedFd>) -> io::Result<i32> {
        t.head = self.head(STACK_TENANT, t.head.tenant, 0);
        Ok(self.ask(&t, device)?.head.error)
    }

    /// Has a tenant listen. Gives the id and the address, or the errno.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn listen(
        &mut self,
        tenant: u64,
        at: IpEndpoint,
        flags: u32,
        backlog: u32,
    ) -> io::Result<Result<(u64, stack_address), i32>> {
        let id = self.id();
        let head = self.head(STACK_LISTEN, tenant, id);
        let address = proto::named(at);
        let options = stack_options::default();
        let answer = self.ask(&stack_listen { head, address, flags, backlog, options }, None)?;
        Ok(match answer.head.error {
            0 => Ok((id, answer.read::<stack_named>().local)),
            errno => Err(errno),
        })
    }

    /// Begins to connect, through a new pair. Gives the id and the program's end.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn begin(
        &mut self,
        tenant: u64,
        to: IpEndpoint,
        options: stack_options,
    ) -> io::Result<(u64, UnixStream)> {
        let (program, module) = UnixStream::pair()?;
        io::Write::write_all(&mut &program, &[0])?;
        let id = self.id();
        let head = self.head(STACK_CONNECT, tenant, id);
        let remote = proto::named(to);
        let request = stack_connect { head, remote, skip: 1, reserved: 0, options };
        self.send(&proto::bytes(&request), Some(&module.into()))?;
        Ok((id, program))
    }

    /// Connects. Gives the id and the program's end, or the errno.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out; that the pair does not come back.
    pub fn connect(
        &mut self,
        tenant: u64,
        to: IpEndpoint,
        options: stack_options,
    ) -> io::Result<Result<(u64, UnixStream), i32>> {
        let (id, program) = self.begin(tenant, to, options)?;
        let heard = self.answer(STACK_CONNECT, id)?;
        match heard.head.error {
            0 => Ok(Ok((id, program))),
            errno => {
                heard.descriptor.ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
                Ok(Err(errno))
            }
        }
    }

    /// Waits for the answer to a request about a socket.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn answer(&mut self, kind: u32, id: u64) -> io::Result<Heard> {
        self.wait(|h| h.head.type_ == kind | STACK_ANSWER && h.head.id == id)
    }

    /// Waits for a listener to accept, and takes the connection. Gives it and the program's end.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn accept(&mut self, listener: u64) -> io::Result<(stack_accepted, UnixStream)> {
        let heard = self.wait(|h| is_accepted(h, listener))?;
        let accepted: stack_accepted = heard.read();
        self.plain(STACK_TAKEN, accepted.head.tenant, accepted.head.id)?;
        let program = heard.descriptor.ok_or(io::Error::from(io::ErrorKind::InvalidData))?;
        Ok((accepted, program.into()))
    }

    /// Takes a listener's next connection if the module has told of one by now.
    ///
    /// # Errors
    ///
    /// The socket's.
    pub fn accept_now(&mut self, listener: u64) -> io::Result<Option<UnixStream>> {
        while wait_readable(self.socket.as_fd(), Duration::ZERO) {
            let heard = self.hear()?;
            self.kept.push_back(heard);
        }
        let there = self.kept.iter().any(|h| is_accepted(h, listener));
        if there { self.accept(listener).map(|(_, program)| Some(program)) } else { Ok(None) }
    }

    /// Waits for a connection to be over. Gives what ENDED says.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn ended(&mut self, id: u64) -> io::Result<stack_info> {
        self.wait(|h| h.head.type_ == STACK_ENDED && h.head.id == id).map(|h| h.read())
    }

    /// Asks what a socket is. Gives it, or the errno.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn info(&mut self, tenant: u64, id: u64) -> io::Result<Result<stack_info, i32>> {
        let head = self.head(STACK_INFO, tenant, id);
        let answer = self.ask(&stack_plain { head }, None)?;
        Ok(if answer.head.error == 0 { Ok(answer.read()) } else { Err(answer.head.error) })
    }

    /// Asks for a tenant's counters, or with 0 for the module's.
    ///
    /// # Errors
    ///
    /// The socket's, and a time-out.
    pub fn stats(&mut self, tenant: u64) -> io::Result<stack_stats> {
        let head = self.head(STACK_STATS, tenant, 0);
        self.ask(&stack_plain { head }, None).map(|h| h.read())
    }
}

fn is_accepted(h: &Heard, listener: u64) -> bool {
    h.head.type_ == STACK_ACCEPTED
        && plain::read(&h.bytes).is_some_and(|a: stack_accepted| a.listener == listener)
}

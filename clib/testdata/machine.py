"""A program of a virtual machine, and its peer outside: TCP as any program has it.

machine.py echo PORT       takes connections, and sends what came back, each at its end
machine.py send HOST PORT  sends 1 MB, reads it back, compares
machine.py hold HOST PORT [again]  connects, says how a read ends, and may connect once more
machine.py calls HOST PORT REFUSED  what calls say, in blocking mode and not; PORT is of an echo
"""

import errno
import fcntl
import hashlib
import os
import random
import select
import socket
import struct
import sys
import threading


def say(*words):
    print(*words, flush=True)


def all_of(s):
    data = b""
    while piece := s.recv(65536):
        data += piece
    return data


def echo_one(s, peer):
    try:
        data = all_of(s)
        s.sendall(data)
        say("echoed", len(data), hashlib.sha256(data).hexdigest(), "to", peer[0])
        s.close()
    except OSError as err:
        say("echo ends with", errno.errorcode[err.errno])


def echo(port):
    listener = socket.create_server(("", port), backlog=64)
    say("listening at", *listener.getsockname())
    while True:
        s, peer = listener.accept()
        assert s.getpeername() == peer, (s.getpeername(), peer)
        assert s.getsockname()[1] == port
        threading.Thread(target=echo_one, args=(s, peer)).start()


def send(host, port):
    data = random.randbytes(1 << 20)
    with socket.create_connection((host, port)) as s:
        writer = threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR)))
        writer.start()
        back = all_of(s)
        writer.join()
    assert back == data, (len(back), len(data))
    say("equal", len(back), hashlib.sha256(back).hexdigest())


def hold(host, port, again=None):
    s = socket.create_connection((host, port))
    say("connected from", *s.getsockname())
    try:
        say("read", s.recv(1))
    except OSError as err:
        say("read ends with", errno.errorcode[err.errno])
    if not again:
        return
    try:
        socket.create_connection((host, port))
        say("connects again")
    except OSError as err:
        say("connect ends with", errno.errorcode[err.errno])


def name_of(call, *args):
    try:
        return call(*args)
    except OSError as err:
        return errno.errorcode[err.errno]


def calls(host, port, refused):
    # Refused, waited for or not.
    s = socket.socket()
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_INET
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
    assert name_of(s.getpeername) == "ENOTCONN"
    assert name_of(s.connect, (host, refused)) == "ECONNREFUSED"
    s.connect((host, port))  # the same socket, once more
    assert s.getpeername() == (host, port), s.getpeername()
    assert name_of(s.connect, (host, port)) == "EISCONN"
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    s.close()
    s = socket.socket()
    s.setblocking(False)
    assert s.connect_ex((host, refused)) == errno.EINPROGRESS
    select.select([], [s], [])
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    # Not waited for: it is writable once it is connected, and epoll tells of what comes.
    s = socket.socket()
    s.setblocking(False)
    assert s.connect_ex((host, port)) == errno.EINPROGRESS
    poll = select.epoll()
    poll.register(s, select.EPOLLOUT)
    assert poll.poll() == [(s.fileno(), select.EPOLLOUT)]
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    poll.modify(s, select.EPOLLIN)
    assert name_of(s.recv, 1) == "EAGAIN"
    # A child has it, too, and the last one to close ends it.
    if os.fork() == 0:
        s.send(b"from the child")
        os._exit(0)
    os.wait()
    copy = os.dup(s.fileno())
    s.close()
    s = socket.socket(fileno=copy)
    assert s.getpeername() == (host, port)
    s.shutdown(socket.SHUT_WR)
    poll = select.epoll()
    poll.register(s, select.EPOLLIN)
    poll.poll()
    s.setblocking(True)
    assert all_of(s) == b"from the child"
    # Addresses.
    a, b = socket.socket(), socket.socket()
    a.bind(("0.0.0.0", 0))
    at = a.getsockname()
    assert at[1] != 0
    a.listen()
    assert a.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    assert name_of(b.bind, at) == "EADDRINUSE"
    assert name_of(b.bind, ("192.0.2.1", 0)) == "EADDRNOTAVAIL"
    a.setblocking(False)
    assert name_of(a.accept) == "EAGAIN"
    b.connect(("127.0.0.1", at[1]))
    select.select([a], [], [])
    c, peer = a.accept()
    assert peer == b.getsockname(), (peer, b.getsockname())
    # RST: by SO_LINGER, and by unread bytes.
    b.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    b.close()
    c.setblocking(True)
    assert name_of(c.recv, 1) == "ECONNRESET"
    a.close()
    # IPv6 is another family, with IPv4 in it.
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as six:
        with socket.create_connection(("127.0.0.1", six.getsockname()[1])):
            assert six.accept()[1][0] == "::ffff:127.0.0.1"
    # What is no TCP is the kernel's.
    x, y = socket.socketpair()
    assert x.getsockname() == "" and x.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_UNIX
    # io with stdio, and a flag that exec looks at.
    assert fcntl.fcntl(six.fileno() if six.fileno() >= 0 else x.fileno(), fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    say("calls are as they should be")


if __name__ == "__main__":
    what, args = sys.argv[1], sys.argv[2:]
    {"echo": echo, "send": send, "hold": hold, "calls": calls}[what](
        *(int(a) if a.isdigit() else a for a in args))

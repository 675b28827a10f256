"""What a program sees of its sockets, on a stack module as on the kernel's TCP. Argument: a peer
whose port echoes what it gets, as HOST PORT."""

import ctypes
import errno
import select
import signal
import socket
import struct
import sys
import threading

host, port = sys.argv[1], int(sys.argv[2])


def refused(call, *want):
    try:
        call()
    except OSError as e:
        assert e.errno in want, (e, want)
    else:
        raise AssertionError("it is not refused")


def names():
    s = socket.socket()
    assert (s.family, s.type) == (socket.AF_INET, socket.SOCK_STREAM)
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN) == socket.AF_INET
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) == socket.IPPROTO_TCP
    assert s.getsockname() == ("0.0.0.0", 0)
    refused(s.getpeername, errno.ENOTCONN)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    s.connect((host, port))
    assert s.getpeername() == (host, port)
    assert s.getsockname()[0] != "0.0.0.0" and s.getsockname()[1] != 0
    refused(lambda: s.connect((host, port)), errno.EISCONN)
    refused(lambda: s.send(b"!", socket.MSG_OOB), errno.EOPNOTSUPP)
    s.sendall(b"x" * 1000)
    s.shutdown(socket.SHUT_WR)
    got = b"".join(iter(lambda: s.recv(4096), b""))
    assert got == b"x" * 1000, len(got)


def listening():
    l = socket.socket()
    l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    l.bind(("127.0.0.1", 0))
    l.listen(5)
    assert l.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    l.setblocking(False)
    refused(l.accept, errno.EAGAIN)
    poll = select.epoll()
    poll.register(l, select.EPOLLIN)
    assert poll.poll(0) == []
    c = socket.create_connection(l.getsockname())
    assert poll.poll(10) == [(l.fileno(), select.EPOLLIN)]
    a, addr = l.accept()
    assert addr == c.getsockname() and a.getsockname() == c.getpeername()
    a.setblocking(True)
    # RST: a close with data that was not read.
    c.sendall(b"unread")
    assert select.select([a], [], [], 10)[0]
    a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    a.close()
    refused(lambda: c.recv(1), errno.ECONNRESET)
    # The port is free as soon as the listener is closed.
    at = l.getsockname()
    l.close()
    again = socket.socket()
    again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    again.bind(at)
    refused(lambda: socket.create_connection(at), errno.ECONNREFUSED)
    # accept() waits, and fork and dup share the socket.
    again.listen()
    done = []
    t = threading.Thread(target=lambda: done.append(again.accept()[1]))
    t.start()
    c = socket.create_connection(at)
    t.join(10)
    assert done == [c.getsockname()], done


def lengths():
    """Attack: lengths of nothing ended the agent."""
    libc = ctypes.CDLL(None, use_errno=True)
    s = socket.socket()
    room = ctypes.create_string_buffer(128)
    for call, *rest in (
        (libc.bind, room, 0),
        (libc.connect, room, 0),
        (libc.setsockopt, socket.IPPROTO_TCP, socket.TCP_NODELAY, room, 0),
        (libc.setsockopt, socket.SOL_SOCKET, socket.SO_LINGER, room, 0),
    ):
        assert call(s.fileno(), *rest) == -1 and ctypes.get_errno() == errno.EINVAL, (call, ctypes.get_errno())
    s.connect((host, port))  # the agent is there


def shut_down():
    """shutdown() of what is not connected is refused, and of a listener ends accept()."""
    s = socket.socket()
    refused(lambda: s.shutdown(socket.SHUT_RDWR), errno.ENOTCONN)
    s.connect((host, port))  # it can be used
    for how in socket.SHUT_RD, socket.SHUT_RDWR:
        l = socket.create_server(("127.0.0.1", 0))
        t = threading.Thread(target=refused, args=(l.accept, errno.EINVAL))
        t.start()
        l.shutdown(how)
        t.join(10)
        assert not t.is_alive(), how


def nonblocking():
    s = socket.socket()
    s.setblocking(False)
    assert s.connect_ex((host, port)) == errno.EINPROGRESS
    assert select.select([], [s], [], 10)[1]
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    assert s.getpeername() == (host, port)
    s = socket.socket()
    s.setblocking(False)
    assert s.connect_ex(("127.0.0.1", 1)) == errno.EINPROGRESS
    assert select.select([], [s], [], 10)[1]
    assert s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
    s = socket.socket()
    for _ in range(2):  # a program may try again
        refused(lambda: s.connect(("127.0.0.1", 1)), errno.ECONNREFUSED)


def closed():
    """What a program has closed, its epoll does not tell it of any more."""
    l = socket.create_server(("127.0.0.1", 0))
    poll = select.epoll()
    for i in range(1000):
        c = socket.create_connection(l.getsockname())
        a, _ = l.accept()
        poll.register(a, select.EPOLLIN | select.EPOLLOUT)
        for s in a, c:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        a.close()
        events = poll.poll(0)
        assert events == [], (i, events)


def interrupted():
    """A signal interrupts connect(), which the kernel makes again: the program sees it succeed. A
    signal in the moment after the answer makes the kernel lose that: EISCONN, as for any second call
    (docs/differences.md). One that fails says why."""
    connect = ctypes.CDLL(None, use_errno=True).connect
    to = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 3e-4, 3e-4)
    try:
        for i in range(500):
            s = socket.socket()
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if connect(s.fileno(), to, len(to)):
                assert ctypes.get_errno() == errno.EISCONN, (i, errno.errorcode[ctypes.get_errno()])
            again = connect(s.fileno(), to, len(to)), ctypes.get_errno()
            assert again == (-1, errno.EISCONN), (i, again)
            s.close()
        nobody = struct.pack("=H", socket.AF_INET) + struct.pack("!H", 9) + to[4:]
        for i in range(500):
            with socket.socket() as s:
                assert connect(s.fileno(), nobody, len(to)) == -1, i
                assert ctypes.get_errno() == errno.ECONNREFUSED, (i, errno.errorcode[ctypes.get_errno()])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def others():
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    u.bind(("127.0.0.1", 0))
    u.sendto(b"x", u.getsockname())
    assert u.recvfrom(9) == (b"x", u.getsockname())
    a, b = socket.socketpair()
    assert a.getsockname() == ""


for test in names, listening, lengths, shut_down, nonblocking, closed, interrupted, others:
    test()
    print(test.__name__, flush=True)

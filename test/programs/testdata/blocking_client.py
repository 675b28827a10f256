"""A blocking client of blocking_server.py: blocking_client.py ADDRESS. Prints what it sees."""
import errno
import hashlib
import select
import socket
import sys

address, PORT = sys.argv[1], 9000
# What a program may read, and finds the same whatever carries its packets. Not among them: sizes of
# buffers and of segments, which depend on the path, and the options that are refused (docs/differences.md).
OPTIONS = [(socket.SOL_SOCKET, name) for name in (
    "SO_TYPE", "SO_PROTOCOL", "SO_DOMAIN", "SO_ERROR", "SO_KEEPALIVE", "SO_REUSEADDR", "SO_REUSEPORT",
    "SO_PRIORITY", "SO_ACCEPTCONN", "SO_OOBINLINE", "SO_BROADCAST", "SO_LINGER", "SO_RCVTIMEO")]
OPTIONS += [(socket.IPPROTO_TCP, name) for name in (
    "TCP_NODELAY", "TCP_CORK", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_CONGESTION",
    "TCP_DEFER_ACCEPT", "TCP_SYNCNT", "TCP_NOTSENT_LOWAT")]
OPTIONS += [(socket.IPPROTO_IP, name) for name in ("IP_TOS", "IP_TTL")]


def ask(command, family=socket.AF_INET):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(20)
    s.connect((address if family == socket.AF_INET else "::ffff:" + address, PORT))
    s.sendall(command.encode() + b"\n")
    return s


def read_all(s):
    with s.makefile("rb") as f:
        return f.read()


def show_options(what, s):
    for level, name in OPTIONS:
        number = {"SO_PROTOCOL": 38, "SO_DOMAIN": 39}.get(name) or getattr(socket, name)
        try:
            print(what, name, s.getsockopt(level, number, 16))
        except OSError as error:
            print(what, name, error)


def names():
    for family in (socket.AF_INET, socket.AF_INET6):
        s = ask("whoami", family)
        print("names", s.getsockname(), s.getpeername())
        print("server says", read_all(s).decode().strip())
        show_options("connected", s)


def half_close():
    s = ask("count")
    total = 0
    for i in range(64):
        total += s.sendmsg([b"x" * 1000, b"y" * (i * 100)])
    s.sendall(b"z" * 100000)
    s.shutdown(socket.SHUT_WR)
    print("sent", total + 100000, "then server counted", read_all(s).decode().strip())
    try:
        s.send(b"more")
    except OSError as error:
        print("after shutdown:", errno.errorcode[error.errno])


def read_file():
    s = ask("sendfile")
    print("peek", s.recv(1, socket.MSG_PEEK), s.recv(1))
    print("file", hashlib.sha256(read_all(s)).hexdigest())


def reset():
    s = ask("reset")
    try:
        print("read", s.recv(1))
    except OSError as error:
        print("reset:", errno.errorcode[error.errno])
    try:
        s.getpeername()
        print("still has a peer")
    except OSError as error:
        print("after reset:", errno.errorcode[error.errno])


def urgent():
    s = ask("urgent")
    out = b""
    while data := s.recv(10):
        out += data
    print("urgent: in line", out)


def timeout():
    s = ask("silent")
    s.settimeout(0.05)
    try:
        s.recv(1)
    except TimeoutError as error:
        print("timeout:", error)
    s.close()


def non_blocking():
    s = socket.socket()
    s.setblocking(False)
    print("connect_ex", errno.errorcode.get(s.connect_ex((address, PORT)), 0))
    print("writable", len(select.select([], [s], [], 20)[1]), "error", s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    print("connect_ex again", errno.errorcode.get(s.connect_ex((address, PORT)), 0), errno.errorcode.get(s.connect_ex((address, PORT)), 0))
    s.setblocking(True)
    s.sendall(b"whoami\n")
    print("server says", read_all(s).decode().strip())


def fresh():
    s = socket.socket()
    show_options("fresh", s)
    print("unbound", s.getsockname())
    try:
        s.getpeername()
    except OSError as error:
        print("unconnected:", errno.errorcode[error.errno])


fresh()
names()
half_close()
read_file()
reset()
urgent()
timeout()
non_blocking()

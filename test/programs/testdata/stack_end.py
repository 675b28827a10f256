"""HOST PORT: an echo server. Looks for the other end of a socket's pair in the socket, as a program
that would hold up whoever reads it does, and says whether it has found it."""

import errno
import socket
import sys


def look(s, flags):
    try:
        _, control, _, _ = s.recvmsg(64, 64, flags | socket.MSG_DONTWAIT)
    except OSError as e:
        return errno.errorcode[e.errno]
    return "found" if control else "nothing"


s = socket.socket()
before = look(s, socket.MSG_PEEK), look(s, 0)
try:  # to a port where nobody listens: the agent has the other end meanwhile
    s.connect((sys.argv[1], 1))
except OSError as e:
    refused = errno.errorcode[e.errno]
failed = look(s, socket.MSG_PEEK)
s.connect((sys.argv[1], int(sys.argv[2])))
after = look(s, socket.MSG_PEEK)
s.sendall(b"x")
print(*before, refused, failed, after, s.recv(1).decode())

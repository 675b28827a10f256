"""Echoes what it gets at the ports in argv, and says at which port a connection has ended, and how,
until the end of its input."""

import errno
import socket
import sys
import threading


def converse(port, c):
    how = "EOF"
    try:
        while data := c.recv(65536):
            c.sendall(data)
    except OSError as e:
        how = errno.errorcode.get(e.errno, str(e))
    print("ended", port, how, flush=True)


def listen(port):
    with socket.create_server(("", port), backlog=64) as listener:
        while True:
            threading.Thread(target=converse, args=(port, listener.accept()[0]), daemon=True).start()


for port in sys.argv[1:]:
    threading.Thread(target=listen, args=(int(port),), daemon=True).start()
sys.stdin.read()

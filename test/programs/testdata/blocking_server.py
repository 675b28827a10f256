"""Carries out one command a connection, blocking, in two processes that share a listener.

Prints who connected. The commands are the first line of a connection: see serve().
"""
import os
import signal
import socket
import struct
import sys
import tempfile

PORT = 9000


def serve(conn, peer):
    file = conn.makefile("rb")
    command = file.readline().decode().strip()
    print("peer", peer, "own", conn.getsockname()[:2], command)
    if command == "whoami":
        conn.sendall(f"{peer} {conn.getpeername()} {conn.getsockname()}\n".encode())
    elif command == "count":  # until the other end has sent all
        conn.sendall(b"%d bytes\n" % len(file.read()))
    elif command == "sendfile":
        with tempfile.TemporaryFile() as f:
            f.write(bytes(i % 251 for i in range(1 << 20)))
            f.seek(0)
            conn.sendfile(f)
    elif command == "reset":
        conn.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif command == "urgent":
        conn.sendall(b"abc")
        conn.send(b"!", socket.MSG_OOB)
    elif command == "silent":
        file.read()
    conn.close()
    file.close()


def try_privileged():
    with socket.socket() as s:
        try:
            s.bind(("", 80))
            print("bound port 80")
        except OSError as error:
            print("bind port 80:", error)


def main():
    listener = socket.create_server(("", PORT), backlog=16)
    try_privileged()
    try:
        socket.create_server(("", PORT))
        print("bound twice")
    except OSError as error:
        print("bind again:", error.errno)
    for _ in range(2):
        if os.fork() == 0:
            while True:
                serve(*listener.accept())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    print("ready", listener.getsockname())
    try:
        signal.pause()
    finally:  # children that live on would keep the listener
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


main()

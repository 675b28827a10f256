"""Sends a server bytes over blocking sockets, which answers with their digest.

Without an address: the server, of one connection. With one: the client.
"""

import hashlib
import socket
import sys

PORT, SIZE = 7175, 3 << 20


def serve():
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", PORT))
        listener.listen()
        connection, _ = listener.accept()
    with connection:
        digest, left = hashlib.sha256(), SIZE
        while left:
            part = connection.recv(65536)
            if not part:
                sys.exit(f"{left} bytes are missing")
            digest.update(part)
            left -= len(part)
        connection.sendall(digest.hexdigest().encode())
        connection.recv(1)  # the end of the client


def send(address):
    data = bytes(i * 7 & 255 for i in range(SIZE))
    with socket.create_connection((address, PORT)) as connection:
        connection.sendall(data)
        got = b""
        while len(got) < 64:
            got += connection.recv(64) or sys.exit("the server has ended")
        if got.decode() != hashlib.sha256(data).hexdigest():
            sys.exit("other bytes have come")


if len(sys.argv) > 1:
    send(sys.argv[1])
else:
    serve()

"""Sends 3 MB to itself by an address, as its client and as its server, by send() and by sendfile(),
with send buffers of several sizes: `stack_buffers.py ADDRESS`. Prints what arrived of what went."""

import hashlib
import os
import socket
import sys
import tempfile
import threading

DATA = os.urandom(3_000_000)
LIMIT = 20  # seconds for one of them


def digest_of(c):
    digest = hashlib.sha256()
    while data := c.recv(65536):
        digest.update(data)
    return digest.hexdigest()


def write(c, how, size):
    if size:
        c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        assert c.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= size
    if how == "send":
        c.sendall(DATA)
    else:
        with tempfile.TemporaryFile() as file:
            file.write(DATA)
            file.flush()
            done = 0
            while done < len(DATA):
                done += os.sendfile(c.fileno(), file.fileno(), done, len(DATA) - done)
    c.shutdown(socket.SHUT_WR)


listener = socket.create_server(("", 0), backlog=8)
where = (sys.argv[1], listener.getsockname()[1])
for how in ("send", "sendfile"):
    for size in (0, 4096, 65536, 200_000):
        for writer in ("client", "server"):
            client = socket.create_connection(where)
            server = listener.accept()[0]
            ends = {"client": (client, server), "server": (server, client)}[writer]
            thread = threading.Thread(target=write, args=(ends[0], how, size), daemon=True)
            thread.start()
            ends[1].settimeout(LIMIT)
            try:
                whole = digest_of(ends[1]) == hashlib.sha256(DATA).hexdigest()
            except TimeoutError:
                whole = False
            print(how, size, writer, "arrived" if whole else "HANGS", flush=True)
            if whole:
                thread.join()
            client.close()
            server.close()

"""Echoes what it gets at port argv[1], to many at a time, without a word of whom."""

import socket
import sys
import threading


def serve(c):
    with c:
        while True:
            try:
                data = c.recv(65536)
                if not data:
                    return
                c.sendall(data)
            except OSError as e:
                print("ended", e.errno, flush=True)
                return


listener = socket.create_server(("", int(sys.argv[1])), backlog=64)
print("listens", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

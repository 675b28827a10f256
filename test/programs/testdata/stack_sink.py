"""Reads all that comes by one connection after the other."""
import socket
import sys

server = socket.create_server(("", int(sys.argv[1])))
while True:
    conn, _ = server.accept()
    while conn.recv(1 << 16):
        pass

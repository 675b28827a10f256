"""many_client.py ADDRESS COUNT: opens COUNT connections to many_server.py, then ends them all, first."""
import socket
import sys

address, count = sys.argv[1], int(sys.argv[2])
conns, ports = [], set()
for _ in range(count):
    conn = socket.create_connection((address, 9200), timeout=10)
    conns.append(conn)
    ports.add(int(conn.makefile().readline()))
print(len(conns), "connections from", len(ports), "ports")
for conn in conns:
    conn.close()

"""Talks memcached's text protocol: memcached_client.py ADDRESS PORT. Prints what it was answered."""
import hashlib
import socket
import sys

CONNECTIONS = 40
address, port = sys.argv[1], int(sys.argv[2])


class Client:
    def __init__(self):
        self.sock = socket.create_connection((address, port), timeout=20)
        self.file = self.sock.makefile("rwb")

    def ask(self, line, data=None):
        self.file.write(line.encode() + b"\r\n")
        if data is not None:
            self.file.write(data + b"\r\n")
        self.file.flush()
        return self.file.readline().decode().strip()

    def get(self, key):
        head = self.ask("get " + key)
        if head == "END":
            return None
        data = self.file.read(int(head.split()[3]) + 2)[:-2]
        assert self.file.readline() == b"END\r\n"
        return data


clients = [Client() for _ in range(CONNECTIONS)]
for i, c in enumerate(clients):
    value = bytes((i + j) % 251 for j in range(1 + i * 20000))
    print("set", i, c.ask(f"set key{i} 0 0 {len(value)}", value))
for i in range(CONNECTIONS):
    value = clients[-1 - i].get(f"key{i}")
    print("get", i, len(value), hashlib.sha256(value).hexdigest())
first = clients[0]
print("missing:", first.get("nothing"))
print("counter:", first.ask("set n 0 0 1", b"0"), first.ask("incr n 41"), first.ask("incr n 1"))
print("delete:", first.ask("delete n"), first.get("n"))
print("nonsense:", first.ask("nonsense"))

# Whom the server says it talks to, and where it listens.
line, seen = first.ask("stats conns"), []
while line != "END":
    if "addr" in line:
        seen.append(line.split(" ", 1)[1].split(":", 1)[1])
    line = first.file.readline().decode().strip()
print("\n".join(sorted("conn " + s.rsplit(":", 1)[0] + (":11211" if s.endswith(":11211") else ":*") for s in seen)))
names = [c.sock.getsockname()[0] + " -> %s:%d" % c.sock.getpeername() for c in clients]
print("\n".join(names))

"""Load for TestUpgrade. `serve PORT` echoes. `load COUNT ADDRESS PORT` keeps COUNT connections with traffic on all of
them, and makes new ones one after the other; both until the input ends. A line of input asks how far it is."""
import json, select, socket, sys, threading, time

TURN = 50  # live connections that are tried at once

def serve(port):
    l = socket.create_server(("0.0.0.0", port), backlog=4096)
    l.setblocking(False)
    ep, peers = select.epoll(), {}
    ep.register(l, select.EPOLLIN)
    print("listening", flush=True)
    while True:
        for fd, _ in ep.poll():
            if fd != l.fileno():
                try:
                    data = peers[fd].recv(4096)
                    if data:
                        peers[fd].sendall(data)
                        continue
                except ConnectionError:
                    pass
                peers.pop(fd).close()
                continue
            try:
                while True:
                    c, _ = l.accept()
                    peers[c.fileno()] = c
                    ep.register(c, select.EPOLLIN)
            except BlockingIOError:
                pass

class Load:
    def __init__(self, where, count):
        self.where, self.end = where, False
        self.connects = self.exchanges = 0
        self.connect = self.exchange = 0.0  # the longest, in seconds
        self.failed = []
        self.live = [socket.create_connection(where) for _ in range(count)]

    def guard(self, what, step):
        try:
            while not self.end:
                step()
        except Exception as e:
            self.failed.append(f"{what}: {e!r}")

    def talk(self):
        """Says something on every live connection, some at a time, and waits for the answers."""
        for i in range(0, len(self.live), TURN):
            began = time.monotonic()
            for c in self.live[i:i + TURN]:
                c.sendall(b"live")
            for c in self.live[i:i + TURN]:
                got = b""
                while len(got) < 4:
                    part = c.recv(4 - len(got))
                    if not part:
                        raise EOFError("closed by the peer")
                    got += part
                assert got == b"live", got
                self.exchanges += 1
            self.exchange = max(self.exchange, time.monotonic() - began)
            time.sleep(0.02)

    def call(self):
        began = time.monotonic()
        with socket.create_connection(self.where) as s:
            s.sendall(b"new")
            assert s.recv(3) == b"new"
        self.connect = max(self.connect, time.monotonic() - began)
        self.connects += 1
        time.sleep(0.005)

    def report(self):
        print(json.dumps({k: getattr(self, k) for k in ("connects", "exchanges", "connect", "exchange", "failed")}), flush=True)

def load(count, address, port):
    l = Load((address, port), count)
    threads = [threading.Thread(target=l.guard, args=a) for a in (("live connection", l.talk), ("new connection", l.call))]
    for t in threads:
        t.start()
    l.report()
    for _ in sys.stdin:
        l.report()
    l.end = True
    for t in threads:
        t.join()
    l.report()

if sys.argv[1] == "serve":
    serve(int(sys.argv[2]))
else:
    load(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

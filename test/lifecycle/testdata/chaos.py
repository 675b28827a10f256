"""Load for TestChaos. `serve ADDRESS PORT` answers; `load ADDRESS PORT STREAMS ...` keeps that many streams to each
address, on which both ends send without pause, and makes one short connection after the other. A line of input asks how
far it is; the end of the input ends it: then both ends of every stream say how much they have sent, and all of it must
have come.

A stream is made of blocks of 128 numbers that count up, so that a byte too many, too few or out of its place is seen."""
import json, os, socket, struct, sys, threading, time

COUNTS, PAUSE = 128, 0.05
BLOCK, END = 8 * COUNTS, (1 << 64) - 1
FORM = struct.Struct(f"!{COUNTS}Q")
IDLE = 120  # seconds without a byte, after which a call fails

failures, lock = [], threading.Lock()

def fail(what, error):
    with lock:
        failures.append(f"{time.time():.3f} {what}: {error!r}")
        print(json.dumps({"failed": failures[-1]}), flush=True)

def patient(s):
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        s.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", IDLE, 0))
    return s

def dial(address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    s = patient(socket.socket(family, socket.SOCK_STREAM))
    s.connect((address, port))
    return s

def receive(s, n):
    got = bytearray()
    while len(got) < n:
        part = s.recv(n - len(got))
        if not part:
            raise EOFError(f"closed by the peer after {len(got)} of {n} bytes")
        got += part
    return bytes(got)

class Stream:
    """One end of a stream. The end that has dialled says when it is over, the other one follows."""
    def __init__(self, s, name, ending):
        self.s, self.name, self.ending = s, name, ending
        self.sent = self.received = 0
        self.gap = 0.0  # the longest without a block, in seconds
        self.threads = [threading.Thread(target=self.guard, args=a, daemon=True) for a in (("send", self.send), ("receive", self.take))]
        for t in self.threads:
            t.start()

    def guard(self, what, f):
        try:
            f()
        except Exception as e:
            fail(f"{self.name}: {what} after {self.sent} blocks sent and {self.received} received", e)
            self.ending.set()

    def send(self):
        n = 0
        while not self.ending.wait(PAUSE):
            self.s.sendall(FORM.pack(*range(n, n + COUNTS)))
            n += COUNTS
            self.sent += 1
        self.s.sendall(struct.pack("!QQ", END, n).ljust(BLOCK, b"\0"))
        self.s.shutdown(socket.SHUT_WR)

    def take(self):
        n, last = 0, time.monotonic()
        while True:
            block = receive(self.s, BLOCK)
            now = time.monotonic()
            self.gap, last = max(self.gap, now - last), now
            got = FORM.unpack(block)
            if got[0] == END:
                break
            if got != tuple(range(n, n + COUNTS)):
                raise ValueError(f"at number {n} of the stream: {got[0]} ... {got[-1]}")
            n += COUNTS
            self.received += 1
        if got[1] != n:
            raise ValueError(f"the peer has sent {got[1]} numbers, {n} have come")
        if self.s.recv(1):
            raise ValueError("more than the peer has sent")
        self.ending.set()

    def join(self, timeout=None):
        for t in self.threads:
            t.join(timeout)
            if t.is_alive():
                fail(self.name, TimeoutError("does not end"))
        self.s.close()

def answer(s):
    with s:
        kind = receive(s, 4)
        if kind == b"call":
            s.sendall(receive(s, 100))
            s.recv(1)
            return
        stream = Stream(s, "accepted", threading.Event())
        stream.join()

def serve(address, port):
    l = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=1024,
                             dualstack_ipv6=address == "::")
    print("listening", flush=True)

    def guard(s, peer):
        try:
            answer(patient(s))
        except Exception as e:
            fail(f"connection of {peer[0]}", e)
    while True:
        s, peer = l.accept()
        threading.Thread(target=guard, args=(s, peer), daemon=True).start()

class Load:
    def __init__(self):
        self.end, self.streams, self.calls, self.slowest = threading.Event(), [], {}, 0.0

    def stream(self, address, port):
        s = dial(address, port)
        s.sendall(b"data")
        self.streams.append(Stream(s, f"stream to {address}", self.end))

    def call(self, address, port):
        where = f"{address}:{port}"
        self.calls[where] = 0
        while not self.end.wait(PAUSE):
            began, data = time.monotonic(), os.urandom(100)
            try:
                with dial(address, port) as s:
                    s.sendall(b"call" + data)
                    if receive(s, 100) != data:
                        raise ValueError("another answer")
            except Exception as e:
                fail(f"call to {where} after {time.monotonic() - began:.3f} s and {self.calls[where]} others", e)
            self.calls[where] += 1
            self.slowest = max(self.slowest, time.monotonic() - began)

    def report(self):
        print(json.dumps({"calls": min(self.calls.values()), "allcalls": sum(self.calls.values()), "slowest": self.slowest,
                          "streams": len(self.streams), "blocks": min(s.received for s in self.streams),
                          "allblocks": sum(s.received for s in self.streams), "gap": max(s.gap for s in self.streams),
                          "failures": failures}), flush=True)

def load(targets):
    l, callers = Load(), []
    for address, port, streams in zip(targets[::3], targets[1::3], targets[2::3]):
        for _ in range(int(streams)):
            l.stream(address, int(port))
        callers.append(threading.Thread(target=l.call, args=(address, int(port)), daemon=True))
    for c in callers:
        c.start()
    while not all(l.calls.get(f"{a}:{p}") for a, p in zip(targets[::3], targets[1::3])):
        time.sleep(PAUSE)
    l.report()
    for _ in sys.stdin:
        l.report()
    l.end.set()
    for c in callers:
        c.join(IDLE)
    for s in l.streams:
        s.join(IDLE)
    l.report()

if sys.argv[1] == "serve":
    serve(sys.argv[2], int(sys.argv[3]))
else:
    load(sys.argv[2:])

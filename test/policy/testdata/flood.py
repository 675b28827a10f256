# flood.py sink PORT CONNECTIONS   counts what it receives; "measure SECONDS" on its input prints the rate in bits a second
# flood.py source HOST PORT CONNECTIONS [FROM|-] [hostile]   sends as fast as it can
import socket, struct, sys, threading, time


def sink(port, n):
    s = socket.socket(socket.AF_INET6)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    s.bind(("::", port))
    s.listen(64)
    print("listening", flush=True)
    total = [0] * n

    def read(i):
        c, _ = s.accept()
        b = bytearray(1 << 18)
        while True:
            got = c.recv_into(b)
            if not got:
                return
            total[i] += got

    for i in range(n):
        threading.Thread(target=read, args=(i,), daemon=True).start()
    for line in sys.stdin:
        words = line.split()
        first, began = list(total), time.monotonic()
        time.sleep(float(words[1]))
        last, took = list(total), time.monotonic() - began
        print(words[2], *(int((b - a) * 8 / took) for a, b in zip(first, last)), "end", flush=True)


# What a program may try to send faster or in front of others. What is refused is refused.
def hostile(s):
    for level, name, value in [
        (socket.SOL_SOCKET, 47, struct.pack("=Q", 1 << 40)),  # SO_MAX_PACING_RATE
        (socket.SOL_SOCKET, 36, struct.pack("=I", 0x48640001)),  # SO_MARK
        (socket.SOL_IP, socket.IP_TOS, struct.pack("=I", 0xE0)),
        (socket.SOL_SOCKET, socket.SO_PRIORITY, struct.pack("=I", 0x48640000)),
    ]:
        try:
            s.setsockopt(level, name, value)
        except OSError as e:
            print("refused", level, name, e, flush=True)
    print("tos", s.getsockopt(socket.SOL_IP, socket.IP_TOS), flush=True)
    print("priority", s.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY), flush=True)


def source(host, port, n, bound, options):
    data = bytes(1 << 17)

    def write():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        s = socket.socket(family)
        if bound != "-":
            s.bind((bound, 0))
        if "hostile" in options:
            hostile(s)
        s.connect((host, port))
        print("connected", flush=True)
        while True:
            s.sendall(data)

    for _ in range(n):
        threading.Thread(target=write, daemon=True).start()
    sys.stdin.read()


if sys.argv[1] == "sink":
    sink(int(sys.argv[2]), int(sys.argv[3]))
else:
    source(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), (sys.argv[5:] + ["-"])[0], sys.argv[6:])

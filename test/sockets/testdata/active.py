"""Active transfers as of FTP: `serve FAMILY PORT` connects from port 20 to the port that its client names, `fetch ADDR PORT TO`
names the same one every time. Whoever closes first has the connection in TIME_WAIT, and the next one takes its place."""
import socket, sys

ROUNDS = 4


def listener(family, addr, port):
    s = socket.socket(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind((addr, port))
    s.listen(1)
    s.settimeout(5)
    return s


def serve(family, port):
    control = listener(family, "", port)
    control.settimeout(60)
    print("listening", flush=True)
    c, _ = control.accept()
    lines = c.makefile("rw")
    for line in lines:
        to, first = line.split()
        s = socket.socket(family)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.settimeout(5)
        try:
            s.bind((c.getsockname()[0], 20))
            s.connect((c.getpeername()[0], int(to)))
            s.sendall(b"data")
            if first == "client":
                s.recv(1)
            answer = "sent"
        except OSError as e:
            answer = repr(e)
        s.close()
        print(answer, file=lines, flush=True)


def fetch(addr, port, to):
    c = socket.create_connection((addr, port), 5)
    lines = c.makefile("rw")
    for first in ("server", "client"):
        for _ in range(ROUNDS):
            l = listener(c.family, c.getsockname()[0], to)
            print(to, first, file=lines, flush=True)
            try:
                d, peer = l.accept()
                d.settimeout(5)
                got = d.recv(4, socket.MSG_WAITALL)
                if first == "server":
                    got += d.recv(1)
                d.close()
                seen = "%s from %s" % (got.decode(), peer[1])
            except OSError as e:
                seen = repr(e)
            l.close()
            print(first, "closes:", lines.readline().strip(), seen)
        to += 1


if sys.argv[1] == "serve":
    serve(socket.AF_INET6 if sys.argv[2] == "6" else socket.AF_INET, int(sys.argv[3]))
else:
    fetch(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

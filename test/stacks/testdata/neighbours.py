"""Two programs that talk over TCP in all ways that programs do: server, or client ADDRESS.

What they print must be the same whether or not their bytes go through memory.
"""
import array, ctypes, fcntl, hashlib, os, select, signal, socket, struct, subprocess, sys, tempfile, threading, termios, time

PORT = 7100


def exactly(s, n, flags=0):
    out = b""
    while len(out) < n:
        got = s.recv(n - len(out), flags)
        if not got:
            raise EOFError(f"{len(out)} of {n}")
        out += got
    return out


def warm(s, first):
    """Exchanges enough for both libraries to ask for lanes, and a little more."""
    for i in range(40):
        if first:
            s.sendall(b"%08d" % i)
        assert exactly(s, 8) == b"%08d" % i
        if not first:
            s.sendall(b"%08d" % i)


def pattern(n, seed):
    block = hashlib.sha256(str(seed).encode()).digest() * 4096
    return (block * (n // len(block) + 1))[:n]


def digest(s, n, size=65536):
    h = hashlib.sha256()
    while n:
        got = s.recv(min(n, size))
        if not got:
            break
        h.update(got)
        n -= len(got)
    return h.hexdigest()[:16], n


def queued(s):
    n = array.array("i", [0])
    fcntl.ioctl(s, termios.FIONREAD, n)
    return n[0]


def error(f, *args):
    try:
        return f(*args)
    except OSError as e:
        return type(e).__name__
    except EOFError as e:
        return f"EOF {e}"


def settle(s, n):
    """Waits until n bytes lie there."""
    while queued(s) < n:
        time.sleep(0.001)


# Each scenario is what the server does and what the client does, with a connection that is warm.

def bulk(s, server):
    if server:
        return digest(s, 64 << 20)
    s.sendall(pattern(64 << 20, 1))


def back(s, server):
    if server:
        s.sendall(pattern(32 << 20, 2))
    else:
        return digest(s, 32 << 20, 100000)


def both(s, server):
    t = threading.Thread(target=s.sendall, args=(pattern(16 << 20, server),))
    t.start()
    out = digest(s, 16 << 20, 7777)
    t.join()
    return out


def slow_reader(s, server):
    """A writer that does not wait stops being writable, and is again when the reader has read."""
    if not server:
        s.settimeout(None)
        assert s.recv(1) == b"!"
        time.sleep(0.2)
        out = digest(s, 48 << 20)
        return out
    s.setblocking(False)
    data, at, full = pattern(48 << 20, 3), 0, False
    p = select.epoll()
    p.register(s, select.EPOLLOUT)
    s.send(b"!")
    while at < len(data):
        try:
            at += s.send(data[at:at + 200000])
        except BlockingIOError:
            full = True
            p.poll()
    s.setblocking(True)
    return full


def peek(s, server):
    if server:
        s.sendall(b"hello world")
        return s.recv(4)
    settle(s, 11)
    out = [s.recv(5, socket.MSG_PEEK), s.recv(100, socket.MSG_PEEK), queued(s), s.recv(5), queued(s), s.recv(6, socket.MSG_WAITALL), queued(s)]
    out.append(error(s.recv, 1, socket.MSG_DONTWAIT))
    s.sendall(b"done")
    return out


def waitall(s, server):
    if server:
        for i in range(10):
            s.sendall(bytes([65 + i]) * 1000)
            time.sleep(0.005)
    else:
        return s.recv(10000, socket.MSG_WAITALL)[::1000]


def vectors(s, server):
    if server:
        a, b = bytearray(5), bytearray(7)
        settle(s, 12)
        n, anc, flags, address = s.recvmsg_into([a, b])
        return n, bytes(a), bytes(b), anc, flags
    s.sendmsg([b"abc", b"", b"defg", b"hijkl"])


def ready(s, server):
    """poll, select and epoll, level and edge triggered, say when there is something to read."""
    if server:
        for _ in range(4):
            assert s.recv(1) == b"n"
            s.sendall(b"xyz")
        return s.recv(2)
    out, p, level, edge = [], select.poll(), select.epoll(), select.epoll()
    p.register(s, select.POLLIN)
    level.register(s, select.EPOLLIN)
    edge.register(s, select.EPOLLIN | select.EPOLLET)
    edge.poll(0)
    for wait in (lambda: p.poll(5000), lambda: select.select([s], [], [], 5)[0], lambda: level.poll(5), lambda: edge.poll(5)):
        s.sendall(b"n")
        out.append(bool(wait()))
        settle(s, 3)
        out.append(s.recv(2))
        out.append(bool(p.poll(0)) and bool(level.poll(0)))
        out.append(s.recv(10))
        out.append((p.poll(0), select.select([s], [], [], 0)[0], level.poll(0)))
        edge.poll(0)
    s.sendall(b"ok")
    return out


def timeout(s, server):
    if server:
        return s.recv(2)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50000))
    began = time.monotonic()
    out = error(s.recv, 1), time.monotonic() - began > 0.04
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    s.sendall(b"ok")
    return out


def interrupted(s, server):
    if server:
        return s.recv(2)

    def ring(*_):
        raise InterruptedError
    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    out = error(s.recv, 1)
    signal.signal(signal.SIGALRM, old)
    s.sendall(b"ok")
    return out


def half_close(s, server):
    if server:
        s.sendall(pattern(3 << 20, 4))
        s.shutdown(socket.SHUT_WR)
        return error(s.send, b"more"), digest(s, 5 << 20)
    out = digest(s, 4 << 20)
    s.sendall(pattern(2 << 20, 5))
    s.shutdown(socket.SHUT_WR)
    return out


def descriptors(s, server):
    """A duplicate is the connection, too, in this process and its children."""
    if server:
        return exactly(s, 9), s.sendall(b"answer")
    d = s.dup()
    d.sendall(b"one")
    pid = os.fork()
    if pid == 0:
        d.sendall(b"two")
        os._exit(0)
    os.waitpid(pid, 0)
    s.sendall(b"tri")
    d.close()
    return exactly(s, 6)


def child_reads(s, server):
    if server:
        s.sendall(pattern(1 << 20, 6))
        return exactly(s, 2)
    r, w = os.pipe()
    if os.fork() == 0:
        os.write(w, str(digest(s, 1 << 19)).encode())
        os._exit(0)
    os.wait()
    out = os.read(r, 100), digest(s, 1 << 19)
    s.sendall(b"ok")
    return out


def files(s, server):
    if server:
        return digest(s, 3 << 20), exactly(s, 3)
    with tempfile.TemporaryFile() as f:
        f.write(pattern(3 << 20, 7))
        f.flush()
        at = 0
        while at < 3 << 20:
            at += os.sendfile(s.fileno(), f.fileno(), at, (3 << 20) - at)
    s.sendall(b"end")


def spliced(s, server):
    if server:
        s.sendall(pattern(100000, 8))
        return exactly(s, 2)
    r, w = os.pipe()
    h, left = hashlib.sha256(), 100000
    while left:
        n = os.splice(s.fileno(), w, min(left, 30000))
        h.update(os.read(r, n))
        left -= n
    s.sendall(b"ok")
    return h.hexdigest()[:16]


def urgent(s, server):
    if server:
        s.sendall(b"before")
        s.send(b"!", socket.MSG_OOB)
        s.sendall(b"after")
        return exactly(s, 2)
    out = exactly(s, 6)
    select.select([], [], [s])
    out = out, s.recv(1, socket.MSG_OOB), exactly(s, 5)
    s.sendall(b"ok")
    return out


def executed(s, server):
    """A program that knows nothing of the library gets the connection as its standard streams."""
    if server:
        s.sendall(b"ready")
        out = exactly(s, 6)
        s.sendall(b"line\n")
        return out, exactly(s, 5)
    exactly(s, 5)
    return subprocess.run(["sh", "-c", "printf '<got>\\n'; head -n1"], stdin=s.fileno(), stdout=s.fileno(), env={"PATH": os.environ["PATH"]}).returncode


def passed(s, server):
    """As executed, by SCM_RIGHTS."""
    if server:
        s.sendall(b"ready")
        return exactly(s, 4)
    exactly(s, 5)
    a, b = socket.socketpair()
    child = subprocess.Popen([sys.executable, "-c", "import socket;s=socket.socket(fileno=0);c=socket.recv_fds(s,1,1)[1][0];socket.socket(fileno=c).sendall(b'pass')"], stdin=b, env={"PATH": os.environ["PATH"]})
    socket.send_fds(a, [b"x"], [s.fileno()])
    return child.wait()


def reset(s, server):
    if server:
        s.sendall(b"unread")
        out = error(exactly, s, 1)
        return out
    settle(s, 6)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def killed(s, server):
    """What a program wrote before it was killed arrives."""
    if server:
        return digest(s, 1 << 20), s.recv(1)
    if os.fork() == 0:
        s.sendall(pattern(600000, 9))
        os.kill(os.getpid(), 9)
    os.wait()


def stream(s, server):
    """Both send until the connection is cut."""
    def send():
        while True:
            s.sendall(bytes(200000))
            time.sleep(0.005)
    t = threading.Thread(target=error, args=(send,))
    t.start()
    while error(s.recv, 100000) not in (b"", "ConnectionResetError", "ConnectionAbortedError"):
        pass
    t.join()
    return "cut"


def pieces(s, server):
    """Both send small pieces until the connection is cut."""
    def receive():
        while error(s.recv, 100000) not in (b"", "ConnectionResetError", "ConnectionAbortedError"):
            pass
    t = threading.Thread(target=receive)
    t.start()
    while isinstance(error(s.sendall, bytes(2000)), type(None)):
        time.sleep(0.0001)
    t.join()
    return "cut"


def stuck(s, server):
    """One sends small pieces that the other does not take, until the connection is cut."""
    if server:
        p = select.poll()
        p.register(s, 0)
        return "cut" if p.poll(60000) else "no end"
    while not error(s.sendall, bytes(2000)):
        pass
    return "cut"


def full_pipe(s, server):
    if server:
        s.sendall(b"p" * 1000)
        return exactly(s, 4)
    settle(s, 1000)
    out, into = os.pipe()
    os.write(into, b"f" * fcntl.fcntl(into, fcntl.F_GETPIPE_SZ))
    full = error(os.splice, s.fileno(), into, 1000, None, None, os.SPLICE_F_NONBLOCK)
    os.read(out, 65536)
    moved = os.splice(s.fileno(), into, 1000, None, None, os.SPLICE_F_NONBLOCK)
    s.sendall(b"done")
    for fd in out, into:
        os.close(fd)
    return full, moved


def not_duplicated(s, server):
    if server:
        s.sendall(b"n" * 1000)
        return exactly(s, 4)
    settle(s, 1000)
    got = error(os.dup2, 60000, s.fileno()), exactly(s, 1000) == b"n" * 1000
    s.sendall(b"done")
    return got


def stream_closes(s, server):
    """A number that a stream has closed is a file's next."""
    if server:
        s.sendall(b"s" * 1000)
        return exactly(s, 4), s.recv(1)
    exactly(s, 1000)
    s.sendall(b"done")
    c = ctypes.CDLL(None)
    c.fdopen.restype, c.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    number = s.detach()
    c.fclose(c.fdopen(number, b"r"))
    f = os.open("/proc/self/comm", os.O_RDONLY)
    try:
        return f == number, error(os.read, f, 6)
    finally:
        os.close(f)


def two_processes_write(s, server):
    n = 100 * 20000
    if server:
        return digest(s, 2 * n)
    child = os.fork()
    said = {error(s.sendall, b"w" * 100) for _ in range(20000)}
    if not child:
        os._exit(said != {None})
    return said, os.waitpid(child, 0)[1]


def small(s, server):
    """Many small sends in a row, answered by none, and the end behind them."""
    n = 5000 * 1000
    if server:
        got = digest(s, n + 1)
        s.sendall(b"done")
        return got
    data = pattern(1000, "small")
    for _ in range(n // 1000):
        s.sendall(data)
    s.shutdown(socket.SHUT_WR)
    return error(s.sendall, b"x"), exactly(s, 4), s.recv(1)


def send_by_edges(s, data, waits=lambda: None):
    """Small sends that never wait, of a program that waits for edges. Gives how often it waited; None: in vain."""
    s.setblocking(False)
    sent = n = 0
    with select.epoll() as e:
        e.register(s, select.EPOLLOUT | select.EPOLLET)
        while sent < len(data):
            try:
                sent += s.send(data[sent:sent + 1000])
            except BlockingIOError:
                waits()
                if not e.poll(20):
                    return None
                n += 1
    return n


def edges(s, server):
    """A program that waits for edges goes on when its peer reads, which it does once the program waits."""
    n = 16000 * 1000  # more than all buffers have room for
    if server:
        with socket.create_server(("0.0.0.0", 0)) as told:
            s.sendall(b"%05d" % told.getsockname()[1])
            with told.accept()[0] as client:
                client.recv(1)
        return digest(s, n)
    with socket.create_connection((s.getpeername()[0], int(exactly(s, 5)))) as tells:
        n = send_by_edges(s, pattern(n, "edges"), tells.close)
    return "no edge" if n is None else n > 0


def stalled(s, server):
    """As edges, of a socket that has room, and a service that stops before the ring is full. Says whether a send waited."""
    n = 1500 * 1000
    if server:
        return digest(s, n)
    print("stop", flush=True)
    sys.stdin.readline()
    n = send_by_edges(s, pattern(n, "stalled"), lambda: print("no room", flush=True))
    return "no edge" if n is None else "sent"


def mixed(s, server):
    """Small and large sends, from a file and not, of two threads after each other."""
    n = 40 * (20 * 500 + 100000)
    if server:
        return digest(s, n)
    with tempfile.TemporaryFile() as f:
        f.write(pattern(100000, "file"))
        for i in range(40):
            def some():
                for _ in range(20):
                    s.sendall(pattern(500, i))
            t = threading.Thread(target=some)
            t.start()
            t.join()
            if i % 2:
                s.sendfile(f, 0, 100000)
            else:
                s.sendall(pattern(100000, i))
    return "sent"


def shut_down(s, server):
    """A send after shutdown fails, though nothing waits to be sent any more and sends were small."""
    n = 200 * 100
    if server:
        got = digest(s, n)
        s.sendall(b"done")
        return got, s.recv(1)
    for _ in range(200):
        s.sendall(b"s" * 100)
    select.select([s], [], [])
    s.shutdown(socket.SHUT_WR)
    return error(s.sendall, b"x"), exactly(s, 4)


def fork_and_shut_down(s, server):
    """What was sent before a fork comes before the end that comes right after it."""
    n = 20000 * 1000
    if server:
        return digest(s, n, 4096), s.recv(1)
    for _ in range(20000):
        s.sendall(b"f" * 1000)
    if os.fork() == 0:
        os._exit(0)
    s.shutdown(socket.SHUT_WR)
    return os.wait()[1], s.recv(1)


def fill(s):
    """Small sends until there is no room."""
    s.setblocking(False)
    while not error(s.sendall, bytes(1000)):
        pass


def linger(s, server):
    """A reset is no later for bytes that wait."""
    if server:
        s.sendall(b"!")  # its names have been asked for
        p = select.poll()
        p.register(s, 0)
        return bool(p.poll(30000))
    exactly(s, 1)
    fill(s)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def numbers(s, server):
    """A file that a program puts at a number that it does not know gets what the program writes there."""
    n = 400 * 100
    if server:
        return digest(s, n), s.recv(1)
    for _ in range(200):
        s.sendall(b"n" * 100)
    with tempfile.TemporaryFile() as f:
        unknown = [n for n in os.listdir("/proc/self/fd") if "eventfd" in (error(os.readlink, "/proc/self/fd/" + n) or "")]
        for n in unknown:
            os.dup2(f.fileno(), int(n))
        for _ in range(200):
            s.sendall(b"n" * 100)
            time.sleep(0.001)
        for n in unknown:
            os.close(int(n))
        return os.fstat(f.fileno()).st_size


def gone(s, server):
    """A program that is killed has sent what its sends took."""
    n = 200 * 1000
    if server:
        return digest(s, n + 1)
    for _ in range(200):
        s.sendall(pattern(1000, "gone"))
    os.kill(os.getpid(), signal.SIGKILL)


SCENARIOS = [bulk, back, both, slow_reader, peek, waitall, vectors, ready, timeout, interrupted, half_close, descriptors, child_reads,
             files, spliced, urgent, executed, passed, reset, killed, full_pipe,
             not_duplicated, stream_closes, two_processes_write, small, edges, mixed, shut_down, fork_and_shut_down, linger, numbers]


def names(s):
    return s.family.name, s.type.name, s.getpeername()[1] == PORT or s.getsockname()[1] == PORT, s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)


def main():
    if sys.argv[1] == "scenarios":
        return print(*[f.__name__ for f in SCENARIOS])
    chosen = [globals()[name] for name in sys.argv[3:]] or SCENARIOS
    server = sys.argv[1] == "server"
    if server:
        l = socket.create_server(("0.0.0.0", PORT))
        print("listens", flush=True)
    else:
        print("listens" if chosen in ([stream], [pieces], [stuck]) else "begins", flush=True)
    for f in chosen:
        s = l.accept()[0] if server else socket.create_connection((sys.argv[2], PORT))
        warm(s, not server)
        seen = f.__name__, names(s) if f not in (stream, pieces, stuck) else ""
        print(*seen, f(s, server), flush=True)
        s.close()


main()

"""Carries out what the test says, a line at a time, and answers each line with one of JSON: the value of an
expression, null for a statement, {"error": "ECONNREFUSED"} for a call that failed."""
import errno, fcntl, hashlib, json, os, resource, select, signal, socket, struct, subprocess, sys, threading, time

AF = {4: socket.AF_INET, 6: socket.AF_INET6}
# What fails to come in so many seconds must not stop the test, and all that comes does, however busy the machine.
PATIENCE = 60
ONE_LINGER = struct.pack("ii", 1, 0)  # close() sends RST


def tcp(family=4):
    s = socket.socket(AF[family], socket.SOCK_STREAM)
    return waits(s, PATIENCE)


def waits(s, seconds):
    """s, whose calls wait for so long, by the kernel's own time-outs: the socket stays blocking."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        s.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
    return s


def listen(family, addr, port, v6only=None, reuseport=False, backlog=64):
    s = tcp(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuseport:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if v6only is not None:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    s.bind((addr, port))
    s.listen(backlog)
    return s


def bound(family, addr, port, v6only=None, reuseaddr=False, reuseport=False):
    s = tcp(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuseaddr)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuseport)
    if v6only is not None:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    s.bind((addr, port))
    return s


def conflicts(port, names, listening=False, **how):
    """What bind() says for each pair of names [family, address, v6only], when the first is bound (and listens)."""
    out = {}
    for first in names:
        for second in names:
            a = bound(*first[:2], port, *first[2:], **how)
            if listening:
                a.listen()
            out[f"{first} then {second}"] = error_of(lambda: bound(*second[:2], port, *second[2:], **how))
            a.close()
    return out


def connect(family, addr, port, source=None):
    s = tcp(family)
    if source:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(source)
    s.connect((addr, port))
    return s


def connect_polled(family, addr, port):
    """A non-blocking connect: its errno, what poll() says, SO_ERROR, and then the socket."""
    s = tcp(family)
    s.setblocking(False)
    first = s.connect_ex((addr, port))
    p = select.poll()
    p.register(s, select.POLLOUT)
    events = p.poll(PATIENCE * 1000)
    failed = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    s.setblocking(True)
    # A connect over lo may be done at once.
    return [errno.errorcode.get(first, first) in ("EINPROGRESS", 0), [e for _, e in events], errno.errorcode.get(failed, failed)], s


def pending(family, addr, port, options=()):
    """A non-blocking connect that has yet to be answered."""
    s = tcp(family)
    for option in options:
        s.setsockopt(*option)
    s.setblocking(False)
    s.connect_ex((addr, port))
    return s


def told(s, timeout=PATIENCE * 1000):
    """What poll() says of a connect in the end, and SO_ERROR."""
    p = select.poll()
    p.register(s, select.POLLOUT)
    events = [e for _, e in p.poll(timeout)]
    failed = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return [events, errno.errorcode.get(failed, failed)]


def names(s):
    return [s.getsockname(), s.getpeername()]


def pattern(n):
    """n bytes that repeat at no power of two."""
    block = b"".join(struct.pack(">I", i * 2654435761 & 0xFFFFFFFF) for i in range(16381))
    return (block * (n // len(block) + 1))[:n]


def digest(b):
    return [len(b), hashlib.sha256(b).hexdigest()[:16]]


def send(s, n):
    """Sends n bytes beside what follows; drained() waits for it."""
    global sender
    sender = threading.Thread(target=s.sendall, args=(pattern(n),), daemon=True)
    sender.start()


def drained():
    sender.join()


def receive(s, n):
    got = bytearray()
    while len(got) < n:
        b = s.recv(min(1 << 18, n - len(got)))
        if not b:
            break
        got += b
    return digest(bytes(got))


def sockopt(s, level, name):
    return s.getsockopt(level, name)


def forked(f, *args):
    """What f(*args) gives in a child process."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(w, json.dumps(f(*args)).encode())
        except OSError as e:
            os.write(w, json.dumps({"error": name_error(e)}).encode())
        finally:
            os._exit(0)
    os.close(w)
    with os.fdopen(r) as f:
        said = f.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def as_user(uid, f, *args):
    """f(*args) as another user; for a forked process."""
    os.setgid(uid)
    os.setuid(uid)
    return f(*args)


def serve_forked(make, n, answer=None):
    """Starts n processes that each answer connections of the listener make() gives with their number."""
    global served
    served = []
    for i in range(n):
        ready, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            l = make()
            l.settimeout(None)
            l.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 60, 0))
            os.write(w, b"x")
            try:
                while True:
                    c, _ = l.accept()
                    c.sendall(str(i).encode())
                    c.close()
            finally:
                os._exit(0)
        os.close(w)
        os.read(ready, 1)
        os.close(ready)
        served.append(pid)


def stop_served():
    for pid in served:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ask_many(family, addr, port, n):
    """Which process answered how often, in n connections."""
    by = {}
    for _ in range(n):
        s = connect(family, addr, port)
        who = s.recv(10).decode()
        s.close()
        by[who] = by.get(who, 0) + 1
    return by


def exhaust(limit):
    """The errno of socket() when the file limit is reached, and then whether it works again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    held, failed = [], None
    try:
        while len(held) < limit:
            held.append(tcp())
    except OSError as e:
        failed = name_error(e)
    n = len(held)
    held.clear()
    again = error_of(tcp)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return [failed, n > 0, again]


def closed_late():
    """Whether a port is still taken after close()."""
    second, first = tcp(), tcp()
    first.bind(("127.0.0.1", 0))
    port = first.getsockname()[1]
    first.close()
    late = error_of(second.bind, ("127.0.0.1", port)) != "ok"
    second.close()
    return late


def flags_of(s):
    """Close-on-exec and non-blocking, as the kernel has them."""
    fd = s.fileno()
    return [fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK)]


def give(path, *s):
    """Sends sockets to the process that takes them at path."""
    u = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    u.connect(path)
    socket.send_fds(u, [b"x"], [x.fileno() for x in s])
    u.recv(1)


def give_late(path, *s):
    """The same, to one that may have to be waited for."""
    end = time.monotonic() + PATIENCE
    while error_of(give, path, *s) != "ok" and time.monotonic() < end:
        select.select([], [], [], 0.02)


def taker(path):
    """Listens for a socket."""
    u = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    u.bind(path)
    u.listen(1)
    return u


def take(u):
    return take_all(u)[0]


def take_all(u):
    c, _ = u.accept()
    _, fds, _, _ = socket.recv_fds(c, 1, 250)
    c.send(b"x")
    return [socket.socket(fileno=fd) for fd in fds]


def insist(sockets, addr, port):
    """Connects them one after the other meanwhile, each when the one before has ended, until that is refused. What became of them
    is in the list that it gives."""
    said = []

    def run():
        for s in sockets:
            said.append(error_of(s.connect, (addr, port)))
            if said[-1] == "ENETDOWN":
                return
            while said[-1] == "ok" and error_of(s.recv, 1) == "EAGAIN":
                pass

    threading.Thread(target=run, daemon=True).start()
    return said


def inherited(s):
    """The sockets a program finds open that s's process starts."""
    code = "import os; print(sum(os.readlink(f'/proc/self/fd/{n}').startswith('socket:') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}') or os.path.islink(f'/proc/self/fd/{n}')))"
    return subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, close_fds=False, text=True).stdout.strip()


def child_connects(addr, port):
    """A program that this one starts connects."""
    code = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); print(s.getpeername()); s.sendall(b'hello')"
    return subprocess.run([sys.executable, "-c", code, addr, str(port)], capture_output=True, text=True).stdout


def greet(sockets):
    """Sends each socket's own name through it, once it is connected."""
    p = select.poll()
    waiting = {s.fileno(): s for s in sockets}
    for fd in waiting:
        p.register(fd, select.POLLOUT)
    end = time.monotonic() + PATIENCE
    while waiting and time.monotonic() < end:
        for fd, _ in p.poll(1000):
            s = waiting.pop(fd)
            p.unregister(fd)
            s.setblocking(True)
            s.sendall(("%s %d" % s.getsockname()[:2]).ljust(32).encode())
    return len(waiting)


def greeted(l, n):
    """How many of n connections carry the name that accept() gave them, and the others."""
    l.settimeout(PATIENCE)
    good, bad = 0, []
    for _ in range(n):
        c, who = l.accept()
        c.settimeout(PATIENCE)
        said = c.recv(32, socket.MSG_WAITALL).decode().strip()
        if said == "%s %d" % who[:2] == "%s %d" % c.getpeername()[:2]:
            good += 1
        else:
            bad.append([said, who])
    return [good, bad]


def shown(s):
    """Of each line in /proc/net/tcp and tcp6 that is about this socket: addresses, state, queues and user."""
    lines = [l.split() for name in ("tcp", "tcp6") for l in open("/proc/net/" + name)]
    return [l[1:5] + [l[7]] for l in lines if l[9] == str(os.fstat(s.fileno()).st_ino)]


def listed():
    """The two addresses and ports of each line in /proc/net/tcp."""
    def name(field):
        addr, port = field.split(":")
        return socket.inet_ntoa(struct.pack("=I", int(addr, 16))), int(port, 16)

    return {tuple(map(name, l.split()[1:3])) for l in list(open("/proc/net/tcp"))[1:]}


def error_of(f, *args):
    """The name of the errno f(*args) fails with, or "ok"."""
    try:
        f(*args)
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))
    return "ok"


def ended_within(seconds, sockets):
    """How many of the connections have ended by then."""
    p, left, end = select.poll(), {s.fileno() for s in sockets}, time.monotonic() + seconds
    for fd in left:
        p.register(fd, 0)  # POLLERR and POLLHUP are told all the same
    while left and (rest := end - time.monotonic()) > 0:
        for fd, _ in p.poll(rest * 1000):
            p.unregister(fd)
            left.discard(fd)
    return len(sockets) - len(left)


def name_error(e):
    return errno.errorcode.get(e.errno, str(e))


def answer(line, env):
    try:
        try:
            code = compile(line, "<test>", "eval")
        except SyntaxError:
            exec(compile(line, "<test>", "exec"), env)
            return None
        return eval(code, env)
    except OSError as e:
        return {"error": name_error(e)}
    except Exception as e:  # a mistake of the test's
        return {"mistake": f"{type(e).__name__}: {e}"}


def main():
    env = globals()
    print('"ready"', flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), env), default=lambda o: type(o).__name__), flush=True)


main()

"""What a program sees of its TCP sockets, printed as JSON: the same with and without the preloaded pool, but for "pooled" and
"interrupted"."""
import ctypes, errno, fcntl, json, os, resource, signal, socket, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
out = {}


def busy(n=300):
    """Makes so many sockets that a process has a pool."""
    for _ in range(n):
        socket.socket().close()


def batches():
    return [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 200]


def child(f):
    """What f gives in a forked process."""
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(w, 0)
        os.close(w)
        try:
            os.write(0, json.dumps(f()).encode())
        except BaseException as e:
            os.write(0, json.dumps(repr(e)).encode())
        os._exit(0)
    os.close(w)
    text = b""
    while part := os.read(r, 65536):
        text += part
    os.close(r)
    os.waitpid(pid, 0)
    return json.loads(text)


end = time.monotonic() + 60
while True:  # the agent makes no batches before it is ready to
    busy()
    if batches() or "LD_PRELOAD" not in os.environ or time.monotonic() > end:
        break
out["pooled"] = len(batches()) > 0

# The lowest number, and flags.
a = [socket.socket() for _ in range(5)]
a[2].close()
s = socket.socket()
out["lowest"] = s.fileno() == a[1].fileno() + 1
flags = []
for family in socket.AF_INET, socket.AF_INET6:
    for extra in 0, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC:
        for protocol in 0, 6, 262, 17:
            for _ in range(6):
                ctypes.set_errno(77)
                fd = libc.socket(family, socket.SOCK_STREAM | extra, protocol)
                one = [family, extra, protocol, ctypes.get_errno()]
                if fd >= 0:
                    t = socket.socket(fileno=fd)
                    one += [fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD), t.family, t.type, t.proto,
                            t.getsockname()[0], os.fstat(fd).st_uid, t.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]
                    t.close()
                flags.append(one)
out["flags"] = flags
for t in a:
    t.close()
s.close()

server = socket.create_server(("127.0.0.1", 0), backlog=512)
where = server.getsockname()


def connects(n):
    for _ in range(n):
        with socket.create_connection(where) as c:
            c.sendall(b"x")
            c.shutdown(socket.SHUT_WR)
            while c.recv(9):
                pass


def serve(n):
    for _ in range(n):
        with server.accept()[0] as c:
            assert c.recv(9) == b"x"


# Several threads.
t = threading.Thread(target=serve, args=(8 * 60,))
t.start()
workers = [threading.Thread(target=connects, args=(60,)) for _ in range(8)]
for w in workers:
    w.start()
for w in workers + [t]:
    w.join()
out["threads"] = True

# A child that lives does not keep its parent's later connections open, and has sockets itself.
r, w = os.pipe()
pid = os.fork()
if not pid:
    os.close(w)
    os.read(r, 1)
    os._exit(0)
os.close(r)
ends = []
for _ in range(100):
    c = socket.create_connection(where)
    peer = server.accept()[0]
    peer.settimeout(60)
    c.close()
    ends.append(peer.recv(1) == b"")
    peer.close()
os.close(w)
os.waitpid(pid, 0)
out["end seen"] = all(ends)
out["child"] = child(lambda: [busy(), len(batches()) > 0][1]) == out["pooled"]
out["child closes its parent's batches"] = child(lambda: [socket.socket().close(), batches()][1])


def closes_all():
    busy()
    os.closerange(3, 2000)
    numbers = [socket.socket().fileno() for _ in range(3)]  # closed at once
    r, w = os.pipe()
    for n in range(990, 1024):  # where batches were, something of the program's
        os.dup2(r, n)
    os.write(w, b"mine")
    busy(600)
    return numbers, os.read(1005, 99).decode()


out["closefrom"] = child(closes_all)


def other_user():
    ids = []
    for uid in 1000, 0, 1001:
        os.seteuid(0)
        os.seteuid(uid)
        for _ in range(40):
            with socket.socket() as s:
                ids.append(os.fstat(s.fileno()).st_uid == uid)
    return all(ids)


out["users"] = child(other_user)


def few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (1015, 1024))
    have = []
    try:
        while True:
            have.append(socket.socket())
    except OSError as e:
        return e.errno == errno.EMFILE, max(s.fileno() for s in have)


out["table full"] = child(few_files)


def very_few_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1024))
    busy()
    return batches()


out["small table"] = child(very_few_files)


def handler(*_):
    socket.socket().close()


def in_signals():
    signal.signal(signal.SIGALRM, handler)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.05)
    busy(1500)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return True


out["signals"] = child(in_signals)


def interrupted():
    """How many calls a signal ended whose handler does not have them restarted; of MPTCP, which is never pooled."""
    n = 0
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    for _ in range(5000):
        try:
            socket.socket(proto=262).close()
        except InterruptedError:
            n += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return n


out["interrupted"] = child(interrupted)
out["exec"] = subprocess.run([sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"], close_fds=False, capture_output=True, text=True).stdout


def other_namespace():
    if libc.unshare(0x50000000):  # user and network
        return "not allowed"
    s = socket.socket()
    try:
        s.connect((sys.argv[1], 9))
    except OSError as e:
        return e.errno


out["other namespace"] = child(other_namespace)
print(json.dumps(out))

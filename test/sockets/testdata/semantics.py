"""Socket semantics: each case is a function that prints what a program sees. `semantics.py serve PORT` is the peer, which
does on each connection what its first line says; `semantics.py run IP PORT OWN CASE...` runs cases, each in a process of
its own, under a line "== CASE"."""
import array, ctypes, errno, fcntl, os, select, signal, socket, struct, subprocess, sys, tempfile, time

libc = ctypes.CDLL(None, use_errno=True)
ENC = {4: socket.AF_INET, 6: socket.AF_INET6}
TCP = socket.IPPROTO_TCP
SOL = socket.SOL_SOCKET
LINGER0 = struct.pack("ii", 1, 0)
IP = PORT = OWN = None
PATIENCE = 60  # seconds for what comes, however busy the machine is; what hangs ends with them


def e(f, *args):
    """f(*args), or the name of the errno."""
    try:
        r = f(*args)
        return "ok" if r is None else r
    except OSError as x:
        return errno.errorcode.get(x.errno, str(x))


def tcp(family=4):
    return socket.socket(ENC[family], socket.SOCK_STREAM)


def ask(what, s=None):
    """A connection to the peer that was told what to do."""
    s = s or tcp()
    s.connect((IP, PORT))
    s.sendall(what.encode().ljust(32))
    return s


def events(ep, timeout=PATIENCE):
    names = {1: "IN", 4: "OUT", 8: "ERR", 16: "HUP", 0x2000: "RDHUP"}
    return ["|".join(n for b, n in names.items() if ev & b) for _, ev in ep.poll(timeout)]


def wait_in(s):
    p = select.poll()
    p.register(s, select.POLLIN)
    p.poll(PATIENCE * 1000)


def shown(s):
    """The addresses of a connection, without ephemeral ports."""
    a, b = s.getsockname(), s.getpeername()
    return a[0], b[0], b[1] == PORT


def child(f, *args):
    """What f(*args) prints and gives in a child process."""
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(w, repr(f(*args)).encode())
        except Exception as x:
            os.write(w, ("failed: %r" % x).encode())
        finally:
            os._exit(0)
    os.close(w)
    said = os.fdopen(r).read()
    _, status = os.waitpid(pid, 0)
    return said if not os.WIFSIGNALED(status) else "signal %d" % os.WTERMSIG(status)


# --- the peer

def serve(port):
    l = socket.socket(socket.AF_INET6)
    l.setsockopt(SOL, socket.SO_REUSEADDR, 1)
    l.setsockopt(0, 12, 1)  # IP_RECVTTL
    l.setsockopt(0, 13, 1)  # IP_RECVTOS
    l.setsockopt(TCP, 23, 16)  # TCP_FASTOPEN, where net.ipv4.tcp_fastopen lets it
    l.bind(("::", port))
    l.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while True:
        c, _ = l.accept()
        if not os.fork():
            l.close()
            signal.alarm(2 * PATIENCE)
            try:
                what = c.recv(32, socket.MSG_WAITALL).decode().split()
                if what:
                    globals()["peer_" + what[0]](c, *what[1:])
            except OSError:
                pass  # the case resets the connection
            os._exit(0)
        c.close()


def peer_echo(c):
    while True:
        b = c.recv(65536)
        if not b:
            return
        c.sendall(b)


def peer_close(c):
    c.close()


def peer_reset(c):
    c.setsockopt(SOL, socket.SO_LINGER, LINGER0)
    c.close()


def peer_hold(c):
    """Reads nothing until the other end is through."""
    c.sendall(b"x")
    p = select.poll()
    p.register(c, select.POLLRDHUP)
    p.poll(PATIENCE * 1000)


def peer_sink(c):
    n = 0
    while True:
        b = c.recv(65536)
        if not b:
            c.sendall(str(n).encode())
            return
        n += len(b)


def peer_half(c):
    c.sendall(b"last")
    c.shutdown(socket.SHUT_WR)
    c.recv(100)
    c.recv(100)


def peer_names(c):
    a, b = c.getsockname(), c.getpeername()
    c.sendall(repr((a[0], a[1] == PORT, b[0])).encode())


def peer_packet(c):
    """TTL and TOS of what came last."""
    c.sendall(b"x")
    c.recv(1)
    raw = c.getsockopt(0, 9, 256)  # IP_PKTOPTIONS
    out = []
    while len(raw) >= 16:
        n, level, kind = struct.unpack("Qii", raw[:16])
        out.append((kind, raw[16]))
        raw = raw[(n + 7) & ~7:]
    c.sendall(repr(out).encode())


def peer_full(c, backlog):
    """Listens elsewhere and accepts nothing until the other end is through; then, what is left in the queue."""
    l = socket.socket(socket.AF_INET6)
    l.bind(("::", 0))
    l.listen(int(backlog))
    c.sendall(b"%5d" % l.getsockname()[1])
    c.recv(1)
    l.setblocking(False)
    n = 0
    while e(l.accept) != "EAGAIN":
        n += 1
    c.sendall(b"%5d" % n)


# --- cases

def case_port_zero():
    s = tcp()
    s.bind(("0.0.0.0", 0))
    a = s.getsockname()
    s.listen(1)
    print(a[0], a[1] > 0, s.getsockname() == a)
    for to in ("127.0.0.1", OWN, "0.0.0.0"):
        c = socket.create_connection((to, a[1]))
        b, who = s.accept()
        print(to, c.getpeername() == b.getsockname(), c.getsockname() == who, c.getpeername()[0], who[0])
    s = tcp(6)
    s.bind(("::", 0))
    a = s.getsockname()
    s.listen(1)
    print(a[0], s.getsockname() == a)


def case_bind_then_connect():
    for addr in ("0.0.0.0", OWN):
        s = tcp()
        s.bind((addr, 0))
        a = s.getsockname()
        ask("names", s)
        print(addr, a[0], s.getsockname()[1] == a[1], shown(s), s.recv(200))
    s = tcp()
    s.setsockopt(0, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
    s.bind((OWN, 0))
    a = s.getsockname()
    ask("names", s)
    print(a, s.getsockname()[1] > 0, shown(s), s.recv(200))
    s = tcp()
    s.bind(("127.0.0.1", 0))
    print(e(s.connect, (IP, PORT)), s.getsockname()[0])


def case_bind_twice():
    s = tcp()
    s.bind(("127.0.0.1", 0))
    a = s.getsockname()
    print(e(s.bind, ("0.0.0.0", 0)), e(s.bind, ("1.2.3.4", 0)), s.getsockname() == a)
    s.listen(1)
    print(e(s.bind, ("0.0.0.0", 0)), s.getsockname() == a, e(s.connect, (IP, PORT)))
    s = ask("echo")
    a = s.getsockname()
    print(e(s.bind, ("0.0.0.0", 0)), e(s.bind, (OWN, 0)), s.getsockname() == a, shown(s), e(s.listen, 1))


def case_connect_twice():
    s = ask("echo")
    print(e(s.connect, (IP, PORT)), e(s.connect, ("127.0.0.1", 1)), shown(s))
    s.sendall(b"abc")
    print(s.recv(3, socket.MSG_WAITALL))
    l = full_listener()
    s = tcp()
    s.setblocking(False)
    print(s.connect_ex(l.getsockname()) == errno.EINPROGRESS, e(s.connect, l.getsockname()), e(s.getpeername), s.getsockname()[0])
    print(e(s.send, b"x"), e(s.recv, 1), e(s.shutdown, socket.SHUT_WR))


def full_listener(backlog=0):
    """A listener whose queue is full, so that it drops what comes."""
    global keep
    l = tcp()
    l.bind((OWN, 0))
    l.listen(backlog)
    keep = []
    while True:
        s = tcp()
        s.setsockopt(TCP, 7, 1)  # TCP_SYNCNT
        keep.append(s)
        if s.connect_ex(l.getsockname()):
            return l


def case_backlog():
    for n in (0, 1, 3, -1):
        if n < 0:
            l = tcp()
            print(n, e(l.listen, n), l.getsockopt(TCP, 11, 104)[0])
            continue
        full_listener(n)
        print(n, len(keep))


def case_backlog_of_peer():
    """The connects that a full queue lets through, and what becomes of the others."""
    for backlog in (0, 2):
        c = ask("full %d" % backlog)
        port = int(c.recv(5, socket.MSG_WAITALL))
        waiting = []
        for i in range(5):
            s = tcp()
            s.setsockopt(TCP, 7, 1)  # TCP_SYNCNT
            s.setblocking(False)
            s.connect_ex((IP, port))
            waiting.append(s)
            select.select([], [s], [], PATIENCE if i <= backlog else 0.3)  # the next one finds them in the queue
        p = select.poll()
        done = []
        for s in waiting:
            p.register(s, select.POLLOUT)
            p.poll(PATIENCE * 1000)
            done.append(errno.errorcode.get(s.getsockopt(SOL, socket.SO_ERROR), "ok"))
            p.unregister(s)
        c.sendall(b"x")
        print(backlog, done, int(c.recv(5, socket.MSG_WAITALL)))


def case_timed_out():
    l = full_listener()
    s = tcp()
    s.setsockopt(TCP, 7, 1)
    began = time.monotonic()
    print(e(s.connect, l.getsockname()), 2.5 < time.monotonic() - began < PATIENCE)  # by itself, two minutes
    print(e(s.getpeername), s.getsockname()[0])
    s = tcp()
    s.setsockopt(SOL, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200000))
    print(e(s.connect, l.getsockname()), e(s.connect, l.getsockname()))


def case_nonblocking_connect():
    for flags, name in ((0, "level"), (select.EPOLLET, "edge"), (select.EPOLLONESHOT, "oneshot")):
        for port in (PORT, 9):
            s = tcp()
            s.setblocking(False)
            ep = select.epoll()
            ep.register(s, select.EPOLLOUT | select.EPOLLIN | flags)
            before = events(ep, 0)
            ep.modify(s, select.EPOLLOUT | select.EPOLLIN | flags)
            r = errno.errorcode.get(s.connect_ex((IP, port)), "ok")
            got = events(ep)
            print(name, port == PORT, before, r, got, events(ep, 0), s.getsockopt(SOL, socket.SO_ERROR), s.getsockopt(SOL, socket.SO_ERROR))
            print(e(s.getpeername) if port == 9 else shown(s), e(s.recv, 1), s.connect_ex((IP, port)) in (0, errno.EISCONN, errno.EINPROGRESS))


def case_refused():
    s = tcp()
    print(e(s.connect, (IP, 9)), e(s.send, b"x"), e(s.recv, 1), e(s.getpeername), s.getsockname()[0])
    print(e(s.connect, (IP, 9)), e(s.connect, (IP, PORT)), shown(s))
    for to in ("127.0.0.1", OWN, "0.0.0.0"):
        print(to, e(tcp().connect, (to, 9)))
    for to in ("::1", "::", "::ffff:127.0.0.1", "::ffff:" + IP, "::ffff:0.0.0.0"):
        print(to, e(tcp(6).connect, (to, 9)))
    print(e(tcp().connect, (IP, 0)), e(tcp().connect, ("127.0.0.1", 0)), e(tcp().connect, ("255.255.255.255", 1)), e(tcp().connect, ("224.0.0.1", 1)))


def disconnect(s):
    """connect() to AF_UNSPEC."""
    r = libc.connect(s.fileno(), struct.pack("H", 0) + bytes(14), 16)
    return errno.errorcode[ctypes.get_errno()] if r else "ok"


def case_connect_unspec():
    s = ask("echo")
    print(disconnect(s), e(s.getpeername), s.getsockname()[0], e(s.send, b"x"))
    ask("names", s)
    print(s.recv(200), shown(s), disconnect(s))
    s = tcp()
    print(disconnect(s), s.getsockname())
    s.bind(("0.0.0.0", 0))
    a = s.getsockname()
    print(disconnect(s), s.getsockname() == a)
    ask("names", s)
    print(s.recv(200), s.getsockname()[1] == a[1], disconnect(s), s.getsockname()[0], s.getsockname()[1] == a[1])
    ask("names", s)
    print(s.recv(200))
    s = tcp()
    s.bind((OWN, 0))
    a = s.getsockname()
    ask("echo", s)
    print(disconnect(s), s.getsockname() == a, e(s.listen, 1))
    s = tcp()
    s.bind((OWN, 0))
    s.listen(1)
    print(disconnect(s), e(s.accept), s.getsockname()[0])
    s = tcp(6)
    s.connect(("::ffff:" + IP, PORT))
    print(disconnect(s), s.getsockname()[0], e(s.connect, ("::ffff:" + IP, PORT)), s.getsockname()[0])


def case_connect_wildcard():
    l = tcp(6)
    l.bind(("::", 0))
    l.listen(8)
    port = l.getsockname()[1]
    for family, to in ((4, "0.0.0.0"), (4, "127.0.0.1"), (4, OWN), (6, "::"), (6, "::1"), (6, "::ffff:0.0.0.0"), (6, "::ffff:127.0.0.1"), (6, "::ffff:" + OWN)):
        s = tcp(family)
        r = e(s.connect, (to, port))
        c, who = l.accept()
        print(to, r, s.getsockname()[0], s.getpeername()[0], c.getsockname()[0], who[0], who[1] == s.getsockname()[1])


def case_self_connect():
    for addr in ("127.0.0.1", OWN):
        s = tcp()
        s.bind((addr, 0))
        a = s.getsockname()
        r = e(s.connect, a)
        print(addr, r, r == "ok" and (s.getsockname() == s.getpeername() == a, s.send(b"me"), s.recv(2)))


def case_listen_connected():
    s = ask("echo")
    print(e(s.listen, 1), e(s.accept))
    l = tcp()
    l.bind(("0.0.0.0", 0))
    l.listen(1)
    print(e(l.connect, (IP, PORT)), e(l.send, b"x"), e(l.recv, 1), e(l.shutdown, socket.SHUT_WR), e(l.getpeername))
    print(e(l.listen, 5), e(l.shutdown, socket.SHUT_RD), e(l.accept), l.getsockname()[0], e(l.listen, 1))


def case_half_close():
    s = ask("half")
    s.shutdown(socket.SHUT_WR)
    print(e(s.send, b"x"), s.recv(10), s.recv(10), e(s.shutdown, socket.SHUT_WR))
    s = ask("echo")
    print(e(s.shutdown, socket.SHUT_RD), s.recv(1), e(s.send, b"abc"))
    ep = select.epoll()
    s = ask("close")
    wait_in(s)
    ep.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    print(events(ep), s.recv(1), s.recv(1))
    s.shutdown(socket.SHUT_RDWR)
    print(events(ep), e(s.getpeername), s.getsockname()[0])


def case_reset():
    s = ask("reset")
    wait_in(s)
    ep = select.epoll()
    ep.register(s, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)
    print(events(ep), e(s.recv, 1), e(s.recv, 1), e(s.send, b"x"), s.getsockopt(SOL, socket.SO_ERROR), e(s.getpeername), s.getsockname()[0])
    s = ask("reset")
    wait_in(s)
    print(s.getsockopt(SOL, socket.SO_ERROR), s.getsockopt(SOL, socket.SO_ERROR), e(s.recv, 1), e(s.send, b"x"))
    s = ask("reset")
    wait_in(s)
    print(e(s.send, b"x"), e(s.send, b"x"), e(s.recv, 1))

    def pipe():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        s.send(b"x")
    print(child(pipe))
    s = ask("hold")
    s.recv(1)
    s.setsockopt(SOL, socket.SO_LINGER, LINGER0)
    s.close()


def case_linger():
    s = ask("hold")
    s.recv(1)
    s.setblocking(False)
    p = select.poll()
    p.register(s, select.POLLOUT)
    while p.poll(1000):  # until both ends' buffers are full
        e(s.send, bytes(65536))
    s.setblocking(True)
    s.setsockopt(SOL, socket.SO_LINGER, struct.pack("ii", 1, 1))
    began = time.monotonic()
    s.close()
    print(0.9 < time.monotonic() - began < PATIENCE)
    s = ask("sink")
    s.sendall(bytes(300000))
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100), s.recv(1))


def case_time_wait():
    l = tcp()
    l.bind((OWN, 0))
    l.listen(1)
    a = l.getsockname()
    s = socket.create_connection(a)
    c, _ = l.accept()
    c.close()
    s.recv(1)
    s.close()
    l.close()
    plain, reuse = tcp(), tcp()
    reuse.setsockopt(SOL, socket.SO_REUSEADDR, 1)
    print(e(plain.bind, a), e(reuse.bind, a), e(reuse.listen, 1))
    both = tcp(), tcp()
    for s in both:
        s.setsockopt(SOL, socket.SO_REUSEADDR, 1)
    both[0].bind((OWN, 0))
    print(e(both[1].bind, both[0].getsockname()), e(both[0].listen, 1), e(both[1].listen, 1))


def listeners(n, port=0, user=None):
    out = []
    for _ in range(n):
        s = tcp()
        s.setsockopt(SOL, 15, 1)  # SO_REUSEPORT
        s.bind(("0.0.0.0", port))
        s.listen(100)
        port = s.getsockname()[1]
        out.append(s)
    return out, port


def accepted(group, port, n, to):
    """How many of n connections each of the group got."""
    got, keep = [0] * len(group), []
    for _ in range(n):
        keep.append(socket.create_connection((to, port)))
        ready, _, _ = select.select(group, [], [], PATIENCE)
        for s in ready:
            s.accept()[0].close()
            got[group.index(s)] += 1
    return got


def case_reuseport():
    for to in (OWN, "127.0.0.1"):
        group, port = listeners(4)
        got = accepted(group, port, 200, to)
        # Each is within 50 +- 7 standard deviations.
        print(to, sum(got), all(8 < n < 92 for n in got))
        print(e(child_bind, port, 0), child_bind(port, 1234))
        group[1].close()
        del group[1]
        print(sum(accepted(group, port, 50, to)))
        # return 2: the third one takes all
        prog = struct.pack("HBBI", 6, 0, 0, 2)
        buf = ctypes.create_string_buffer(prog)
        fprog = struct.pack("HxxxxxxP", 1, ctypes.addressof(buf))
        print(e(group[0].setsockopt, SOL, 51, fprog), accepted(group, port, 20, to))
        print(e(group[0].setsockopt, SOL, 68, struct.pack("i", 0)))  # SO_DETACH_REUSEPORT_BPF
        print(sum(accepted(group, port, 20, to)))
        group[0].setsockopt(SOL, 49, 0)  # SO_INCOMING_CPU
        print(group[0].getsockopt(SOL, 49), sum(accepted(group, port, 20, to)))


def child_bind(port, uid):
    def bind():
        if uid:
            os.setgid(uid)
            os.setuid(uid)
        s = tcp()
        s.setsockopt(SOL, 15, 1)
        return e(s.bind, ("0.0.0.0", port))
    return child(bind)


def case_tos_ttl():
    for tos, ttl in ((0, 64), (0x10, 64), (0xb8, 30)):
        s = ask("packet")
        s.recv(1)
        s.setsockopt(0, 1, tos)
        s.setsockopt(0, 2, ttl)
        s.send(b"x")
        print(tos, ttl, s.recv(200), s.getsockopt(0, 1), s.getsockopt(0, 2))


def case_congestion():
    s = tcp()
    # The list is the whole machine's, and scenarios beside this one load and unload their own.
    available = open("/proc/sys/net/ipv4/tcp_available_congestion_control").read().split()
    allowed = [name for name in ("bbr", "cubic", "reno") if name in available]
    for name in allowed + ["nosuch"]:
        print(name, e(s.setsockopt, TCP, 13, name.encode()), s.getsockopt(TCP, 13, 16))
    s = ask("echo", s)
    s.send(b"abc")
    print(s.recv(3), s.getsockopt(TCP, 13, 16))

    def unprivileged():
        os.setuid(1234)
        s = tcp()
        return [e(s.setsockopt, TCP, 13, name.encode()) for name in allowed]
    print(child(unprivileged))


def case_options_at_work():
    s = tcp()
    for level, name, value in ((TCP, 1, 1), (SOL, 9, 1), (TCP, 4, 5), (TCP, 5, 6), (TCP, 6, 7), (TCP, 18, 9000), (TCP, 25, 4096), (TCP, 2, 1000),
                               (SOL, 7, 20000), (SOL, 8, 20000), (SOL, 12, 6), (SOL, 12, 7), (TCP, 3, 1), (TCP, 3, 0), (TCP, 8, 30), (TCP, 12, 0), (SOL, 36, 5), (SOL, 47, 100000)):
        print(level, name, e(s.setsockopt, level, name, value), s.getsockopt(level, name))
    ask("echo", s)
    s.send(b"abc")
    info = s.getsockopt(TCP, 11, 104)
    print(s.recv(3), info[0], s.getsockopt(TCP, 2), [s.getsockopt(SOL, n) for n in (3, 30, 38, 39, 2, 9)], s.getsockopt(TCP, 25))
    l = tcp()
    l.bind(("0.0.0.0", 0))
    l.setsockopt(TCP, 9, 1)  # TCP_DEFER_ACCEPT
    l.listen(1)
    c = socket.create_connection((OWN, l.getsockname()[1]))
    l.setblocking(False)
    print(e(l.accept), l.getsockopt(SOL, 30))
    c.send(b"x")
    wait_in(l)
    print(l.accept()[0].recv(1))


def case_timestamps():
    s = ask("echo")
    s.setsockopt(SOL, 37, (1 << 4) | (1 << 3) | (1 << 1) | (1 << 7) | (1 << 9))  # TX_SOFTWARE RX SOFTWARE OPT_ID, ACK
    s.setsockopt(SOL, 29, 1)  # SO_TIMESTAMP
    anc = []
    deadline = time.monotonic() + PATIENCE
    while not anc and time.monotonic() < deadline:  # a kernel thread starts the clock of what comes, when it gets to run
        s.send(b"abc")
        wait_in(s)
        b, anc, flags, _ = s.recvmsg(10, 512)
    print(b, sorted((a[0], a[1]) for a in anc))
    deadline = time.monotonic() + PATIENCE
    kinds = []
    while not kinds and time.monotonic() < deadline:
        try:
            b, anc, flags, _ = s.recvmsg(10, 512, socket.MSG_ERRQUEUE)
            kinds = sorted((a[0], a[1]) for a in anc)
        except BlockingIOError:
            pass
    print(kinds, flags & socket.MSG_ERRQUEUE != 0)


def case_zerocopy():
    s = ask("sink")
    print(e(s.setsockopt, SOL, 60, 1))
    print(e(s.send, bytes(100000), 0x4000000) > 0)
    p = select.poll()
    p.register(s, 0)
    print(p.poll(PATIENCE * 1000)[0][1] & select.POLLERR != 0)
    _, anc, flags, _ = s.recvmsg(1, 512, socket.MSG_ERRQUEUE)
    level, kind, data = anc[0]
    err, origin = struct.unpack("IB", data[:5])
    print(level, kind, err, origin, flags & socket.MSG_ERRQUEUE != 0)


def case_queued_errors():
    s = tcp()
    print(e(s.setsockopt, 0, 11, 1), s.getsockopt(0, 11), e(s.connect, (IP, 9)), e(s.recvmsg, 10, 512, socket.MSG_ERRQUEUE))
    s = ask("echo")
    s.setsockopt(0, 8, 1)  # IP_PKTINFO
    raw = s.getsockopt(0, 9, 256)
    print(s.getsockopt(0, 8), e(s.recvmsg, 10, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT))
    print(e(s.getsockopt, SOL, 28, 16)[4:8] == socket.inet_aton(IP), e(s.getsockopt, 0, 80, 16))


def case_ktls():
    s = ask("sink")
    print(e(s.setsockopt, TCP, 31, b"tls"), e(s.setsockopt, TCP, 31, b"nosuch"), e(s.getsockopt, TCP, 31, 16))
    info = struct.pack("HH", 0x0303, 51) + bytes(8) + bytes(16) + bytes(4) + bytes(8)
    print(e(s.setsockopt, 282, 1, info))
    print(e(s.send, b"hello"), e(s.send, bytes(1000)))
    with tempfile.TemporaryFile() as f:
        f.write(bytes(5000))
        f.flush()
        print(e(os.sendfile, s.fileno(), f.fileno(), 0, 5000))
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100))
    l = tcp()
    print(e(l.setsockopt, TCP, 31, b"tls"))


def case_sendfile_splice():
    s = ask("sink")
    with tempfile.TemporaryFile() as f:
        f.write(bytes(100000))
        f.flush()
        n = 0
        while n < 100000:
            n += os.sendfile(s.fileno(), f.fileno(), n, 100000 - n)
    r, w = os.pipe()
    os.write(w, bytes(4096))
    print(n, os.splice(r, s.fileno(), 4096))
    s.shutdown(socket.SHUT_WR)
    print(s.recv(100))


def case_devices():
    s = tcp()
    for name in (b"eth0", b"", b"lo", b"eth0\0", b"nosuch", b"heddle-vx0", b"heddle-hd0", b"eth0123456789abcdef"):
        print(name, e(s.setsockopt, SOL, 25, name), s.getsockopt(SOL, 25, 16), s.getsockopt(SOL, 62))
    for index in (socket.if_nametoindex("eth0"), 1, 0, 99, -1):
        print(index > 1, e(s.setsockopt, SOL, 62, index), e(s.getsockopt, SOL, 25, 16), e(s.getsockopt, SOL, 25, 4))
    s = tcp()
    s.setsockopt(SOL, 25, b"eth0")
    ask("names", s)
    print(s.recv(200), s.getsockopt(SOL, 25, 16))

    def unprivileged():
        os.setuid(1234)
        s = tcp()
        return [e(s.setsockopt, SOL, 25, n) for n in (b"eth0", b"lo", b"")]
    print(child(unprivileged))


PRIVILEGED = ((SOL, 36, 5), (0, 19, 1), (0, 19, 0), (SOL, 12, 7), (SOL, 12, 6), (SOL, 32, 100000), (SOL, 1, 1), (TCP, 19, 1), (SOL, 69, 1), (SOL, 10, 1), (SOL, 11, 1))


def rights():
    s = tcp()
    return [e(s.setsockopt, *o) for o in PRIVILEGED] + [e(tcp().bind, ("0.0.0.0", p)) for p in (1, 80, 1023, 1024, 0)] + [e(tcp(6).bind, ("::", 81))]


def without_capabilities(*numbers):
    """Drops capabilities of this process, user 0 all the same."""
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, data)
    words = list(struct.unpack("6I", data.raw))
    for n in numbers:
        words[0] &= ~(1 << n)
    return libc.capset(header, struct.pack("6I", *words))


def case_rights():
    print(child(rights))

    def dropped(*numbers):
        without_capabilities(*numbers)
        return rights()
    print(child(dropped, 10))
    print(child(dropped, 13))

    def user(uid, keep=()):
        if keep:
            libc.prctl(8, 1, 0, 0, 0)
        os.setgid(uid)
        os.setuid(uid)
        if keep:
            libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[sum(1 << n for n in keep)] * 2, 0, 0, 0, 0))
        return rights()
    print(child(user, 1234))
    print(child(user, 1234, (10,)))
    print(child(user, 1234, (13,)))

    def namespace():
        return libc.unshare(0x10000000), rights()
    print(child(namespace))

    def late():
        """A socket made with rights, used without."""
        s = tcp()
        os.setuid(1234)
        return e(s.bind, ("0.0.0.0", 80)), e(s.setsockopt, SOL, 36, 1)
    print(child(late))


def case_credentials():
    def owner(uid):
        os.setgid(uid)
        os.setuid(uid)
        s = tcp()
        st = os.fstat(s.fileno())
        return st.st_uid, st.st_gid, oct(st.st_mode)
    print(child(owner, 0), child(owner, 1234))

    def namespace():
        uid = os.getuid()
        if libc.unshare(0x10000000):
            return "no user namespaces"
        open("/proc/self/uid_map", "w").write("5 %d 1" % uid)
        s = tcp()
        st = os.fstat(s.fileno())
        return st.st_uid, os.getuid()
    print(child(namespace))


def case_descriptors():
    ep = select.epoll()
    a, b = ask("echo"), ask("echo")
    ep.register(a, select.EPOLLIN)
    b.send(b"x")
    wait_in(b)
    print(events(ep, 0.1))
    os.dup2(b.fileno(), a.fileno())
    print(events(ep, 0.1), a.recv(1), shown(a))
    r, w = socket.socketpair()
    s = ask("echo")
    n = s.getsockname()
    socket.send_fds(r, [b"x"], [s.fileno()])
    s.close()

    def take():
        _, fds, _, _ = socket.recv_fds(w, 1, 1)
        s = socket.socket(fileno=fds[0])
        s.send(b"abc")
        return s.recv(3, socket.MSG_WAITALL), s.getsockname() == n, shown(s)
    print(child(take))
    fd = libc.socket(2, 1 | 0o2000000 | 0o4000, 0)
    print(fcntl.fcntl(fd, fcntl.F_GETFD), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK != 0, os.readlink("/proc/self/fd/%d" % fd).split(":")[0])
    os.close(fd)
    s = tcp()
    code = "import os; print(sorted(os.readlink('/proc/self/fd/%s' % f)[:7] for f in os.listdir('/proc/self/fd') if int(f) > 2 and os.path.exists('/proc/self/fd/%s' % f)))"
    for inherit in (True, False):
        s.set_inheritable(inherit)
        print(subprocess.run([sys.executable, "-c", code], close_fds=False, capture_output=True, text=True).stdout)
    import resource
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (s.fileno() + 1, before[1]))
    print(e(tcp), e(tcp, 6), e(socket.socket, socket.AF_INET, socket.SOCK_DGRAM))
    l, port = None, 0
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    l = tcp()
    l.bind((OWN, 0))
    l.listen(4)
    c = socket.create_connection(l.getsockname())
    resource.setrlimit(resource.RLIMIT_NOFILE, (c.fileno() + 1, before[1]))
    print(e(l.accept))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    print(l.accept()[1] == c.getsockname())


def case_activation():
    """LISTEN_FDS, as systemd passes sockets."""
    l = tcp()
    l.bind(("0.0.0.0", 0))
    l.listen(4)
    port = l.getsockname()[1]
    code = "import socket; l = socket.socket(fileno=3); print(l.getsockname()[0], l.getsockopt(1, 30), l.family); c, a = l.accept(); c.send(b'hi'); print(c.getsockname()[0], a[0])"
    pid = os.fork()
    if not pid:
        os.dup2(l.fileno(), 3)
        os.set_inheritable(3, True)
        os.execve(sys.executable, [sys.executable, "-c", code], dict(os.environ, LISTEN_FDS="1", LISTEN_PID=str(os.getpid())))
    l.close()
    c = socket.create_connection((OWN, port))
    print(c.recv(2))
    os.waitpid(pid, 0)


def case_prefork():
    l = tcp()
    l.bind(("0.0.0.0", 0))
    l.listen(64)
    pids = []
    for i in range(4):
        pid = os.fork()
        if not pid:
            signal.alarm(2 * PATIENCE)
            while True:
                c, _ = l.accept()
                c.send(b"%d" % os.getppid())
                c.close()
        pids.append(pid)
    print({socket.create_connection(l.getsockname()).recv(20) == b"%d" % os.getpid() for _ in range(60)})
    for pid in pids:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def case_messages():
    s = ask("echo")
    print(s.sendmsg([b"ab", b"cd"]), s.recv(4, socket.MSG_WAITALL), e(s.sendto, b"x", (IP, 1)), e(s.recv, 1))
    print(e(s.recv, 1, socket.MSG_DONTWAIT), e(s.send, b"!", socket.MSG_OOB), fcntl.ioctl(s, 0x5411, bytes(4)) is not None)
    print(e(s.sendto, b"", ("1.2.3.4", 5)), e(s.recvfrom, 1, socket.MSG_DONTWAIT), e(tcp().send, b"x"), e(tcp().recv, 1), e(tcp().getpeername), tcp().getsockname(), tcp(6).getsockname())
    print(e(tcp().accept), e(tcp().shutdown, 2), e(tcp().listen, 1))


def case_mptcp():
    s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
    print(s.getsockopt(SOL, 38), s.getsockopt(SOL, 3), s.getsockopt(SOL, 39))
    s.bind(("0.0.0.0", 0))
    s.listen(1)
    c = socket.create_connection((OWN, s.getsockname()[1]))
    a, _ = s.accept()
    print(s.getsockopt(SOL, 38), a.getsockopt(SOL, 38), c.getsockopt(SOL, 38), e(a.getsockopt, 284, 1, 64))
    s = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 262)
    print(s.getsockopt(SOL, 38), e(tcp().getsockopt, 284, 1, 64), e(tcp(6).getsockopt, 284, 1, 64), e(socket.socket, 2, 1, 263), e(socket.socket, 2, 2, 262), e(socket.socket, 2, 5, 6))


SYS_SOCKET, SYS_SECCOMP = {"x86_64": (41, 317), "aarch64": (198, 277)}[os.uname().machine]


def filter_socket(action, flags=0):
    """A seccomp filter as sandboxes install it: socket() of AF_INET gets action, all else is allowed."""
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    code = [(0x20, 0, 0, 0), (0x15, 0, 3, SYS_SOCKET), (0x20, 0, 0, 16), (0x15, 0, 1, 2), (6, 0, 0, action), (6, 0, 0, 0x7fff0000)]
    buf = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *c) for c in code))
    prog = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buf))
    return e(lambda: os.strerror(ctypes.get_errno()) if libc.syscall(SYS_SECCOMP, 1, flags, prog) < 0 else "ok")


def case_filters():
    def use(action, flags=0):
        r = filter_socket(action, flags)
        s = e(tcp)
        if isinstance(s, str):
            return r, s, e(tcp, 6) != "EACCES"
        ask("names", s)
        return r, s.recv(200), shown(s)
    for action in (0x7fff0000, 0x7ffc0000, 0x50000 | errno.EACCES):  # ALLOW, LOG, ERRNO
        print(hex(action), child(use, action))
    print(child(use, 0x80000000))  # KILL_PROCESS

    def twice():
        return filter_socket(0x7fff0000), use(0x7fff0000)
    print(child(twice))


def case_strace():
    code = "import socket, sys, os; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); s.send(b'names'.ljust(32)); s.recv(200); s.getsockname(); s.setsockopt(1, 36, 1); os.fork() or os._exit(0); os.wait(); s.close(); socket.create_connection((sys.argv[1], 9))"
    with tempfile.NamedTemporaryFile("r") as f:
        p = subprocess.run(["strace", "-f", "-q", "-e", "trace=%network", "-o", f.name, "/usr/bin/python3", "-S", "-c", code, IP, str(PORT)],
                           capture_output=True, text=True)
        for line in f:
            if "AF_UNIX" in line or "exited with" in line or "SIGCHLD" in line:
                continue
            line = line.split(None, 1)[1].replace(str(PORT), "PORT").strip()
            if "getsockname" in line:
                line = line.split("sin_port")[0] + line.split("), ")[-1]
            print(line)
    print(p.returncode, p.stderr.strip().splitlines()[-1:])


def case_addrform():
    s = tcp(6)
    print(e(s.setsockopt, 41, 1, 2))
    s.connect(("::ffff:" + IP, PORT))
    ask_on(s, "echo")
    print(e(s.setsockopt, 41, 1, 10), e(s.setsockopt, 41, 1, 2))
    s = socket.socket(fileno=os.dup(s.fileno()))
    print(s.family == socket.AF_INET, shown(s), s.send(b"abc"), s.recv(3, socket.MSG_WAITALL))


def ask_on(s, what):
    s.sendall(what.encode().ljust(32))


def case_fastopen():
    """Three ways to ask for it, again and again: from the second time on there is a cookie, if the peer gives any."""
    def data_in_syn(s):
        return bool(s.getsockopt(TCP, 11, 8)[5] & 32)
    command = b"names".ljust(32)
    for _ in range(3):
        s = tcp()
        print("blocking", e(s.sendto, command, 0x20000000, (IP, PORT)), s.recv(200), shown(s), data_in_syn(s))
    for _ in range(2):
        s = tcp()
        s.setblocking(False)
        r = e(s.sendto, command, 0x20000000, (IP, PORT))
        s.setblocking(True)
        if r == "EINPROGRESS":
            select.select([], [s], [], PATIENCE)
            ask_on(s, "names")
        print("non-blocking", r, s.recv(200), shown(s), data_in_syn(s))
    for _ in range(2):
        s = tcp()
        s.setsockopt(TCP, 30, 1)  # TCP_FASTOPEN_CONNECT
        print("connect", e(s.connect, (IP, PORT)), s.getsockopt(TCP, 30))
        ask_on(s, "names")
        print(s.recv(200), shown(s), data_in_syn(s))
    print(e(tcp().sendto, b"x", 0x20000000, (IP, 9)), e(tcp().sendto, b"x", 0x20000000, ("127.0.0.1", 9)), e(tcp().sendto, b"x", 0x20000000, (IP, 0)))


def begin(name):
    """Starts a case as a process of its own and gives it, with the file of what it prints."""
    out = tempfile.TemporaryFile("w+")
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(2 * PATIENCE)
        os.dup2(out.fileno(), 1)
        try:
            globals()["case_" + name]()
        except Exception as x:
            frame = x.__traceback__
            while frame.tb_next:
                frame = frame.tb_next
            print("failed:", type(x).__name__, x, "line", frame.tb_lineno)
        sys.stdout.flush()
        os._exit(0)
    return pid, out


def end(name, pid, out):
    _, status = os.waitpid(pid, 0)
    out.seek(0)
    print("==", name)
    sys.stdout.write(out.read())
    if status:
        print("status", status)
    sys.stdout.flush()


# Cases that wait for seconds, on queues and listeners of their own: they do so while the others run, one after another.
WAITING = ["backlog_of_peer", "timed_out", "backlog"]

if sys.argv[1] == "serve":
    PORT = int(sys.argv[2])
    serve(PORT)
else:
    IP, PORT, OWN = sys.argv[2], int(sys.argv[3]), sys.argv[4]
    names = sys.argv[5:] or [n[5:] for n in list(globals()) if n.startswith("case_")]
    waiting = [(name,) + begin(name) for name in WAITING if name in names]
    for name in names:
        if name not in WAITING:
            end(name, *begin(name))
    for one in waiting:
        end(*one)
    print("== end", flush=True)

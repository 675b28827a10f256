"""What the tests of policy do beside peer.py: many connects at once, and connections that somebody else ends."""
accepted = {}  # port -> connections
ended = {}  # port -> how they ended
held = {}  # port -> sockets


def serve(ports):
    """Says "hi" to each connection to these ports, echoes what it says, and notes how it ends."""
    def converse(port, c):
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        try:
            c.sendall(b"hi")
            while True:
                b = c.recv(100)
                if not b:
                    how = "EOF"
                    break
                c.sendall(b)
        except OSError as e:
            how = errno.errorcode.get(e.errno, str(e))
        ended.setdefault(port, []).append(how)

    def listening(port, l):
        while True:
            try:
                c, _ = l.accept()
            except BlockingIOError:  # peer.py's time-out
                continue
            accepted[port] = accepted.get(port, 0) + 1
            held.setdefault(port, []).append(c)
            threading.Thread(target=converse, args=(port, c), daemon=True).start()

    for port in ports:
        threading.Thread(target=listening, args=(port, listen(6, "::", port, backlog=1024)), daemon=True).start()


def attempts(targets, wait):
    """What becomes of connects to [family, address, port, hangs, source], made side by side: "hi", an errno, or "hangs".
    Those that are not to hang are waited for; the others for wait seconds."""
    out, sockets = [None] * len(targets), []
    for i, (family, addr, port, _, source) in enumerate(targets):
        s = tcp(family)
        if source:
            s.bind((source, 0))
        s.setblocking(False)
        err = s.connect_ex((addr, port))
        if err not in (0, errno.EINPROGRESS):
            out[i] = errno.errorcode[err]
        sockets.append(s)
    began = time.monotonic()
    while True:
        for i, s in enumerate(sockets):
            if out[i] is None and select.select([], [s], [], 0)[1]:
                err = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if err:
                    out[i] = errno.errorcode[err]
                elif select.select([s], [], [], 0)[0]:
                    out[i] = said(s)
        waiting = any(o is None and not t[3] for o, t in zip(out, targets))
        took = time.monotonic() - began
        if took > (PATIENCE if waiting else wait) or None not in out:
            break
        time.sleep(0.01)
    for s in sockets:
        s.close()
    return [o or "hangs" for o in out]


def said(s):
    try:
        return s.recv(2).decode()
    except OSError as e:
        return errno.errorcode[e.errno]


def received(s, n):
    """The next n bytes of s."""
    out = b""
    while len(out) < n:
        b = s.recv(n - len(out))
        if not b:
            break
        out += b
    return out.decode()


def opened(family, addr, port, source=None):
    """A connection that the other end has greeted. A process that is not intercepted may get the source port of one of its
    container that is (docs/differences.md, two stacks) and hears nothing then: it tries again, from another one."""
    for last in (False, False, True):
        try:
            s = connect(family, addr, port, (source, 0) if source else None)
            break
        except OSError as e:
            if last or e.errno != errno.EINPROGRESS:
                raise
    assert s.recv(2) == b"hi"
    return s


def outcome(s, alive):
    """How s ended; "alive" if it did not. alive: it is expected to be, and echoes; else it says nothing and waits."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if alive:
                s.send(b"x")
            b = s.recv(1)
            if not b:
                return "EOF"
            if alive:
                return "alive"
        except BlockingIOError:  # peer.py's time-out
            pass
        except OSError as e:
            return errno.errorcode.get(e.errno, str(e))
    return "alive"


def hold(family, addr, ports, each):
    """Opens each connections to each of the ports, and watches when they end; see lost."""
    global watched, lost
    watched, lost = select.epoll(), {p: 0 for p in ports}
    owner = {}
    for port in ports:
        for _ in range(each):
            s = opened(family, addr, port)
            held.setdefault(port, []).append(s)
            owner[s.fileno()] = port
            watched.register(s, 0)  # errors and hang-ups only
    threading.Thread(target=watch, args=(owner,), daemon=True).start()


def serve_many(ports):
    """Accepts and greets connections to these ports in one thread, and watches when they end; see lost."""
    global watched, lost
    watched, lost = select.epoll(), {p: 0 for p in ports}
    owner, listeners = {}, {}
    for port in ports:
        l = listen(6, "::", port, backlog=1024)
        l.setblocking(False)
        listeners[l.fileno()] = (port, l)
        watched.register(l, select.EPOLLIN)
    threading.Thread(target=watch, args=(owner, listeners), daemon=True).start()


def watch(owner, listeners={}):
    while True:
        for fd, events in watched.poll():
            if fd not in listeners:
                watched.unregister(fd)
                lost[owner[fd]] += 1
                continue
            port, l = listeners[fd]
            try:
                c, _ = l.accept()
            except BlockingIOError:
                continue
            c.send(b"hi")
            held.setdefault(port, []).append(c)
            owner[c.fileno()] = port
            watched.register(c, 0)


def await_lost(port, n, seconds):
    """How many connections to port have ended, when it is n or seconds have passed."""
    deadline = time.monotonic() + seconds
    while lost[port] < n and time.monotonic() < deadline:
        time.sleep(0.005)
    return lost[port]


def all_echo(port, n):
    """Whether n connections to port are alive: they carry a byte each, one way."""
    for c in held[port]:
        c.send(b"?")
    return len(held[port]) == n and lost[port] == 0


tally = {}  # name -> what came of connects, and how often
hammering = True


def hammer(name, family, addr, port, keep):
    """Connects again and again in a thread, and counts what comes of it; with keep, keeps the connections that come
    to be until they end."""
    def loop():
        count, kept = tally.setdefault(name, {}), []
        while hammering:
            s = tcp(family)
            try:
                s.connect((addr, port))
                how = said(s)
            except OSError as e:
                how = errno.errorcode[e.errno]
            count[how] = count.get(how, 0) + 1
            if keep and how == "hi":
                kept.append(s)
            else:
                s.close()
            kept = [k for k in kept if not dead(k)]
            time.sleep(0.002)

    threading.Thread(target=loop, daemon=True).start()


def dead(s):
    p = select.poll()
    p.register(s, 0)
    if not p.poll(0):
        return False
    s.close()
    return True


def stream(name, family, addr, port):
    """Echoes on one connection for as long as it lives, and notes how it ended."""
    def loop():
        s, count = opened(family, addr, port), tally.setdefault(name, {})
        try:
            while hammering:
                s.send(b"x")
                if s.recv(1) != b"x":
                    raise OSError(errno.ECONNRESET, "EOF")
                count["echo"] = count.get("echo", 0) + 1
        except OSError as e:
            count[errno.errorcode[e.errno]] = 1

    threading.Thread(target=loop, daemon=True).start()


def alive(port):
    """How many of the connections that serve() took on port have not ended."""
    return accepted.get(port, 0) - len(ended.get(port, []))


def answer_datagrams(port):
    """Sends back every datagram that comes to port."""
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    s.bind(("::", port))

    def loop():
        while True:
            b, who = s.recvfrom(65536)
            s.sendto(b, who)

    threading.Thread(target=loop, daemon=True).start()


def datagram(family, addr, port, size, silent):
    """What comes of a datagram: the size of the answer, an errno, or "silence". silent: nothing is expected, so it is not
    asked twice."""
    s = socket.socket(AF[family], socket.SOCK_DGRAM)
    s.connect((addr, port))
    how = "silence"
    for _ in range(1 if silent else 10):
        s.settimeout(0.5 if silent else 1)
        try:
            s.send(b"d" * size)
            how = len(s.recv(65536))
            break
        except TimeoutError:
            continue
        except OSError as e:
            how = errno.errorcode[e.errno]
            break
    s.close()
    return how

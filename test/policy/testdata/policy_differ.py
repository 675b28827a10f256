import concurrent.futures


def serve_policy(ports, addrs=()):
    """Echoes on these TCP and UDP ports, in both families, for ever; UDP at each of addrs, if there are some, so that the answer
    comes from where it was asked for."""
    poll, tcp_listeners, udp_sockets, accepted = select.epoll(), {}, {}, {}
    for port in ports:
        for family, any_addr in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            own = [a for a in addrs if (":" in a) == (family == socket.AF_INET6)]
            for kind, known, addr in [(socket.SOCK_STREAM, tcp_listeners, any_addr)] + [
                    (socket.SOCK_DGRAM, udp_sockets, a) for a in own or [any_addr]]:
                s = socket.socket(family, kind)
                if family == socket.AF_INET6:
                    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((addr, port))
                if kind == socket.SOCK_STREAM:
                    s.listen(512)
                s.setblocking(False)
                known[s.fileno()] = s
                poll.register(s, select.EPOLLIN)

    def loop():
        while True:
            for fd, _ in poll.poll():
                try:
                    if fd in tcp_listeners:
                        c = tcp_listeners[fd].accept()[0]
                        c.setblocking(False)
                        accepted[c.fileno()] = c
                        poll.register(c, select.EPOLLIN)
                    elif fd in udp_sockets:
                        data, who = udp_sockets[fd].recvfrom(2000)
                        udp_sockets[fd].sendto(data, who)
                    else:
                        c = accepted.pop(fd)
                        poll.unregister(fd)
                        c.send(c.recv(2000))
                        c.close()
                except OSError:
                    pass  # the other end is gone, or was rejected meanwhile

    threading.Thread(target=loop, daemon=True).start()
    return "serves"


def source_of(addr):
    """The address that this host sends from to addr."""
    with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((addr, 9))
        return s.getsockname()[0]


def checksum(b):
    n = sum(struct.unpack("!%dH" % (len(b) // 2), b))
    n = (n >> 16) + (n & 0xFFFF)
    return ~(n + (n >> 16)) & 0xFFFF


def ping_once(addr, wait, number):
    ipv6 = ":" in addr
    with socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_RAW, 58 if ipv6 else 1) as s:
        s.connect((addr, 0))
        body = os.urandom(16)
        echo = struct.pack("!BBHHH", 128 if ipv6 else 8, 0, 0, os.getpid() & 0xFFFF, number & 0xFFFF) + body
        if not ipv6:
            echo = echo[:2] + struct.pack("!H", checksum(echo)) + echo[4:]
        s.send(echo)
        end = time.monotonic() + wait
        while time.monotonic() < end:
            s.settimeout(max(0.01, end - time.monotonic()))
            got = s.recv(2000)
            if not ipv6:
                got = got[(got[0] & 15) * 4:]
            if got[0] == (129 if ipv6 else 0) and got[8:] == body:
                return "answer"
    raise TimeoutError


def probe_once(kind, addr, port, answered, number):
    """One try: "answer", "refused" or "nothing". What has to be answered gets all the time it may need."""
    wait = 20 if answered else 1
    try:
        if kind == "icmp":
            return ping_once(addr, wait, number)
        with socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as s:
            s.settimeout(wait)
            s.connect((addr, port))
            said = b"x%d" % number
            s.send(said)
            got = s.recv(100)
            return "answer" if got == said else "got %r" % got
    except ConnectionRefusedError:
        return "refused"
    except (TimeoutError, socket.timeout):
        return "nothing"
    except OSError as e:
        # A datagram that a node may not send to its own container is dropped before it leaves: ENOBUFS.
        return "nothing" if kind != "tcp" and e.errno in (errno.EHOSTUNREACH, errno.ENOBUFS) else name_error(e)


def probe_all(tries):
    """What becomes of each of tries, all at once."""
    with concurrent.futures.ThreadPoolExecutor(max(1, len(tries))) as pool:
        return list(pool.map(lambda t: probe_once(*t[1], t[0]), enumerate(tries)))

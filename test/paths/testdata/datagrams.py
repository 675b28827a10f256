# Datagrams: UDP, ICMP, multicast, raw sockets. Added to peer.py; what functions return is compared between modes.
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU, IP_RECVTTL, IP_RECVTOS, IP_PKTINFO = 10, 2, 14, 12, 13, 8
GROUP = "239.17.2.3"


def outcome(f, *args):
    """What f(*args) gives, or the name of its error."""
    try:
        return f(*args)
    except TimeoutError:
        return "timeout"
    except OSError as e:
        return name_error(e)


def udp(wait=5):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(wait)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return s


def serve_udp(port):
    """Echoes every datagram from the address it was sent to, beginning with its sender's."""
    s = udp(None)
    s.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
    s.bind(("0.0.0.0", port))

    def loop():
        while True:
            data, aux, _, who = s.recvmsg(1 << 16, 1024)
            info = struct.pack("I4s4s", 0, aux[0][2][8:12], b"\0" * 4)
            head = socket.inet_aton(who[0]) + struct.pack("!H", who[1])
            s.sendmsg([head + data[6:]], [(socket.IPPROTO_IP, IP_PKTINFO, info)], 0, who)

    threading.Thread(target=loop, daemon=True).start()


def echo(target, port, n, connected=False):
    """Size and digest of what comes back, and whether the server saw this socket's own address."""
    s = udp()
    data = b"\0" * 6 + pattern(n - 6)
    if connected:
        s.connect((target, port))
        s.send(data)
    else:
        s.sendto(data, (target, port))
    got, who = s.recvfrom(1 << 16)
    probe = udp()
    probe.connect((target, port))
    seen = socket.inet_ntoa(got[:4])
    return [digest(got[6:]), list(who) == [target, port], seen == probe.getsockname()[0] or seen,
            struct.unpack("!H", got[4:6])[0] == s.getsockname()[1]]


def refused(target, port):
    """A connected socket hears of the port that nobody has."""
    s = udp()
    s.connect((target, port))
    s.send(b"x")
    return [outcome(s.recv, 10), outcome(s.send, b"y"), s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) >= 0]


def ancillary(target, port):
    s = udp()
    for option in IP_PKTINFO, IP_RECVTTL, IP_RECVTOS:
        s.setsockopt(socket.IPPROTO_IP, option, 1)
    s.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x28)
    s.sendto(b"\0" * 20, (target, port))
    _, aux, flags, who = s.recvmsg(100, 1024)
    out = [flags, who[0]]
    for level, kind, value in sorted(aux):
        if kind == IP_PKTINFO:
            out.append(["pktinfo", socket.inet_ntoa(value[4:8]), socket.inet_ntoa(value[8:12])])
        else:
            out.append([level, kind, value.hex()])
    return out


def segments(target, port):
    """One send of ten segments; the receiver may get them joined again."""
    s = udp()
    s.setsockopt(SOL_UDP, UDP_SEGMENT, 1000)
    s.setsockopt(SOL_UDP, UDP_GRO, 1)
    s.sendto(pattern(10000), (target, port))
    n = 0
    while n < 10000:
        n += len(s.recv(1 << 16))
    return n


def path_mtu(target, port):
    """Largest datagram that leaves with DF set, what a larger one gets, and the MTU the kernel tells."""
    s = udp()
    s.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
    s.connect((target, port))
    mtu = s.getsockopt(socket.IPPROTO_IP, IP_MTU)
    s.send(b"\0" * (mtu - 28))
    got = outcome(lambda: len(s.recv(1 << 16)))
    return [mtu, got, outcome(s.send, b"\0" * (mtu - 27)), s.getsockopt(socket.IPPROTO_IP, IP_MTU)]


def join(port):
    global member
    member = udp(0.3)  # long enough for what does come, on one machine
    member.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    member.bind(("", port))
    index = socket.if_nametoindex("eth0")
    return outcome(member.setsockopt, socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP,
                   socket.inet_aton(GROUP) + struct.pack("@4si", b"\0" * 4, index))


def heard():
    return outcome(lambda: member.recv(100).decode())


def multicast(port, ttl):
    s = udp()
    index = socket.if_nametoindex("eth0")
    s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, struct.pack("@4s4si", b"\0" * 4, b"\0" * 4, index))
    s.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, ttl)
    return outcome(s.sendto, b"multicast", (GROUP, port))


def broadcast(addr, port, allowed):
    s = udp()
    if allowed:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    return outcome(s.sendto, b"broadcast", (addr, port))


def icmp(target, kind, size=56):
    """An echo over a raw socket, or over one of ping_group_range."""
    s = socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP)
    s.settimeout(5)
    body = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 7) + pattern(size)
    odd = body + b"\0" * (len(body) % 2)
    n = sum(struct.unpack(f"!{len(odd) // 2}H", odd))
    n = (n >> 16) + (n & 0xFFFF)
    n = ~(n + (n >> 16)) & 0xFFFF
    s.sendto(body[:2] + struct.pack("!H", n) + body[4:], (target, 0))
    while True:
        got, who = s.recvfrom(1 << 16)
        if kind == socket.SOCK_RAW:
            got = got[(got[0] & 15) * 4:]
        if got[0] == 0:
            return [who[0], got[0], got[1], got[6:8].hex(), digest(got[8:])]


def segment_size(target, port):
    s = connect(4, target, port)
    n = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    s.close()
    return n

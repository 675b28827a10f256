# Datagrams over IPv6. Added to peer.py after datagrams.py; what functions return is compared between modes.
IPV6_MTU_DISCOVER, IPV6_MTU, IPV6_PMTUDISC_DO = 23, 24, 2
HEADERS6 = 48  # of IPv6 and UDP


def udp6(wait=5):
    s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    s.settimeout(wait)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return s


def serve_udp6(port):
    """Echoes every datagram from the address it was sent to, beginning with its sender's."""
    s = udp6(None)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
    s.bind(("::", port))

    def loop():
        while True:
            data, aux, _, who = s.recvmsg(1 << 16, 1024)
            info = aux[0][2][:16] + b"\0" * 4
            head = socket.inet_pton(socket.AF_INET6, who[0]) + struct.pack("!H", who[1])
            s.sendmsg([head + data[18:]], [(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, info)], 0, who)

    threading.Thread(target=loop, daemon=True).start()


def echo6(target, port, n, connected=False, wait=5):
    """Size and digest of what comes back, and whether the server saw this socket's own address."""
    s = udp6(wait)
    data = b"\0" * 18 + pattern(n - 18)
    if connected:
        s.connect((target, port))
        s.send(data)
    else:
        s.sendto(data, (target, port))
    got, who = s.recvfrom(1 << 16)
    probe = udp6()
    probe.connect((target, port))
    seen = socket.inet_ntop(socket.AF_INET6, got[:16])
    return [digest(got[18:]), list(who[:2]) == [target, port], seen == probe.getsockname()[0] or seen,
            struct.unpack("!H", got[16:18])[0] == s.getsockname()[1]]


def refused6(target, port):
    """A connected socket hears of the port that nobody has."""
    s = udp6()
    s.connect((target, port))
    s.send(b"x")
    return [outcome(s.recv, 10), outcome(s.send, b"y"), s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) >= 0]


def ancillary6(target, port):
    s = udp6()
    for option in socket.IPV6_RECVPKTINFO, socket.IPV6_RECVHOPLIMIT, socket.IPV6_RECVTCLASS:
        s.setsockopt(socket.IPPROTO_IPV6, option, 1)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, 0x28)
    s.sendto(b"\0" * 20, (target, port))
    _, aux, flags, who = s.recvmsg(100, 1024)
    return [flags, who[0]] + [[level, kind, value[:16].hex()] for level, kind, value in sorted(aux)]


def path_mtu6(target, port):
    """Largest datagram that leaves in one piece, what a larger one gets, and the MTU the kernel tells."""
    s = udp6()
    s.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_DO)
    s.connect((target, port))
    mtu = s.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)
    s.send(b"\0" * (mtu - HEADERS6))
    got = outcome(lambda: len(s.recv(1 << 16)))
    return [mtu, got, outcome(s.send, b"\0" * (mtu - HEADERS6 + 1)), s.getsockopt(socket.IPPROTO_IPV6, IPV6_MTU)]


def icmp6(target, kind, size=56):
    """An echo over a raw socket, or over one of ping_group_range."""
    s = socket.socket(socket.AF_INET6, kind, socket.IPPROTO_ICMPV6)
    s.settimeout(5)
    s.sendto(struct.pack("!BBHHH", 128, 0, 0, os.getpid() & 0xFFFF, 7) + pattern(size), (target, 0))
    while True:
        got, who = s.recvfrom(1 << 16)
        if got[0] == 129:
            return [who[0], got[0], got[1], got[6:8].hex(), digest(got[8:])]

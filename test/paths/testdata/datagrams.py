# Datagrams: UDP, ICMP, multicast, raw sockets. Added to peer.py; what functions return is compared between modes.
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU, IP_RECVTTL, IP_RECVTOS, IP_PKTINFO = 10, 2, 14, 12, 13, 8
GROUP = "239.17.2.3"


class V4:
    """How the tests' functions ask for the same in IPv4 and in IPv6."""
    af, level, any, icmp, request, reply = socket.AF_INET, socket.IPPROTO_IP, "0.0.0.0", socket.IPPROTO_ICMP, 8, 0
    recv_info, info, about = IP_PKTINFO, IP_PKTINFO, (IP_PKTINFO, IP_RECVTTL, IP_RECVTOS)
    tos, mtu_discover, mtu, headers = socket.IP_TOS, IP_MTU_DISCOVER, IP_MTU, 28  # of IP and UDP
    addr = 4  # bytes

    def reply_info(info):
        """What sends from the address that info says a datagram was sent to."""
        return struct.pack("I4s4s", 0, info[8:12], b"\0" * 4)


class V6:
    af, level, any, icmp, request, reply = socket.AF_INET6, socket.IPPROTO_IPV6, "::", socket.IPPROTO_ICMPV6, 128, 129
    recv_info, info = socket.IPV6_RECVPKTINFO, socket.IPV6_PKTINFO
    about = socket.IPV6_RECVPKTINFO, socket.IPV6_RECVHOPLIMIT, socket.IPV6_RECVTCLASS
    tos, mtu_discover, mtu, headers = socket.IPV6_TCLASS, 23, 24, 48
    addr = 16

    def reply_info(info):
        return info[:16] + b"\0" * 4


def version(addr):
    return V6 if ":" in addr else V4


def outcome(f, *args):
    """What f(*args) gives, or the name of its error."""
    try:
        return f(*args)
    except TimeoutError:
        return "timeout"
    except OSError as e:
        return name_error(e)


def udp(wait=5, ip=V4):
    s = socket.socket(ip.af, socket.SOCK_DGRAM)
    s.settimeout(wait)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return s


def serve_udp(port, ip=V4):
    """Echoes every datagram from the address it was sent to, beginning with its sender's."""
    s = udp(None, ip)
    s.setsockopt(ip.level, ip.recv_info, 1)
    s.bind((ip.any, port))

    def loop():
        while True:
            data, aux, _, who = s.recvmsg(1 << 16, 1024)
            head = socket.inet_pton(ip.af, who[0]) + struct.pack("!H", who[1])
            s.sendmsg([head + data[len(head):]], [(ip.level, ip.info, ip.reply_info(aux[0][2]))], 0, who)

    threading.Thread(target=loop, daemon=True).start()


def echo(target, port, n, connected=False, wait=5):
    """Size and digest of what comes back, and whether the server saw this socket's own address."""
    ip = version(target)
    s, head = udp(wait, ip), ip.addr + 2
    data = b"\0" * head + pattern(n - head)
    if connected:
        s.connect((target, port))
        s.send(data)
    else:
        s.sendto(data, (target, port))
    got, who = s.recvfrom(1 << 16)
    probe = udp(5, ip)
    probe.connect((target, port))
    seen = socket.inet_ntop(ip.af, got[:ip.addr])
    return [digest(got[head:]), list(who[:2]) == [target, port], seen == probe.getsockname()[0] or seen,
            struct.unpack("!H", got[ip.addr:head])[0] == s.getsockname()[1]]


def refused(target, port):
    """A connected socket hears of the port that nobody has."""
    s = udp(5, version(target))
    s.connect((target, port))
    s.send(b"x")
    return [outcome(s.recv, 10), outcome(s.send, b"y"), s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) >= 0]


def ancillary(target, port):
    ip = version(target)
    s = udp(5, ip)
    for option in ip.about:
        s.setsockopt(ip.level, option, 1)
    s.setsockopt(ip.level, ip.tos, 0x28)
    s.sendto(b"\0" * 20, (target, port))
    _, aux, flags, who = s.recvmsg(100, 1024)
    out = [flags, who[0]]
    for level, kind, value in sorted(aux):
        if ip is V4 and kind == IP_PKTINFO:
            out.append(["pktinfo", socket.inet_ntoa(value[4:8]), socket.inet_ntoa(value[8:12])])
        else:
            out.append([level, kind, value[:16].hex()])  # not the device's number
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
    """Largest datagram that leaves in one piece, what a larger one gets, and the MTU the kernel tells."""
    ip = version(target)
    s = udp(5, ip)
    s.setsockopt(ip.level, ip.mtu_discover, IP_PMTUDISC_DO)
    s.connect((target, port))
    mtu = s.getsockopt(ip.level, ip.mtu)
    s.send(b"\0" * (mtu - ip.headers))
    got = outcome(lambda: len(s.recv(1 << 16)))
    return [mtu, got, outcome(s.send, b"\0" * (mtu - ip.headers + 1)), s.getsockopt(ip.level, ip.mtu)]


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
    ip = version(target)
    s = socket.socket(ip.af, kind, ip.icmp)
    s.settimeout(5)
    body = struct.pack("!BBHHH", ip.request, 0, 0, os.getpid() & 0xFFFF, 7) + pattern(size)
    if ip is V4:  # of ICMPv6 the kernel makes the checksum
        odd = body + b"\0" * (len(body) % 2)
        n = sum(struct.unpack(f"!{len(odd) // 2}H", odd))
        n = (n >> 16) + (n & 0xFFFF)
        n = ~(n + (n >> 16)) & 0xFFFF
        body = body[:2] + struct.pack("!H", n) + body[4:]
    s.sendto(body, (target, 0))
    while True:
        got, who = s.recvfrom(1 << 16)
        if ip is V4 and kind == socket.SOCK_RAW:
            got = got[(got[0] & 15) * 4:]
        if got[0] == ip.reply:
            return [who[0], got[0], got[1], got[6:8].hex(), digest(got[8:])]


def segment_size(target, port):
    s = connect(4, target, port)
    n = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    s.close()
    return n

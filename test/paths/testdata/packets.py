# What a packet needs a router for. Added to peer.py and datagrams.py.
IP_RECVERR, MSG_ERRQUEUE = 11, 0x2000


def expires(target, port, hops):
    """Kind and sender of the ICMP error about a datagram that goes so far only."""
    s = udp()
    s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hops)
    s.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
    s.sendto(b"x" * 20, (target, port))
    poll = select.poll()
    poll.register(s, 0)  # errors are always told
    if not poll.poll(5000):
        return "timeout"
    _, aux, _, _ = s.recvmsg(100, 1024, MSG_ERRQUEUE)
    error = aux[0][2]  # struct sock_extended_err, then the offender's struct sockaddr_in
    return [error[5], socket.inet_ntoa(error[20:24])]


def with_options(target, port):
    """A datagram with IP options: record route has none recorded."""
    s = udp()
    s.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, b"\x01\x01\x01\x00")
    s.sendto(b"\0" * 6 + b"hello", (target, port))
    data, who = s.recvfrom(100)
    return [data[6:].decode(), list(who)]

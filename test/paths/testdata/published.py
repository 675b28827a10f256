# Servers that say where a message is from, and clients of theirs.


def family_of(addr):
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def answer_stream(s):
    while s.recv(1):
        s.sendall(s.getpeername()[0].encode())


def serve_streams(listener):
    while True:
        threading.Thread(target=answer_stream, args=(listener.accept()[0],), daemon=True).start()


def serve_datagrams(s):
    while True:
        message, peer = s.recvfrom(100)
        heard.append(message.decode())
        s.sendto(peer[0].encode(), peer)


def who(tcp_port, udp_port):
    global heard
    heard = []
    for addr in "0.0.0.0", "::":
        for kind, port, serve in (socket.SOCK_STREAM, tcp_port, serve_streams), (socket.SOCK_DGRAM, udp_port, serve_datagrams):
            s = socket.socket(family_of(addr), kind)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if addr == "::":
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            s.bind((addr, port))
            if kind == socket.SOCK_STREAM:
                s.listen()
            threading.Thread(target=serve, args=(s,), daemon=True).start()


def opened(addr, port, kind=socket.SOCK_STREAM):
    s = socket.socket(family_of(addr), kind)
    s.settimeout(5)
    s.connect((addr, port))
    return s


def ask(s):
    s.send(b"x")
    return s.recv(100).decode() or "closed"


def asked(addr, port, kind=socket.SOCK_STREAM):
    return ask(opened(addr, port, kind))

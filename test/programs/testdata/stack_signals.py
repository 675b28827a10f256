# Many short connections, to a server that signals interrupt all the time.
# stack_signals.py server PORT COUNT
# stack_signals.py client ADDRESS PORT COUNT
import os
import select
import signal
import socket
import sys
import time

WAIT = 20  # seconds


def sockets():
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            links[fd] = os.readlink("/proc/self/fd/" + fd)
        except FileNotFoundError:  # the directory's own
            pass
    return {fd for fd, link in links.items() if link.startswith("socket:")}


def serve(port, count):
    listener = socket.create_server(("", port), backlog=64)
    listener.setblocking(False)
    epoll = select.epoll()
    epoll.register(listener, select.EPOLLIN)
    before = sockets()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    print("ready", flush=True)
    live, ended = set(), 0
    while ended < count:
        for fd, _ in epoll.poll():
            if fd == listener.fileno():
                try:
                    # accept() alone would call getsockname(), which the agent answers, too: a signal
                    # would take the program out of it while the agent still looks at the socket.
                    conn, _ = listener._accept()
                except BlockingIOError:
                    continue
                live.add(conn)
                epoll.register(conn, select.EPOLLIN)
            elif fd in live:  # else it is closed, and its file may be for another moment
                try:
                    data = os.read(fd, 100)
                except ConnectionResetError:
                    data = b""
                if data:
                    os.write(fd, data)
                else:
                    live.discard(fd)
                    os.close(fd)
                    ended += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    left = sockets() - before
    # A file that somebody has open still goes on telling of its end.
    epoll.unregister(listener)
    until = time.monotonic() + WAIT
    while epoll.poll(0) and time.monotonic() < until:
        pass
    print("closed ones that stay:", len(epoll.poll(0)), "descriptors left:", len(left), flush=True)


def ask(address, port, count):
    for _ in range(count):
        with socket.create_connection((address, port), 20) as conn:
            conn.sendall(b"x")
            if conn.recv(1) != b"x":
                sys.exit("no echo")


if sys.argv[1] == "server":
    serve(int(sys.argv[2]), int(sys.argv[3]))
else:
    ask(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

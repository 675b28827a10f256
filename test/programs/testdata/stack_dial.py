"""try HOST PORT...    says for each port what became of a connection to an echo server there
hold HOST PORT...   has connections there that say nothing, and says how each ends, until the end of its input"""

import errno
import socket
import sys
import threading


def greeted(host, port):
    s = socket.create_connection((host, port), 2)
    s.sendall(b"x")
    if s.recv(1) != b"x":
        raise ConnectionError("no echo")
    return s


def attempt(host, port):
    try:
        greeted(host, port).close()
        return "echo"
    except TimeoutError as e:
        return "timeout" if e.errno is None else errno.errorcode[e.errno]
    except OSError as e:
        return errno.errorcode.get(e.errno, str(e))


def stay(s, port):
    s.settimeout(None)
    try:
        how = "EOF"
        while s.recv(1):
            pass
    except OSError as e:
        how = errno.errorcode.get(e.errno, str(e))
    print("ended", port, how, flush=True)


what, host, ports = sys.argv[1], sys.argv[2], [int(p) for p in sys.argv[3:]]
if what == "try":
    print(*(f"{p}={attempt(host, p)}" for p in ports))
else:
    for port in ports:
        threading.Thread(target=stay, args=(greeted(host, port), port), daemon=True).start()
    print("held", flush=True)
    sys.stdin.read()

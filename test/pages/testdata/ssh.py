#!/usr/bin/env python3
"""Stands in for ssh and its server between the hosts of a test: `ssh HOST COMMAND...`, and `ssh --serve`. Nothing is encrypted and
nobody is asked who he is."""
import socket, subprocess, sys, threading

def serve(c):
    with c, c.makefile("rb") as r:
        command = r.readline().decode()
        p = subprocess.run(["sh", "-c", command], input=r.read(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        c.sendall(b"%d\n" % p.returncode + p.stdout)

if sys.argv[1] == "--serve":
    l = socket.create_server(("0.0.0.0", 22))
    while True:
        threading.Thread(target=serve, args=(l.accept()[0],), daemon=True).start()

host = sys.argv[1].rpartition("@")[2]
with socket.create_connection((host, 22), 10) as s, s.makefile("rb") as r:
    s.settimeout(60)
    s.sendall(" ".join(sys.argv[2:]).replace("\n", ";").encode() + b"\n")
    if not sys.stdin.isatty():
        s.sendall(sys.stdin.buffer.read())
    s.shutdown(socket.SHUT_WR)
    code = int(r.readline())
    sys.stdout.buffer.write(r.read())
sys.exit(code)

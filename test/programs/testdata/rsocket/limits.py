"""What programs under librspreload meet, whatever the device is."""

import ctypes
import os
import select
import socket
import threading

preload, libc = ctypes.CDLL(os.environ["LD_PRELOAD"]), ctypes.CDLL("libc.so.6")


class PollFd(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short)]


def waits_end():
    """rpoll() of a pipe: once until its time is over, once until something comes, and once more."""
    rdmacm = ctypes.CDLL("librdmacm.so.1")
    reads, writes = os.pipe()

    def poll(milliseconds):
        fd = PollFd(reads, select.POLLIN, 0)
        return rdmacm.rpoll(ctypes.byref(fd), ctypes.c_ulong(1), milliseconds)

    assert poll(10) == 0
    threading.Timer(0.1, os.write, (writes, b"x")).start()
    assert poll(-1) == 1
    os.read(reads, 1)
    last = threading.Thread(target=poll, args=(10,), daemon=True)
    last.start()
    last.join(2)
    return not last.is_alive()


def descriptor(more):
    fd = preload.socket(socket.AF_INET, socket.SOCK_STREAM | more, 0)
    return fd, os.readlink(f"/proc/self/fd/{fd}").split(":")[0]


fd, what = descriptor(0)
print("a socket's descriptor:", what)
try:
    select.epoll().register(fd)
except OSError as e:
    print("epoll:", e.strerror)
print("with SOCK_CLOEXEC:", descriptor(socket.SOCK_CLOEXEC)[1])
if ctypes.cast(preload.accept4, ctypes.c_void_p).value == ctypes.cast(libc.accept4, ctypes.c_void_p).value:
    print("accept4 is the C library's")
print("a wait with a time, after one that is over:", "ends" if waits_end() else "does not end", flush=True)
os._exit(0)  # not before it ends

"""Event channels of the image's librdmacm, in a process that loads it late, and after fork()."""

import ctypes
import errno
import os
import select

PS_TCP = 0x0106

rdma = ctypes.CDLL("librdmacm.so.1", use_errno=True)
rdma.rdma_create_event_channel.restype = ctypes.c_void_p


def open_channel():
    channel = rdma.rdma_create_event_channel()
    assert channel, os.strerror(ctypes.get_errno())
    return ctypes.c_void_p(channel)


def create(channel):
    """Gives an errno, or 0."""
    made = ctypes.c_void_p()
    result = rdma.rdma_create_id(channel, ctypes.byref(made), None, PS_TCP)
    return ctypes.get_errno() if result else 0


channel = open_channel()
fd = ctypes.cast(channel, ctypes.POINTER(ctypes.c_int))[0]
assert create(channel) == 0
os.set_blocking(fd, False)
event = ctypes.c_void_p()
assert rdma.rdma_get_cm_event(channel, ctypes.byref(event)) == -1
assert ctypes.get_errno() == errno.EAGAIN
poll = select.epoll()
poll.register(fd, select.EPOLLIN)
assert poll.poll(0) == []

child = os.fork()
if child == 0:
    # The channel is its parent's, another one its own.
    os._exit(0 if create(channel) == errno.EIO and create(open_channel()) == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
assert create(channel) == 0

# A descriptor that the program closes itself is another file's then, and ended as that.
os.close(fd)
null = os.open("/dev/null", os.O_RDWR)
assert null == fd
rdma.rdma_destroy_event_channel(channel)
try:
    os.fstat(fd)
except OSError:
    pass
else:
    raise AssertionError("the descriptor is still open")

package main

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// undo ALLOWED NODE PORT connects to ALLOWED, disconnects, and then binds the address NODE with the
// same socket, or connects to the container's own loopback; and it connects there with data in the
// SYN. What listens at PORT greets.
func undo(args []string) {
	allowed, node, port := parse(args[0]), parse(args[1]), number(args[2])
	loopback := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	for _, f := range []struct {
		name   string
		family int
		form   func(netip.Addr) netip.Addr
	}{
		{"AF_INET", unix.AF_INET, func(a netip.Addr) netip.Addr { return a }},
		{"AF_INET6", unix.AF_INET6, mapped},
	} {
		// A socket that was connected, and is not any more.
		undone := func() int {
			fd := newSocket(f.family)
			if said := greeted(fd, connect(fd, addressOf(f.form(allowed), port))); said != "peer" {
				say("connect "+f.name, said)
			}
			for _, length := range []int{0, 1} {
				if errno := disconnect(fd, length); errno != unix.EINVAL {
					say("disconnect with a short address", nameOf(errno))
				}
			}
			check("disconnect", errorOf(disconnect(fd, 2)))
			return fd
		}
		fd := undone()
		say("bind "+f.name, nameOf(bind(fd, addressOf(f.form(node), 0))))
		unix.Close(fd)
		target := addressOf(f.form(loopback), port)
		attempt := func(made func() int, do func(fd int) unix.Errno) string {
			return uninterrupted(func() string {
				fd := made()
				defer unix.Close(fd)
				return greeted(fd, do(fd))
			})
		}
		say("reconnect "+f.name, attempt(undone, func(fd int) unix.Errno { return connect(fd, target) }))
		long := append(target[:len(target):len(target)], make([]byte, 100)...)
		say("reconnect with a long address "+f.name, attempt(undone, func(fd int) unix.Errno { return connect(fd, long) }))
		fast := func(fd int) unix.Errno { return sendFast(fd, target) }
		say("fast open "+f.name, attempt(func() int { return newSocket(f.family) }, fast))
		say("fast open again "+f.name, attempt(undone, fast))
		say("deferred "+f.name, uninterrupted(func() string { return deferred(f.family, addressOf(f.form(allowed), port), target) }))
	}
}

// deferred connects to the allowed address, which sends nothing as long as there is no data, undoes
// that, and sends to the target.
func deferred(family int, allowed, target []byte) string {
	fd := newSocket(family)
	defer unix.Close(fd)
	check("TCP_FASTOPEN_CONNECT", unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_FASTOPEN_CONNECT, 1))
	check("TCP_FASTOPEN_NO_COOKIE", unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_FASTOPEN_NO_COOKIE, 1))
	check("connect", errorOf(connect(fd, allowed)))
	check("disconnect", errorOf(disconnect(fd, 16)))
	if errno := connect(fd, target); errno != 0 {
		return nameOf(errno)
	}
	if _, err := unix.Write(fd, []byte("x")); err != nil {
		return nameOf(err.(unix.Errno))
	}
	return greeting(fd)
}

// uninterrupted gives the first result of try that is not a signal's: Go's own runtime sends some,
// and nothing came of it then.
func uninterrupted(try func() string) string {
	for {
		if result := try(); result != "EINTR" {
			return result
		}
	}
}

// errorOf is errno as an error.
func errorOf(errno unix.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}

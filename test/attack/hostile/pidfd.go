package main

import (
	"bytes"
	"encoding/binary"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// lent is how many sockets lend makes.
const lent = 4

// lend PATH makes sockets, and lets who connects to PATH take any descriptor of this process
// (pidfd_getfd): it gives its pidfd away, and the sockets' numbers.
func lend(args []string) {
	var numbers [4 * lent]byte
	for i := range lent {
		binary.NativeEndian.PutUint32(numbers[4*i:], uint32(newSocket(unix.AF_INET)))
	}
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	check("pidfd_open", err)
	l, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	check("socket", err)
	check("bind", unix.Bind(l, &unix.SockaddrUnix{Name: args[0]}))
	check("listen", unix.Listen(l, 1))
	say("lends", args[0])
	c, _, err := unix.Accept(l)
	check("accept", err)
	check("sendmsg", unix.Sendmsg(c, numbers[:], unix.UnixRights(self), nil, 0))
	waitForEnd()
}

// steal PATH OWN SERVER PORT takes the sockets that a process of another container lends, and uses
// them here: OWN is the address of this container, and at PORT of SERVER somebody accepts.
func steal(args []string) {
	own, server, port := parse(args[1]), parse(args[2]), number(args[3])
	stolen := take(args[0])
	say("bind the thief's address", nameOf(bind(stolen[0], addressOf(own, 0))))
	anywhere := addressOf(parse("0.0.0.0"), port)
	say("bind", nameOf(bind(stolen[0], anywhere)))
	check("listen", unix.Listen(stolen[0], 1))
	say("bind one of its own to the same port", nameOf(bind(newSocket(unix.AF_INET), anywhere)))
	say("connect", nameOf(connect(stolen[1], addressOf(server, port))))
	say("connected from", localOf(stolen[1]).Addr().String())
	err := unix.SetsockoptInt(stolen[2], unix.SOL_TCP, unix.TCP_REPAIR, 1)
	errno, _ := err.(unix.Errno)
	say("TCP_REPAIR", nameOf(errno))
	say("devices", strings.Join(devices(stolen[3]), " "))
	waitForEnd()
}

// take gets the lent sockets.
func take(path string) (fds [lent]int) {
	c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	check("socket", err)
	check("connect", unix.Connect(c, &unix.SockaddrUnix{Name: path}))
	numbers, oob := make([]byte, 4*lent), make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(c, numbers, oob, 0)
	check("recvmsg", err)
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	check("control message", err)
	rights, err := unix.ParseUnixRights(&messages[0])
	check("rights", err)
	for i := range fds {
		fds[i], err = unix.PidfdGetfd(rights[0], int(binary.NativeEndian.Uint32(numbers[4*i:])), 0)
		check("pidfd_getfd", err)
	}
	return fds
}

// devices are the names of devices with an address that SIOCGIFCONF tells of.
func devices(fd int) (names []string) {
	const size = 40 // of struct ifreq
	list := new([64 * size]byte)
	var request struct {
		length int32
		_      int32
		list   *[64 * size]byte
	}
	request.length, request.list = int32(len(list)), list
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCGIFCONF, uintptr(unsafe.Pointer(&request)))
	check("SIOCGIFCONF", errorOf(errno))
	for at := 0; at < int(request.length); at += size {
		name, _, _ := bytes.Cut(list[at:at+unix.IFNAMSIZ], []byte{0})
		names = append(names, string(name))
	}
	return names
}

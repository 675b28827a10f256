package main

import (
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// batchMagic makes of socket() a question for many sockets: internal/plane/tcp/intercept/batch.go.
const batchMagic uint64 = 0xb7c1_5e0d_92f6_4a83

// askBatches SECONDS MOST asks by hand for batches of one socket until it gets single ones, keeps
// them, and says how many it got, and what the first one leads to. If it gets none at all it asks
// again for so many seconds: an agent that has just started gives none.
func askBatches(args []string) {
	end, most := time.Now().Add(time.Duration(number(args[0]))*time.Second), number(args[1])
	var held []int
	for single := 0; len(held) < most && single < 3; {
		fd, ok := askBatch()
		if ok {
			held = append(held, fd)
			continue
		}
		check("close", unix.Close(fd))
		if len(held) > 0 || time.Now().After(end) {
			single++
			continue
		}
		time.Sleep(10 * time.Millisecond)
	}
	say("batches", strconv.Itoa(len(held)))
	if len(held) > 0 {
		say("file of who made it", fileOfPeer(held[0]))
	}
}

// askBatch asks for a batch, and reports whether it got one: else fd is a single socket.
func askBatch() (fd int, ok bool) {
	r, _, errno := unix.Syscall6(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM, 0, uintptr(batchMagic), 1, ^uintptr(batchMagic))
	check("socket", errorOf(errno))
	domain, err := unix.GetsockoptInt(int(r), unix.SOL_SOCKET, unix.SO_DOMAIN)
	check("SO_DOMAIN", err)
	return int(r), domain == unix.AF_UNIX
}

// fileOfPeer takes a file of the process at the other end of a Unix connection: "ok", the name of
// an errno, or "nobody" if there is no such process.
func fileOfPeer(fd int) string {
	pidfd, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err == nil {
		defer unix.Close(pidfd)
		_, err = unix.PidfdGetfd(pidfd, 2, 0)
	}
	switch errno, _ := err.(unix.Errno); errno {
	case unix.ESRCH, unix.EINVAL, unix.ENODATA: // by kernel: the process has ended, and left no trace
		return "nobody"
	default:
		return nameOf(errno)
	}
}

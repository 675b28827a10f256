package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// waitTimeout bounds a race that never shows both of its sides.
const waitTimeout = 20 * time.Second

// race calls try again and again while another thread changes memory between a and b, until it was
// tried often and came to two results at least: then the change fell between what was looked at and
// what was done, if it can.
func race(memory, a, b []byte, tries int, try func() string) map[string]int {
	var stop atomic.Bool
	var changing sync.WaitGroup
	changing.Go(func() {
		runtime.LockOSThread()
		for i := 0; !stop.Load(); i++ {
			if i&1 == 0 {
				copy(memory, a)
			} else {
				copy(memory, b)
			}
		}
	})
	counts, end := map[string]int{}, time.Now().Add(waitTimeout)
	for i := 0; (i < tries || len(counts) < 2) && time.Now().Before(end); i++ {
		counts[uninterrupted(try)]++
	}
	stop.Store(true)
	changing.Wait()
	return counts
}

// raceBind OWN FOREIGN binds an address that changes between the two, and listens.
func raceBind(args []string) {
	own, foreign := addressOf(parse(args[0]), 0), addressOf(parse(args[1]), 0)
	memory := append([]byte(nil), own...)
	held := 0
	counts := race(memory, own, foreign, 400, func() string {
		fd := newSocket(unix.AF_INET)
		if errno := bind(fd, memory); errno != 0 {
			unix.Close(fd)
			return nameOf(errno)
		}
		at := localOf(fd).Addr().String()
		if held++; held > 20 {
			unix.Close(fd)
		} else {
			check("listen", unix.Listen(fd, 1))
		}
		return at
	})
	sayCounts(counts)
	fmt.Println("listening")
	waitForEnd()
}

// raceConnect HOW A B PORT connects to an address that changes between the two.
func raceConnect(args []string) {
	a, b := addressOf(parse(args[1]), number(args[3])), addressOf(parse(args[2]), number(args[3]))
	memory := append([]byte(nil), a...)
	calls := map[string]func(int, []byte) unix.Errno{"connect": connect, "fastopen": sendFast}
	var r *ring
	if args[0] == "ring" {
		r = newRing(0)
	}
	sayCounts(race(memory, a, b, 200, func() string {
		fd := newSocket(unix.AF_INET)
		defer unix.Close(fd)
		if r != nil {
			return greeted(fd, r.connect(fd, memory))
		}
		return greeted(fd, calls[args[0]](fd, memory))
	}))
}

// raceOption A B binds a socket to a device whose name changes between the two, and asks which it
// is.
func raceOption(args []string) {
	var a, b, memory [unix.IFNAMSIZ]byte
	copy(a[:], args[0])
	copy(b[:], args[1])
	memory = a
	sayCounts(race(memory[:], a[:], b[:], 2000, func() string {
		fd := newSocket(unix.AF_INET)
		defer unix.Close(fd)
		_, _, errno := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_BINDTODEVICE,
			uintptr(unsafe.Pointer(&memory[0])), unix.IFNAMSIZ, 0)
		if errno != 0 {
			return nameOf(errno)
		}
		name, err := unix.GetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE)
		check("SO_BINDTODEVICE", err)
		return name
	}))
}

// raceDescriptor MS ADDRESS PORT has threads make and close sockets, connect, make ioctls and set
// options by numbers that other threads meanwhile close or put other files behind.
func raceDescriptor(args []string) {
	const numbers = 8
	end := time.Now().Add(time.Duration(number(args[0])) * time.Millisecond)
	target := addressOf(parse(args[1]), number(args[2]))
	file, err := os.Open("/proc/self/status")
	check("open", err)
	plain, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	check("socket", err)
	var fds [numbers]int
	for i := range fds {
		fds[i], err = unix.FcntlInt(file.Fd(), unix.F_DUPFD, 100)
		check("F_DUPFD", err)
	}
	// What each thread does with the i-th number; errors are as it happens.
	acts := []func(fd int){
		func(fd int) { _ = unix.Dup3(int(file.Fd()), fd, 0) },
		func(fd int) { _ = unix.Dup3(plain, fd, 0) },
		func(fd int) {
			if s, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0); err == nil {
				_ = unix.Dup3(s, fd, 0)
				_ = unix.Close(s)
			}
		},
		func(fd int) { _ = unix.Close(fd) },
		func(fd int) { _ = connect(fd, target) },
		func(fd int) { _ = disconnect(fd, 16) },
		func(fd int) {
			var request [40]byte // struct ifreq of the first device
			binary.NativeEndian.PutUint32(request[16:], 1)
			_ = call(unix.SYS_IOCTL, fd, request[:], 0) // no such request: not trapped
			_, _, _ = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCGIFNAME, uintptr(unsafe.Pointer(&request[0])))
		},
		func(fd int) { _ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 1) },
		func(fd int) { _ = unix.Listen(fd, 1) },
	}
	var threads sync.WaitGroup
	for i, act := range acts {
		threads.Go(func() {
			runtime.LockOSThread()
			for n := i; time.Now().Before(end); n++ {
				act(fds[n%numbers])
			}
		})
	}
	threads.Wait()
}

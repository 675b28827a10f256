package main

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// holdPorts OWN N binds N sockets to ports of the kernel's choice, or as many as it can.
func holdPorts(args []string) {
	any, n, want := addressOf(parse(args[0]), 0), 0, number(args[1])
	result := "ok"
	for ; n < want; n++ {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			result = "socket: " + nameOf(err.(unix.Errno))
			break
		}
		if errno := bind(fd, any); errno != 0 {
			result = nameOf(errno)
			break
		}
	}
	say("bound", strconv.Itoa(n))
	say("then", result)
	waitForEnd()
}

// holdMemory ADDRESS PORT N sends on N connections until nothing more is taken, and goes on to hold what is under way.
func holdMemory(args []string) {
	target, n := addressOf(parse(args[0]), number(args[1])), number(args[2])
	block := make([]byte, 1<<20)
	sent := 0
	for range n {
		fd := newSocket(unix.AF_INET)
		check("connect", errorOf(connect(fd, target)))
		check("O_NONBLOCK", unix.SetNonblock(fd, true))
		for {
			m, err := unix.Write(fd, block)
			if err != nil {
				break
			}
			sent += m
		}
	}
	fmt.Println("sent:", sent)
	waitForEnd()
}

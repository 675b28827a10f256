package main

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
)

// holdPorts OWN FIRST LAST binds a socket to each of these ports, or as many as it can.
func holdPorts(args []string) {
	own, bound, results := parse(args[0]), 0, map[string]int{}
	for port := number(args[1]); port <= number(args[2]); port++ {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		check("socket", err)
		errno := bind(fd, addressOf(own, port))
		if errno == 0 {
			bound++
		}
		results[nameOf(errno)]++
	}
	sayCounts(results)
	say("bound", strconv.Itoa(bound))
	waitForEnd()
}

// holdMemory ADDRESS PORT N sends on N connections until nothing more is taken, and goes on to hold
// what is under way.
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

// Command static is a program without a C library: it connects, sends what it is told to, and waits
// until its input ends.
package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
)

func main() {
	c, err := net.Dial("tcp", os.Args[1])
	if err == nil {
		var n int64
		if n, err = strconv.ParseInt(os.Args[2], 10, 64); err == nil {
			fmt.Println("port", c.LocalAddr().(*net.TCPAddr).Port)
			_, err = io.CopyN(c, zeroes{}, n)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("sent")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

type zeroes struct{}

func (zeroes) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

package main

import (
	"fmt"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// maxTransfer bounds one call, so that what it sends fits the buffers of every path: how much of
// more is taken is a matter of their size.
const maxTransfer = 16 << 10

// pattern gives the data of step index: a letter of its own, and every 16th byte a count, so that
// lost or doubled pieces show.
func pattern(index, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte('a' + index%26)
		if i%16 == 15 {
			b[i] = byte('0' + i/16%10)
		}
	}
	return b
}

// show writes data in short: the letters with the number of bytes each, and a sum of all.
func show(b []byte) string {
	var out strings.Builder
	sum := uint32(2166136261)
	for _, c := range b {
		sum = (sum ^ uint32(c)) * 16777619
	}
	for i := 0; i < len(b); {
		c, n := b[i], 0
		for i < len(b) && (b[i] == c || b[i] >= '0' && b[i] <= '9') {
			i, n = i+1, n+1
		}
		if out.Len() < 200 {
			fmt.Fprintf(&out, "%dx%q ", n, c)
		}
	}
	return fmt.Sprintf("%ssum %08x", out.String(), sum)
}

// transfer sends or receives.
func transfer(index, fd int, s differ.Step) differ.Result {
	n := max(0, min(s.Arg(0), maxTransfer))
	buf := make([]byte, n+1) // never empty, so that it has an address
	at, size, flags := uintptr(unsafe.Pointer(&buf[0])), uintptr(n), uintptr(s.Arg(1))
	sending := strings.HasPrefix(s.Op, "write") || strings.HasPrefix(s.Op, "send") || s.Op == "splice_to"
	if sending {
		copy(buf, pattern(index, n))
	}
	var got int
	var err error
	out := ""
	switch s.Op {
	case "write":
		got, err = sys(unix.SYS_WRITE, uintptr(fd), at, size)
	case "read":
		got, err = sys(unix.SYS_READ, uintptr(fd), at, size)
	case "writev", "readv":
		trap := uintptr(unix.SYS_WRITEV)
		if s.Op == "readv" {
			trap = unix.SYS_READV
		}
		parts := halves(buf[:n])
		got, err = sys(trap, uintptr(fd), uintptr(unsafe.Pointer(&parts[0])), 2)
	case "send":
		got, err = sys(unix.SYS_SENDTO, uintptr(fd), at, size, flags)
	case "recv":
		got, err = sys(unix.SYS_RECVFROM, uintptr(fd), at, size, flags)
	case "recvfrom":
		var a rawAddr
		length := int32(len(a))
		got, err = sys(unix.SYS_RECVFROM, uintptr(fd), at, size, flags, uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&length)))
		out = fmt.Sprintf("from len %d", length)
	case "sendmsg":
		parts := halves(buf[:n])
		msg := unix.Msghdr{Iov: &parts[0], Iovlen: 2}
		got, err = sys(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)), flags)
	case "sendfile":
		var from int64
		got, err = sys(unix.SYS_SENDFILE, uintptr(fd), fileFd, uintptr(unsafe.Pointer(&from)), size)
	case "splice_to":
		return spliceTo(index, fd, n, int(flags))
	case "splice_from":
		return spliceFrom(fd, n, int(flags))
	case "recvmsg":
		return receiveMessage(fd, buf[:n], s.Arg(1), s.Arg(2))
	case "recvmmsg":
		return receiveMessages(fd, n, s.Arg(1), s.Arg(2))
	}
	if err != nil || sending {
		return result(got, err, out)
	}
	return result(got, nil, show(buf[:min(got, n)]), out) // with MSG_TRUNC got can be more
}

func halves(b []byte) [2]unix.Iovec {
	var v [2]unix.Iovec
	k := len(b) / 3
	if k > 0 {
		v[0].Base = &b[0]
		v[0].SetLen(k)
	}
	if len(b) > k {
		v[1].Base = &b[k]
		v[1].SetLen(len(b) - k)
	}
	return v
}

func receiveMessage(fd int, b []byte, flags, controlLen int) differ.Result {
	parts := halves(b)
	control := make([]byte, max(0, min(controlLen, 4096))+1)
	msg := unix.Msghdr{Iov: &parts[0], Iovlen: 2, Control: &control[0]}
	msg.SetControllen(len(control) - 1)
	var a rawAddr
	msg.Name, msg.Namelen = &a[0], uint32(len(a))
	n, err := sys(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&msg)), uintptr(flags))
	if err != nil {
		return result(n, err)
	}
	out := []string{show(b[:min(n, len(b))]), "flags " + differ.MsgFlags(int(msg.Flags)), fmt.Sprintf("name len %d", msg.Namelen)}
	messages, err := unix.ParseSocketControlMessage(control[:int(msg.Controllen)])
	if err != nil {
		return result(n, err)
	}
	for _, m := range messages {
		out = append(out, fmt.Sprintf("control %d/%d len %d", m.Header.Level, m.Header.Type, m.Header.Len))
	}
	return result(n, nil, out...)
}

func receiveMessages(fd, n, flags, messages int) differ.Result {
	type mmsghdr struct {
		hdr unix.Msghdr
		n   uint32
		_   [4]byte
	}
	messages = max(0, min(messages, 4))
	vec := make([]mmsghdr, 4)
	bufs := make([][]byte, 4)
	parts := make([][2]unix.Iovec, 4)
	for i := range vec {
		bufs[i] = make([]byte, n)
		parts[i] = halves(bufs[i])
		vec[i].hdr.Iov, vec[i].hdr.Iovlen = &parts[i][0], 2
	}
	got, err := sys(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&vec[0])), uintptr(messages), uintptr(flags), 0)
	if err != nil {
		return result(got, err)
	}
	var out []string
	for i := range got {
		out = append(out, fmt.Sprintf("%d: %s", vec[i].n, show(bufs[i][:min(int(vec[i].n), n)])))
	}
	return result(got, nil, out...)
}

// spliceTo moves data from a pipe to the socket. What the socket does not take is thrown away.
func spliceTo(index, fd, n, flags int) differ.Result {
	if _, err := unix.Write(pipeWFd, pattern(index, n)); err != nil && n > 0 {
		return result(0, fmt.Errorf("fill the pipe: %w", err))
	}
	got, err := sys(unix.SYS_SPLICE, pipeRFd, 0, uintptr(fd), 0, uintptr(n), uintptr(flags))
	rest := make([]byte, maxTransfer)
	for {
		if m, e := unix.Read(pipeRFd, rest); m <= 0 || e != nil {
			break
		}
	}
	return result(got, err)
}

// spliceFrom moves data from the socket to a pipe and reads them there.
func spliceFrom(fd, n, flags int) differ.Result {
	got, err := sys(unix.SYS_SPLICE, uintptr(fd), 0, pipeWFd, 0, uintptr(n), uintptr(flags))
	if err != nil {
		return result(got, err)
	}
	var all []byte
	buf := make([]byte, maxTransfer)
	for len(all) < got {
		m, err := unix.Read(pipeRFd, buf)
		if m <= 0 || err != nil {
			break
		}
		all = append(all, buf[:m]...)
	}
	return result(got, nil, show(all))
}

package loadgen

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// What the first byte of a datagram says. All that a client sends begins with it.
const (
	datagramEcho  = iota // to be sent back as it is
	datagramData         // of a flow
	datagramAsked        // the same, to be answered by how many datagrams of flows have come
)

const (
	// flowBatch datagrams are sent for each answer, or at once where the kernel cuts them up.
	flowBatch = 40
	// maxFlow bytes are sent at once, at most.
	maxFlow = 64 << 10
	// flowWindow datagrams may be on their way: what the buffer of a socket holds of them however
	// small they are.
	flowWindow = 3 * flowBatch
	// answerSize is the size of such an answer: a number.
	answerSize = 8
	// datagramPatience is how long an answer may take before its datagram is taken for lost.
	datagramPatience = 200 * time.Millisecond
	// datagramBuffer is asked for at both ends; it is what a program without privileges may have.
	datagramBuffer = 208 << 10
)

// openDatagrams makes a UDP socket that gives up waiting after datagramPatience. So its calls are
// not begun again after a signal, by which the Go scheduler asks for a pause.
func openDatagrams(family int) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	for _, option := range []int{unix.SO_RCVBUF, unix.SO_SNDBUF} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, datagramBuffer); err != nil {
			return -1, errors.Join(fmt.Errorf("set the size of a buffer: %w", err), unix.Close(fd))
		}
	}
	patience := unix.NsecToTimeval(int64(datagramPatience))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		return -1, errors.Join(fmt.Errorf("set SO_RCVTIMEO: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// dialDatagrams opens a socket that is connected to the server; the caller closes it.
func dialDatagrams(to netip.AddrPort) (int, error) {
	sa, family := sockaddr(to)
	fd, err := openDatagrams(family)
	if err != nil {
		return -1, err
	}
	if err := unix.Connect(fd, sa); err != nil {
		return -1, errors.Join(fmt.Errorf("connect: %w", err), unix.Close(fd))
	}
	return fd, nil
}

// readAnswer reads a datagram, or gives EAGAIN if none comes within datagramPatience. The Go
// scheduler interrupts who waits for longer than 10 ms, again and again.
func readAnswer(fd int, b []byte) (int, error) {
	n, err := rawRead(fd, b)
	for start := time.Now(); err == unix.EINTR && time.Since(start) < datagramPatience; {
		n, err = rawRead(fd, b)
	}
	if err == unix.EINTR {
		err = unix.EAGAIN
	}
	return n, err
}

// datagramServer answers datagrams until its standard input or its lifetime ends.
func datagramServer(ctx context.Context, s settings, streams Streams) (err error) {
	address, err := netip.ParseAddrPort(s.listen)
	if err != nil {
		return fmt.Errorf("--listen %q: want ADDRESS:PORT", s.listen)
	}
	sa, family := sockaddr(address)
	fd, err := openDatagrams(family)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := unix.Bind(fd, sa); err != nil {
		return fmt.Errorf("bind %s: %w", address, err)
	}
	if s.segments {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_GRO, 1); err != nil {
			return fmt.Errorf("set UDP_GRO: %w", err)
		}
	}
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	var stop atomic.Bool
	finished := make(chan error, 1)
	go func() {
		if err := pin(s.cpu); err != nil {
			finished <- err
			return
		}
		finished <- answerDatagrams(fd, &stop)
	}()
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	select {
	case err := <-finished:
		return err
	case <-ended(streams.In):
	case <-ctx.Done():
	}
	stop.Store(true)
	return <-finished
}

// received is a receive buffer as the kernel fills it.
type received struct {
	buffer  [maxFlow]byte
	name    [unix.SizeofSockaddrInet6]byte
	control [64]byte
	vector  unix.Iovec
	header  unix.Msghdr
}

// receive waits for a datagram, or several that the kernel made one of: each has size bytes, the
// last perhaps fewer.
func (r *received) receive(fd int) (n, size int, err error) {
	r.vector.Base = &r.buffer[0]
	r.vector.SetLen(len(r.buffer))
	r.header = unix.Msghdr{Name: &r.name[0], Namelen: uint32(len(r.name)), Iov: &r.vector, Control: &r.control[0]}
	r.header.SetIovlen(1)
	r.header.SetControllen(len(r.control))
	got, _, e := unix.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&r.header)), 0)
	n = int(got)
	if e != 0 {
		return 0, 0, e
	}
	size = n
	head := (*unix.Cmsghdr)(unsafe.Pointer(&r.control[0]))
	if r.header.Controllen >= uint64(unix.CmsgLen(2)) && head.Level == unix.IPPROTO_UDP && head.Type == unix.UDP_GRO {
		size = int(binary.NativeEndian.Uint16(r.control[unix.CmsgLen(0):]))
	}
	return n, size, nil
}

// reply sends b to where the last datagram came from.
func (r *received) reply(fd int, b []byte) error {
	_, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), 0,
		uintptr(unsafe.Pointer(&r.name[0])), uintptr(r.header.Namelen))
	return rawErr(e)
}

// answerDatagrams serves until stop is set, which it looks at every datagramPatience.
func answerDatagrams(fd int, stop *atomic.Bool) error {
	r := new(received)
	var flow uint64
	var answer [answerSize]byte
	for !stop.Load() {
		n, size, err := r.receive(fd)
		if err == unix.EINTR || err == unix.EAGAIN || err == nil && n == 0 {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		asked := false
		for at := 0; at < n; at += size {
			if r.buffer[at] == datagramEcho {
				err = errors.Join(err, r.reply(fd, r.buffer[at:min(at+size, n)]))
				continue
			}
			flow++
			asked = asked || r.buffer[at] == datagramAsked
		}
		if asked {
			binary.LittleEndian.PutUint64(answer[:], flow)
			err = errors.Join(err, r.reply(fd, answer[:]))
		}
		if err != nil {
			return fmt.Errorf("answer: %w", err)
		}
	}
	return nil
}

// datagramTrips measures round trips by UDP. What is lost is sent again, and is a long round trip.
func datagramTrips(to netip.AddrPort, s settings) (result RoundTrips, err error) {
	if s.size <= answerSize {
		return RoundTrips{}, fmt.Errorf("--size %d: want more than %d", s.size, answerSize)
	}
	if err := pin(s.cpu); err != nil {
		return RoundTrips{}, err
	}
	fd, err := dialDatagrams(to)
	if err != nil {
		return RoundTrips{}, err
	}
	defer func() { err = errors.Join(err, rawClose(fd)) }()
	message, back := make([]byte, s.size), make([]byte, s.size)
	var number uint64
	return measureTrips(s, func() error {
		number++
		binary.LittleEndian.PutUint64(message[1:], number)
		for range maxTries {
			if _, err := rawWrite(fd, message); err != nil {
				return fmt.Errorf("send: %w", err)
			}
			for {
				n, err := readAnswer(fd, back)
				if err == unix.EAGAIN {
					break // lost
				}
				if err != nil {
					return fmt.Errorf("receive: %w", err)
				}
				// The answer to one that was taken for lost may still come.
				if n == len(back) && binary.LittleEndian.Uint64(back[1:]) == number {
					return nil
				}
			}
		}
		return errNoAnswer
	})
}

// maxTries is how often a datagram is sent before its receiver is taken for gone.
const maxTries = 10

var errNoAnswer = fmt.Errorf("no answer to %d datagrams, each within %s", maxTries, datagramPatience)

// Flow is what flow measures: datagrams as fast as the receiver takes them.
type Flow struct {
	Datagrams int     `json:"datagrams"` // that were received
	Lost      int     `json:"lost"`
	Size      int     `json:"size"` // of each, in bytes
	ElapsedS  float64 `json:"elapsed_s"`
	BusyCPUS  float64 `json:"busy_cpu_s"` // whole machine, see CPUTime
}

// sender is the client's end of a flow. No more than flowWindow datagrams are on their way, so that
// nothing is lost because the receiver is slower.
type sender struct {
	fd                 int
	size               int
	segments           bool // the kernel cuts a batch up
	batch              []byte
	sent, gone, missed uint64 // datagrams: sent, known to have come, and given up
}

// flow sends datagrams for a while.
func flow(to netip.AddrPort, s settings) (result Flow, err error) {
	if flowBatch*s.size > maxFlow {
		return Flow{}, fmt.Errorf("--size %d: want at most %d", s.size, maxFlow/flowBatch)
	}
	if err := pin(s.cpu); err != nil {
		return Flow{}, err
	}
	fd, err := dialDatagrams(to)
	if err != nil {
		return Flow{}, err
	}
	defer func() { err = errors.Join(err, rawClose(fd)) }()
	f := &sender{fd: fd, size: s.size, segments: s.segments, batch: make([]byte, flowBatch*s.size)}
	if s.segments {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, s.size); err != nil {
			return Flow{}, fmt.Errorf("set UDP_SEGMENT: %w", err)
		}
	}
	for i := range flowBatch {
		f.batch[i*s.size] = datagramData
	}
	f.batch[(flowBatch-1)*s.size] = datagramAsked
	if err := f.begin(); err != nil {
		return Flow{}, err
	}
	for range warmUpRoundTrips / flowBatch {
		if err := f.send(); err != nil {
			return Flow{}, fmt.Errorf("warm up: %w", err)
		}
	}
	came, lost := f.gone, f.missed
	elapsed, busy, err := metered(func() error {
		for start := time.Now(); time.Since(start) < s.duration; {
			if err := f.send(); err != nil {
				return err
			}
		}
		return nil
	})
	return Flow{Datagrams: int(f.gone - came), Lost: int(f.missed - lost), Size: s.size,
		ElapsedS: elapsed.Seconds(), BusyCPUS: busy.Seconds()}, err
}

// begin asks how many datagrams the server has had of others.
func (f *sender) begin() error {
	var answer [answerSize]byte
	for range maxTries {
		if _, err := rawWrite(f.fd, []byte{datagramAsked}); err != nil {
			return fmt.Errorf("send: %w", err)
		}
		if _, err := readAnswer(f.fd, answer[:]); err == nil {
			f.sent = binary.LittleEndian.Uint64(answer[:])
			f.gone = f.sent
			return nil
		} else if err != unix.EAGAIN {
			return fmt.Errorf("receive: %w", err)
		}
	}
	return errNoAnswer
}

// send sends a batch, when there is room in the window.
func (f *sender) send() error {
	var answer [answerSize]byte
	for f.sent-f.gone-f.missed+flowBatch > flowWindow {
		_, err := readAnswer(f.fd, answer[:])
		switch {
		case err == unix.EAGAIN:
			f.missed = f.sent - f.gone
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		default:
			// What was given up may have come all the same.
			f.gone = min(f.sent, max(f.gone, binary.LittleEndian.Uint64(answer[:])))
			f.missed = min(f.missed, f.sent-f.gone)
		}
	}
	each := f.size
	if f.segments {
		each = len(f.batch)
	}
	for at := 0; at < len(f.batch); at += each {
		if _, err := rawWrite(f.fd, f.batch[at:at+each]); err != nil {
			return fmt.Errorf("send: %w", err)
		}
	}
	f.sent += flowBatch
	return nil
}

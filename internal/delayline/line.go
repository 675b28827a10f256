// Package delayline joins two network namespaces by a line with a rate, a delay and losses, for
// benchmarks and tests: two TUN devices and a program between them. Kernels without netem have
// nothing of the kind.
package delayline

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// End is one end of a line: a TUN device in a network namespace.
type End struct {
	Netns  string // path
	Device string
	Addr   netip.Addr // IPv4; the peer's is in the same /30
}

// Counts say what became of the packets of a direction.
type Counts struct{ Passed, Lost int64 }

// Line is a line that is up. Close takes it down, and its devices with it.
type Line struct {
	files   [2]*os.File
	there   direction // from the first end to the second
	back    direction
	workers sync.WaitGroup
}

// mtu is of the devices: larger packets are cut by who sends.
const mtu = 1500

// Open makes a line. seed makes its losses the same each time.
func Open(a, b End, there, back Shape, seed uint64) (_ *Line, err error) {
	l := &Line{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	for i, end := range []End{a, b} {
		if l.files[i], err = end.open(); err != nil {
			return nil, fmt.Errorf("device %s in %s: %w", end.Device, end.Netns, err)
		}
	}
	l.there = newDirection(there, rand.New(rand.NewPCG(seed, 1)))
	l.back = newDirection(back, rand.New(rand.NewPCG(seed, 2)))
	l.start(&l.there, l.files[0], l.files[1])
	l.start(&l.back, l.files[1], l.files[0])
	return l, nil
}

func (l *Line) start(d *direction, from, to *os.File) {
	l.workers.Go(func() { d.read(from) })
	l.workers.Go(func() { d.write(to) })
}

// Counts gives those of both directions.
func (l *Line) Counts() (there, back Counts) { return l.there.counts(), l.back.counts() }

// Close takes the line down.
func (l *Line) Close() error {
	var errs []error
	for _, f := range l.files {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	l.workers.Wait()
	return errors.Join(errs...)
}

// packet is one under way.
type packet struct {
	bytes []byte
	out   time.Time
}

type direction struct {
	shaper       shaper // of read alone
	underway     chan packet
	passed, lost atomic.Int64
}

// underwayMax bounds packets under way: more than any line here holds.
const underwayMax = 1 << 16

func newDirection(s Shape, random *rand.Rand) direction {
	return direction{shaper: shaper{Shape: s, random: random}, underway: make(chan packet, underwayMax)}
}

func (d *direction) counts() Counts { return Counts{d.passed.Load(), d.lost.Load()} }

// read takes packets until the device is closed.
func (d *direction) read(from *os.File) {
	defer close(d.underway)
	b := make([]byte, 1<<16)
	for {
		n, err := from.Read(b)
		if err != nil {
			return
		}
		out, ok := d.shaper.take(n, time.Now())
		if !ok {
			d.lost.Add(1)
			continue
		}
		select {
		case d.underway <- packet{append([]byte(nil), b[:n]...), out}:
		default:
			d.lost.Add(1)
		}
	}
}

// write puts packets out when their time has come. They do not overtake each other.
func (d *direction) write(to *os.File) {
	for p := range d.underway {
		if wait := time.Until(p.out); wait > 0 {
			time.Sleep(wait)
		}
		if _, err := to.Write(p.bytes); err != nil {
			d.lost.Add(1) // the device is down, or closed
			continue
		}
		d.passed.Add(1)
	}
}

// open makes the device, which is there until the file is closed.
func (e End) open() (file *os.File, err error) {
	err = netns.Do(e.Netns, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("open /dev/net/tun: %w", err)
		}
		// Known to the poller only when it is a device.
		if err := e.configure(fd); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		file = os.NewFile(uintptr(fd), e.Device)
		return nil
	})
	return file, err
}

// configure gives the device its name and address and brings it up.
func (e End) configure(fd int) error {
	request, err := unix.NewIfreq(e.Device)
	if err != nil {
		return err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return fmt.Errorf("make the device: %w", err)
	}
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(socket)
	for _, step := range []struct {
		what  string
		ioctl uint
		set   func(*unix.Ifreq) error
	}{
		{"set its address", unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(e.Addr.AsSlice()) }},
		{"set its prefix", unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error { return r.SetInet4Addr([]byte{255, 255, 255, 252}) }},
		{"set its MTU", unix.SIOCSIFMTU, func(r *unix.Ifreq) error { r.SetUint32(mtu); return nil }},
		{"bring it up", unix.SIOCSIFFLAGS, func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP); return nil }},
	} {
		r, err := unix.NewIfreq(e.Device)
		if err == nil {
			err = step.set(r)
		}
		if err == nil {
			err = unix.IoctlIfreq(socket, step.ioctl, r)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

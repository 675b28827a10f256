// Package ioctl answers trapped ioctls of network devices: the agent makes them for their callers.
//
// A TCP socket of the node would show the node's devices, and a container's privileges could change
// them. So the filter traps such ioctls on whatever file, and none continues: ioctl.go takes the
// file and the argument, caller.go says who calls, and thread.go makes the call in the container's
// namespace with the caller's rights (decision 0019).
package ioctl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// call is a trapped ioctl of those that act on network devices.
type call struct {
	fd     int32
	cmd    uint32
	arg    uint64 // address in the caller's memory
	compat bool   // made by a 32-bit program, or as one
}

// The trapped requests: 0x8900-0x89ff and 0x8b00-0x8bff. internal/runtime's filter has the same.
const (
	ioctlMask   = 0xfffffd00
	ioctlPrefix = 0x8900
)

// parse reads a trapped call. It returns false for everything but the ioctls that the filter traps.
func parse(d *trap.Data) (c call, ok bool) {
	switch {
	case d.Arch == trap.NativeArch && d.Nr == unix.SYS_IOCTL:
		c.arg = d.Args[2]
	case compat(d):
		c.arg, c.compat = uint64(uint32(d.Args[2])), true
	default:
		return call{}, false
	}
	// The kernel takes an int and an unsigned int, whatever the registers' upper halves hold.
	c.fd, c.cmd = int32(d.Args[0]), uint32(d.Args[1])
	return c, c.cmd&ioctlMask == ioctlPrefix
}

// argument says what an ioctl's third argument points to.
type argument uint8

const (
	argUnknown  argument = iota // no socket knows the request
	argState                    // a number, of the socket itself
	argSetOwner                 // a process or process group that signals are for
	argGetOwner
	argFlat     // a structure without pointers
	argConf     // struct ifconf: a buffer for a list
	argRoute    // struct rtentry, whose rt_dev is a string; of IPv6 sockets one without pointers
	argData     // struct ifreq, whose ifr_data leads to a structure without pointers
	argNoData   // struct ifreq, whose union leads anywhere: the kernel gets null instead
	argBridge   // three words, the last two of which may be pointers: null instead
	argWireless // struct iwreq, whose union may be a pointer: null instead
	argNetns    // none: gives a descriptor
	argPrivate  // of a protocol
)

// Requests that have a case of their own. linux/sockios.h has no names for x/sys to offer.
const (
	siocSetOwner1, siocSetOwner2 = 0x8901, 0x8902 // FIOSETOWN, SIOCSPGRP
	siocGetOwner1, siocGetOwner2 = 0x8903, 0x8904 // FIOGETOWN, SIOCGPGRP
	siocAtMark                   = 0x8905
	siocGetStamp, siocGetStampNS = 0x8906, 0x8907 // of the old kind
	siocOutqNSD                  = 0x894b
	siocWANDev                   = 0x894a
	siocGIfMap, siocSIfMap       = 0x8970, 0x8971
	siocGetNetns                 = 0x894c // SIOCGSKNS
	siocUnixFile                 = 0x89e0 // of Unix sockets: opens the file it is bound to
)

// argumentOf is the table of what Heddle knows. The rest is argUnknown.
func argumentOf(cmd uint32) argument {
	switch {
	case cmd == siocSetOwner1 || cmd == siocSetOwner2:
		return argSetOwner
	case cmd == siocGetOwner1 || cmd == siocGetOwner2:
		return argGetOwner
	case cmd == siocAtMark || cmd == siocGetStamp || cmd == siocGetStampNS || cmd == siocOutqNSD:
		return argState
	case cmd == 0x890b || cmd == 0x890c: // SIOCADDRT, SIOCDELRT
		return argRoute
	case cmd == unix.SIOCGIFCONF:
		return argConf
	case cmd == 0x8940 || cmd == 0x8941: // SIOCGIFBR, SIOCSIFBR
		return argBridge
	case cmd == unix.SIOCETHTOOL || cmd == 0x8993 || cmd == 0x8994 || cmd == 0x89b0 || cmd == 0x89b1: // bonds, time stamps
		return argData
	case cmd == siocWANDev || cmd >= 0x89f0 && cmd <= 0x89ff: // SIOCDEVPRIVATE
		return argNoData
	case cmd == siocGetNetns:
		return argNetns
	case cmd >= 0x89e0 && cmd <= 0x89ef: // SIOCPROTOPRIVATE
		return argPrivate
	case cmd >= 0x8b00:
		return argWireless
	case cmd == 0x890d, // SIOCRTMSG
		cmd >= 0x8910 && cmd <= 0x8938, // interfaces
		cmd == 0x8942 || cmd == 0x8943, // queue lengths
		cmd >= 0x8947 && cmd <= 0x8949, // MII
		cmd >= 0x8953 && cmd <= 0x8955, // ARP
		cmd >= 0x8960 && cmd <= 0x8962, // RARP
		cmd == siocGIfMap || cmd == siocSIfMap,
		cmd >= 0x8980 && cmd <= 0x8983, // DLCI, VLAN
		cmd >= 0x8990 && cmd <= 0x8995, // bonds
		cmd >= 0x89a0 && cmd <= 0x89a3: // bridges
		return argFlat
	}
	return argUnknown
}

// Sizes in bytes.
const (
	nameBytes        = 16 // IFNAMSIZ
	ifreqBytes       = 40
	compatIfreqBytes = 32
	flatBytes        = 256 // more than any structure without pointers has
	dataBytes        = 64 << 10
	confBytes        = 256 << 10 // a list of 6,553 addresses
	routeDev         = 88        // offset of rt_dev in struct rtentry
)

// memory is the caller's memory of one ioctl, read once: what a thread of the caller writes there
// afterwards changes nothing.
type memory struct {
	flat []byte // what arg points to, as much of it as can be read, flatBytes at most
	data []byte // what its pointer leads to, likewise
	name []byte // what rt_dev leads to, likewise
	// where data came from, or goes to; 0 if arg holds no pointer
	dataAddr uint64
}

// readArguments reads what c may need. How much there is to read is for the kernel to find too
// little.
func readArguments(tid uint32, c call) (m memory, err error) {
	if m.flat, err = task.ReadMemory(tid, c.arg, flatBytes); err != nil {
		return m, err
	}
	pointer := func(native, compat int) uint64 {
		switch {
		case c.compat && len(m.flat) >= compat+4:
			return uint64(binary.NativeEndian.Uint32(m.flat[compat:]))
		case !c.compat && len(m.flat) >= native+8:
			return binary.NativeEndian.Uint64(m.flat[native:])
		}
		return 0
	}
	switch argumentOf(c.cmd) {
	case argConf:
		m.dataAddr = pointer(8, 4)
	case argData:
		if m.dataAddr = pointer(nameBytes, nameBytes); m.dataAddr != 0 {
			m.data, err = task.ReadMemory(tid, m.dataAddr, dataBytes)
		}
	case argRoute:
		if at := pointer(routeDev, math.MaxInt32-8); at != 0 {
			m.name, err = task.ReadMemory(tid, at, nameBytes-1)
		}
	}
	return m, err
}

// Handler answers the ioctls that act on network devices, in containers that are not intercepted,
// too.
type Handler struct {
	cfg    Config
	proc   task.Proc
	netns  uint64     // inode of the agent's own network namespace
	epoll  unix.Errno // what ioctls of sockets on an epoll instance fail with
	failed trap.Reason
	made   atomic.Uint64
}

// Config says how a Handler works.
type Config struct {
	// OtherNetns gives the inode of another network namespace of the agent's than its own, 0 if
	// there is none: sockets of both stand for those of their container's namespace. It is asked
	// for every call.
	OtherNetns func() uint64
}

// New gives a handler. Close releases it.
func New(cfg Config) (_ *Handler, err error) {
	h := &Handler{cfg: cfg, failed: trap.Reason{Name: "ioctl", Errno: unix.ENETDOWN}}
	if h.proc, err = task.Open(); err != nil {
		return nil, err
	}
	if h.netns, err = h.proc.OwnNetns(); err != nil {
		h.proc.Close()
		return nil, err
	}
	if h.epoll, err = epollErrno(); err != nil {
		h.proc.Close()
		return nil, err
	}
	return h, nil
}

// epollErrno asks the kernel: it is ENOTTY, as of other files, but EINVAL since Linux 6.9.
func epollErrno() (unix.Errno, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return 0, fmt.Errorf("make an epoll instance: %w", err)
	}
	defer closeFD(fd)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), siocAtMark, 0)
	return errno, nil
}

// Close releases what New has opened.
func (h *Handler) Close() { h.proc.Close() }

// Reasons implements trap.Handler.
func (h *Handler) Reasons() []*trap.Reason { return []*trap.Reason{&h.failed} }

// Made gives how many ioctls were made for their callers.
func (h *Handler) Made() uint64 { return h.made.Load() }

// Owns implements trap.Handler.
func (h *Handler) Owns(d *trap.Data) bool {
	_, ok := parse(d)
	return ok && model.ProtectIoctls.On()
}

// Answer makes an ioctl for its caller. The kernel does not go on with it, as another thread may
// put another file under the descriptor meanwhile: the agent makes the call itself, on the file
// that it finds, with the caller's rights (thread).
func (h *Handler) Answer(t *trap.Call) error {
	c, _ := parse(t.Data())
	who, errno, err := callerOf(h.proc, t.Thread(), c.fd, h.epoll)
	if err != nil {
		return h.failed.Because(err)
	}
	defer who.close()
	tid := t.Thread() // t is another call when the listener has gone
	mem, err := unlessDone(t.Context(), func() (memory, error) { return readArguments(tid, c) })
	if err != nil {
		return h.failed.Because(err)
	}
	// From here on what was opened and read is known to be the caller's: it has been waiting all
	// the time.
	if err := t.StillWaits(); err != nil {
		return err
	}
	out := outcome{errno: errno, fd: -1}
	if errno == 0 {
		if out, err = h.perform(t.Context(), who, c, mem); err != nil {
			return h.failed.Because(err)
		}
	}
	return h.tell(t, c, mem, out)
}

// tell gives the caller the outcome of its ioctl.
func (h *Handler) tell(t *trap.Call, c call, mem memory, out outcome) error {
	given := false
	defer func() {
		if out.fd >= 0 && !given {
			closeFD(out.fd)
		}
	}()
	if err := t.StillWaits(); err != nil {
		return err
	}
	err := h.writeBack(t, c, mem, out)
	if errors.Is(err, trap.ErrAgentEnds) {
		return err
	}
	if err != nil && out.errno == 0 {
		out.errno = unix.EFAULT
	}
	switch {
	case out.errno != 0:
		err = t.Refuse(out.errno)
	case out.fd >= 0:
		given = true
		err = t.Give(trap.Descriptor{FD: out.fd, CloseOnExec: true})
	default:
		err = t.Return(out.value)
	}
	if err == nil {
		h.made.Add(1)
	}
	return err
}

// unlessDone gives what f gives, or trap.ErrAgentEnds if ctx is done first: a page of a program's
// memory may come from a file system that another program of the container serves, so f may never
// return. It must use nothing that goes with the listener.
func unlessDone[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		value, err := f()
		done <- answer{value, err}
	}()
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, trap.ErrAgentEnds
	}
}

// writeBack is writeArguments for a call, or ErrAgentEnds.
func (h *Handler) writeBack(t *trap.Call, c call, before memory, out outcome) error {
	waiter, err := t.Waiter() // the listener may be closed first
	if err != nil {
		return err
	}
	ctx, tid := t.Context(), t.Thread()
	_, err = unlessDone(ctx, func() (struct{}, error) {
		defer waiter.Close()
		return struct{}{}, writeArguments(tid, c, before, out, func() error {
			if ctx.Err() != nil {
				return trap.ErrAgentEnds
			}
			return waiter.StillWaits()
		})
	})
	return err
}

// writeArguments writes what the kernel changed, where it would have written itself. Writing what a
// pointer leads to may take as long as a program of the container likes, so whether thread tid is
// still the caller is asked again by check.
func writeArguments(tid uint32, c call, before memory, out outcome, check func() error) error {
	if argumentOf(c.cmd) == argConf && before.dataAddr != 0 {
		if err := task.WriteMemory(tid, before.dataAddr, out.data); err != nil {
			return err
		}
	} else if err := writeChanges(tid, before.dataAddr, before.data, out.data); err != nil {
		return err
	}
	if before.dataAddr != 0 {
		if err := check(); err != nil {
			return err
		}
	}
	return writeChanges(tid, c.arg, before.flat, out.flat)
}

// writeChanges writes the part of after that differs from before. They begin at addr.
func writeChanges(tid uint32, addr uint64, before, after []byte) error {
	first, last := -1, -1
	for i := range after {
		if i >= len(before) || before[i] != after[i] {
			if first < 0 {
				first = i
			}
			last = i
		}
	}
	if first < 0 {
		return nil
	}
	return task.WriteMemory(tid, addr+uint64(first), after[first:last+1])
}

// isSocketLink reports whether a link of /proc/TID/fd is a socket's.
func isSocketLink(link string) bool { return strings.HasPrefix(link, "socket:[") }

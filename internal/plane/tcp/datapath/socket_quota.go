package datapath

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// The socket options by which the agent asks bpf/sock/socket_quota.h to count a socket, and
// bpf/sock/tagging.h to tag one. There is no such level in the kernel.
const (
	levelHeddle = 0x4864
	countSocket = 1
	tagSocket   = 2
)

// newAgentKey gives a number that only this agent knows.
func newAgentKey() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.NativeEndian.Uint64(b[:])
}

// CountSocket counts a tagged socket as one of its endpoint's, until it is closed for good; a
// socket is counted once. It compares caller with the thread as it is, if ComparesCallers.
// model.ErrSocketQuota, ErrStackRefused, ErrOtherNetns, ErrOtherOwner and ErrNoCaller say why it is
// not counted.
func (d *Datapath) CountSocket(fd int, caller model.Caller) error {
	asked := heddleAdmission{Thread: caller.Thread, Netns: caller.Netns, Uid: caller.UID, Gid: caller.GID}
	if !caller.AnyOwner {
		asked.Flags = uint32(heddleAdmissionFlagsADMIT_OWNER)
	}
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), levelHeddle, countSocket,
		uintptr(unsafe.Pointer(&asked)), unsafe.Sizeof(asked), 0)
	switch errno {
	case 0:
		return nil
	case unix.EDQUOT:
		return model.ErrSocketQuota
	case unix.EPROTONOSUPPORT:
		return model.ErrStackRefused
	case unix.EXDEV:
		return model.ErrOtherNetns
	case unix.ESTALE:
		return model.ErrOtherOwner
	case unix.ESRCH:
		return model.ErrNoCaller
	}
	return fmt.Errorf("count socket: %w", errno)
}

// ComparesCallers reports whether CountSocket compares callers; if not, the agent must ask /proc
// itself. It takes a kernel that lets programs look for threads, and an agent that numbers threads
// as the kernel does.
func (d *Datapath) ComparesCallers() bool { return d.comparesCallers }

// initialPIDNamespace is the inode of the initial PID namespace, the same on every machine
// (PROC_PID_INIT_INO).
const initialPIDNamespace = 0xEFFFFFFC

// canCompareCallers says why CountSocket cannot.
func canCompareCallers(types *btf.Cache) error {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/pid", &st); err != nil {
		return fmt.Errorf("PID namespace: %w", err)
	}
	if st.Ino != initialPIDNamespace {
		return errors.New("the agent is not in the initial PID namespace")
	}
	return probeTask(types)
}

// Sockets gives how many sockets endpoint id has, those that its programs hold and connections that
// wait for accept(). 0 if there is no such endpoint.
func (d *Datapath) Sockets(id model.EndpointID) (n uint64, err error) {
	if err := d.objs.SocketsByEndpoint.Lookup(uint32(id), &n); ignoreAbsent(err) != nil {
		return 0, fmt.Errorf("read sockets of endpoint %d: %w", id, err)
	}
	return n, nil
}

// openSockets begins to count the endpoint's sockets, unless an earlier agent has.
func (d *Datapath) openSockets(id model.EndpointID) error {
	err := d.objs.SocketsByEndpoint.Update(uint32(id), uint64(0), ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return nil
	}
	return err
}

func (d *Datapath) closeSockets(id model.EndpointID) error {
	return ignoreAbsent(d.objs.SocketsByEndpoint.Delete(uint32(id)))
}

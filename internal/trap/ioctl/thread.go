package ioctl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
	"heddle.dev/heddle/internal/trap/task"
)

// outcome is what an ioctl did.
type outcome struct {
	errno unix.Errno
	value int    // what it returned, if errno is 0
	fd    int    // what it opened, or -1
	flat  []byte // the caller's memory as the kernel left it
	data  []byte
}

// perform makes the call on a thread of its own, which then ends: what it may, and which namespace
// it is in, is the caller's. It does not wait for longer than the agent lives, because a file may
// make a thread wait for ever when a program of the container serves its file system.
func (h *Handler) perform(ctx context.Context, who *caller, c call, mem memory) (outcome, error) {
	t := &thread{call: c, mem: mem, ids: who.ids, owner: who.owner, caps: who.caps, file: -1, netns: -1, inNode: who.inode == h.netns}
	t.nodeNetns, t.otherNetns = h.netns, h.cfg.OtherNetns()
	// Its own descriptors: this goroutine may give up first.
	pidfd, err := unix.FcntlInt(uintptr(who.task), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return outcome{}, err
	}
	t.pidfd = pidfd
	if t.netns, err = unix.FcntlInt(uintptr(who.netns), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		closeFD(pidfd)
		return outcome{}, err
	}
	type answer struct {
		out outcome
		err error
	}
	done := make(chan answer, 1)
	task.OnThread(func() {
		out, err := t.run()
		// Before the answer: the last one to close a file may have to wait, for SO_LINGER or for a
		// file system that a program of the container serves. The caller waits as long, so that it
		// cannot collect such threads.
		t.close()
		done <- answer{out, err}
	})
	select {
	case a := <-done:
		return a.out, a.err
	case <-ctx.Done():
		return outcome{}, trap.ErrAgentEnds
	}
}

// thread makes one ioctl. Its methods change the calling thread for good.
type thread struct {
	call  call
	mem   memory
	ids   taskIDs
	owner task.Owner
	caps  uint64

	pidfd, netns int // the caller's pidfd and network namespace
	file         int // the caller's file, or the socket that stands for it
	inNode       bool
	nodeNetns    uint64
	otherNetns   uint64 // Config.OtherNetns
}

func (t *thread) close() {
	for _, fd := range []int{t.pidfd, t.netns, t.file} {
		if fd >= 0 {
			closeFD(fd)
		}
	}
}

// run takes the caller's file, finds out what it is, and makes the call as the caller would.
func (t *thread) run() (outcome, error) {
	out := outcome{fd: -1}
	var err error
	if t.file, err = unix.PidfdGetfd(t.pidfd, int(t.call.fd), 0); err != nil {
		if err == unix.EBADF {
			out.errno = unix.EBADF
			return out, nil
		}
		t.file = -1
		return out, fmt.Errorf("take the caller's file: %w", err)
	}
	family, errno, err := t.prepare()
	if errno != 0 || err != nil {
		out.errno = errno
		return out, err
	}
	if err := t.dropCapabilities(); err != nil {
		return out, err
	}
	return t.carryOut(family, out)
}

// What prepare says of a TUN device.
const familyTUN = -1

// prepare finds out what the file is. A socket of the node's namespace is replaced by one of the
// caller's.
func (t *thread) prepare() (family int, errno unix.Errno, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(t.file, &st); err != nil {
		return 0, 0, err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(10, 200) {
		return familyTUN, 0, nil
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return 0, unix.ENOTTY, nil
	}
	if family, err = unix.GetsockoptInt(t.file, unix.SOL_SOCKET, unix.SO_DOMAIN); err != nil {
		return 0, 0, fmt.Errorf("family of the caller's socket: %w", err)
	}
	if t.inNode && t.otherNetns == 0 {
		return family, 0, nil
	}
	inode, err := task.NetnsOfSocket(t.file)
	if err != nil {
		return 0, 0, err
	}
	switch argumentOf(t.call.cmd) {
	case argState, argSetOwner, argGetOwner:
		return family, 0, nil // of the socket itself
	}
	if inode == t.nodeNetns && !t.inNode || inode == t.otherNetns {
		errno, err = t.replace(family)
	}
	return family, errno, err
}

// replace puts a new socket of the caller's network namespace in the place of one of the node's.
func (t *thread) replace(family int) (unix.Errno, error) {
	typ, err := unix.GetsockoptInt(t.file, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return 0, fmt.Errorf("type of the caller's socket: %w", err)
	}
	protocol, err := unix.GetsockoptInt(t.file, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil {
		return 0, fmt.Errorf("protocol of the caller's socket: %w", err)
	}
	if err := unix.Setns(t.netns, unix.CLONE_NEWNET); err != nil {
		return 0, fmt.Errorf("enter the caller's network namespace: %w", err)
	}
	fd, err := unix.Socket(family, typ|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return unix.ENOTTY, nil // of a kind that the caller's namespace does not have
	}
	closeFD(t.file)
	t.file = fd
	return 0, nil
}

// dropCapabilities leaves the thread those that the caller has itself.
func (t *thread) dropCapabilities() error {
	caps := t.caps
	if argumentOf(t.call.cmd) == argWireless {
		caps = 0 // what is set would not be what the caller asks for
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	for i := range data {
		word := uint32(caps >> (32 * i))
		data[i].Effective, data[i].Permitted = word, word
	}
	// The owner of a user namespace has all capabilities in it, whatever its sets say; for one that
	// root made, that is root. With the real user still root the permitted set stays, of which the
	// caller's part is raised then. This makes the agent undumpable, as if it had been a
	// set-user-id program; it is root's all the same.
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(t.owner.UID), ^uintptr(0)); e != 0 {
		return fmt.Errorf("become user %d: %w", t.owner.UID, e)
	}
	if err := unix.Capset(&header, &data[0]); err != nil {
		return fmt.Errorf("drop capabilities: %w", err)
	}
	return nil
}

// carryOut makes the call on the file.
func (t *thread) carryOut(family int, out outcome) (outcome, error) {
	kind := argumentOf(t.call.cmd)
	if family == familyTUN {
		if kind == argNetns {
			out.errno = unix.EPERM
			return out, nil
		}
		kind = argFlat // a TUN device reads a struct ifreq for all requests of its range
	}
	if t.call.compat && otherLayout(t.call.cmd) {
		return t.refuse(out), nil
	}
	switch kind {
	case argSetOwner:
		return t.setOwner(out)
	case argGetOwner:
		return t.getOwner(out)
	case argConf:
		return t.listAddresses(out)
	case argNetns:
		return t.open(out), nil
	case argUnknown:
		return t.refuse(out), nil
	case argPrivate:
		if family == unix.AF_UNIX && t.call.cmd == siocUnixFile {
			return t.open(out), nil
		}
		if family != unix.AF_INET && family != unix.AF_INET6 {
			return t.refuse(out), nil
		}
	case argRoute:
		if family != unix.AF_INET && family != unix.AF_INET6 && family != unix.AF_PACKET {
			return t.refuse(out), nil
		}
	}
	return t.flat(kind, family, out)
}

// open makes a call that opens a file and has no argument.
func (t *thread) open(out outcome) outcome {
	fd, errno := t.ioctl(nil)
	if out.errno = errno; errno == 0 {
		out.fd = fd
	}
	return out
}

// otherLayout reports whether the structure of a request is another for 32-bit programs, whose
// calls are then answered as if no socket knew the request.
func otherLayout(cmd uint32) bool {
	switch cmd {
	case siocGIfMap, siocSIfMap, siocGetStamp, siocGetStampNS:
		return true
	}
	return argumentOf(cmd) == argRoute
}

// refuse answers a request that sockets do not know, as the kernel does: it reads the argument
// first.
func (t *thread) refuse(out outcome) outcome {
	out.errno = unix.ENOTTY
	if len(t.mem.flat) < t.ifreqBytes() {
		out.errno = unix.EFAULT
	}
	return out
}

func (t *thread) ifreqBytes() int {
	if t.call.compat {
		return compatIfreqBytes
	}
	return ifreqBytes
}

// flat makes a call whose argument is a structure, with what its pointer leads to if it has one.
func (t *thread) flat(kind argument, family int, out outcome) (outcome, error) {
	in := append([]byte(nil), t.mem.flat...)
	if t.call.compat && len(in) >= compatIfreqBytes && len(in) < ifreqBytes {
		in = append(in, make([]byte, ifreqBytes-len(in))...)
	}
	var data scratch
	defer func() { data.free() }()
	pointer := -1 // where in the structure
	var err error
	switch {
	case kind == argData:
		pointer = nameBytes
		data, err = newScratch(t.mem.data)
	case kind == argRoute && family != unix.AF_INET6:
		pointer = routeDev
		data, err = newScratch(t.mem.name)
	case kind == argNoData, kind == argWireless:
		from := nameBytes
		if t.call.cmd == siocWANDev {
			from += 8 // type and size, then the pointer
		}
		clear(in[min(from, len(in)):])
	case kind == argBridge:
		clear(in[min(8, len(in)):])
	}
	if err != nil {
		return out, err
	}
	if pointer >= 0 && len(in) >= pointer+8 {
		binary.NativeEndian.PutUint64(in[pointer:], uint64(data.addr()))
	}
	arg, err := newScratch(in)
	if err != nil {
		return out, err
	}
	defer arg.free()
	// A call that fails may have written something before.
	out.value, out.errno = t.ioctl(arg.pointer())
	out.flat = t.changed(arg.bytes(), in)
	if kind == argData {
		out.data = append([]byte(nil), data.bytes()...)
	}
	return out, nil
}

// changed gives the caller's structure with what the kernel changed in that which it was given: the
// pointers in it stay the caller's own.
func (t *thread) changed(after, given []byte) []byte {
	flat := append([]byte(nil), t.mem.flat...)
	for i := range flat {
		if after[i] != given[i] {
			flat[i] = after[i]
		}
	}
	return flat
}

// listAddresses makes SIOCGIFCONF, which fills the caller's buffer.
func (t *thread) listAddresses(out outcome) (outcome, error) {
	header, entry := 16, ifreqBytes
	if t.call.compat {
		header, entry = 8, compatIfreqBytes
	}
	if len(t.mem.flat) < header {
		out.errno = unix.EFAULT
		return out, nil
	}
	room := min(int(int32(binary.NativeEndian.Uint32(t.mem.flat)))/entry, confBytes/ifreqBytes)
	var list scratch
	defer func() { list.free() }()
	in := make([]byte, 16)
	if t.mem.dataAddr != 0 {
		var err error
		if list, err = newScratch(make([]byte, max(room, 0)*ifreqBytes)); err != nil {
			return out, err
		}
		binary.NativeEndian.PutUint32(in, uint32(len(list.bytes())))
		binary.NativeEndian.PutUint64(in[8:], uint64(list.addr()))
	}
	arg, err := newScratch(in)
	if err != nil {
		return out, err
	}
	defer arg.free()
	if out.value, out.errno = t.ioctl(arg.pointer()); out.errno != 0 {
		return out, nil
	}
	n := int(binary.NativeEndian.Uint32(arg.bytes())) / ifreqBytes
	for i := 0; t.mem.dataAddr != 0 && i < n; i++ {
		out.data = append(out.data, list.bytes()[i*ifreqBytes:][:entry]...)
	}
	out.flat = append([]byte(nil), t.mem.flat...)
	binary.NativeEndian.PutUint32(out.flat, uint32(n*entry))
	return out, nil
}

// setOwner has signals of the socket sent to the caller, its process or its process group, with its
// user's rights.
func (t *thread) setOwner(out outcome) (outcome, error) {
	if len(t.mem.flat) < 4 {
		out.errno = unix.EFAULT
		return out, nil
	}
	pid, errno := t.ids.outer(int32(binary.NativeEndian.Uint32(t.mem.flat)))
	if errno != 0 {
		out.errno = errno
		return out, nil
	}
	_, err := unix.FcntlInt(uintptr(t.file), unix.F_SETOWN, pid)
	errors.As(err, &out.errno)
	return out, nil
}

// getOwner tells whom signals of the socket are sent to.
func (t *thread) getOwner(out outcome) (outcome, error) {
	var owner struct{ typ, pid int32 } // struct f_owner_ex
	const getOwnerEx, groupType = 16, 2
	if _, _, e := unix.Syscall(unix.SYS_FCNTL, uintptr(t.file), getOwnerEx, uintptr(unsafe.Pointer(&owner))); e != 0 {
		out.errno = e
		return out, nil
	}
	pid := int(owner.pid)
	if owner.typ == groupType {
		pid = -pid
	}
	out.flat = append([]byte(nil), t.mem.flat...)
	if len(out.flat) < 4 {
		out.errno = unix.EFAULT
		return out, nil
	}
	binary.NativeEndian.PutUint32(out.flat, uint32(t.ids.inner(pid)))
	return out, nil
}

// ioctl makes the call itself.
func (t *thread) ioctl(arg unsafe.Pointer) (int, unix.Errno) {
	r, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(t.file), uintptr(t.call.cmd), uintptr(arg))
	return int(r), errno
}

// scratch is memory for the kernel to read and write that ends where its content does: beyond is no
// memory, so that the kernel fails (EFAULT) where it would have in the caller's.
type scratch struct {
	pages []byte // nil: no content
	at    int    // where in pages the content begins
	end   int
}

func newScratch(content []byte) (scratch, error) {
	page := unix.Getpagesize()
	room := (len(content) + page - 1) / page * page
	pages, err := unix.Mmap(-1, 0, room+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return scratch{}, fmt.Errorf("map memory for an ioctl: %w", err)
	}
	s := scratch{pages: pages, at: room - len(content), end: room}
	copy(pages[s.at:], content)
	if err := unix.Mprotect(pages[room:], unix.PROT_NONE); err != nil {
		s.free()
		return scratch{}, fmt.Errorf("protect memory for an ioctl: %w", err)
	}
	return s, nil
}

func (s scratch) bytes() []byte { return s.pages[s.at:s.end] }

// pointer gives the address of the content; that of no memory, if there is none.
func (s scratch) pointer() unsafe.Pointer { return unsafe.Pointer(&s.pages[s.at]) }

func (s scratch) addr() uintptr {
	if s.pages == nil {
		return 0
	}
	return uintptr(s.pointer())
}

func (s scratch) free() {
	if s.pages != nil {
		_ = unix.Munmap(s.pages) // fails only for what is not mapped
	}
}

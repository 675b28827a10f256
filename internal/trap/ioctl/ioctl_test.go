package ioctl

import (
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/trap"
)

// The trapped ioctls are told by the lower halves of the registers, of the native and of the 32-bit
// interface.
func TestParse(t *testing.T) {
	const high = 0xdeadbeef << 32
	native := func(fd, cmd, arg uint64) trap.Data {
		return trap.Data{Nr: unix.SYS_IOCTL, Arch: trap.NativeArch, Args: [6]uint64{fd, cmd, arg}}
	}
	for d, want := range map[trap.Data]call{
		native(3, unix.SIOCGIFCONF, 7<<40): {fd: 3, cmd: unix.SIOCGIFCONF, arg: 7 << 40},
		native(high|3, high|0x89ff, 1):     {fd: 3, cmd: 0x89ff, arg: 1},
		native(1<<32-1, 0x8b00, 0):         {fd: -1, cmd: 0x8b00},
		native(3, 0x8bff, high|1):          {fd: 3, cmd: 0x8bff, arg: high | 1},
	} {
		if got, ok := parse(&d); !ok || got != want {
			t.Errorf("%+v: %+v %v, want %+v", d, got, ok, want)
		}
	}
	for _, cmd := range []uint64{0, 0x5401, 0x88ff, 0x8a00, 0x8aff, 0x8c00, 0x18900, 0x80108906, high} {
		d := native(3, cmd, 0)
		if got, ok := parse(&d); ok {
			t.Errorf("%#x: %+v", cmd, got)
		}
	}
	socket := trap.Data{Nr: unix.SYS_SOCKET, Arch: trap.NativeArch, Args: [6]uint64{3, 0x8912}}
	if got, ok := parse(&socket); ok {
		t.Errorf("socket(): %+v", got)
	}
}

// No request that is made as it stands may have a pointer in its structure. These are all of
// linux/sockios.h that do.
func TestIoctlArguments(t *testing.T) {
	for cmd, want := range map[uint32]argument{
		0x890b: argRoute, 0x890c: argRoute, 0x8912: argConf, 0x8940: argBridge, 0x8941: argBridge, 0x8946: argData,
		0x894a: argNoData, 0x8993: argData, 0x8994: argData, 0x89b0: argData, 0x89b1: argData, 0x89f0: argNoData, 0x89ff: argNoData,
		0x8b00: argWireless, 0x8bff: argWireless, 0x894c: argNetns, 0x89e0: argPrivate, 0x89ef: argPrivate, 0x8905: argState,
		0x8901: argSetOwner, 0x8904: argGetOwner, 0x8913: argFlat, 0x8955: argFlat, 0x89a3: argFlat,
		0x8900: argUnknown, 0x890a: argUnknown, 0x893f: argUnknown, 0x8950: argUnknown, 0x8999: argUnknown, 0x89c0: argUnknown,
	} {
		if got := argumentOf(cmd); got != want {
			t.Errorf("%#x: %d, want %d", cmd, got, want)
		}
	}
}

// What the kernel gets ends where the caller's memory did.
func TestScratchEnds(t *testing.T) {
	for _, n := range []int{0, 1, 20, 4096, 4097, dataBytes} {
		content := make([]byte, n)
		for i := range content {
			content[i] = byte(i)
		}
		s, err := newScratch(content)
		if err != nil {
			t.Fatal(err)
		}
		var pipe [2]int
		if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		if _, err := unix.FcntlInt(uintptr(pipe[1]), unix.F_SETPIPE_SZ, 2*dataBytes); err != nil {
			t.Fatal(err)
		}
		// The kernel can read it, and not a byte more.
		got, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(pipe[1]), s.addr(), uintptr(n))
		if errno != 0 || int(got) != n || string(s.bytes()) != string(content) {
			t.Errorf("%d bytes: the kernel read %d (%v)", n, int(got), errno)
		}
		if _, _, errno := unix.Syscall(unix.SYS_WRITE, uintptr(pipe[1]), s.addr()+uintptr(n), 1); errno != unix.EFAULT {
			t.Errorf("%d bytes: one more: %v", n, errno)
		}
		s.free()
		closeFD(pipe[0])
		closeFD(pipe[1])
	}
}

func TestTaskIDs(t *testing.T) {
	var ids taskIDs
	ids.thread.outer, ids.thread.inner = 1001, 6
	ids.process.outer, ids.process.inner = 1000, 5
	ids.group.outer, ids.group.inner = 900, 1
	for inner, outer := range map[int32]int{0: 0, 5: 1000, 6: 1001, -1: -900} {
		if got, errno := ids.outer(inner); got != outer || errno != 0 {
			t.Errorf("outer(%d) = %d, %v", inner, got, errno)
		}
		if got := ids.inner(outer); got != inner {
			t.Errorf("inner(%d) = %d", outer, got)
		}
	}
	for _, other := range []int32{1, -5, 1000, 99} {
		if _, errno := ids.outer(other); errno != unix.ESRCH {
			t.Errorf("outer(%d): %v", other, errno)
		}
	}
	if got := ids.inner(1); got != 0 {
		t.Errorf("the agent's own init shows as %d", got)
	}
}

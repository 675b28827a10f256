package cost

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A container's start is over when the first instruction of its program runs. A program in Go takes
// milliseconds before it can say so, and one in C needs a compiler, so this one is made by hand: it
// writes the monotonic clock to its standard output.

var errStampArch = errors.New("the bench has its smallest program for amd64 only")

// auditArch gives the architecture as seccomp filters see it.
func auditArch() (uint32, error) {
	switch runtime.GOARCH {
	case "amd64":
		return unix.AUDIT_ARCH_X86_64, nil
	case "arm64":
		return unix.AUDIT_ARCH_AARCH64, nil
	}
	return 0, fmt.Errorf("architecture %s: no number for seccomp filters known", runtime.GOARCH)
}

// stampCode is clock_gettime(CLOCK_MONOTONIC, sp); write(1, sp, 16); exit_group(0).
var stampCode = []byte{
	0x48, 0x83, 0xec, 0x10, // sub rsp, 16
	0xb8, 0xe4, 0x00, 0x00, 0x00, // mov eax, 228
	0xbf, 0x01, 0x00, 0x00, 0x00, // mov edi, 1
	0x48, 0x89, 0xe6, // mov rsi, rsp
	0x0f, 0x05, // syscall
	0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
	0xbf, 0x01, 0x00, 0x00, 0x00, // mov edi, 1
	0x48, 0x89, 0xe6, // mov rsi, rsp
	0xba, 0x10, 0x00, 0x00, 0x00, // mov edx, 16
	0x0f, 0x05, // syscall
	0xb8, 0xe7, 0x00, 0x00, 0x00, // mov eax, 231
	0x31, 0xff, // xor edi, edi
	0x0f, 0x05, // syscall
}

// stampBytes is what it writes: seconds and nanoseconds, 8 bytes each.
const stampBytes = 16

// stampProgram gives the program as an ELF file with one segment.
func stampProgram() ([]byte, error) {
	if runtime.GOARCH != "amd64" {
		return nil, errStampArch
	}
	const base, header, segment = 0x400000, 64, 56
	size := uint64(header + segment + len(stampCode))
	le := binary.LittleEndian
	elf := append([]byte{0x7f, 'E', 'L', 'F', 2 /* 64 bits */, 1 /* little-endian */, 1 /* version */}, make([]byte, 9)...)
	elf = le.AppendUint16(elf, 2)  // executable
	elf = le.AppendUint16(elf, 62) // x86-64
	elf = le.AppendUint32(elf, 1)
	elf = le.AppendUint64(elf, base+header+segment) // entry
	elf = le.AppendUint64(elf, header)              // offset of segments
	elf = le.AppendUint64(elf, 0)                   // no sections
	elf = le.AppendUint32(elf, 0)
	for _, v := range []uint16{header, segment, 1, 64, 0, 0} {
		elf = le.AppendUint16(elf, v)
	}
	elf = le.AppendUint32(elf, 1)                                 // to be loaded
	elf = le.AppendUint32(elf, 5)                                 // readable and executable
	for _, v := range []uint64{0, base, base, size, size, 4096} { // offset, addresses, sizes, alignment
		elf = le.AppendUint64(elf, v)
	}
	return slices.Concat(elf, stampCode), nil
}

// readStamp reads what the program wrote.
func readStamp(out []byte) (time.Duration, error) {
	if len(out) != stampBytes {
		return 0, fmt.Errorf("the program wrote %d bytes, want %d", len(out), stampBytes)
	}
	return time.Duration(binary.LittleEndian.Uint64(out))*time.Second + time.Duration(binary.LittleEndian.Uint64(out[8:])), nil
}

// monotonic reads the clock that the program writes.
func monotonic() (time.Duration, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		return 0, fmt.Errorf("read clock: %w", err)
	}
	return time.Duration(t.Nano()), nil
}

package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Options say how a machine is run. What is zero has a default.
type Options struct {
	// Megabytes of memory, 1024, and processors, 1.
	Megabytes, Processors int
	// OneThread has the processors take turns in a thread of this machine. With one for each, qemu
	// before 8.1 may run what it has translated of code that the kernel changed meanwhile: rarely,
	// Linux on x86 ends by an "int3".
	OneThread bool
	// Arguments are further ones of the kernel.
	Arguments string
	// Memory is the file of a shared memory (ivshmem-plain, without interrupts), a PCI device of
	// vendor 1af4, device 1110; none if it is empty. qemu opens it: /dev/fd/3 is that which Through
	// gives it. MemoryMegabytes is its size, a power of two.
	Memory          string
	MemoryMegabytes int
	// Through is the command that runs qemu, to which its words are added; qemu is run as it is if
	// there is none.
	Through []string
	// Links are network cards (virtio_net, which Modules has to name): eth0 and so on.
	Links []*os.File
	// Console gets what the kernel and the script print, as it comes.
	Console io.Writer
}

// kernelArguments are those of every machine. The check that it leaves out counts ticks in a time
// of this machine's, which a busy one does not keep.
const kernelArguments = "quiet panic=-1 no_timer_check"

// ErrNoEnd says that a machine did not say how its script ended: it has crashed, or ctx was over.
var ErrNoEnd = errors.New("the machine ended before its script did")

// Run boots a machine, and gives the exit code of the script, which dash runs.
func (b Built) Run(ctx context.Context, script string, o Options) (code int, err error) {
	dir, err := os.MkdirTemp("", "heddle-machine-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	end := filepath.Join(dir, "end")
	initramfs, err := b.withScript(dir, script)
	if err != nil {
		return 0, err
	}
	threads := "multi"
	if o.OneThread {
		threads = "single"
	}
	arguments := []string{"-accel", "tcg,thread=" + threads, "-cpu", "max", "-m", strconv.Itoa(max(o.Megabytes, 1024)), "-smp", strconv.Itoa(max(o.Processors, 1)),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", b.kernel, "-initrd", initramfs, "-append", b.arch.console + " " + kernelArguments + " " + o.Arguments}
	arguments = append(arguments, b.arch.machine(end)...)
	if b.root != "" {
		for tag, path := range map[string]string{"root": b.root, "modules": b.modules} {
			arguments = append(arguments, "-virtfs", fmt.Sprintf("local,path=%s,mount_tag=%s,security_model=none,readonly=on,multidevs=remap", path, tag))
		}
	}
	for i, link := range o.Links {
		// ExtraFiles begin at descriptor 3. Each end of a cable has another number here, and by
		// that another address.
		arguments = append(arguments, "-netdev", fmt.Sprintf("socket,id=link%d,fd=%d", i, 3+i),
			"-device", fmt.Sprintf("virtio-net-pci,netdev=link%d,mac=52:54:00:00:%02x:%02x,romfile=", i, byte(link.Fd()>>8), byte(link.Fd())))
	}
	if o.Memory != "" {
		arguments = append(arguments, "-object", fmt.Sprintf("memory-backend-file,id=shared,share=on,mem-path=%s,size=%dM", o.Memory, o.MemoryMegabytes),
			"-device", "ivshmem-plain,memdev=shared")
	}
	words := append(slices.Clone(o.Through), append([]string{b.arch.emulator}, arguments...)...)
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = o.Console, o.Console, o.Links
	cmd.WaitDelay = time.Second
	ran := cmd.Run()
	said, err := os.ReadFile(end)
	if err := errors.Join(ran, err); err != nil {
		return 0, fmt.Errorf("%w: %w", ErrNoEnd, err)
	}
	if _, err := fmt.Sscanf(string(said), "code %d", &code); err != nil {
		return 0, fmt.Errorf("%w: it said %q", ErrNoEnd, said)
	}
	return code, nil
}

// withScript adds the script to the file system: the kernel unpacks one archive after the other.
func (b Built) withScript(dir, script string) (string, error) {
	if err := os.WriteFile(filepath.Join(dir, "script"), []byte(script), 0o755); err != nil {
		return "", err
	}
	both := filepath.Join(dir, "initramfs")
	return both, run("sh", "-ec", `cd "$1"; echo script | cpio --create --format newc --quiet | gzip -1 | cat "$2" - >"$3"`, "sh", dir, b.initramfs, both)
}

// Link gives the two ends of a cable, each for the Options of one machine. The caller closes them.
func Link() (a, b *os.File, err error) {
	ends, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a cable: %w", err)
	}
	return os.NewFile(uintptr(ends[0]), "cable"), os.NewFile(uintptr(ends[1]), "cable"), nil
}

// Lines is a Console that gives whole lines to a function, such as a test's Log.
func Lines(log func(line string)) io.Writer { return &lines{log: log} }

type lines struct {
	mu   sync.Mutex
	rest string
	log  func(string)
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest += string(p)
	for {
		line, rest, found := strings.Cut(l.rest, "\n")
		if !found {
			return len(p), nil
		}
		l.log(strings.TrimRight(line, "\r"))
		l.rest = rest
	}
}

package machine

import (
	"fmt"
	"os/exec"
	"runtime"
	"strings"
)

// arch is what a machine of an architecture has.
type arch struct {
	name     string // as Debian has it
	emulator string // qemu's program
	console  string // the kernel's argument for its first serial line
	// machine gives qemu's words for the machine and its serial lines: the console is standard
	// output, what is written to the other one goes to a file.
	machine func(end string) []string
	end     string // that line's device
	shell   string // runs scripts
	packed  bool   // the kernel's image unpacks itself
}

var arches = []arch{
	{"amd64", "qemu-system-x86_64", "console=ttyS0", func(end string) []string {
		return []string{"-serial", "stdio", "-serial", "file:" + end}
	}, "/dev/ttyS1", "/usr/bin/dash", true},
	// Its board has one serial line; the other one is a PCI card.
	{"arm64", "qemu-system-aarch64", "console=ttyAMA0", func(end string) []string {
		return []string{"-machine", "virt", "-serial", "stdio", "-chardev", "file,id=end,path=" + end, "-device", "pci-serial,chardev=end"}
	}, "/dev/ttyS0", "/bin/busybox sh", false},
}

// own reports whether programs of this machine run there.
func (a arch) own() bool { return a.name == runtime.GOARCH }

// arch gives the architecture of the kernel's package.
func (i Image) arch() (arch, error) {
	out, err := exec.Command("dpkg-deb", "--field", i.Kernel, "Architecture").CombinedOutput()
	if err != nil {
		return arch{}, fmt.Errorf("read the kernel's package: %w: %s", err, out)
	}
	name := strings.TrimSpace(string(out))
	for _, a := range arches {
		if a.name != name {
			continue
		}
		if !a.own() && (i.Root == "/" || len(i.Programs) > 0 || i.BusyBox == "") {
			return arch{}, fmt.Errorf("a machine of %s has none of this machine's programs, and wants BusyBox of its own", name)
		}
		return a, nil
	}
	return arch{}, fmt.Errorf("no machine of %s is known here", name)
}

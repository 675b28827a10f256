// Package machine runs scripts in emulated machines that have a kernel of Debian's: for tests of
// what this machine's own kernel does not have, or does otherwise. There is no KVM: a machine is
// slow, so it is good for correctness only. `make test-lsm` and `make test-rdma-card` use it.
//
// An Image is made once of a kernel's package, programs of this machine with the libraries that
// they need, and modules; Run boots it, and runs a script in it as root.
package machine

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// Image says what a machine has.
type Image struct {
	// Kernel is a package's file, linux-image-*.deb, with modules.
	Kernel string
	// Modules are loaded before the script runs, each after those that it needs.
	Modules []string
	// Programs are names in PATH, or paths; they are at the same paths in the machine, with the
	// libraries that they are linked with. BusyBox, which is linked statically, and its applets are
	// there, too; a program that is named here is found before an applet of its name. Scripts are
	// run by dash.
	Programs []string
	// Files are files or folders of this machine by their paths in the emulated one. The libraries
	// that a file needs are there, too.
	Files map[string]string
}

// Built is an image in a folder, ready to boot.
type Built struct{ kernel, initramfs string }

// Build makes the image in dir.
func (i Image) Build(dir string) (Built, error) {
	root := filepath.Join(dir, "root")
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "etc", "root", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "modules"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return Built{}, err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} { // as Debian has it
		if err := os.Symlink("usr/"+d, filepath.Join(root, d)); err != nil {
			return Built{}, err
		}
	}
	steps := []func(dir, root string) error{i.addKernel, i.addPrograms, i.addFiles, pack}
	for _, step := range steps {
		if err := step(dir, root); err != nil {
			return Built{}, fmt.Errorf("make the image of a machine: %w", err)
		}
	}
	return Built{kernel: filepath.Join(dir, "vmlinux"), initramfs: filepath.Join(dir, "initramfs")}, nil
}

// addKernel takes the kernel and modules out of the package. The kernel is unpacked here: that an
// emulated processor does it takes seconds.
func (i Image) addKernel(dir, root string) error {
	if _, err := os.Stat(i.Kernel); err != nil {
		return fmt.Errorf("find the kernel's package: %w", err)
	}
	tree := filepath.Join(dir, "kernel")
	if err := run("dpkg-deb", "--extract", i.Kernel, tree); err != nil {
		return err
	}
	versions, err := filepath.Glob(filepath.Join(tree, "lib/modules/*"))
	if err != nil || len(versions) != 1 {
		return fmt.Errorf("%s has modules of %d kernels, and not of one: %w", i.Kernel, len(versions), err)
	}
	version := filepath.Base(versions[0])
	packed, err := os.ReadFile(filepath.Join(tree, "boot/vmlinuz-"+version))
	if err != nil {
		return err
	}
	if err := unpack(packed, filepath.Join(dir, "vmlinux")); err != nil {
		return fmt.Errorf("unpack the kernel: %w", err)
	}
	if err := run("/sbin/depmod", "-b", tree, version); err != nil {
		return err
	}
	return addModules(tree, version, root, i.Modules)
}

// xz is how an archive of it begins. Debian's kernels are packed so.
var xz = []byte("\xfd7zXZ\x00")

// unpack writes the ELF file that is packed in a kernel's boot image.
func unpack(packed []byte, to string) error {
	at := bytes.Index(packed, xz)
	if at < 0 {
		return errors.New("it is not packed by xz")
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer out.Close()
	cmd := exec.Command("xz", "--decompress", "--stdout", "--single-stream")
	cmd.Stdin, cmd.Stdout = bytes.NewReader(packed[at:]), out
	return cmd.Run()
}

// addModules copies modules with those that they need, and their order.
func addModules(tree, version, root string, names []string) error {
	var order []string
	added := map[string]bool{}
	for _, name := range names {
		out, err := exec.Command("/sbin/modprobe", "-d", tree, "-S", version, "--show-depends", name).CombinedOutput()
		if err != nil {
			return fmt.Errorf("find module %s: %w: %s", name, err, out)
		}
		for line := range strings.Lines(string(out)) {
			words := strings.Fields(line) // insmod PATH, or builtin NAME
			if len(words) < 2 || words[0] != "insmod" || added[words[1]] {
				continue
			}
			added[words[1]] = true
			order = append(order, filepath.Base(words[1]))
			if err := copyFile(words[1], filepath.Join(root, "modules", filepath.Base(words[1]))); err != nil {
				return err
			}
		}
	}
	return os.WriteFile(filepath.Join(root, "modules/order"), []byte(strings.Join(order, "\n")+"\n"), 0o644)
}

// initScript is what the kernel runs. The script's exit code goes to a serial line of its own,
// where nothing else is written.
const initScript = `#!/bin/busybox sh
export PATH=/usr/bin:/usr/sbin:/bin:/sbin:/applets HOME=/root
/bin/busybox mkdir /applets
/bin/busybox --install -s /applets
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
ulimit -l unlimited
ip link set lo up
for module in $(cat /modules/order); do insmod /modules/$module || echo "machine: $module cannot be loaded"; done
/usr/bin/dash /script
echo "code $?" >/dev/ttyS1
poweroff -f
`

func (i Image) addPrograms(_, root string) error {
	if err := copyFile("/bin/busybox", filepath.Join(root, "usr/bin/busybox")); err != nil {
		return err
	}
	for _, name := range append([]string{"/usr/bin/dash"}, i.Programs...) {
		path, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		if err := addFile(root, path, path); err != nil {
			return err
		}
	}
	for path, text := range map[string]string{
		"init":              initScript,
		"etc/passwd":        "root:x:0:0:root:/root:/bin/sh\n",
		"etc/group":         "root:x:0:\n",
		"etc/hosts":         "127.0.0.1 localhost\n",
		"etc/nsswitch.conf": "hosts: files\n",
	} {
		if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o755); err != nil {
			return err
		}
	}
	return nil
}

func (i Image) addFiles(_, root string) error {
	for to, from := range i.Files {
		err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			return addFile(root, path, filepath.Join(to, strings.TrimPrefix(path, from)))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

var library = regexp.MustCompile(`(?m)(?:=> |^\s*)(/\S+) \(0x`)

// addFile copies a file with the libraries that it needs; these are at their own paths.
func addFile(root, from, to string) error {
	if err := copyFile(from, filepath.Join(root, to)); err != nil {
		return err
	}
	needs, err := exec.Command("ldd", from).Output()
	if err != nil {
		return nil //nolint:nilerr // ldd says so of what is linked with nothing
	}
	for _, m := range library.FindAllStringSubmatch(string(needs), -1) {
		if err := copyFile(m[1], filepath.Join(root, m[1])); err != nil {
			return err
		}
	}
	return nil
}

// copyFile copies what a path leads to, unless it is there.
func copyFile(from, to string) error {
	if _, err := os.Stat(to); err == nil {
		return nil
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, info.Mode().Perm())
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// pack makes the file system that the kernel unpacks into memory.
func pack(dir, root string) error {
	return run("sh", "-ec", `cd "$1"; find . | cpio --create --format newc --quiet | gzip -1 >"$2"`, "sh", root, filepath.Join(dir, "initramfs"))
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

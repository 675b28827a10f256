// Package machine runs scripts in emulated machines that have a kernel of Debian's: for tests of
// what this machine's own kernel does not have, or does otherwise. There is no KVM: a machine is
// slow, so it is good for correctness only. `make test-lsm` and `make test-rdma-card` use it.
//
// An Image is made once of a kernel's package, programs of this machine with the libraries that
// they need, and modules; Run boots it, and runs a script in it as root.
package machine

import (
	"bytes"
	"encoding/binary"
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
	// Kernel is a package's file, linux-image-*.deb, with modules. Its architecture is the
	// machine's: amd64, or arm64, which has the BusyBox of a package, and Files or a Root of its
	// own.
	Kernel string
	// BusyBox is the package busybox-static of the machine's architecture. Empty: this machine's
	// own.
	BusyBox string
	// Modules are loaded before the script runs, each after those that it needs.
	Modules []string
	// Programs are names in PATH, or paths; they are at the same paths in the machine, with the
	// libraries that they are linked with. BusyBox, which is linked statically, and its applets are
	// there, too; a program that is named here is found before an applet of its name. Scripts are
	// run by dash.
	Programs []string
	// Root is a folder whose files the machine has, read only, which is / for all files of this
	// one: what it writes is in its own memory, and /tmp, /run and /var/lib are empty. Programs and
	// Files are not needed then. Empty: it has those only.
	Root string
	// Files are files or folders of this machine by their paths in the emulated one. The libraries
	// that a file needs are there, too.
	Files map[string]string
}

// Built is an image in a folder, ready to boot.
type Built struct {
	kernel, initramfs string
	arch              arch
	root, modules     string // of a machine with Root: that, and the modules of its kernel
}

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
	kind, err := i.arch()
	if err != nil {
		return Built{}, err
	}
	steps := []func(dir, root string) error{i.addKernel, i.addPrograms, i.addFiles, pack}
	for _, step := range steps {
		if err := step(dir, root); err != nil {
			return Built{}, fmt.Errorf("make the image of a machine: %w", err)
		}
	}
	built := Built{kernel: filepath.Join(dir, "vmlinux"), initramfs: filepath.Join(dir, "initramfs"), arch: kind}
	if i.Root != "" {
		built.root, built.modules = i.Root, filepath.Join(dir, "kernel/lib/modules")
	}
	return built, nil
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
	image, err := os.ReadFile(filepath.Join(tree, "boot/vmlinuz-"+version))
	if err != nil {
		return err
	}
	kind, err := i.arch()
	if err != nil {
		return err
	}
	write := unpack
	if !kind.packed {
		write = func(image []byte, to string) error { return os.WriteFile(to, image, 0o644) }
	}
	if err := write(image, filepath.Join(dir, "vmlinux")); err != nil {
		return fmt.Errorf("unpack the kernel: %w", err)
	}
	if err := run("/sbin/depmod", "-b", tree, version); err != nil {
		return err
	}
	modules := i.Modules
	if i.Root != "" {
		modules = append([]string{"virtio_pci", "9pnet_virtio", "9p", "overlay"}, modules...)
	}
	return addModules(tree, version, root, modules)
}

// decompressors are the programs that unpack a kernel, by how what they unpack begins.
var decompressors = []struct{ magic, program, option string }{
	{"\xfd7zXZ\x00", "xz", "--single-stream"},
	{"\x28\xb5\x2f\xfd", "zstd", "--quiet"},
}

// unpack writes the ELF file that is packed in a kernel's boot image, where the image's header says
// (Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length). Four bytes at its
// end are its length unpacked.
func unpack(image []byte, to string) error {
	if len(image) < 0x250 || string(image[0x202:0x206]) != "HdrS" {
		return errors.New("it is no boot image of x86")
	}
	begin := (int(image[0x1f1])+1)*512 + int(binary.LittleEndian.Uint32(image[0x248:]))
	length := int(binary.LittleEndian.Uint32(image[0x24c:]))
	if length < 4 || begin+length > len(image) {
		return errors.New("its header names no part of it")
	}
	packed := image[begin : begin+length-4]
	for _, d := range decompressors {
		if !bytes.HasPrefix(packed, []byte(d.magic)) {
			continue
		}
		out, err := os.Create(to)
		if err != nil {
			return err
		}
		defer out.Close()
		cmd := exec.Command(d.program, "--decompress", "--stdout", d.option)
		cmd.Stdin, cmd.Stdout = bytes.NewReader(packed), out
		return cmd.Run()
	}
	return fmt.Errorf("it is packed in a way that is not known here: it begins with %x", packed[:4])
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

// systemMounts is what every machine has beside /proc and /dev.
const systemMounts = `mount -t sysfs sysfs /sys
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t devpts pts /dev/pts
mount -t securityfs securityfs /sys/kernel/security
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
ulimit -l unlimited
ip link set lo up
`

// initScript is what the kernel runs. The script's exit code goes to a serial line of its own,
// where nothing else is written.
const initScript = `#!/bin/busybox sh
export PATH=/usr/bin:/usr/sbin:/bin:/sbin:/applets HOME=/root
/bin/busybox mkdir /applets
/bin/busybox --install -s /applets
mount -t proc proc /proc
mount -t devtmpfs dev /dev
` + systemMounts + `for module in $(cat /modules/order); do insmod /modules/$module || echo "machine: $module cannot be loaded"; done
@SHELL@ /script
echo "code $?" >@END@
poweroff -f
`

// rootScript is what the kernel runs in a machine with Root: it goes over to that, where
// systemScript goes on. Modules are found there by those who need them.
const rootScript = `#!/bin/busybox sh
busybox=/bin/busybox
$busybox mount -t proc proc /proc
$busybox mount -t devtmpfs dev /dev
for module in $($busybox cat /modules/order); do $busybox insmod /modules/$module || echo "machine: $module cannot be loaded"; done
$busybox mkdir /layers
$busybox mount -t tmpfs -o size=50% layers /layers
$busybox mkdir /layers/lower /layers/upper /layers/work /layers/root
shared="-t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144"
$busybox mount $shared root /layers/lower
root=/layers/root
$busybox mount -t overlay -o lowerdir=/layers/lower,upperdir=/layers/upper,workdir=/layers/work overlay $root
$busybox mount -t tmpfs tmp $root/tmp
$busybox mount -t tmpfs run $root/run
$busybox mount -t tmpfs lib $root/var/lib
$busybox mkdir -p $root/lib/modules
$busybox mount $shared modules $root/lib/modules
$busybox cp /script /system $root/run/
$busybox mount --move /proc $root/proc
$busybox mount --move /dev $root/dev
exec $busybox switch_root $root /bin/sh /run/system
`

const systemScript = `export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root
` + systemMounts + `cd /root
sh /run/script
echo "code $?" >@END@
echo o >/proc/sysrq-trigger
exec sleep 60
`

func (i Image) addPrograms(dir, root string) error {
	kind, err := i.arch()
	if err != nil {
		return err
	}
	programs := i.Programs
	if kind.own() {
		programs = append([]string{kind.shell}, programs...)
	}
	if i.BusyBox != "" {
		if err := run("dpkg-deb", "--extract", i.BusyBox, filepath.Join(dir, "busybox")); err != nil {
			return err
		}
	}
	busybox := map[bool]string{true: "/bin/busybox", false: filepath.Join(dir, "busybox/bin/busybox")}[i.BusyBox == ""]
	if err := copyFile(busybox, filepath.Join(root, "usr/bin/busybox")); err != nil {
		return err
	}
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			return err
		}
		if err := addFile(root, path, path); err != nil {
			return err
		}
	}
	begin := initScript
	if i.Root != "" {
		begin = rootScript
	}
	scripts := strings.NewReplacer("@SHELL@", kind.shell, "@END@", kind.end)
	for path, text := range map[string]string{
		"init":              scripts.Replace(begin),
		"system":            scripts.Replace(systemScript),
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

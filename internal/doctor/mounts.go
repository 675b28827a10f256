package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netns"
)

// probeMounts tries the file systems that Heddle mounts, in a mount namespace that dies with its
// thread.
func probeMounts() []finding {
	bpf := finding{name: "bpffs", detail: "file system bpf can be mounted"}
	overlay := finding{name: "overlayfs", detail: "an overlay over / can be mounted"}
	err := netns.OnDiscardedThread(func() error {
		dir, err := scratchMount()
		if err != nil {
			return err
		}
		bpf.err = tryBPFFS(dir)
		overlay.err = tryOverlay(dir)
		return nil
	})
	if errors.Is(err, unix.EPERM) && os.Geteuid() == 0 {
		// A service manager's sandbox keeps the agent from making mount namespaces, which it does
		// for these probes only.
		bpf.err, overlay.err = findFilesystem(&bpf), findFilesystem(&overlay)
	} else if err != nil {
		bpf.err, overlay.err = err, err
	}
	return []finding{bpf, overlay}
}

// filesystemOf are the kernel's names for the file systems of the checks.
var filesystemOf = map[string]string{"bpffs": "bpf", "overlayfs": "overlay"}

// findFilesystem looks whether the kernel says that it has the file system of f. It may have it as
// a module that is not loaded.
func findFilesystem(f *finding) error {
	name := filesystemOf[f.name]
	raw, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(raw)), name) {
		return fmt.Errorf("%s is not in /proc/filesystems, and nothing can be mounted here", name)
	}
	f.detail = "in /proc/filesystems; not tried, because no mount namespace can be made here"
	return nil
}

// scratchMount puts the calling thread into a mount namespace of its own, with an empty tmpfs over
// the folder for temporary files, and gives that folder.
func scratchMount() (dir string, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return "", fmt.Errorf("make a mount namespace: %w", err)
	}
	// Without this, a mount would show in the namespace the machine lives in.
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return "", fmt.Errorf("make mounts private: %w", err)
	}
	dir = os.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=1m,mode=700"); err != nil {
		return "", fmt.Errorf("mount tmpfs: %w", err)
	}
	return dir, nil
}

func tryBPFFS(dir string) error {
	at := filepath.Join(dir, "bpf")
	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}
	if err := unix.Mount("none", at, "bpf", 0, ""); err != nil {
		return fmt.Errorf("mount bpf: %w", err)
	}
	return nil
}

func tryOverlay(dir string) error {
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := errors.Join(os.Mkdir(at("upper"), 0o700), os.Mkdir(at("work"), 0o700), os.Mkdir(at("merged"), 0o700)); err != nil {
		return err
	}
	options := fmt.Sprintf("lowerdir=/,upperdir=%s,workdir=%s", at("upper"), at("work"))
	if err := unix.Mount("none", at("merged"), "overlay", 0, options); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"heddle.dev/heddle/internal/runtime"
)

// runcTimeout is ample for printing a version.
const runcTimeout = 5 * time.Second

// The versions from which runc hands seccomp listeners over, and libseccomp knows
// WAIT_KILLABLE_RECV.
var (
	minRunc       = version{1, 1}
	minLibseccomp = version{2, 6}
)

// runc looks for the OCI runtime that heddle-runtime would run.
func runc(ctx context.Context) []finding {
	f := finding{name: "runc"}
	root := os.Getenv(EnvHostRoot)
	path, err := findRuntime(root)
	if err != nil {
		f.err = err
		return []finding{f}
	}
	ctx, cancel := context.WithTimeout(ctx, runcTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	if root != "" {
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Chroot: root}
	}
	out, err := cmd.Output()
	if err != nil {
		f.err = fmt.Errorf("%s --version: %w", path, err)
		return []finding{f}
	}
	return runcVersion(path, string(out))
}

// EnvHostRoot is the variable with the root of the node's file system, for an agent that is itself
// in a container: the OCI runtime is there.
const EnvHostRoot = "HEDDLE_HOST_ROOT"

// findRuntime gives the path of the OCI runtime below root, "" for this process's own.
func findRuntime(root string) (string, error) {
	name := os.Getenv(runtime.EnvRuntime)
	if root == "" {
		return runtime.FindRuntime(name)
	}
	if name == "" {
		name = "runc"
	}
	candidates := []string{name}
	if !filepath.IsAbs(name) {
		candidates = nil
		for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	for _, c := range candidates {
		if info, err := os.Stat(filepath.Join(root, c)); err == nil && info.Mode().IsRegular() {
			return c, nil
		}
	}
	return "", fmt.Errorf("OCI runtime %s: not on the node", name)
}

// runcVersion judges what `runc --version` printed. Another runtime is taken as it is: its version
// numbers say something else.
func runcVersion(path, out string) []finding {
	f := finding{name: "runc"}
	lib := finding{name: "runc_libseccomp"}
	first, _, _ := strings.Cut(out, "\n")
	f.detail = fmt.Sprintf("%s: %.60s", path, first)
	release, isRunc := strings.CutPrefix(first, "runc version ")
	if !isRunc {
		return []finding{f}
	}
	if v, err := parseVersion(release); err != nil {
		f.err = err
	} else if v.before(minRunc) {
		f.err = fmt.Errorf("%s: version %s is older than %s", path, release, minRunc)
	}
	lib.err = errors.New("runc is built without libseccomp")
	for line := range strings.Lines(out) {
		if s, ok := strings.CutPrefix(strings.TrimSpace(line), "libseccomp:"); ok {
			s = strings.TrimSpace(s)
			lib.detail = "version " + s
			v, err := parseVersion(s)
			if err == nil && v.before(minLibseccomp) {
				err = fmt.Errorf("version %s is older than %s", s, minLibseccomp)
			}
			lib.err = err
		}
	}
	if lib.detail == "" {
		// Without it there is no interception at all.
		f.err = lib.err
	}
	return []finding{f, lib}
}

package doctor

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

// host reads a machine's /proc and /sys below root; tests give it trees of their own.
type host struct{ root string }

// The kernel versions below which nothing works, and from which memlock is not counted for BPF.
var (
	minKernel      = version{5, 14} // RHEL 9's, to which what is newer has been brought
	noMemlockSince = version{5, 11}
)

// version is a major and a minor number.
type version [2]int

// LeastKernel is the oldest mainline kernel on which an agent runs: the first that has all that is
// required. Distributions bring what is newer to older ones, from minKernel on; probes say of each
// whether it does.
func LeastKernel() string {
	least := minKernel
	for _, m := range meanings {
		for _, found := range kernelOf.FindAllStringSubmatch(m.remedy, -1) {
			if v, err := parseVersion(found[1]); m.required && err == nil && least.before(v) {
				least = v
			}
		}
	}
	return least.String()
}

// kernelOf finds the version in a remedy.
var kernelOf = regexp.MustCompile(`(?:Linux |, )(\d+\.\d+) or later`)

// parseVersion reads the beginning of s, such as "6.1.0-28-amd64".
func parseVersion(s string) (version, error) {
	var v version
	if _, err := fmt.Sscanf(s, "%d.%d", &v[0], &v[1]); err != nil {
		return v, fmt.Errorf("version %.60q: want MAJOR.MINOR", s)
	}
	return v, nil
}

func (v version) before(w version) bool { return slices.Compare(v[:], w[:]) < 0 }

func (v version) String() string { return fmt.Sprintf("%d.%d", v[0], v[1]) }

// probePrivileges asks for what an agent needs, not for uid 0: root in a container has the uid
// only.
func probePrivileges() finding {
	f := finding{name: "privileges"}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		f.err = fmt.Errorf("capget: %w", err)
		return f
	}
	var lacking []string
	for _, c := range []struct {
		bit  uint
		name string
	}{
		{unix.CAP_CHOWN, "CAP_CHOWN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_NET_RAW, "CAP_NET_RAW"},
		{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"},
	} {
		if data[c.bit/32].Effective&(1<<(c.bit%32)) == 0 {
			lacking = append(lacking, c.name)
		}
	}
	f.detail = fmt.Sprintf("uid %d with the capabilities needed", os.Geteuid())
	if len(lacking) > 0 {
		f.err = fmt.Errorf("uid %d lacks %s", os.Geteuid(), strings.Join(lacking, ", "))
	}
	return f
}

// value reads a one-line file; "" if it does not exist.
func (h host) value(path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(h.root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return strings.TrimSpace(string(b)), err
}

func (h host) kernel() finding {
	f := finding{name: "kernel"}
	release, err := h.value("proc/sys/kernel/osrelease")
	if err != nil {
		f.err = err
		return f
	}
	v, err := parseVersion(release)
	switch {
	case err != nil:
		f.err = err
	case v.before(minKernel):
		f.err = fmt.Errorf("kernel %s is older than %s", release, minKernel)
	}
	f.detail = "Linux " + release
	return f
}

// cgroup2 looks for a writable cgroup2 hierarchy, which may be the only one or stand beside v1's.
func (h host) cgroup2() finding {
	f := finding{name: "cgroup2"}
	info, err := os.ReadFile(filepath.Join(h.root, "proc/self/mountinfo"))
	if err != nil {
		f.err = err
		return f
	}
	at, v1 := cgroupMounts(info)
	switch {
	case at == "" && v1:
		f.err = errors.New("only cgroup v1 is mounted")
	case at == "":
		f.err = errors.New("no cgroup file system is mounted")
	case v1:
		f.detail = "at " + at + ", beside v1 (hybrid)"
	default:
		f.detail = "at " + at
	}
	if f.err == nil {
		if err := unix.Access(filepath.Join(h.root, at), unix.W_OK); err != nil && os.Geteuid() == 0 {
			f.err = fmt.Errorf("%s is not writable: %w", at, err)
		}
	}
	return f
}

// cgroupMounts reads /proc/self/mountinfo: where cgroup2 is mounted ("" if nowhere), and whether a
// v1 controller is. A mount that shows a part of the hierarchy only is no use to the agent.
func cgroupMounts(mountinfo []byte) (cgroup2 string, v1 bool) {
	const rootField, pointField = 3, 4
	lines := bufio.NewScanner(bytes.NewReader(mountinfo))
	for lines.Scan() {
		// The optional fields before " - " vary in number.
		before, after, ok := strings.Cut(lines.Text(), " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) <= pointField || len(kind) == 0 {
			continue
		}
		switch kind[0] {
		case "cgroup2":
			if cgroup2 == "" && fields[rootField] == "/" {
				cgroup2 = fields[pointField]
			}
		case "cgroup":
			v1 = true
		}
	}
	return cgroup2, v1
}

// initPIDNamespace is the inode number that the kernel gives the first PID namespace on every
// machine.
const initPIDNamespace = "pid:[4026531836]"

func (h host) pidNamespace() finding {
	f := finding{name: "pid_namespace", detail: "the machine's own"}
	ns, err := os.Readlink(filepath.Join(h.root, "proc/self/ns/pid"))
	if err != nil {
		f.err = err
	} else if ns != initPIDNamespace {
		f.err = fmt.Errorf("%s is not the machine's own", ns)
	}
	return f
}

// sysctlsWritable opens a setting for writing without writing: containers see /proc/sys read-only.
func (h host) sysctlsWritable() finding {
	f := finding{name: "sysctls", detail: "/proc/sys is writable"}
	file, err := os.OpenFile(filepath.Join(h.root, "proc/sys/net/ipv4/ip_forward"), os.O_WRONLY, 0)
	if err != nil {
		f.err = err
		return f
	}
	f.err = file.Close()
	return f
}

// ipForward is no fault when it is off and the agent can switch it on.
func (h host) ipForward() finding {
	f := finding{name: "ip_forward"}
	v, err := h.value("proc/sys/net/ipv4/ip_forward")
	f.detail = "net.ipv4.ip_forward = " + v
	switch {
	case err != nil:
		f.err = err
	case v != "1" && h.sysctlsWritable().err != nil:
		f.err = errors.New(f.detail + ", and the agent cannot set it")
	case v != "1":
		f.detail += "; the agent sets it to 1"
	}
	return f
}

func (h host) synCookies() finding {
	f := finding{name: "tcp_syncookies"}
	v, err := h.value("proc/sys/net/ipv4/tcp_syncookies")
	f.detail = "net.ipv4.tcp_syncookies = " + v
	switch {
	case err != nil:
		f.err = err
	case v == "":
		f.err = errors.New("this kernel has no SYN cookies (CONFIG_SYN_COOKIES)")
	case v == "0":
		f.err = errors.New(f.detail)
	}
	return f
}

func (h host) fwmarkAccept() finding {
	f := finding{name: "tcp_fwmark_accept"}
	v, err := h.value("proc/sys/net/ipv4/tcp_fwmark_accept")
	f.detail = "net.ipv4.tcp_fwmark_accept = " + v
	if err != nil {
		f.err = err
	} else if v != "0" && v != "" {
		f.err = errors.New(f.detail)
	}
	return f
}

// memlock matters to kernels that do not account BPF memory by cgroup.
func memlock() finding {
	f := finding{name: "memlock"}
	var uts unix.Utsname
	var limit unix.Rlimit
	if err := errors.Join(unix.Uname(&uts), unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit)); err != nil {
		f.err = err
		return f
	}
	v, err := parseVersion(unix.ByteSliceToString(uts.Release[:]))
	f.detail = "limit " + limitString(limit.Max)
	switch {
	case err != nil:
		f.err = err
	case !v.before(noMemlockSince):
		f.detail += "; this kernel does not count BPF maps against it"
	case limit.Max != unix.RLIM_INFINITY:
		f.err = errors.New(f.detail + " bytes")
	}
	return f
}

func nofile() finding {
	f := finding{name: "nofile"}
	limit, err := fdkeep.RaiseFiles() // as the agent does
	f.detail = fmt.Sprintf("limit %d: room for some %d containers", limit, fdkeep.RoomFor(limit))
	if err != nil || limit < fdkeep.LeastFiles {
		f.err = errors.Join(fmt.Errorf("%s, want %d or more", f.detail, fdkeep.LeastFiles), err)
	}
	return f
}

func limitString(v uint64) string {
	if v == math.MaxUint64 {
		return "unlimited"
	}
	return fmt.Sprint(v)
}

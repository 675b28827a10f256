package lifecycle

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	clientv3 "go.etcd.io/etcd/client/v3"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
	"heddle.dev/heddle/test/labstore"
)

// footprint is all that the lab is on this machine: lines by what they are about, and how often
// each is there.
type footprint map[string]map[string]int

func (f footprint) add(about, format string, args ...any) {
	if f[about] == nil {
		f[about] = map[string]int{}
	}
	f[about][fmt.Sprintf(format, args...)]++
}

// lines adds each line of a text that is not empty.
func (f footprint) lines(about, text string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" {
			f.add(about, "%s", line)
		}
	}
}

// diff says what after has that f has not, and the other way round: nothing if they are equal.
func (f footprint) diff(after footprint) string {
	var b strings.Builder
	for _, about := range slices.Sorted(maps.Keys(union(f, after))) {
		for _, line := range slices.Sorted(maps.Keys(union(f[about], after[about]))) {
			if was, is := f[about][line], after[about][line]; was != is {
				fmt.Fprintf(&b, "%s: %d times, was %d: %s\n", about, is, was, line)
			}
		}
	}
	return b.String()
}

func union[V any](a, b map[string]V) map[string]V {
	out := maps.Clone(a)
	if out == nil {
		out = map[string]V{}
	}
	maps.Copy(out, b)
	return out
}

// leaksNothing takes the lab's footprint. The function it gives waits until there is the same
// again, and fails the test if that does not come: something was left behind, or lost. Programs
// that a test runs in containers must have ended.
func leaksNothing(t testing.TB) (same func()) {
	t.Helper()
	before, err := takeFootprint(t)
	testutil.NoError(t, err)
	return func() {
		t.Helper()
		testutil.Eventually(t, "nothing to be left behind or lost", func() (bool, string) {
			after, err := takeFootprint(t)
			if err != nil {
				return false, err.Error()
			}
			changes := before.diff(after)
			return changes == "", changes
		})
	}
}

// takeFootprint lists network namespaces and all in them, pins and what they hold, programs, files,
// mounts, cgroups, processes, descriptors of agents and fd keepers, and the store's keys.
func takeFootprint(t testing.TB) (footprint, error) {
	t.Helper()
	f := footprint{}
	err := errors.Join(f.namespaces(), f.files(), f.mounts(), f.cgroups(), f.processes())
	for _, node := range []string{"n1", "n2"} {
		err = errors.Join(err, f.pins(node), f.faults(t.Context(), node))
	}
	return f, errors.Join(err, f.programs(), f.store(t))
}

// inNamespace prints what a network namespace has, each line after the name of its kind.
const inNamespace = `
say() { sed "s/^/$1: /"; }
ip -o link | say link
ip -o addr | say address
for family in -4 -6; do
	ip $family rule | say "rule $family"
	ip $family route show table all | say "route $family"
	ip $family neigh show nud permanent | say "neighbour $family"
done
bridge fdb show | grep permanent | say fdb
tc qdisc show | say qdisc
for device in $(ls /sys/class/net 2>/dev/null; ip -o link | sed 's/^[0-9]*: //;s/[@:].*//' | sort -u); do
	for side in ingress egress; do tc filter show dev $device $side 2>/dev/null | say "filter $device $side"; done
	tc class show dev $device | say "class $device"
done
nft -s list ruleset | say nftables
for setting in route_localnet accept_local rp_filter forwarding; do grep -H . /proc/sys/net/ipv4/conf/*/$setting; done | say setting
for setting in disable_ipv6 forwarding force_forwarding accept_ra addr_gen_mode; do grep -sH . /proc/sys/net/ipv6/conf/*/$setting; done | say setting
cat /proc/sys/net/ipv4/ip_forward | say ip_forward
true`

// volatile are parts of lines that say nothing about what is there: numbers of programs, which each
// agent loads anew.
var volatile = regexp.MustCompile(`( id \d+| tag [0-9a-f]{16}| jited|qlen \d+|\[\d+\])`)

func (f footprint) namespaces() error {
	entries, err := os.ReadDir(netns.Dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), lab.Name+"-") {
			continue
		}
		f.add("network namespaces", "%s", e.Name())
		out, err := exec.Command("nsenter", "--net="+netns.Path(e.Name()), "sh", "-c", inNamespace).CombinedOutput()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w\n%s", e.Name(), err, out))
		}
		f.lines(e.Name(), volatile.ReplaceAllString(string(out), ""))
	}
	return errors.Join(errs...)
}

// memories are maps that keep what was, as long as there is room, and tables that exist twice and
// change sides.
var memories = regexp.MustCompile(`^(abi_by_map|suspected_by_node|class_.*|verdict_.*)$`)

// pins lists a node's pins, and the keys of the maps among them.
func (f footprint) pins(node string) error {
	paths, err := filepath.Glob(lab.NodeFile(node, "bpf/heddle/*"))
	if err != nil {
		return err
	}
	about := "pins of " + node
	for _, path := range paths {
		name := filepath.Base(path)
		f.add(about, "%s", name)
		if strings.HasPrefix(name, "link_") {
			continue
		}
		if err := f.entries(node+" "+name, path); err != nil {
			return fmt.Errorf("%s of %s: %w", name, node, err)
		}
	}
	return nil
}

func (f footprint) entries(about, path string) error {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer m.Close()
	if t := m.Type(); t != ebpf.Hash && t != ebpf.LPMTrie || memories.MatchString(filepath.Base(path)) {
		return nil
	}
	var key, value []byte
	it := m.Iterate()
	for it.Next(&key, &value) {
		if filepath.Base(path) == "sockets_by_endpoint" {
			f.add(about, "%x: %x", key, value)
		} else {
			f.add(about, "%x", key)
		}
	}
	return it.Err()
}

// programs lists the programs of this machine's kernel that use a map of the lab's nodes, whoever
// holds them.
func (f footprint) programs() error {
	ours := map[ebpf.MapID]string{}
	for _, node := range []string{"n1", "n2"} {
		paths, err := filepath.Glob(lab.NodeFile(node, "bpf/heddle/*_by_*"))
		if err != nil {
			return err
		}
		for _, path := range paths {
			m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			info, err := m.Info()
			m.Close()
			if err != nil {
				return err
			}
			if id, ok := info.ID(); ok {
				ours[id] = node
			}
		}
	}
	for id, err := ebpf.ProgramGetNextID(0); ; id, err = ebpf.ProgramGetNextID(id) {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		} else if err != nil {
			return err
		}
		p, err := ebpf.NewProgramFromID(id)
		if err != nil {
			continue // gone since
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			return err
		}
		used, _ := info.MapIDs()
		if i := slices.IndexFunc(used, func(m ebpf.MapID) bool { return ours[m] != "" }); i >= 0 {
			f.add("programs of "+ours[used[i]], "%s", info.Name)
		}
	}
}

// files lists what is below the lab's directory, but for the store's own and the containers' root
// file systems.
func (f footprint) files() error {
	root := "/run/heddle/lab/" + lab.Name
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil // gone since
		} else if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, root)
		if d.IsDir() && slices.Contains([]string{"member", "bpf", "rootfs", "scratch"}, d.Name()) {
			return fs.SkipDir
		}
		if !d.IsDir() || d.Name() != "deleted" { // made once, with the first note in it
			f.add("files", "%s %s", d.Type(), name)
		}
		return nil
	})
}

func (f footprint) mounts() error {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(raw)) {
		words := strings.Fields(line)
		if len(words) > 4 && (strings.Contains(words[4], "/"+lab.Name+"/") || strings.Contains(words[4], "/"+lab.Name+"-")) {
			f.add("mounts", "%s", words[4])
		}
	}
	return err
}

// cgroups lists the lab's and those of containers that tests run themselves, in all hierarchies.
func (f footprint) cgroups() error {
	var tops []string
	for _, pattern := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup/*/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, dir := range found {
			if name := filepath.Base(dir); name == "heddle-"+lab.Name || strings.HasPrefix(name, lab.Name+"-") {
				tops = append(tops, dir)
			}
		}
	}
	for _, top := range tops {
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				f.add("cgroups", "%s", path)
			}
			return nil // gone since
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// processes lists those in a network namespace or a cgroup of the lab, and what agents and fd
// keepers have open.
func (f footprint) processes() error {
	ours := map[string]string{}
	entries, err := os.ReadDir(netns.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st syscall.Stat_t
		if strings.HasPrefix(e.Name(), lab.Name+"-") && syscall.Stat(netns.Path(e.Name()), &st) == nil {
			ours[fmt.Sprintf("net:[%d]", st.Ino)] = e.Name()
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return err
	}
	for _, proc := range procs {
		raw, err := os.ReadFile(proc + "/cmdline")
		if err != nil || len(raw) == 0 {
			continue // gone, a zombie or the kernel's
		}
		group, _ := os.ReadFile(proc + "/cgroup")
		ns, _ := os.Readlink(proc + "/ns/net")
		if ours[ns] == "" && !strings.Contains(string(group), "heddle-"+lab.Name) && !strings.Contains(string(group), "/"+lab.Name+"-") {
			continue
		}
		command := strings.Join(strings.Split(strings.TrimSuffix(string(raw), "\x00"), "\x00"), " ")
		f.add("processes", "%s: %s", ours[ns], command)
		if strings.Contains(command, "heddled park ") {
			f.descriptors("fd keeper of "+ours[ns], proc, true)
		} else if strings.Contains(command, "heddled --node") {
			f.descriptors("agent of "+ours[ns], proc, false)
		}
	}
	return nil
}

// number is what a link in /proc/PID/fd has that tells one file of its kind from another.
var number = regexp.MustCompile(`\d+`)

// descriptors counts what a process has open, by kind. An agent's sockets come and go.
func (f footprint) descriptors(about, proc string, sockets bool) {
	fds, _ := filepath.Glob(proc + "/fd/*")
	for _, fd := range fds {
		to, err := os.Readlink(fd)
		if err != nil || !sockets && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "/memfd:") && !strings.HasPrefix(to, "net:") {
			continue
		}
		if to == "anon_inode:[pidfd]" && !sockets {
			continue // of a program that the agent runs or looks at
		}
		to = strings.Replace(to, "bpf-link", "bpf_link", 1) // made by this agent, or opened by its pin
		f.add(about, "%s", number.ReplaceAllString(to, "N"))
	}
}

// faults lists what a node's agent says is wrong.
func (f footprint) faults(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, testutil.WaitTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, lab.Bin, "status", "--lab", lab.Name, "--node", node, "--output", "json").Output()
	if err != nil {
		return fmt.Errorf("status of %s: %w\n%s", node, err, out)
	}
	var status []struct{ Faults []json.RawMessage }
	if err := json.Unmarshal(out, &status); err != nil {
		return fmt.Errorf("status of %s: %w\n%s", node, err, out)
	}
	for _, s := range status {
		for _, fault := range s.Faults {
			f.add("faults of "+node, "%s", fault)
		}
	}
	return nil
}

// store lists the keys of the lab's network and how many leases there are.
func (f footprint) store(t testing.TB) error {
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	client, err := labstore.Open(t)
	if err != nil {
		return err
	}
	defer client.Close()
	all, err := client.Get(ctx, "", clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("read store: %w", err)
	}
	for _, kv := range all.Kvs {
		value := string(kv.Value)
		if strings.Contains(string(kv.Key), "/holders/") {
			value = ""
		}
		f.add("store", "%s %s", kv.Key, value)
	}
	leases, err := client.Leases(ctx)
	if err != nil {
		return fmt.Errorf("leases of the store: %w", err)
	}
	f.add("store", "%d leases", len(leases.Leases))
	return nil
}

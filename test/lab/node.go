package lab

import (
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// InNode runs a program in the network namespace of a node or container of the lab.
func InNode(t testing.TB, suffix string, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testutil.WaitTimeout) // the test's own has ended when it cleans up
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + Name + "-" + suffix}, argv...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s in %s: %v\n%s", strings.Join(argv, " "), suffix, err, out)
	}
	return string(out)
}

// UnlimitedICMP lets every error be answered: the kernel sends one a second to each destination,
// which made answers depend on what came before.
func UnlimitedICMP(t testing.TB) {
	t.Helper()
	for _, suffix := range []string{"n1", "n2", "n1-c1", "n1-c2", "n2-c1", "n2-c2", "outside"} {
		SetSysctl(t, suffix, "ipv4/icmp_ratelimit", "0")
	}
}

// TryInNode runs a command in a node's network namespace.
func TryInNode(t testing.TB, node string, argv ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=/run/netns/" + Name + "-" + node}, argv...)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// Shaping lists what limits may leave on a node: devices, qdiscs and filters.
func Shaping(t testing.TB, node string) string {
	t.Helper()
	// The kernel may complain of devices whose peer's namespace is just being removed.
	out, err := TryInNode(t, node, "sh", "-c", `exec 2>/dev/null; for d in $(ip -o link | cut -d: -f2 | cut -d@ -f1); do echo $d
		tc qdisc show dev $d; tc filter show dev $d ingress; tc filter show dev $d egress; done`)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return out
}

// SetSysctl sets a network setting of a node until the end of the test.
func SetSysctl(t testing.TB, node, name, value string) {
	t.Helper()
	path := "/proc/sys/net/" + name
	set := func(value string) (before string) {
		err := netns.Do(netns.Path(Name+"-"+node), func() error {
			raw, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			before = strings.TrimSpace(string(raw))
			return os.WriteFile(path, []byte(value), 0)
		})
		if err != nil {
			t.Fatalf("%s of %s: %v", name, node, err)
		}
		return before
	}
	before := set(value)
	t.Cleanup(func() { set(before) })
}

// KernelCounter reads one of a node's TcpExt counters.
func KernelCounter(t testing.TB, node, name string) (n uint64) {
	t.Helper()
	err := netns.Do(netns.Path(Name+"-"+node), func() error {
		raw, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		lines := strings.Split(string(raw), "\n")
		names, values := strings.Fields(lines[0]), strings.Fields(lines[1])
		for i := range names {
			if names[i] == name {
				n, err = strconv.ParseUint(values[i], 10, 64)
				return err
			}
		}
		return fmt.Errorf("no counter %s", name)
	})
	testutil.NoError(t, err)
	return n
}

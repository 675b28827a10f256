package lifecycle

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestAgentRefuses: settings and surroundings an agent cannot work with.
func TestAgentRefuses(t *testing.T) {
	n, _ := lab.BareNodes(t)
	plain := t.TempDir()
	for _, c := range []struct {
		name string
		args []string
		wrap []string
		// listen is an address that is in use.
		listen string
		says   []string
	}{
		{name: "no underlay", args: []string{"--underlay", ""}, says: []string{"--underlay", "address other nodes reach"}},
		{name: "malformed underlay", args: []string{"--underlay", "10.0.0"}, says: []string{"--underlay", "10.0.0"}},
		{name: "unknown IPv6 underlay", args: []string{"--underlay", "2001:db8::1"}, says: []string{"underlay", "2001:db8::1", "no device here"}},
		{name: "unknown underlay", args: []string{"--underlay", "192.0.2.77"}, says: []string{"underlay", "192.0.2.77"}},
		{name: "unknown underlay, other store", args: []string{"--underlay", "192.0.2.77", "--store", "http://192.0.2.1:2379"}, says: []string{"underlay", "192.0.2.77"}},
		{name: "node name", args: []string{"--node", "Bad_Name"}, says: []string{"node name", "Bad_Name", "a-z"}},
		{name: "prefix with host bits", args: []string{"--prefix", "10.244.3.1/24"}, says: []string{"--prefix", "10.244.3.1/24", "10.244.3.0/24"}},
		{name: "prefix outside the pool", args: []string{"--prefix", "10.99.0.0/24"}, says: []string{"10.99.0.0/24", "pool"}},
		{name: "IPv6 pool", args: []string{"--pool", "fd00::/48"}, says: []string{"pool", "fd00::/48", "IPv4", "prefix6"}},
		{name: "malformed prefix6", args: []string{"--prefix6", "auto"}, says: []string{"--prefix6", "auto", "prefix"}},
		{name: "prefix6 of another length", args: []string{"--prefix6", "fd00::/64"}, says: []string{"--prefix6", "fd00::/64", "96 bits"}},
		{name: "malformed pool", args: []string{"--pool", "10.244.0.0"}, says: []string{"--pool", "10.244.0.0", "prefix"}},
		{name: "pool with host bits", args: []string{"--pool", "10.244.1.0/16"}, says: []string{"--pool", "10.244.0.0/16"}},
		{name: "pool without room", args: []string{"--pool", "10.9.0.0/30"}, says: []string{"pool", "10.9.0.0/30"}},
		{name: "pool of multicast", args: []string{"--pool", "239.0.0.0/16"}, says: []string{"pool", "239.0.0.0/16"}},
		{name: "pool holds the underlay", args: []string{"--pool", "192.0.0.0/16"}, says: []string{"192.0.2.1"}},
		{name: "network id 0", args: []string{"--network-id", "0"}, says: []string{"network id", "1..4095"}},
		{name: "network id too large", args: []string{"--network-id", "4096"}, says: []string{"network id", "1..4095"}},
		{name: "network id no number", args: []string{"--network-id", "x"}, says: []string{"network-id"}},
		{name: "vni too large", args: []string{"--vni", "16777216"}, says: []string{"vni"}},
		{name: "direct ports reversed", args: []string{"--direct-ports", "9-3"}, says: []string{"direct-ports", "FIRST"}},
		{name: "direct ports malformed", args: []string{"--direct-ports", "a-b"}, says: []string{"direct-ports", "FIRST-LAST"}},
		{name: "direct ports too large", args: []string{"--direct-ports", "65535-65536"}, says: []string{"direct-ports"}},
		{name: "direct ports in use", listen: "192.0.2.1:17410", says: []string{"direct ports", "17410", "--direct-ports"}},
		{name: "direct ports in use on the wildcard", listen: "[::]:17471", says: []string{"direct ports", "17471", "--direct-ports"}},
		{name: "store port in use", listen: "192.0.2.1:2379", says: []string{"store", "2379", "in use", "--store-port"}},
		{name: "store down", args: []string{"--store", "http://192.0.2.1:9"}, says: []string{"store", "192.0.2.1:9"}},
		{name: "store unreachable", args: []string{"--store", "http://192.0.2.200:2379"}, says: []string{"store", "192.0.2.200:2379"}},
		{name: "store malformed", args: []string{"--store", "ftp://x y"}, says: []string{"store", "ftp://x y"}},
		{name: "no store", args: []string{"--store", ""}, says: []string{"store", "embedded"}},
		{name: "no join file", args: []string{"--join-file", filepath.Join(plain, "none.pem")}, says: []string{"join file", "none.pem", "first node"}},
		{name: "join file of something else", args: []string{"--join-file", "/etc/passwd"}, says: []string{"join file", "/etc/passwd", "anew"}},
		{name: "join file for the embedded store", args: []string{"--join-file", "x", "--store", "embedded"}, says: []string{"--store embedded", "--join-file"}},
		{name: "join file and certificates", args: []string{"--join-file", "x", "--store-cert", "y"}, says: []string{"--join-file", "--store-cert"}},
		{name: "no CA file", args: []string{"--store", "https://192.0.2.1:9", "--store-ca", filepath.Join(plain, "none.pem")}, says: []string{"--store-ca", "none.pem", "PEM"}},
		{name: "CA file of something else", args: []string{"--store", "https://192.0.2.1:9", "--store-ca", "/etc/passwd"}, says: []string{"--store-ca", "/etc/passwd", "PEM"}},
		{name: "certificate without key", args: []string{"--store", "https://192.0.2.1:9", "--store-cert", "y"}, says: []string{"--store-cert", "--store-key", "both"}},
		{name: "certificates without TLS", args: []string{"--store", "http://192.0.2.1:9", "--join-file", "x"}, says: []string{"join file", "x"}},
		{name: "user without password", args: []string{"--store", "https://192.0.2.1:9", "--store-user", "u"}, says: []string{"--store-user", "--store-password-file"}},
		{name: "not root", wrap: []string{"setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"}, says: []string{"root"}},
		{name: "no BPF file system", args: []string{"--bpf-dir", plain}, says: []string{plain, "BPF file system", "mount -t bpf"}},
		{name: "relative BPF directory", args: []string{"--bpf-dir", "bpf"}, says: []string{"BPF directory", "absolute"}},
		{name: "cgroup not version 2", args: []string{"--cgroup", filepath.Join(plain, "group")}, says: []string{"cgroup", "cgroup2", "mount"}},
		{name: "relative API socket", args: []string{"--api-socket", "api"}, says: []string{"API socket", "absolute"}},
		{name: "log level", args: []string{"--log-level", "loud"}, says: []string{"--log-level", "debug, info"}},
		{name: "unknown flag", args: []string{"--undrelay", "x"}, says: []string{"undrelay"}},
		{name: "argument", args: []string{"start"}, says: []string{"start"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.listen != "" {
				err := netns.Do(netns.Path(n.Name), func() error {
					l, err := net.Listen("tcp", c.listen)
					if err == nil {
						t.Cleanup(func() { l.Close() })
					}
					return err
				})
				testutil.NoError(t, err)
			}
			said := n.Fails(t, c.wrap, n.Args(c.args...))
			for _, want := range c.says {
				if !strings.Contains(said, want) {
					t.Errorf("it said: %s\nwithout %q", said, want)
				}
			}
			_ = os.RemoveAll(filepath.Join(n.Dir, "state")) // the store of one case is not the next one's
		})
	}
}

package k8s_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// TestNodes installs Heddle on two nodes as docs/howto/install-on-kubernetes.md says, by its
// DaemonSet, and has pods talk.
func TestNodes(t *testing.T) {
	c := startCluster(t)
	c.steps(t, []step{{"install", c.install}, {"pods", c.pods}, {"connections", c.connections}, {"host ports", c.hostPorts}, {"verbs", c.verbsPods}, {"service", c.service}, {"policy", c.policy},
		{"kube-proxy", c.kubeProxy}, {"agents replaced", c.agentsReplaced}, {"verbs with the next agent", c.verbs}, {"agent killed", c.agentKilled}, {"pods deleted", c.podsDeleted}, {"removed", c.removed}})
}

// TestNodesChained does so where another network carries what is not TCP.
func TestNodesChained(t *testing.T) {
	c := startCluster(t)
	c.bridge(t)
	c.steps(t, []step{{"install", c.install}, {"pods", c.pods}, {"connections", c.connections}, {"service", c.service}, {"policy", c.policy},
		{"pods deleted", c.podsDeleted}, {"removed", c.removed}})
}

// step is a part of a test.
type step struct {
	name string
	run  func(t *testing.T)
}

// steps runs parts that build on each other; what fails in one ends the test.
func (c *cluster) steps(t *testing.T, steps []step) {
	t.Helper()
	began := time.Now()
	for _, s := range steps {
		if !t.Failed() {
			t.Run(s.name, s.run)
			t.Logf("%s: %.1f s after the cluster's start", s.name, time.Since(began).Seconds())
		}
	}
	if t.Failed() {
		for _, args := range [][]string{{"get", "pods", "-A", "-o", "wide"}, {"get", "events", "-A"}, {"-n", "heddle-system", "logs", "-l", "app.kubernetes.io/name=heddled", "--all-containers", "--prefix"}} {
			out, err := c.try("", args...)
			t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// bridge gives the nodes a network of bridges and routes, that pods are on before Heddle comes.
func (c *cluster) bridge(t *testing.T) {
	c.chained = true
	for i, m := range c.machines {
		m.run(t, "sh", "-c", "cp /usr/lib/cni/bridge /usr/lib/cni/host-local /opt/cni/bin/ && mkdir -p /etc/cni/net.d && echo 1 >/proc/sys/net/ipv4/ip_forward")
		list := fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true,
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.%d.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, i+1)
		write(t, filepath.Join(c.dir, "other.conflist"), list)
		m.run(t, "cp", filepath.Join(c.dir, "other.conflist"), "/etc/cni/net.d/20-other.conflist")
		far := c.machines[1-i]
		m.run(t, "ip", "route", "add", fmt.Sprintf("10.88.%d.0/24", 2-i), "via", far.addr)
	}
}

// image is the file that `make image` made.
func image(t *testing.T) string {
	t.Helper()
	path := os.Getenv("HEDDLE_IMAGE")
	if path == "" {
		t.Skip("HEDDLE_IMAGE does not say where the image is: make test-k8s builds it")
	}
	return path
}

// manifest gives packaging/kubernetes/heddle.yaml with what an installation sets: the store's node
// and the image; and what the test's machines need: cgroups of both versions that two nodes share,
// and an API server that is reached without a kube-proxy.
func (c *cluster) manifest(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../../packaging/kubernetes/heddle.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := string(raw)
	changes := [][2]string{
		{`HEDDLE_STORE_NODE: ""`, `HEDDLE_STORE_NODE: n1`},
		{`image: heddle.dev/heddle:latest`, `image: ` + c.ref},
		{`HEDDLED_CGROUP: /sys/fs/cgroup/heddle`, `HEDDLE_TEST: "1"`},
		{`command: [heddle-kube, --node=$(NODE), --lease-namespace=heddle-system]` + "\n          env:\n", `command: [heddle-kube, --node=$(NODE), --lease-namespace=heddle-system]` + "\n          env:\n" +
			`            - {name: KUBERNETES_SERVICE_HOST, value: 10.77.0.1}` + "\n" + `            - {name: KUBERNETES_SERVICE_PORT, value: "6443"}` + "\n"},
		{`- {name: HEDDLE_HOST_ROOT,`, `- {name: HEDDLED_CGROUP, value: /sys/fs/cgroup/unified/heddle-k8s-$(NODE)}` + "\n" + `            - {name: HEDDLE_HOST_ROOT,`},
	}
	if c.chained {
		changes = append(changes, [2]string{`HEDDLE_NETWORK: main`, `HEDDLE_NETWORK: chained`}, [2]string{`HEDDLE_CARRIED: ""`, `HEDDLE_CARRIED: 10.88.0.0/16`})
	}
	for _, change := range changes {
		if !strings.Contains(text, change[0]) {
			t.Fatalf("the manifest lacks %q", change[0])
		}
		text = strings.ReplaceAll(text, change[0], change[1])
	}
	return text
}

// install puts the image and the DaemonSet into the cluster.
func (c *cluster) install(t *testing.T) {
	file := image(t)
	for _, m := range c.machines {
		m.run(t, "ctr", "-n", "k8s.io", "images", "import", file)
		for _, name := range strings.Fields(m.run(t, "ctr", "-n", "k8s.io", "images", "ls", "-q")) {
			if strings.HasPrefix(name, "heddle.dev/heddle:") {
				c.ref = name
			}
		}
	}
	c.run(t, c.manifest(t), "apply", "-f", "-")
	join := filepath.Join(c.dir, "join.pem")
	testutil.EventuallyNil(t, "the join file of the store's node", func() error {
		raw, err := c.machines[0].try("cat", "/var/lib/heddle/join.pem")
		if err == nil {
			write(t, join, raw)
		}
		return err
	})
	c.run(t, "", "-n", "heddle-system", "create", "secret", "generic", "heddle-join", "--from-file=join.pem="+join)
	c.run(t, "", "-n", "heddle-system", "rollout", "status", "daemonset/heddled", "--timeout=3m")
	for _, m := range c.machines {
		c.agent(t, m, "doctor") // exit code 1 if something is missing
		testutil.EventuallyNil(t, "the direct path of "+m.name, func() error {
			if out := c.agent(t, m, "status"); !regexp.MustCompile(`direct paths +1 direct`).MatchString(out) {
				return fmt.Errorf("status: %s", out)
			}
			return nil
		})
	}
	c.run(t, "", "wait", "--for=condition=Ready", "nodes", "--all", "--timeout=60s")
	t.Log(c.run(t, "", "get", "nodes", "-o", `jsonpath={range .items[*]}{.status.nodeInfo.kernelVersion} {.status.nodeInfo.containerRuntimeVersion}{"\n"}{end}`))
}

// agent runs heddle in the agent's pod of a machine.
func (c *cluster) agent(t *testing.T, m *machine, args ...string) string {
	t.Helper()
	pod := strings.TrimSpace(c.run(t, "", "-n", "heddle-system", "get", "pods", "-l", "app.kubernetes.io/name=heddled",
		"--field-selector=spec.nodeName="+m.name, "-o", "jsonpath={.items[0].metadata.name}"))
	return c.run(t, "", append([]string{"-n", "heddle-system", "exec", pod, "-c", "heddled", "--", "heddle"}, args...)...)
}

// podOf describes one of the test's.
func podOf(name, node, more, command string) string {
	if command != "" {
		command = ", command: " + command
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s}%[3]s}
spec:
  nodeName: %[2]s
  runtimeClassName: heddle
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  containers: [{name: c, image: %[5]q%[4]s}]
---
`, name, node, more, command, testImage)
}

const serveWeb = `[httpd, -f, -p, "80", -h, /www]`

// pods starts them.
func (c *cluster) pods(t *testing.T) {
	objects := podOf("client", "n1", "", "") + podOf("near", "n1", "", serveWeb) + podOf("far", "n2", "", serveWeb) +
		podOf("stranger", "n1", `, annotations: {io.heddle.endpoint: heddle/another/eth0, io.heddle.seccomp-socket: /tmp/mine}`, "") + podOf("optout", "n1", `, annotations: {io.heddle.intercept: "false"}`, "") +
		strings.Replace(podOf("plain", "n1", "", ""), "  runtimeClassName: heddle\n", "", 1)
	testutil.EventuallyNil(t, "service account", func() error {
		_, err := c.try("", "get", "serviceaccount", "default")
		return err
	})
	c.run(t, objects, "apply", "-f", "-")
	c.run(t, "", "wait", "--for=condition=Ready", "pods", "--all", "--timeout=2m")
	network := "10.244."
	if c.chained {
		network = "10.88."
	}
	if addr := c.addr(t, "far"); !strings.HasPrefix(addr, network) {
		t.Errorf("a pod has the address %s, want one of %s", addr, network)
	}
	// Who opts out has a filter for ioctls of devices, and for nothing else: its paths tell.
	for name, filtered := range map[string]bool{"client": true, "far": true, "optout": true, "plain": false} {
		status := c.run(t, "", "exec", name, "--", "cat", "/proc/1/status")
		if has := regexp.MustCompile(`Seccomp:\s+2`).MatchString(status); has != filtered {
			t.Errorf("pod %s: seccomp filter %v, want %v", name, has, filtered)
		}
	}
}

// addr gives a pod's address.
func (c *cluster) addr(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(c.run(t, "", "get", "pod", name, "-o", "jsonpath={.status.podIP}"))
}

// fetch gets the page of a web server from a pod.
func (c *cluster) fetch(from, addr string) (string, error) {
	return c.try("", "exec", from, "--", "timeout", "5", "wget", "-qO-", "http://"+addr+"/")
}

// counters gives those of a machine's agent.
func (c *cluster) counters(t *testing.T, m *machine) map[string]uint64 {
	t.Helper()
	var status []struct {
		Counters []struct {
			Name  string
			Value uint64
		}
	}
	text := c.agent(t, m, "status", "-o", "json")
	if err := json.Unmarshal([]byte(text), &status); err != nil || len(status) != 1 {
		t.Fatalf("%v: %s", err, text)
	}
	out := map[string]uint64{}
	for _, counter := range status[0].Counters {
		out[counter.Name] = counter.Value
	}
	return out
}

// connections shows the paths that pods' connections take.
func (c *cluster) connections(t *testing.T) {
	n1 := c.machines[0]
	near, far := c.addr(t, "near"), c.addr(t, "far")
	for _, x := range []struct {
		from, to, counter string
		n                 uint64
	}{
		{"client", far, "connect_direct", 1}, {"client", near, "connect_local", 1}, {"client", far, "connect_direct", 5},
		{"stranger", far, "connect_direct", 1}, // its annotations were not believed
		{"optout", far, "connect_direct", 0}, {"plain", far, "connect_direct", 0},
	} {
		before := c.counters(t, n1)
		for range max(x.n, 1) {
			if got, err := c.fetch(x.from, x.to); err != nil || got != greeting {
				t.Errorf("%s from %s: %q, %v", x.to, x.from, got, err)
			}
		}
		after := c.counters(t, n1)
		if got := after[x.counter] - before[x.counter]; got != x.n {
			t.Errorf("%s to %s: %s grew by %d, want %d", x.from, x.to, x.counter, got, x.n)
		}
		for name := range after {
			if strings.HasPrefix(name, "fallback_") && after[name] != before[name] && x.n > 0 {
				t.Errorf("%s to %s: %s", x.from, x.to, name)
			}
		}
	}
}

// agentsReplaced upgrades the agents, which replaces their pods, under load: calls of socket()
// wait, none fails.
func (c *cluster) agentsReplaced(t *testing.T) {
	const connects = 2000
	n1 := c.machines[0]
	old := strings.TrimSpace(c.run(t, "", "-n", "heddle-system", "get", "pods", "--field-selector=spec.nodeName="+n1.name, "-o", "jsonpath={.items[0].metadata.name}"))
	type result struct {
		out string
		err error
	}
	done := make(chan result, 1)
	go func() {
		script := fmt.Sprintf(`touch /tmp/running; for i in $(seq %d); do wget -qO- http://%s/ >/dev/null && echo ok; done; touch /tmp/finished`, connects, c.addr(t, "far"))
		out, err := c.try("", "exec", "client", "--", "sh", "-c", script)
		done <- result{out, err}
	}()
	testutil.EventuallyNil(t, "load", func() error {
		_, err := c.try("", "exec", "client", "--", "cat", "/tmp/running")
		return err
	})
	next := c.ref + "-next"
	for _, m := range c.machines {
		m.run(t, "ctr", "-n", "k8s.io", "images", "tag", c.ref, next)
	}
	c.run(t, "", "-n", "heddle-system", "set", "image", "daemonset/heddled", "*="+next)
	c.run(t, "", "-n", "heddle-system", "rollout", "status", "daemonset/heddled", "--timeout=3m")
	if got := c.run(t, "", "-n", "heddle-system", "get", "pods", "-o", "jsonpath={.items[*].spec['initContainers','containers'][*].image}"); strings.Count(got, next) != strings.Count(got, c.ref) {
		t.Errorf("images after the upgrade: %s", got)
	}
	r := <-done
	if ok := strings.Count(r.out, "ok\n"); r.err != nil || ok != connects {
		t.Errorf("%d of %d connects while the agent was replaced: %v", ok, connects, r.err)
	}
	if now := strings.TrimSpace(c.run(t, "", "-n", "heddle-system", "get", "pods", "--field-selector=spec.nodeName="+n1.name, "-o", "jsonpath={.items[0].metadata.name}")); now == old {
		t.Error("the agent was not replaced")
	}
	if got, err := c.fetch("client", c.addr(t, "near")); err != nil || got != greeting {
		t.Errorf("after it: %q, %v", got, err)
	}
}

// agentKilled kills the container's own process: the agent, which is outside of the container, ends
// with it, or the next would not start.
func (c *cluster) agentKilled(t *testing.T) {
	n1 := c.machines[0]
	first := n1.run(t, "pgrep", "-f", "^/opt/heddle/bin/heddled --node")
	n1.run(t, "pkill", "-KILL", "-f", "^/opt/heddle/bin/heddled pod run")
	testutil.EventuallyNil(t, "another agent", func() error {
		now, err := n1.try("pgrep", "-f", "^/opt/heddle/bin/heddled --node")
		if err == nil && now == first {
			err = fmt.Errorf("it is still process %s", now)
		}
		return err
	})
	// It waits for the agent, longer on a busy machine than fetch lets it.
	if got, err := c.try("", "exec", "client", "--", "timeout", "60", "wget", "-qO-", "http://"+c.addr(t, "far")+"/"); err != nil || got != greeting {
		t.Errorf("after it: %q, %v", got, err)
	}
	c.run(t, "", "-n", "heddle-system", "rollout", "status", "daemonset/heddled", "--timeout=3m")
}

// podsDeleted: a pod that is deleted leaves nothing.
func (c *cluster) podsDeleted(t *testing.T) {
	c.run(t, "", "delete", "pods", "--all", "--timeout=2m")
	for _, m := range c.machines {
		testutil.EventuallyNil(t, "nothing left on "+m.name, func() error {
			if out := c.agent(t, m, "endpoints", "-o", "json"); len(decode(t, out)) != 0 {
				return fmt.Errorf("endpoints: %s", out)
			}
			links, err := m.try("ip", "-o", "link")
			if err != nil {
				return err
			}
			if regexp.MustCompile(`(?m)^\d+: hd[0-9]`).MatchString(links) {
				return fmt.Errorf("devices: %s", links)
			}
			if out, err := m.try("sh", "-c", "ls /run/netns"); err != nil || strings.TrimSpace(out) != "" {
				return fmt.Errorf("network namespaces: %q, %v", out, err)
			}
			if out := c.agent(t, m, "status"); !regexp.MustCompile(`listeners +0\b`).MatchString(out) {
				return fmt.Errorf("status: %s", out)
			}
			return nil
		})
	}
}

// decode reads a JSON list.
func decode(t *testing.T, text string) (list []any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return list
}

// removed takes Heddle off the cluster and its nodes, of which nothing is left.
func (c *cluster) removed(t *testing.T) {
	c.run(t, c.manifest(t), "delete", "-f", "-", "--timeout=2m")
	for _, m := range c.machines {
		m.run(t, "/opt/heddle/bin/heddle", "uninstall", "--cgroup", "/sys/fs/cgroup/unified/heddle-k8s-"+m.name)
		m.run(t, "sh", "-c", "rm -r /opt/heddle /opt/cni/bin/heddle-cni /etc/cni/net.d/*-heddle.conflist")
		for what, command := range map[string]string{
			"state": "ls -d /var/lib/heddle || true", "pins": "ls -d /sys/fs/bpf/heddle || true", "devices": "ip -o link | grep -E 'heddle|hd[0-9]' || true",
			"sockets": "ls -d /run/heddle || true", "tables": "nft list tables | grep heddle || true", "rules": "ip rule | grep -E '18532|0x4864' || true",
			"processes": "ps ax -o args | grep '^/opt/heddle' || true", "control group": "ls -d /sys/fs/cgroup/unified/heddle-k8s-" + m.name + " || true",
		} {
			if out, err := m.try("sh", "-c", command+" 2>/dev/null"); err != nil || strings.TrimSpace(out) != "" {
				t.Errorf("%s left on %s: %q, %v", what, m.name, out, err)
			}
		}
	}
}

// service reaches a Service by its address. There is no kube-proxy that would translate it.
func (c *cluster) service(t *testing.T) {
	c.run(t, "", "expose", "pod", "far", "--name=web", "--port=8080", "--target-port=80")
	addr := strings.TrimSpace(c.run(t, "", "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}")) + ":8080"
	testutil.EventuallyNil(t, "page by the Service's address", func() error {
		got, err := c.fetch("client", addr)
		if err == nil && got != greeting {
			err = fmt.Errorf("page %q", got)
		}
		return err
	})
	n1 := c.machines[0]
	before := c.counters(t, n1)["connect_direct"]
	if got, err := c.fetch("client", addr); err != nil || got != greeting {
		t.Errorf("page %q, %v", got, err)
	}
	if n := c.counters(t, n1)["connect_direct"] - before; n != 1 {
		t.Errorf("%d direct connects to the Service, want 1", n)
	}
	c.run(t, "", "delete", "service", "web")
}

const onlyClients = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: only-clients}
spec:
  podSelector: {matchLabels: {app: far}}
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector: {matchLabels: {app: client}}
    - podSelector: {matchLabels: {access: granted}}
`

// policy applies a NetworkPolicy: it cuts a live connection, and what it does not allow is not
// made, until a label allows it and again when the policy has gone.
func (c *cluster) policy(t *testing.T) {
	far, stranger := c.addr(t, "far"), c.addr(t, "stranger")
	cut := make(chan struct{})
	go func() {
		defer close(cut)
		_, _ = c.try("", "exec", "stranger", "--", "sh", "-c", "mkfifo /tmp/open; exec 3<>/tmp/open; nc "+far+" 80 <&3")
	}()
	testutil.EventuallyNil(t, "live connection of the stranger", func() error {
		if out := c.agent(t, c.machines[0], "connections"); !regexp.MustCompile(`(?m)^.*` + regexp.QuoteMeta(stranger) + `.*` + regexp.QuoteMeta(far) + `:80.*direct`).MatchString(out) {
			return fmt.Errorf("connections: %s", out)
		}
		return nil
	})
	mayFetch := func(from string, want bool) {
		t.Helper()
		testutil.EventuallyNil(t, fmt.Sprintf("%s fetches: %v", from, want), func() error {
			if got, err := c.fetch(from, far); (err == nil && got == greeting) != want {
				return fmt.Errorf("%q, %v", got, err)
			}
			return nil
		})
	}
	mayFetch("stranger", true)
	c.run(t, onlyClients, "apply", "-f", "-")
	mayFetch("stranger", false)
	mayFetch("plain", false)
	mayFetch("client", true)
	select {
	case <-cut:
	case <-time.After(2 * waitTimeout):
		t.Error("the live connection was not cut")
	}
	if out := c.agent(t, c.machines[0], "status") + c.agent(t, c.machines[1], "status"); !regexp.MustCompile(`[1-9]\d* connections? cut`).MatchString(out) {
		t.Errorf("no connection was cut: %s", out) // the server may have ended it
	}
	c.run(t, "", "label", "pod", "stranger", "access=granted")
	mayFetch("stranger", true)
	c.run(t, "", "label", "pod", "stranger", "access-")
	mayFetch("stranger", false)
	c.run(t, onlyClients, "delete", "-f", "-")
	mayFetch("stranger", true)
	mayFetch("plain", true)
}

package k8s_test

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// hostPorts has kubelet ask for ports of a node: of an intercepted pod and of a plain one, which are
// reached by either node's processes and by pods of all kinds, by the node's address and as long as
// the pod is there.
func (c *cluster) hostPorts(t *testing.T) {
	n1, n2 := c.machines[0], c.machines[1]
	withPort := func(pod string, port int) string {
		return strings.Replace(pod, "containers: [{name: c,", fmt.Sprintf("containers: [{name: c, ports: [{containerPort: 80, hostPort: %d}],", port), 1)
	}
	intercepted := withPort(podOf("hosted", "n1", "", serveWeb), 8091)
	plain := strings.Replace(withPort(podOf("hostedplain", "n1", "", serveWeb), 8092), "  runtimeClassName: heddle\n", "", 1)
	c.run(t, intercepted+plain, "apply", "-f", "-")
	c.run(t, "", "wait", "--for=condition=Ready", "pods", "--all", "--timeout=2m")
	fetches := map[string]func(url string) (string, error){}
	for _, pod := range []string{"client", "far", "plain", "hosted"} {
		fetches["pod "+pod] = func(url string) (string, error) {
			return c.try("", "exec", pod, "--", "timeout", "5", "wget", "-qO-", url)
		}
	}
	for _, m := range c.machines {
		fetches["node "+m.name] = func(url string) (string, error) {
			return m.try("timeout", "5", "/bin/busybox", "wget", "-qO-", url)
		}
	}
	for _, port := range []string{"8091", "8092"} {
		for name, fetch := range fetches {
			if got, err := fetch("http://" + n1.addr + ":" + port + "/"); err != nil || got != greeting {
				t.Errorf("port %s of n1, from %s: %q, %v", port, name, got, err)
			}
		}
	}
	c.run(t, "", "delete", "pod", "hosted", "hostedplain")
	testutil.EventuallyNil(t, "the port of a pod that is gone to be refused", func() error { // kubectl does not wait for DEL
		got, err := n2.try("timeout", "5", "/bin/busybox", "wget", "-qO-", "http://"+n1.addr+":8091/")
		if err == nil || !strings.Contains(err.Error(), "refused") {
			return fmt.Errorf("%q, %w", got, cmp.Or(err, errors.New("it answers")))
		}
		return nil
	})
}

package k8s_test

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// proxyServices are of a server each, with a ClusterIP and a port at every node's addresses.
const proxyServices = `apiVersion: v1
kind: Service
metadata: {name: web-%[1]s, labels: {test: proxy}}
spec:
  type: NodePort
  selector: {app: %[1]s}
  ports: [{port: 8080, targetPort: 80}]
---
`

// kubeProxy has kube-proxy beside Heddle on both nodes, in each of its modes: pods that are not
// intercepted, and the nodes' own processes, reach Services by its translation, intercepted ones by
// Heddle's choice at connect(), or, at a node's port, by translation as well. What it starts last
// goes on to the test's end.
func (c *cluster) kubeProxy(t *testing.T) {
	plain := strings.Replace(podOf("plainweb", "n2", "", serveWeb), "  runtimeClassName: heddle\n", "", 1)
	objects := plain
	for _, server := range []string{"near", "far", "plainweb"} {
		objects += fmt.Sprintf(proxyServices, server)
	}
	c.run(t, objects, "apply", "-f", "-")
	c.run(t, "", "wait", "--for=condition=Ready", "pods", "--all", "--timeout=2m")
	for i, m := range c.machines { // as by a default route: packets of the node's own processes need one before they are translated
		m.run(t, "ip", "route", "add", "10.96.0.0/16", "via", c.machines[1-i].addr)
	}
	var running []*daemon
	for _, mode := range []string{"iptables", "nftables"} {
		for _, d := range running {
			d.stop()
		}
		running = nil
		for _, m := range c.machines {
			if mode != "iptables" {
				m.run(t, program(t, "kube-proxy"), "--cleanup", "--kubeconfig", c.dir+"/kubeconfig")
			}
			// Without the settings of connection tracking, which are not a network namespace's own.
			running = append(running, startDaemon(t, c.dir, "kube-proxy-"+mode+"-"+m.name, m.command(program(t, "kube-proxy"), "--kubeconfig", c.dir+"/kubeconfig", "--proxy-mode", mode,
				"--hostname-override", m.name, "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0", "--conntrack-min=0",
				"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")))
		}
		t.Run(mode, c.reachServices)
	}
	c.programs = append(c.programs, running...)
	c.run(t, "", "delete", "service", "-l", "test=proxy")
	c.run(t, "", "delete", "pod", "plainweb")
}

// reachServices fetches a page from each kind of client by each address of each Service.
func (c *cluster) reachServices(t *testing.T) {
	n1, n2 := c.machines[0], c.machines[1]
	clients := map[string]func(url string) (string, error){}
	for _, pod := range []string{"client", "plain", "plainweb"} {
		clients[pod] = func(url string) (string, error) {
			return c.try("", "exec", pod, "--", "timeout", "5", "wget", "-qO-", url)
		}
	}
	for _, m := range c.machines {
		clients["node "+m.name] = func(url string) (string, error) {
			return m.try("timeout", "5", "/bin/busybox", "wget", "-qO-", url)
		}
	}
	for _, server := range []string{"near", "far", "plainweb"} {
		fields := strings.Fields(c.run(t, "", "get", "service", "web-"+server, "-o", "jsonpath={.spec.clusterIP} {.spec.ports[0].nodePort}"))
		addrs := []string{fields[0] + ":8080", n1.addr + ":" + fields[1], n2.addr + ":" + fields[1]}
		for name, fetch := range clients {
			if name == "plainweb" && server != name {
				continue // it is there for the way by its own Service
			}
			for _, addr := range addrs {
				direct := name == "client" && addr == addrs[0]
				var before map[string]uint64
				if direct {
					before = c.counters(t, n1)
				}
				tries := uint64(0)
				soon(t, name+" fetches "+server+" at "+addr, func() error {
					tries++
					got, err := fetch("http://" + addr + "/")
					if err == nil && got != greeting {
						err = fmt.Errorf("page %q", got)
					}
					return err
				})
				if !direct {
					continue
				}
				path := map[string]string{"near": "connect_local", "far": "connect_direct", "plainweb": "connect_direct"}[server]
				if n := c.counters(t, n1)[path] - before[path]; n < 1 || n > tries {
					t.Errorf("%s to the ClusterIP of %s: %s grew by %d", name, server, path, n)
				}
			}
		}
		c.forward(t, server)
	}
	c.connections(t) // pods' addresses, as without a kube-proxy
}

// forward reaches a pod's port by `kubectl port-forward`: a process of the node connects to the
// pod's loopback, in the pod's own stack.
func (c *cluster) forward(t *testing.T, pod string) {
	t.Helper()
	d := startDaemon(t, c.dir, "port-forward-"+pod, c.machines[0].command(append(c.kubectl, "port-forward", "pod/"+pod, "18080:80")...))
	defer d.stop()
	soon(t, "page of "+pod+" by port-forward", func() error {
		got, err := c.machines[0].try("timeout", "5", "/bin/busybox", "wget", "-qO-", "http://127.0.0.1:18080/")
		if err == nil && got != greeting {
			err = fmt.Errorf("page %q", got)
		}
		return err
	})
}

// soon is eventually for one of many: the others are tried, too.
func soon(t *testing.T, what string, is func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(waitTimeout / 3); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = is(); err == nil {
			return
		}
	}
	t.Errorf("%s: %v", what, err)
}

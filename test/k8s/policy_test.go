package k8s_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// heddleLab is a lab of one node, in whose place heddle-kube and the CNI plugin stand.
type heddleLab struct {
	t    *testing.T
	name string
}

// startLab brings a lab up, which goes with the test.
func startLab(t *testing.T, nodes string) *heddleLab {
	t.Helper()
	l := &heddleLab{t: t, name: testutil.LabName() + "-k8s"}
	l.heddle("lab", "up", "--nodes", nodes, "--containers", "1")
	t.Cleanup(func() { l.heddle("lab", "down") })
	return l
}

// heddle runs the command line for the lab.
func (l *heddleLab) heddle(args ...string) string {
	l.t.Helper()
	out, err := l.try(args...)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

func (l *heddleLab) try(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*waitTimeout)
	defer cancel()
	verb := 1 // lab, endpoints and policy have a verb of their own, before --
	args = append(append(append([]string{}, args[:verb+1]...), "--lab", l.name), args[verb+1:]...)
	out, err := exec.CommandContext(ctx, heddleProgram(l.t, "heddle"), args...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("heddle %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

func (l *heddleLab) socket(node string) string {
	return "/run/heddle/lab/" + l.name + "/" + node + "/api.sock"
}

// startKube starts heddle-kube for a node of the lab, and gives the path of its socket.
func (l *heddleLab) startKube(c *controlPlane, node string) (*daemon, string) {
	l.t.Helper()
	socket := filepath.Join(c.dir, "kube-"+node+".sock")
	metrics := "127.0.0.1:" + freePort(l.t)
	d := startDaemon(l.t, c.dir, "heddle-kube-"+node, exec.Command(heddleProgram(l.t, "heddle-kube"), "--kubeconfig", c.kubeconfig, "--node", node,
		"--api-socket", l.socket(node), "--socket", socket, "--metrics", metrics, "--lease-duration", "3s"))
	testutil.EventuallyNil(l.t, "heddle-kube of "+node, func() error {
		resp, err := http.Get("http://" + metrics + "/readyz")
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return errors.New(resp.Status)
		}
		return nil
	})
	return d, socket
}

// labPod is what kubelet and containerd make of a pod: a network namespace that heddle-cni has
// attached.
type labPod struct {
	namespace, name, addr string
	netns                 string
}

const pause = "sleep 1000000"

// bindPod makes the API server's pod, bound to node as the scheduler does.
func (c *controlPlane) bindPod(t *testing.T, node, namespace, name, labels string) (uid string) {
	t.Helper()
	c.apply(t, fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": %q, "name": %q, "labels": {%s}},
		"spec": {"nodeName": %q, "containers": [{"name": "c", "image": "none", "command": [%q],
			"ports": [{"name": "admin", "containerPort": 8000}]}]}}`, namespace, name, labels, node, pause))
	return strings.TrimSpace(c.run(t, "", "get", "pod", "-n", namespace, name, "-o", "jsonpath={.metadata.uid}"))
}

// cni runs heddle-cni on a node.
func (l *heddleLab) cni(operation, node, kube, namespace, name, uid string) ([]byte, error) {
	conf := fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "kube", "type": "heddle-cni", "intercepted": false, "socket": %q, "kubernetes": %q}`, l.socket(node), kube)
	cmd := exec.Command("nsenter", "--net=/run/netns/"+l.name+"-"+node, heddleProgram(l.t, "heddle-cni"))
	cmd.Stdin = strings.NewReader(conf)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+operation, "CNI_CONTAINERID="+namespace+"-"+name, "CNI_NETNS=/run/netns/"+l.netns(namespace, name), "CNI_IFNAME=eth0",
		"CNI_PATH="+filepath.Dir(heddleProgram(l.t, "heddle-cni")), "CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE="+namespace+";K8S_POD_NAME="+name+";K8S_POD_UID="+uid)
	return cmd.Output()
}

func (l *heddleLab) netns(namespace, name string) string {
	return l.name + "-" + namespace + "-" + name
}

// attach makes a pod's network namespace and endpoint.
func (l *heddleLab) attach(node, kube, namespace, name, uid string) labPod {
	l.t.Helper()
	p := labPod{namespace: namespace, name: name, netns: l.netns(namespace, name)}
	if out, err := exec.Command("ip", "netns", "add", p.netns).CombinedOutput(); err != nil {
		l.t.Fatalf("ip netns add: %v: %s", err, out)
	}
	l.t.Cleanup(func() {
		if out, err := l.cni("DEL", node, kube, namespace, name, uid); err != nil {
			l.t.Errorf("cni DEL: %v: %s", err, out)
		}
		if out, err := exec.Command("ip", "netns", "del", p.netns).CombinedOutput(); err != nil {
			l.t.Errorf("ip netns del: %v: %s", err, out)
		}
	})
	out, err := l.cni("ADD", node, kube, namespace, name, uid)
	if err != nil {
		l.t.Fatalf("cni ADD: %v: %s", err, out)
	}
	var result struct {
		IPs []struct{ Address string }
	}
	if err := json.Unmarshal(out, &result); err != nil || len(result.IPs) == 0 {
		l.t.Fatalf("cni ADD: %v: %s", err, out)
	}
	p.addr, _, _ = strings.Cut(result.IPs[0].Address, "/")
	return p
}

// serve has the pod listen at a port until the test ends.
func (p labPod) serve(t *testing.T, port string) {
	t.Helper()
	cmd := exec.Command("nsenter", "--net=/run/netns/"+p.netns, "python3", "-c",
		"import socket,sys\nl=socket.create_server(('0.0.0.0',int(sys.argv[1])))\nprint('up',flush=True)\nwhile 1: l.accept()[0].close()", port)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	watchdog := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer watchdog.Stop()
	if line, err := bufio.NewReader(io.LimitReader(out, 100)).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("listener of %s: %q, %v", p.name, line, err)
	}
}

// connects says what a connect of the pod to another one's port meets: "yes", "refused" or an
// error's text.
func (p labPod) connects(to labPod, port string) string {
	out, err := exec.Command("nsenter", "--net=/run/netns/"+p.netns, "python3", "-c",
		"import socket,sys\ntry: socket.create_connection((sys.argv[1],int(sys.argv[2])),10);print('yes')\nexcept ConnectionRefusedError: print('refused')\nexcept OSError as e: print(e)", to.addr, port).CombinedOutput()
	if err != nil {
		return err.Error() + string(out)
	}
	return strings.TrimSpace(string(out))
}

// wantConnects waits until connects is as it is to be.
func wantConnects(t *testing.T, what string, from, to labPod, port, want string) {
	t.Helper()
	testutil.EventuallyNil(t, what, func() error {
		if got := from.connects(to, port); got != want {
			return fmt.Errorf("%s to %s:%s: %s, want %s", from.name, to.name, port, got, want)
		}
		return nil
	})
}

const fromWeb = `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": "db"},
	"spec": {"podSelector": {"matchLabels": {"app": "db"}}, "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}, "namespaceSelector": {"matchLabels": {"tier": "a"}}}], "ports": [{"port": 80}, {"port": "admin"}, {"protocol": "SCTP", "port": 1}]}]}}`

// TestPolicies has a real API server say what pods, namespaces and policies there are, and looks at
// what connections meet.
func TestPolicies(t *testing.T) {
	c := startControlPlane(t)
	l := startLab(t, "1")
	kube, socket := l.startKube(c, "n1")
	c.apply(t, `{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop", "labels": {"tier": "a"}}}`)
	pods := map[string]labPod{}
	for name, labels := range map[string]string{"db": `"app": "db"`, "web": `"app": "web"`, "other": `"app": "other", "io.heddle.namespace": "kube-system"`} {
		pods[name] = l.attach("n1", socket, "shop", name, c.bindPod(t, "n1", "shop", name, labels))
	}
	byHand := filepath.Join(c.dir, "by-hand.json")
	write(t, byHand, `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"namespace": "shop", "name": "by-hand"},
		"spec": {"podSelector": {"matchLabels": {"app": "nobody"}}, "ingress": []}}`)
	l.heddle("policy", "apply", "-f", byHand)
	pods["db"].serve(t, "80")
	pods["db"].serve(t, "8000")
	wantConnects(t, "no policy", pods["other"], pods["db"], "80", "yes")

	c.apply(t, fromWeb)
	wantConnects(t, "a policy", pods["other"], pods["db"], "80", "refused")
	wantConnects(t, "a policy allows", pods["web"], pods["db"], "80", "yes")
	wantConnects(t, "a policy allows the port admin", pods["web"], pods["db"], "8000", "yes")
	wantConnects(t, "a policy with a named port", pods["other"], pods["db"], "8000", "refused")
	testutil.EventuallyNil(t, "event of SCTP", func() error {
		events := c.run(t, "", "get", "events", "-n", "shop", "-o", "jsonpath={range .items[*]}{.involvedObject.kind}/{.involvedObject.name}: {.message}{end}")
		if !strings.Contains(events, `NetworkPolicy/db: spec.ingress[0]: SCTP`) {
			return fmt.Errorf("events: %s", events)
		}
		return nil
	})
	c.run(t, "", "label", "pod", "-n", "shop", "other", "app=web", "--overwrite")
	wantConnects(t, "a pod's label changed", pods["other"], pods["db"], "80", "yes")
	c.run(t, "", "label", "namespace", "shop", "tier=b", "--overwrite")
	wantConnects(t, "the namespace's label changed", pods["web"], pods["db"], "80", "refused")

	// Without API server all stays, and nothing is attached that it has not told of.
	c.apiserver.stop()
	if got := pods["web"].connects(pods["db"], "80"); got != "refused" {
		t.Errorf("without API server: %s", got)
	}
	// Nor does heddle-kube, started again, take "nothing is known" for "nothing is there".
	kube.stop()
	c.apiserver = c.startAPI()
	c.waitReady(t)
	c.run(t, "", "label", "namespace", "shop", "tier=a", "--overwrite")
	c.run(t, "", "label", "pod", "-n", "shop", "other", "app=other", "--overwrite")
	kube, socket = l.startKube(c, "n1")
	wantConnects(t, "a namespace's label changed while nobody looked", pods["web"], pods["db"], "80", "yes")
	wantConnects(t, "a pod's label changed while nobody looked", pods["other"], pods["db"], "80", "refused")
	kube.stop()
	c.run(t, "", "delete", "networkpolicy", "-n", "shop", "db")
	if out, err := l.cni("ADD", "n1", socket, "shop", "nobody", "no-uid"); err == nil || !strings.Contains(string(out), `"code": 11`) {
		t.Errorf("ADD without heddle-kube: %v: %s", err, out)
	}
	l.startKube(c, "n1")
	wantConnects(t, "a policy deleted while nobody looked", pods["other"], pods["db"], "80", "yes")
	if got := l.heddle("policy", "list"); strings.Contains(got, "shop/db") || !strings.Contains(got, "shop/by-hand") {
		t.Errorf("policies left: %s", got)
	}
}

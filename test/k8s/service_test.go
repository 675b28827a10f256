package k8s_test

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

const endpointSlice = `{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": %q, "labels": {"kubernetes.io/service-name": %q}},
	"addressType": "IPv4", "ports": [{"name": "http", "port": 8080}], "endpoints": [%s]}`

// TestServices has a real API server give a Service its ClusterIP, to which an intercepted
// container connects.
func TestServices(t *testing.T) {
	c := startControlPlane(t)
	l := startLab(t, "2")
	kube, _ := l.startKube(c, "n1")
	server := exec.Command(heddleProgram(t, "heddle"), "lab", "exec", "--lab", l.name, "n2/c1", "--", "python3", "-c",
		"import socket\nl=socket.create_server(('0.0.0.0',8080))\nprint('up',flush=True)\nwhile 1: l.accept()[0].close()")
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	out, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGTERM)
		_ = server.Wait()
	})
	watchdog := time.AfterFunc(time.Minute, func() { _ = server.Process.Kill() })
	defer watchdog.Stop()
	if line, err := bufio.NewReader(io.LimitReader(out, 100)).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("listener: %q, %v", line, err)
	}
	backend := strings.TrimSpace(l.heddle("lab", "ip", "--mode", "overlay", "n2/c1"))

	c.apply(t, `{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": {"ports": [{"name": "http", "port": 80}]}}`)
	vip := strings.TrimSpace(c.run(t, "", "get", "service", "web", "-o", "jsonpath={.spec.clusterIP}"))
	connect := func() string {
		out, err := l.try("lab", "exec", "n1/c1", "--", "python3", "-c",
			"import socket,sys\ntry: print(*socket.create_connection((sys.argv[1],80),10).getpeername())\nexcept ConnectionRefusedError: print('refused')\nexcept OSError as e: print(e)", vip)
		if err != nil {
			return err.Error()
		}
		return strings.TrimSpace(out)
	}
	want := func(what, want string) {
		t.Helper()
		testutil.EventuallyNil(t, what, func() error {
			if got := connect(); got != want {
				return fmt.Errorf("connect to %s: %s, want %s", vip, got, want)
			}
			return nil
		})
	}
	want("a Service without backends", "refused")
	c.apply(t, fmt.Sprintf(endpointSlice, "web-1", "web", `{"addresses": ["`+backend+`"]}`))
	want("a backend", vip+" 80")

	// All that goes while nobody looks, and while the API server is away.
	c.apiserver.stop()
	if got := connect(); got != vip+" 80" {
		t.Errorf("without API server: %s", got)
	}
	kube.stop()
	if got := connect(); got != vip+" 80" {
		t.Errorf("without heddle-kube: %s", got)
	}
	c.apiserver = c.startAPI()
	c.waitReady(t)
	c.run(t, "", "delete", "endpointslice", "web-1")
	l.startKube(c, "n1")
	want("a backend deleted while nobody looked", "refused")
}

// Package k8s_test tries Heddle against a real Kubernetes: `make test-k8s`. HEDDLE_K8S_BIN is the
// folder with kube-apiserver, kubectl and etcd (and kubelet, for what needs one); without it every
// test is skipped. HEDDLE_BIN is the folder of Heddle's own programs.
package k8s_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// waitTimeout bounds every wait for something that takes milliseconds on an idle machine.
const waitTimeout = 30 * time.Second

// program gives the path of a program below HEDDLE_K8S_BIN, and skips the test if there is none.
// etcd may also be the machine's own.
func program(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("HEDDLE_K8S_BIN")
	if dir == "" {
		t.Skip("HEDDLE_K8S_BIN does not say where Kubernetes' programs are: make test-k8s builds them")
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err == nil {
		return path
	}
	if path, err := exec.LookPath(name); err == nil && name == "etcd" {
		return path
	}
	t.Skipf("%s has no %s", dir, name)
	return ""
}

// heddleProgram gives the path of one of Heddle's own programs.
func heddleProgram(t *testing.T, name string) string {
	t.Helper()
	dir := os.Getenv("HEDDLE_BIN")
	if dir == "" {
		t.Skip("HEDDLE_BIN does not say where Heddle's programs are")
	}
	return filepath.Join(dir, name)
}

// controlPlane is an API server with its etcd.
type controlPlane struct {
	dir        string
	kubectl    string
	kubeconfig string // of an administrator
	url        string // https://127.0.0.1:PORT
	token      string // the administrator's
	apiserver  *daemon
	startAPI   func() *daemon
}

// startControlPlane starts etcd and an API server in folders of the test, and ends them with it.
func startControlPlane(t *testing.T) *controlPlane {
	t.Helper()
	etcd, apiserver, kubectl := program(t, "etcd"), program(t, "kube-apiserver"), program(t, "kubectl")
	c := &controlPlane{dir: t.TempDir(), kubectl: kubectl, token: "heddle-test-token"}
	client, peer, secure := freePort(t), freePort(t), freePort(t)
	etcdURL := "http://127.0.0.1:" + client
	c.url = "https://127.0.0.1:" + secure
	startDaemon(t, c.dir, "etcd", exec.Command(etcd, "--data-dir", filepath.Join(c.dir, "etcd"), "--listen-client-urls", etcdURL,
		"--advertise-client-urls", etcdURL, "--listen-peer-urls", "http://127.0.0.1:"+peer, "--initial-advertise-peer-urls", "http://127.0.0.1:"+peer,
		"--initial-cluster", "default=http://127.0.0.1:"+peer, "--unsafe-no-fsync"))
	key := filepath.Join(c.dir, "sa.key")
	writeKey(t, key)
	tokens := filepath.Join(c.dir, "tokens.csv")
	write(t, tokens, c.token+",admin,1,system:masters\n")
	c.kubeconfig = filepath.Join(c.dir, "kubeconfig")
	write(t, c.kubeconfig, fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: %q, insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`, c.url, c.token))
	c.startAPI = func() *daemon {
		return startDaemon(t, c.dir, "kube-apiserver", exec.Command(apiserver, "--etcd-servers="+etcdURL, "--bind-address=127.0.0.1", "--secure-port="+secure,
			"--advertise-address=127.0.0.1", "--cert-dir="+filepath.Join(c.dir, "certs"), "--service-account-key-file="+key,
			"--service-account-signing-key-file="+key, "--service-account-issuer=https://kubernetes.default.svc",
			"--service-cluster-ip-range=10.96.0.0/16", "--token-auth-file="+tokens, "--authorization-mode=Node,RBAC",
			"--disable-admission-plugins=ServiceAccount", "--endpoint-reconciler-type=none", "--allow-privileged"))
	}
	c.apiserver = c.startAPI()
	c.waitReady(t)
	return c
}

func (c *controlPlane) waitReady(t *testing.T) {
	t.Helper()
	testutil.EventuallyNil(t, "API server ready", func() error {
		_, err := c.try("", "get", "--raw=/readyz")
		return err
	})
	testutil.EventuallyNil(t, "namespace default", func() error {
		_, err := c.try("", "get", "namespace", "default")
		return err
	})
}

// try runs kubectl with input, and gives what it printed.
func (c *controlPlane) try(input string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.kubectl, append([]string{"--kubeconfig", c.kubeconfig, "--cache-dir", filepath.Join(c.dir, "cache")}, args...)...)
	return kubectlOutput(cmd, input)
}

// kubectlOutput runs a kubectl with input, and gives what it printed.
func kubectlOutput(cmd *exec.Cmd, input string) (string, error) {
	cmd.Stdin = strings.NewReader(input)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, errs.String())
	}
	return out.String(), nil
}

// run is try that must not fail.
func (c *controlPlane) run(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, err := c.try(input, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// apply gives objects to the API server.
func (c *controlPlane) apply(t *testing.T, objects string) {
	t.Helper()
	c.run(t, objects, "apply", "-f", "-")
}

// daemon is a program that runs until the test ends, or stop.
type daemon struct {
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

func startDaemon(t *testing.T, dir, name string, cmd *exec.Cmd) *daemon {
	t.Helper()
	d := &daemon{cmd: cmd, log: filepath.Join(dir, name+".log"), done: make(chan struct{})}
	f, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = f, f
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	go func() {
		_ = cmd.Wait()
		close(d.done)
	}()
	t.Cleanup(func() {
		d.stop()
		if t.Failed() {
			log, _ := os.ReadFile(d.log)
			t.Logf("end of the log of %s:\n%s", name, log[max(0, len(log)-4000):])
		}
	})
	return d
}

// stop ends the program, at once.
func (d *daemon) stop() {
	_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
	<-d.done
}

func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func writeKey(t *testing.T, path string) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, string(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})))
}

// TestControlPlane shows that the programs are usable: what other tests rest on.
func TestControlPlane(t *testing.T) {
	c := startControlPlane(t)
	if got := strings.TrimSpace(c.run(t, "", "get", "namespace", "default", "-o", "name")); got != "namespace/default" {
		t.Errorf("got %q", got)
	}
}

package k8s_test

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// verbsImage has a program that uses RDMA, with its libraries.
const verbsImage = "heddle.test/verbs:1"

// filesOf gives a program of the machine and the libraries that it is linked with.
func filesOf(t *testing.T, name string) (files []string) {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("%v (`make test-k8s` installs perftest)", err)
	}
	said, err := exec.Command("ldd", program).Output()
	testutil.NoError(t, err)
	for _, word := range append(strings.Fields(string(said)), program) {
		if filepath.IsAbs(word) {
			files = append(files, word)
		}
	}
	return files
}

// verbsPods starts pods with RDMA devices: all that says so is an annotation of theirs.
func (c *cluster) verbsPods(t *testing.T) {
	var objects strings.Builder
	for name, node := range map[string]string{"rdma-near": "n1", "rdma": "n1", "rdma-far": "n2"} {
		objects.WriteString(strings.Replace(podOf(name, node, `, annotations: {io.heddle.verbs: "true"}`, ""), testImage, verbsImage, 1))
	}
	c.run(t, objects.String(), "apply", "-f", "-")
	c.run(t, "", "wait", "--for=condition=Ready", "pods", "--all", "--timeout=2m")
	c.verbs(t)
}

// verbs has unmodified programs write into each other's memory, on one node and between two.
func (c *cluster) verbs(t *testing.T) {
	type result struct {
		out string
		err error
	}
	write := func(pod string, more ...string) chan result {
		done := make(chan result, 1)
		go func() {
			args := append([]string{"exec", pod, "--", "timeout", "60", "ib_write_bw", "-x", "0", "-D", "5"}, more...)
			out, err := c.try("", args...)
			for late := time.Now().Add(waitTimeout); len(more) > 0 && err != nil && time.Now().Before(late); {
				out, err = c.try("", args...) // the server does not listen yet
			}
			done <- result{out, err}
		}()
		return done
	}
	addr := c.addr(t, "rdma")
	for client, path := range map[string]string{"rdma-near": "memory", "rdma-far": "tcp"} {
		served, said := write("rdma"), write(client, addr)
		testutil.EventuallyNil(t, "a queue pair by "+path, func() error {
			if out := c.agent(t, c.machines[0], "rdma"); !regexp.MustCompile(` RT[RS] +` + regexp.QuoteMeta(addr) + ` .* ` + path + ` `).MatchString(out) {
				return fmt.Errorf("heddle rdma: %s", out)
			}
			return nil
		})
		for end, done := range map[string]chan result{"server": served, client: said} {
			if r := <-done; r.err != nil || !strings.Contains(r.out, "BW average") {
				t.Errorf("%s of %s: %v: %s", end, client, r.err, r.out)
			}
		}
	}
}

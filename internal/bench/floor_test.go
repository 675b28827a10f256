package bench_test

import (
	"encoding/json"
	"net"
	"os/exec"
	"testing"

	"heddle.dev/heddle/internal/bench/benchtest"
	"heddle.dev/heddle/internal/bench/loadgen"
	"heddle.dev/heddle/internal/testutil"
)

// TestFloor: callers in a network namespace in which nothing is up make connections by sockets of
// this one's.
func TestFloor(t *testing.T) {
	testutil.NeedRoot(t, "makes a network namespace")
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	testutil.NoError(t, err)
	defer listener.Close()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for err == nil {
					if _, err = c.Read(b); err == nil {
						_, err = c.Write(b)
					}
				}
			}()
		}
	}()
	program := benchtest.Program(t)
	run := func(args ...string) (loadgen.Connections, error) {
		words := append(append(append([]string{}, program...), args...), program...)
		words = append(words, "crr", "-to", listener.Addr().String(), "-duration", "100ms", "-callers", "8")
		out, err := exec.Command(words[0], words[1:]...).Output()
		var c loadgen.Connections
		if err == nil {
			err = json.Unmarshal(out, &c)
		}
		return c, err
	}
	if c, err := run("floor", "--"); err != nil || c.Connections == 0 {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := run("meter", "--", "unshare", "--net", "--"); err == nil && c.Connections > 0 {
		t.Errorf("%+v without sockets of another namespace", c)
	}
}

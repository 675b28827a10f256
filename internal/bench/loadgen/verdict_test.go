package loadgen

import (
	"net"
	"testing"
)

// TestWatch: it tells once that connects succeed, and once that they do not any more, and ends with
// its input.
func TestWatch(t *testing.T) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	watch := startMain(t, "watch", "-to", l.Addr().String(), "-pause", "1ms")
	for _, want := range []bool{true, false} {
		var v Verdict
		if watch.read(&v); v.Allowed != want {
			t.Fatalf("verdict %+v; want allowed=%t", v, want)
		}
		_ = l.Close()
	}
	if more := watch.stop(); more != "" {
		t.Errorf("more verdicts: %s", more)
	}
}

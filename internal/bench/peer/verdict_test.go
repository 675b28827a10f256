package peer

import (
	"encoding/json"
	"io"
	"net"
	"testing"
)

// TestWatch: it tells once that connects succeed, and once that they do not any more, and ends with its input.
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
	in, stop := io.Pipe()
	printed, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- Main(t.Context(), []string{"watch", "-to", l.Addr().String(), "-pause", "1ms"}, Streams{In: in, Out: out, Err: io.Discard})
		_ = out.Close()
	}()
	verdicts := json.NewDecoder(printed)
	for _, want := range []bool{true, false} {
		var v Verdict
		if err := verdicts.Decode(&v); err != nil || v.Allowed != want {
			t.Fatalf("verdict %+v, %v; want allowed=%t", v, err, want)
		}
		_ = l.Close()
	}
	_ = stop.Close()
	if err := verdicts.Decode(new(Verdict)); err != io.EOF {
		t.Errorf("more verdicts: %v", err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

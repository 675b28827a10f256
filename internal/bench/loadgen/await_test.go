package loadgen

import (
	"bytes"
	"io"
	"strings"
	"testing"
	"time"
)

// TestAwait: a client that is there before its server reaches it as soon as it listens, and ends
// with its input.
func TestAwait(t *testing.T) {
	address := freePort(t, "tcp", "127.0.0.1:0")
	client := startMain(t, "await", "-to", address)
	client.awaitReady()
	before := time.Now().UnixNano()
	startEcho(t, address)
	var r Reached
	if client.read(&r); r.At < before || r.Tries < 1 {
		t.Errorf("%+v", r)
	}
	client.end()
	var said bytes.Buffer
	err := Main(t.Context(), []string{"await", "-to", freePort(t, "tcp", "127.0.0.1:0")}, Streams{In: strings.NewReader(""), Out: &said, Err: io.Discard})
	if err == nil || !strings.Contains(err.Error(), "not reached") {
		t.Errorf("nobody there, and the input ends: %v", err)
	}
}

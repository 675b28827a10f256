package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"
	"time"
)

// TestAwait: a client that is there before its server reaches it as soon as it listens, and ends with its input.
func TestAwait(t *testing.T) {
	address := freePort(t, "tcp", "127.0.0.1:0")
	in, stop := io.Pipe()
	defer stop.Close()
	printed, out := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- Main(context.Background(), []string{"await", "-to", address}, Streams{In: in, Out: out, Err: io.Discard})
		out.Close()
	}()
	ready := make([]byte, len(Ready)+1)
	if _, err := io.ReadFull(printed, ready); err != nil || string(ready) != Ready+"\n" {
		t.Fatalf("%q, %v", ready, err)
	}
	before := time.Now().UnixNano()
	startEcho(t, address)
	var r Reached
	if err := json.NewDecoder(printed).Decode(&r); err != nil || r.At < before || r.Tries < 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
	var said bytes.Buffer
	err := Main(t.Context(), []string{"await", "-to", freePort(t, "tcp", "127.0.0.1:0")}, Streams{In: strings.NewReader(""), Out: &said, Err: io.Discard})
	if err == nil || !strings.Contains(err.Error(), "not reached") {
		t.Errorf("nobody there, and the input ends: %v", err)
	}
}

package api

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"testing"
)

// TestUnanswered: however a connection to the agent ends before a request is answered, the agent
// has ended; a caller that gives up knows that it did.
func TestUnanswered(t *testing.T) {
	for name, said := range map[string]string{
		"nothing":          "",
		"half a line":      "HTTP/1.1 20",
		"half a header":    "HTTP/1.1 200 OK\r\nContent-Le",
		"half a body":      "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
		"half a chunk":     "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{",
		"a damaged length": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx",
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
			go func() {
				for {
					conn, err := l.Accept()
					if err != nil {
						return
					}
					_, _ = conn.Read(make([]byte, 1)) // what is unread resets the connection
					_, _ = io.WriteString(conn, said)
					_ = conn.Close()
				}
			}()
			client := Dial(socket)
			defer client.Close()
			if err := client.DeleteEndpoint(t.Context(), "a"); !errors.Is(err, ErrAgentEnded) {
				t.Errorf("%v, want that the agent ended", err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if err := client.DeleteEndpoint(ctx, "a"); !errors.Is(err, context.Canceled) || errors.Is(err, ErrAgentEnded) {
				t.Errorf("given up: %v", err)
			}
		})
	}
}

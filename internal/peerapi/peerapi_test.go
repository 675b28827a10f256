package peerapi

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

func open(t *testing.T) *Identity {
	t.Helper()
	id, err := Open(filepath.Join(t.TempDir(), "peer.pem"))
	testutil.NoError(t, err)
	return id
}

// serve answers as id to those whose keys are known, until the test ends.
func serve(t *testing.T, id *Identity, handler http.HandlerFunc, known ...*Identity) netip.AddrPort {
	t.Helper()
	l, err := id.Listen(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"), func(key string) bool {
		for _, k := range known {
			if k.Key() == key {
				return true
			}
		}
		return false
	})
	testutil.NoError(t, err)
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
	return netip.MustParseAddrPort(l.Addr().String())
}

// TestKeys: each end believes the other by its key alone, both ways.
func TestKeys(t *testing.T) {
	server, client, other := open(t), open(t), open(t)
	at := serve(t, server, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.String()) }, client)
	resp, err := client.Get(t.Context(), at, server.Key(), "/v1/connections?listeners=true")
	testutil.NoError(t, err)
	said, err := io.ReadAll(resp.Body)
	testutil.NoError(t, err)
	testutil.NoError(t, resp.Body.Close())
	if string(said) != "/v1/connections?listeners=true" {
		t.Errorf("asked for %s", said)
	}
	if _, err := other.Get(t.Context(), at, server.Key(), "/"); err == nil {
		t.Error("a key that is no node's got an answer")
	}
	if _, err := client.Get(t.Context(), at, other.Key(), "/"); err == nil || !strings.Contains(err.Error(), server.Key()) {
		t.Errorf("a server with another key than the node's: %v", err)
	}
	plain := http.Client{Timeout: time.Minute}
	if resp, err := plain.Get("http://" + at.String() + "/v1/connections"); err == nil && resp.StatusCode == http.StatusOK {
		t.Error("got an answer without TLS")
	}
}

// TestSilent: who does not begin to answer is given up; who has begun may take longer.
func TestSilent(t *testing.T) {
	server, client := open(t), open(t)
	release := make(chan struct{})
	at := serve(t, server, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/begins" {
			_ = http.NewResponseController(w).Flush()
		}
		select {
		case <-release:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "at last")
	}, client)
	began := time.Now()
	if _, err := client.Get(t.Context(), at, server.Key(), "/"); !errors.Is(err, errSilent) {
		t.Errorf("silent server: %v", err)
	}
	if took := time.Since(began); took < Answers {
		t.Errorf("given up after %s", took)
	}
	resp, err := client.Get(t.Context(), at, server.Key(), "/begins")
	testutil.NoError(t, err)
	time.AfterFunc(Answers+100*time.Millisecond, func() { close(release) })
	if said, err := io.ReadAll(resp.Body); err != nil || string(said) != "at last" {
		t.Errorf("an answer that takes its time: %q, %v", said, err)
	}
	testutil.NoError(t, resp.Body.Close())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := client.Get(ctx, at, server.Key(), "/"); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that gave up: %v", err)
	}
}

// TestKept: an identity lasts, and a file that is none is named with what to do.
func TestKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "peer.pem")
	first, err := Open(path)
	testutil.NoError(t, err)
	again, err := Open(path)
	if err != nil || again.Key() != first.Key() {
		t.Errorf("opened again: %v, or another key", err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("file: %v, %v", fi.Mode(), err)
	}
	for _, bad := range []string{"", "x", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"} {
		testutil.NoError(t, os.WriteFile(path, []byte(bad), 0o600))
		if _, err := Open(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// TestListenWaits: the port of an agent that ends is had as soon as it is free.
func TestListenWaits(t *testing.T) {
	held, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.NoError(t, err)
	time.AfterFunc(3*listenAgain, func() { _ = held.Close() })
	l, err := open(t).Listen(t.Context(), netip.MustParseAddrPort(held.Addr().String()), nil)
	testutil.NoError(t, err)
	testutil.NoError(t, l.Close())
}

package api

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"heddle.dev/heddle/internal/model"
)

func TestDeleteEndpointLater(t *testing.T) {
	agent := newFakeAgent()
	agent.endpoints["net/a/eth0"] = model.Endpoint{}
	client := serve(t, agent)
	if err := client.DeleteEndpointLater(t.Context(), "net/a/eth0"); err != nil || len(agent.endpoints) != 0 {
		t.Errorf("with an agent: %v, %v left", err, agent.endpoints)
	}
	if err := client.DeleteEndpointLater(t.Context(), "net/a/eth0"); !errors.Is(err, ErrNotFound) {
		t.Errorf("again: %v", err)
	}
	nobody := Dial(filepath.Join(t.TempDir(), "api.sock"))
	before := time.Now().Add(-time.Second) // files have the time of the kernel's last tick
	for range 2 {
		if err := nobody.DeleteEndpointLater(context.Background(), "net/a/eth0"); err != nil {
			t.Fatal(err)
		}
	}
	byName, done, err := Deletions(nobody.SocketPath())
	if err != nil || len(byName) != 1 || byName["net/a/eth0"].Before(before) {
		t.Fatalf("%v %v", byName, err)
	}
	for range 2 {
		if err := done(); err != nil {
			t.Error(err)
		}
	}
	if byName, _, err = Deletions(nobody.SocketPath()); err != nil || len(byName) != 0 {
		t.Errorf("afterwards: %v %v", byName, err)
	}
	if byName := deleteFromDying(t); len(byName) != 1 {
		t.Errorf("with an agent that ends while it is at it: %v", byName)
	}
	never := Dial(filepath.Join(t.TempDir(), "none", "api.sock"))
	if err := never.DeleteEndpointLater(context.Background(), "a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(never.SocketPath())); err == nil {
		t.Error("a directory was made where no agent ever ran")
	}
}

// deleteFromDying deletes an endpoint where each agent ends as soon as it is asked, and gives what
// the next one is told.
func deleteFromDying(t *testing.T) map[string]time.Time {
	t.Helper()
	path := filepath.Join(t.TempDir(), "api.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1))
			c.Close()
		}
	}()
	dying := Dial(path)
	if err := dying.DeleteEndpoint(t.Context(), "net/a/eth0"); !errors.Is(err, ErrAgentEnded) {
		t.Errorf("DeleteEndpoint: %v", err)
	}
	if err := dying.DeleteEndpointLater(t.Context(), "net/a/eth0"); err != nil {
		t.Errorf("DeleteEndpointLater: %v", err)
	}
	byName, _, err := Deletions(path)
	if err != nil {
		t.Error(err)
	}
	return byName
}

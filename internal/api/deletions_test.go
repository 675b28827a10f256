package api

import (
	"context"
	"errors"
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
	never := Dial(filepath.Join(t.TempDir(), "none", "api.sock"))
	if err := never.DeleteEndpointLater(context.Background(), "a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Dir(never.SocketPath())); err == nil {
		t.Error("a directory was made where no agent ever ran")
	}
}

package trap

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/fdkeep"
	"heddle.dev/heddle/internal/model"
)

// dying is a keeper that ends as soon as it has started.
type dying struct{}

func (dying) Put(string, []byte, int, int) error { return nil }
func (dying) Drop(string) error                  { return nil }
func (dying) Take(string) ([]fdkeep.Kept, error) { return nil, nil }
func (dying) Watch(context.Context) error        { return nil }
func (dying) Serve() (io.Closer, fdkeep.Settled, error) {
	return nil, fdkeep.Settled{}, errors.New("dead")
}

// A keeper that ends at once is started again ever more rarely.
func TestKeeperThatDiesAtOnce(t *testing.T) {
	const enough = 5
	starts := make(chan time.Time, 1000)
	s := New()
	if err := s.Listen(Config{
		SocketPath: filepath.Join(t.TempDir(), "s"), Log: slog.New(slog.DiscardHandler),
		Resolve:     func(string, specs.ContainerProcessState) (model.EndpointID, error) { return 1, nil },
		Keeper:      dying{},
		StartKeeper: func() error { starts <- time.Now(); return nil },
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(context.Background()) }()
	before := <-starts
	for pause := firstKeeperPause; pause < firstKeeperPause<<(enough-1); pause *= 2 {
		at := <-starts
		if at.Sub(before) < pause {
			t.Errorf("started again after %s, want %s or more", at.Sub(before), pause)
		}
		before = at
	}
	began := time.Now()
	s.Close()
	if err := <-done; err != nil || time.Since(began) > time.Second {
		t.Errorf("end: %v after %v", err, time.Since(began))
	}
}

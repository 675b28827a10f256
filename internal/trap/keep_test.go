package trap

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync/atomic"
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
	var starts atomic.Int32
	s := New()
	if err := s.Listen(Config{
		SocketPath: filepath.Join(t.TempDir(), "s"), Log: slog.New(slog.DiscardHandler),
		Resolve:     func(string, specs.ContainerProcessState) (model.EndpointID, error) { return 1, nil },
		Keeper:      dying{},
		StartKeeper: func() error { starts.Add(1); return nil },
	}); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(context.Background()) }()
	eventually(t, "it is started again", func() bool { return starts.Load() >= 2 })
	time.Sleep(time.Second)
	if n := starts.Load(); n > 5 {
		t.Errorf("%d starts within a second", n)
	}
	began := time.Now()
	s.Close()
	if err := <-done; err != nil || time.Since(began) > time.Second {
		t.Errorf("end: %v after %v", err, time.Since(began))
	}
}

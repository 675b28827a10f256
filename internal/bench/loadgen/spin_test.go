package loadgen

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSpin(t *testing.T) {
	file := filepath.Join(t.TempDir(), "shared")
	if err := os.WriteFile(file, make([]byte, spinBytes), 0o600); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() {
		answered <- Main(context.Background(), []string{"spin", "-path", file, "-answer"}, Streams{In: strings.NewReader(""), Out: t.Output(), Err: t.Output()})
	}()
	var r Spins
	runPeer(t, &r, "spin", "-path", file, "-duration", "20ms")
	if err := <-answered; err != nil || r.RoundTrips < 1 || r.ElapsedS < .02 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := Main(t.Context(), []string{"spin", "-path", file, "-lifetime", "20ms", "-duration", "1s"}, Streams{Out: t.Output(), Err: t.Output()}); err == nil {
		t.Error("spun alone")
	}
}

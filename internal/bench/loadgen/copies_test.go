package loadgen

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestCopies(t *testing.T) {
	const size = copiesPiece + 5000
	file := filepath.Join(t.TempDir(), "shared")
	content := make([]byte, CopiesBytes(size))
	to := len(content) - (len(content)-copiesBuffersAt)/2
	for i := range size {
		content[to+i] = 1
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	go func() {
		asked <- Main(context.Background(), []string{"copies", "-path", file, "-size", strconv.Itoa(size), "-answer"},
			Streams{In: strings.NewReader(""), Out: t.Output(), Err: t.Output()})
	}()
	var c Copies
	runPeer(t, &c, "copies", "-path", file, "-size", strconv.Itoa(size), "-duration", "20ms")
	if err := <-asked; err != nil || c.Messages < 1 || c.ElapsedS < .02 {
		t.Errorf("%+v, %v", c, err)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range content[to : to+size] {
		if b != 0 {
			t.Fatalf("byte %d was not copied", i)
		}
	}
	if err := Main(t.Context(), []string{"copies", "-path", file, "-lifetime", "20ms", "-answer"}, Streams{Out: t.Output(), Err: t.Output()}); err != nil {
		t.Errorf("after the end: %v", err)
	}
	if err := os.WriteFile(file, make([]byte, CopiesBytes(size)), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, end := range []string{"-answer", "-duration=1s"} {
		if err := Main(t.Context(), []string{"copies", "-path", file, "-lifetime", "20ms", end}, Streams{Out: t.Output(), Err: t.Output()}); err == nil && end == "-answer" {
			t.Error("asked alone")
		} else if err == nil {
			t.Error("copied alone")
		}
	}
}

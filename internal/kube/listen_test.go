package kube

import (
	"os"
	"path/filepath"
	"testing"
)

func TestListen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "kube.sock")
	l, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := listen(path); err == nil {
		t.Error("two listen at the same socket")
	}
	_ = l.Close()
	if err := os.WriteFile(path, nil, 0o600); err != nil { // as one that died leaves it
		t.Fatal(err)
	}
	again, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	_ = again.Close()
}

package durable

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// watch notes what is brought to the disk, with what is at path by then.
func watch(t *testing.T, path string, fail error) *[]string {
	t.Helper()
	var seen []string
	was := sync
	t.Cleanup(func() { sync = was })
	sync = func(f *os.File) error {
		at, err := os.ReadFile(path)
		if err != nil {
			at = []byte("nothing")
		}
		seen = append(seen, filepath.Base(f.Name())+" while there is "+string(at))
		if fail != nil {
			return fail
		}
		return was(f)
	}
	return &seen
}

// TestWriteFile checks that the content is on the disk before it has the name, and the name before
// WriteFile returns.
func TestWriteFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "dir")
	path := filepath.Join(dir, "file")
	if err := MakeDir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for i, content := range []string{"one", "two"} {
		before := []string{"nothing", "one"}[i]
		if err := os.WriteFile(path+".new", []byte("of a writer that was killed"), 0o644); err != nil {
			t.Fatal(err)
		}
		seen := watch(t, path, nil)
		if err := WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if want := []string{"file.new while there is " + before, "dir while there is " + content}; !slices.Equal(*seen, want) {
			t.Errorf("brought to the disk: %q, want %q", *seen, want)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != content {
			t.Errorf("%q, %v, want %q", got, err, content)
		}
		if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
			t.Errorf("%v, %v, want mode 0600", info, err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v, want the file alone", entries, err)
	}
}

func TestWriteFileFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	full := errors.New("disk is full")
	watch(t, path, full)
	if err := WriteFile(path, []byte("new"), 0o600); !errors.Is(err, full) || !strings.Contains(err.Error(), path) {
		t.Errorf("%v, want %v and the path", err, full)
	}
	if got, err := os.ReadFile(path); err != nil || string(got) != "old" {
		t.Errorf("%q, %v, want the old file", got, err)
	}
	if err := WriteFile(filepath.Join(path, "below"), nil, 0o600); err == nil {
		t.Error("wrote below a file")
	}
}

func TestMakeDir(t *testing.T) {
	base := t.TempDir()
	seen := watch(t, base, nil)
	if err := MakeDir(filepath.Join(base, "a", "b")+"/", 0o700); err != nil {
		t.Fatal(err)
	}
	if want := []string{filepath.Base(base) + " while there is nothing", "a while there is nothing"}; !slices.Equal(*seen, want) {
		t.Errorf("brought to the disk: %q, want %q", *seen, want)
	}
	if info, err := os.Stat(filepath.Join(base, "a", "b")); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	if err := os.WriteFile(filepath.Join(base, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"file", "file/below"} {
		if err := MakeDir(filepath.Join(base, bad), 0o700); err == nil {
			t.Errorf("made %s", bad)
		}
	}
}

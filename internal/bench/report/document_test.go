package report

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDocument(t *testing.T) {
	const doc = "a\n<!-- `heddle x report` writes from here -->\nold\n<!-- to here -->\nb\n" +
		"<!-- `heddle x report` writes from here: more -->\nold\n<!-- `heddle x report` writes to here -->\nc\n"
	folder := t.TempDir()
	file := filepath.Join(folder, "doc.md")
	open := func(text string) *Document {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := OpenDocument(file, folder, "x report")
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	d := open(doc)
	draw := func(w io.Writer) error { _, err := io.WriteString(w, "<svg>"); return err }
	if err := errors.Join(d.Section("", "new\n"), d.Section("more", ""), d.Plot("p.svg", draw), d.Save(io.Discard)); err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(strings.Replace(doc, "old\n", "new\n", 1), "old\n", "", 1)
	if got, err := os.ReadFile(file); err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
	if got, err := os.ReadFile(filepath.Join(folder, "p.svg")); err != nil || string(got) != "<svg>" {
		t.Errorf("plot: %q, %v", got, err)
	}
	for _, bad := range []string{"", "<!-- to here -->\n", Mark("x report", ""), Mark("x report", "") + Mark("x report", "more") + "<!-- to here -->\n"} {
		if err := open(bad).Section("", "new\n"); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

func TestWriteFileLeavesNoHalf(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "results.json")
	broken := errors.New("broken")
	err := WriteFile(path, func(w io.Writer) error {
		_, err := io.WriteString(w, "[")
		return errors.Join(err, broken)
	})
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), path) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

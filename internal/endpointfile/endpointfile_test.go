package endpointfile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"heddle.dev/heddle/internal/model"
)

// put writes the file of an endpoint with that name.
func put(t *testing.T, f *Files, id model.EndpointID, inode uint64, name string) {
	t.Helper()
	raw, err := json.Marshal(model.Endpoint{ID: id, Name: name})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Put(id, inode, raw); err != nil {
		t.Fatal(err)
	}
}

// names gives those of endpoints, in order.
func names(t *testing.T, all []model.Endpoint, err error) (out []string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		out = append(out, e.Name)
	}
	slices.Sort(out)
	return out
}

// TestFiles: an endpoint has one file, which is found by its network namespace; a namespace's
// number may become another endpoint's.
func TestFiles(t *testing.T) {
	sockets := t.TempDir()
	f := In(sockets)
	near := func(inode uint64) []string {
		all, err := Near(sockets, inode)
		return names(t, all, err)
	}
	expect := func(when string, got []string, want ...string) {
		t.Helper()
		if len(got) != len(want) || len(want) > 0 && !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, want %v", when, got, want)
		}
	}
	expect("nothing written", near(40))
	put(t, f, 1, 0, "a")
	put(t, f, 2, 40, "b")
	put(t, f, 3, 41, "c")
	expect("one waits", near(40), "a", "b")
	put(t, f, 1, 42, "a")
	expect("none waits", near(40), "b")
	expect("it has come", near(42), "a")
	put(t, f, 2, 0, "b") // its namespace has gone, and its number is the third's now
	put(t, f, 3, 40, "c")
	expect("a number given again", near(40), "b", "c")
	expect("a number of nobody", near(41), "b")
	put(t, f, 1, 40, "a") // before anybody has said so of the third
	if err := f.Delete(3); err != nil {
		t.Fatal(err)
	}
	expect("a file that is another's stays", near(40), "a", "b")
	if err := f.Delete(9); err != nil {
		t.Error(err)
	}
	all, err := All(sockets)
	expect("all", names(t, all, err), "a", "b")

	next := In(sockets) // the next agent
	put(t, next, 2, 43, "b")
	if err := os.WriteFile(filepath.Join(sockets, Dir, "50"+suffix), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(sockets, Dir, "51"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all, err = All(sockets)
	expect("half written, and empty", names(t, all, err), "a", "b", "b")
	if err := next.Keep(); err != nil {
		t.Fatal(err)
	}
	if all, err = All(sockets); len(all) != 1 {
		t.Errorf("kept: %v, %v", all, err)
	}
	if err := os.WriteFile(filepath.Join(sockets, Dir, "52"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Near(sockets, 52); err == nil {
		t.Error("a malformed file is taken for none")
	}
	if st, err := os.Stat(filepath.Join(sockets, Dir, "43")); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode: %v, %v", st, err)
	}
}

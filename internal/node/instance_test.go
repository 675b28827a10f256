package node

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

func TestInstanceIsKept(t *testing.T) {
	dir := t.TempDir()
	first, err := instance(dir)
	if err != nil || len(first) != 32 {
		t.Fatalf("%q, %v", first, err)
	}
	if again, err := instance(dir); again != first || err != nil {
		t.Errorf("then %q, %v", again, err)
	}
	if other, err := instance(t.TempDir()); other == first || err != nil {
		t.Errorf("another node has %q, %v", other, err)
	}
	path := filepath.Join(dir, instanceFile)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	for _, bad := range []string{"", "x", strings.ToUpper(first), first + first} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := instance(dir); err == nil && bad != first {
			t.Errorf("%q: taken as %q", bad, got)
		}
	}
}

func TestTakenName(t *testing.T) {
	own := store.NameLease{Node: "n1", Instance: strings.Repeat("a", 32)}
	other := store.NameLease{Node: "n1", Instance: strings.Repeat("b", 32)}
	for name, c := range map[string]struct {
		leases map[string]store.NameLease
		ends   bool
	}{
		"held":                {map[string]store.NameLease{"n1": own}, false},
		"nobody, for a while": {nil, false},
		"somebody else":       {map[string]store.NameLease{"n1": other}, true},
	} {
		err := checkName(store.State{NameLeases: c.leases}, own)
		if (err != nil) != c.ends || err != nil && !strings.Contains(err.Error(), "--take-over") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOffline(t *testing.T) {
	state := store.State{
		Nodes:      []model.Node{{Name: "n1"}, {Name: "n2"}, {Name: "n3"}},
		NameLeases: map[string]store.NameLease{"n2": {Node: "n2"}},
	}
	if got := offline(state, "n1"); !slices.Equal(got, []string{"n3"}) {
		t.Errorf("offline: %v", got)
	}
}

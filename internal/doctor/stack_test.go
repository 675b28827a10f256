package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/testutil"
)

// TestMain is the program by which modules are started, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == process.Confine {
		fmt.Fprintln(os.Stderr, process.Become(os.Args[2], os.Args[3:]))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// TestOwnStackModules: what is wrong with a module of the operator's own is said, one that starts
// is named, and where there is none nothing is wrong.
func TestOwnStackModules(t *testing.T) {
	testutil.NeedRoot(t, "starts programs as other users")
	folder, err := os.MkdirTemp("", "stack-modules") // t's own are closed to the module's user
	testutil.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(folder) })
	testutil.NoError(t, os.Chmod(folder, 0o755))
	find := func() finding { return ownStackModules(folder, "/proc/self/exe", nil) }
	if f := ownStackModules(filepath.Join(folder, "absent"), "", errors.New("no heddled")); f.err != nil || !strings.HasPrefix(f.detail, "none in") {
		t.Errorf("without the folder: %+v", f)
	}
	if f := find(); f.err != nil || !strings.HasPrefix(f.detail, "none in") {
		t.Errorf("an empty folder: %+v", f)
	}
	const listens = `#!/usr/bin/python3
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.bind(sys.argv[2])
s.listen()
s.accept()[0].recv(1)
`
	program := filepath.Join(folder, "mine")
	for _, tt := range []struct {
		name, text string
		mode       os.FileMode
		owner      int
		want       string // empty: it is all right
	}{
		{"mine", listens, 0o755, 0, ""},
		{"mine", listens, 0o644, 0, "mine: " + program + " cannot be executed"},
		{"mine", listens, 0o755, 65534, "chown root"},
		{"mine", listens, 0o777, 0, "chmod go-w"},
		{"mine", "#!/bin/sh\necho it is broken >&2\nexit 3\n", 0o755, 0, "it ended at once: exit status 3: it is broken"},
		{"mine", "no program", 0o755, 0, "exec format error"},
		{"README.md", listens, 0o755, 0, "README.md: "},
	} {
		path := filepath.Join(folder, tt.name)
		testutil.NoError(t, os.WriteFile(path, []byte(tt.text), 0o600))
		testutil.NoError(t, errors.Join(os.Chmod(path, tt.mode), os.Chown(path, tt.owner, 0)))
		f := find()
		switch {
		case tt.want == "" && (f.err != nil || f.detail != "mine in "+folder):
			t.Errorf("one that answers: %+v", f)
		case tt.want != "" && (f.err == nil || !strings.Contains(f.err.Error(), tt.want) || strings.Contains(f.err.Error(), "\n")):
			t.Errorf("want %q: %v", tt.want, f.err)
		}
		testutil.NoError(t, os.Remove(path))
	}
	testutil.NoError(t, os.WriteFile(program, nil, 0o600))
	if f := ownStackModules(folder, "", errors.New("no heddled")); f.err == nil || !strings.Contains(f.err.Error(), "no heddled") {
		t.Errorf("without heddled: %+v", f)
	}
}

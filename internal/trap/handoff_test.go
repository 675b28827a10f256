package trap

import (
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
)

const goodState = `{"ociVersion":"1.2.0","fds":["seccompFd"],"pid":7,"metadata":"n1/c1",` +
	`"state":{"ociVersion":"1.2.0","id":"ctr","status":"creating","bundle":"/b"}}`

func TestParseState(t *testing.T) {
	st, i, err := parseState([]byte(goodState), 1)
	if err != nil || i != 0 || st.Metadata != "n1/c1" || st.State.ID != "ctr" || st.Pid != 7 {
		t.Fatalf("%+v %d %v", st, i, err)
	}
	two := strings.Replace(goodState, `["seccompFd"]`, `["pidFd","seccompFd"]`, 1)
	if _, i, err := parseState([]byte(two), 2); err != nil || i != 1 {
		t.Errorf("second descriptor: %d %v", i, err)
	}
	if _, _, err := parseState([]byte(strings.Replace(goodState, `"pid"`, `"later":{},"pid"`, 1)), 1); err != nil {
		t.Errorf("a field of a later specification: %v", err)
	}
	bad := map[string]struct {
		old, new string
		fds      int
	}{
		"ociVersion": {`{"ociVersion":"1.2.0",`, `{`, 1},
		"pid":        {`"pid":7`, `"pid":0`, 1},
		"cannot":     {`"pid":7`, `"pid":"7"`, 1},
		"state.id":   {`"id":"ctr",`, ``, 1},
		"metadata":   {`n1/c1`, strings.Repeat("m", maxMetadataBytes+1), 1},
		"2 came":     {``, ``, 2},
		"0 came":     {``, ``, 0},
		"twice":      {`["seccompFd"]`, `["seccompFd","seccompFd"]`, 2},
		"lacks":      {`["seccompFd"]`, `["pidFd"]`, 1},
		"after":      {`"bundle":"/b"}}`, `"bundle":"/b"}}{}`, 1},
		"unexpected": {`"bundle":"/b"}}`, `"bundle":"/b"}`, 1},
	}
	for what, b := range bad {
		_, _, err := parseState([]byte(strings.Replace(goodState, b.old, b.new, 1)), b.fds)
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: error %v", what, err)
		}
	}
}

func FuzzParseState(f *testing.F) {
	f.Add([]byte(goodState), 1)
	f.Add([]byte(`{"fds":["seccompFd","seccompFd"]}`), 2)
	f.Add([]byte(`[]`), 0)
	f.Add([]byte(``), 0)
	f.Fuzz(func(t *testing.T, msg []byte, fds int) {
		st, i, err := parseState(msg, fds)
		if err == nil && (i < 0 || i >= fds || st.Fds[i] != specs.SeccompFdName || st.Pid <= 0 || st.State.ID == "") {
			t.Errorf("accepted %q with %d descriptors: index %d of %v", msg, fds, i, st.Fds)
		}
	})
}

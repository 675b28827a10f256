package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// events makes a part's file: each word is PACKAGE.TEST=ACTION, a second after the one before.
func events(words string) string {
	var b strings.Builder
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for word := range strings.FieldsSeq(words) {
		name, action, _ := strings.Cut(word, "=")
		pkg, test, _ := strings.Cut(name, ".")
		fmt.Fprintf(&b, `{"Time":%q,"Action":"run","Package":%q,"Test":%q}`+"\n", at.Format(time.RFC3339), pkg, test)
		fmt.Fprintf(&b, `{"Time":%q,"Action":%q,"Package":%q,"Test":%q,"Elapsed":1}`+"\n", at.Format(time.RFC3339), action, pkg, test)
		at = at.Add(time.Second)
	}
	return b.String()
}

// TestSum: a run is good if every test passed in the end; whatever is wrong is named, also what
// passed at the second try only.
func TestSum(t *testing.T) {
	for _, c := range []struct{ name, events, want string }{
		{"good", "a.T1=pass a.T2/x=pass a.T2=pass", ""},
		{"skipped", "a.T1=pass a.T2/x=skip a.T2=skip a.T3=skip", "SKIPPED: p: a.T2/x\nSKIPPED: p: a.T3\n"},
		{"second try", "a.T1=pass a.T2/x=fail a.T2/y=pass a.T2=fail a.T2/x=pass a.T2=pass", "FAULT: p: needed a second try: a.T2/x\n"},
		{"skipped then", "a.T1=pass a.T2=fail a.T2=skip", "FAULT: p: needed a second try: a.T2\n"},
		{"failed", "a.T1=pass b.T1/x=fail b.T1=fail b.T1/x=fail b.T1=fail", "FAIL: p: failed: b.T1/x\n"},
		{"the same name elsewhere", "a.T1=fail b.T1=pass", "FAIL: p: failed: a.T1\n"},
		{"nothing", "", "FAIL: p: no test passed: often no lab could be brought up, see above and: p.json\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := part{shard: "1", name: "p", tests: 2}
			p.read(strings.NewReader(events(c.events)))
			var out strings.Builder
			ok := sum(&out, []part{p})
			if _, said, _ := strings.Cut(out.String(), "\n"); said != c.want || ok == strings.HasPrefix(c.want, "FAIL") {
				t.Errorf("%v, %q, want %q", ok, out.String(), c.want)
			}
		})
	}
	idle := part{name: "p"}
	idle.read(strings.NewReader(events("a.T1=pass") + `{"Time":"2026-01-01T00:00:00Z","Action":"output","Package":"b","Output":"testing: warning: no tests to run\n"}` + "\n"))
	var out strings.Builder
	if sum(&out, []part{idle}) || !strings.Contains(out.String(), "without any: b\n") {
		t.Errorf("%s", out.String())
	}
}

// TestProgress: parts that are over are not spoken of, and the slower shard says how long it takes
// still.
func TestProgress(t *testing.T) {
	parts := []part{{shard: "1", name: "lab", tests: 4, seconds: 400}, {shard: "2", name: "unit", tests: 10, seconds: 100},
		{shard: "2", name: "suites", tests: 2, seconds: 100}, {shard: "2", name: "other", tests: 2, seconds: 50}}
	parts[0].read(strings.NewReader(events("a.T1=pass a.T2/x=pass a.T2=fail")))
	parts[1].read(strings.NewReader(events("b.T1=pass")))
	parts[2].read(strings.NewReader(events("c.T1=pass") + `{"Action":"pa`)) // being written
	got := progress(parts, parts[0].began.Add(90*time.Second))
	if want := "progress: lab 2 of 4 tests, suites 1 of 2 tests; 1m30s gone, some 3m20s left"; got != want {
		t.Errorf("%q\nwant %q", got, want)
	}
	if got := progress(parts[3:], time.Now()); got != "progress: ; 0s gone, some 50s left" {
		t.Errorf("before the beginning: %q", got)
	}
}

// TestLook: the record is whole, and names the parts of the Makefile.
func TestLook(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "unit.json"), []byte(events("a.T1=pass")), 0o600); err != nil {
		t.Fatal(err)
	}
	parts, err := look(dir)
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	var recorded []string
	for _, p := range parts {
		recorded = append(recorded, p.name)
		if p.tests < 1 || p.seconds < 1 || (p.name == "unit") != (len(p.passed) == 1) {
			t.Errorf("%+v", p)
		}
	}
	_, names, _ := strings.Cut(string(makefile), "\nPARTS  := ")
	if names, _, _ = strings.Cut(names, "\n"); names != strings.Join(recorded, " ") {
		t.Errorf("parts in the Makefile are %s, recorded %s", names, recorded)
	}
}

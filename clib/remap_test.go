package clib_test

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
)

func compileRemap(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "remap")
	out, err := exec.Command("cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o", program, "testdata/remap.c", "-libverbs").CombinedOutput()
	if err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	return program
}

// reserveHugePage has the machine set a huge page aside for the test, whose programs fail then if
// they have none. That there is none to be had is logged.
func reserveHugePage(t *testing.T) {
	t.Helper()
	const name = "/proc/sys/vm/nr_hugepages"
	have := func() int {
		raw, err := os.ReadFile(name)
		testutil.NoError(t, err)
		n, err := strconv.Atoi(strings.TrimSpace(string(raw)))
		testutil.NoError(t, err)
		return n
	}
	if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
		t.Log("not tried: huge pages, which this kernel has not")
		return
	}
	lock, err := os.OpenFile("/run/heddle-test-hugepages.lock", os.O_CREATE|os.O_RDWR, 0o600)
	testutil.NoError(t, err)
	t.Cleanup(func() { lock.Close() })
	// Another checkout's test would take its page away, or leave one behind.
	testutil.NoError(t, unix.Flock(int(lock.Fd()), unix.LOCK_EX))
	before := have()
	want := func(n int) error { return os.WriteFile(name, []byte(strconv.Itoa(n)), 0o644) }
	if err := want(before + 1); errors.Is(err, unix.EROFS) || errors.Is(err, unix.EACCES) {
		t.Logf("not tried: huge pages, which are not this test's to set aside: %v", err)
		return
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { testutil.NoError(t, want(before)) })
	if have() == before {
		t.Log("not tried: huge pages, for which there is no memory")
		return
	}
	t.Setenv("HUGE_PAGES", "1")
}

// TestRemap: pages of registered buffers become memory that the router has mapped and the program's
// own again, whatever else happens to them.
func TestRemap(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	p := newPlace(t, dirs[0])
	program := compileRemap(t)
	reserveHugePage(t)
	for _, part := range []string{"writers", "forks", "overlaps", "places", "changes"} {
		t.Run(part, func(t *testing.T) {
			out, err := p.command(program, part).CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			t.Logf("%s", out)
		})
	}
}

// TestRemapOff: a program whose environment says so keeps its pages.
func TestRemapOff(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	p := newPlace(t, dirs[0])
	p.run("env", "HEDDLE_VERBS_REMAP=0", compileRemap(t), "off")
}

// TestRemapRouterEnds: memory that a router had mapped stays the program's when it ends.
func TestRemapRouterEnds(t *testing.T) {
	a, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	p := newPlace(t, dirs[0])
	cmd := p.command(compileRemap(t), "gone")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != "registered" {
		t.Errorf("it says %q", lines.Text())
	}
	a.kill()
	stdin.Close()
	for lines.Scan() {
		t.Error(lines.Text())
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// Package lab gives tests of whole nodes what they need: a lab of two nodes, programs and peers in
// its containers, and what its nodes say of themselves. Each package of tests below test/ has one
// lab, which Main brings up and takes down, so that packages can run at once. Everything here needs
// root.
package lab

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
)

// Name is this package's lab: testutil.LabName, then a dash and the theme. A run that was killed
// leaves its lab behind; the next one of that name takes it down first.
var Name string

// Bin is the command line under test: `heddle` in HEDDLE_BIN, or in bin/ of this repository.
var Bin string

// Flags are further ones of `heddle lab up`, set before Main is called.
var Flags []string

// Modes are the ways a program is run; what it prints must not depend on which.
var Modes = []string{"overlay", "heddle"}

// Main runs the tests of a theme in a lab of their own and gives the exit code. Each of cleanups is
// called before the lab comes up, for what a killed run left, and before it is taken down.
func Main(m *testing.M, theme string, cleanups ...func() error) int {
	flag.Parse()
	if flag.Lookup("test.run").Value.String() == "^$" { // how gotestsum tries a run again that failed without a failed test
		return fail("try again", fmt.Errorf("no test is asked for: that cannot make good for a run that failed outside its tests; what it said stands above"))
	}
	if os.Geteuid() != 0 {
		fmt.Println("SKIP: all scenarios need root: they make network namespaces, containers and BPF programs")
		return 0
	}
	if none, err := noneMatches(); err != nil || none {
		if err != nil {
			return fail("list the tests asked for", err)
		}
		return m.Run()
	}
	Name = testutil.LabName() + "-" + theme
	var err error
	if Bin, err = filepath.Abs(filepath.Join(cmp.Or(os.Getenv("HEDDLE_BIN"), "../../bin"), "heddle")); err != nil {
		return fail("find the programs", err)
	}
	if _, err := os.Stat(Bin); err != nil {
		return fail("run `make build` first", err)
	}
	down := func() error {
		for _, clean := range cleanups {
			if err := clean(); err != nil {
				return err
			}
		}
		return Command("down")
	}
	if err := down(); err != nil {
		return fail("take an earlier lab down", err)
	}
	if underlay := os.Getenv("HEDDLE_TEST_UNDERLAY"); underlay != "" {
		Flags = append(Flags, "--underlay", underlay)
	}
	if err := Command("up", append([]string{"--nodes", "2", "--containers", "2"}, Flags...)...); err != nil {
		_ = down()
		return fail("bring the lab up", err)
	}
	code := m.Run()
	_ = os.RemoveAll(builds.dir) // "": nothing was built
	if code != 0 {
		Dump(os.Stderr)
	}
	if err := down(); err != nil {
		return fail("take the lab down", err)
	}
	return code
}

// Another brings up one more lab of two nodes, whose name has a suffix, and has all of this package
// be about that one until the end of the test, which must not run beside others.
func Another(t testing.TB, suffix string, args ...string) {
	t.Helper()
	before := Name
	Name += suffix
	t.Cleanup(func() {
		if t.Failed() {
			Dump(os.Stderr)
		}
		if err := Command("down"); err != nil {
			t.Error(err)
		}
		Name = before
	})
	if err := errors.Join(Command("down"), Command("up", append([]string{"--nodes", "2", "--containers", "2"}, args...)...)); err != nil {
		t.Fatal(err)
	}
}

// noneMatches says that -test.run asks for no test of this package: one theme's, among packages of
// all.
func noneMatches() (bool, error) {
	if flag.Lookup("test.list").Value.String() != "" {
		return true, nil // they are listed, as below
	}
	asked, _, _ := strings.Cut(flag.Lookup("test.run").Value.String(), "/")
	if asked == "" {
		return false, nil
	}
	out, err := exec.Command(os.Args[0], "-test.list", asked).Output()
	return !strings.Contains("\n"+string(out), "\nTest"), err
}

// fail says why no test could be run, and gives the exit code.
func fail(what string, err error) int {
	fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
	return 1
}

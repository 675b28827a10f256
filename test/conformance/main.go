// Command conformance runs test suites of others inside a lab container, once on the plain overlay
// and once through Heddle, and compares case by case: what fails through Heddle must be a subset of
// what fails on the overlay. It needs root, the programs of the project, and the suites' packages
// (`make conformance` sees to them). It exits 1 if that does not hold, or could not be judged.
//
// A suite is a list of modules (cpython.go, gostd.go, stressng.go). A module is one program that
// runs many cases; run.go runs it, judge.go compares its two runs and tries again what differs,
// report.go prints and writes the table of docs/conformance.md. lab.go brings up the node and its
// two containers.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// errDiffers means that the suites ran and Heddle did worse.
var errDiffers = errors.New("cases fail through Heddle and not on the overlay")

// options are what the command line asks for.
type options struct {
	bin, lab string   // folder of the programs; name of the lab
	suites   []string // "" for all
	modules  []string // none for all
	docs     string   // the page to update; "" for none
	keep     string   // folder that keeps what the programs printed; "" for none
}

func main() {
	var o options
	var suiteName, moduleNames string
	flag.StringVar(&o.bin, "bin", "bin", "folder of the heddle programs")
	flag.StringVar(&o.lab, "lab", "conformance", "name of the lab to bring up and take down")
	flag.StringVar(&suiteName, "suite", "", "run one suite only: "+strings.Join(suiteNames(), ", "))
	flag.StringVar(&moduleNames, "modules", "", "run these modules only: names with commas between them")
	flag.StringVar(&o.docs, "docs", "", "page whose table is updated")
	flag.StringVar(&o.keep, "keep", "", "folder to keep the programs' output in")
	flag.Parse()
	o.suites = suiteNames()
	if suiteName != "" {
		o.suites = []string{suiteName}
	}
	if moduleNames != "" {
		o.modules = strings.Split(moduleNames, ",")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := conform(ctx, o)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

// conform runs what o asks for, prints and writes the report, and gives errDiffers if Heddle did
// worse.
func conform(ctx context.Context, o options) (err error) {
	if o.docs != "" && len(o.modules) > 0 {
		return errors.New("-docs takes whole suites: a table of some modules would replace that of all")
	}
	chosen, err := choose(o.suites, o.modules)
	if err != nil {
		return err
	}
	l, err := bringUp(ctx, o.bin, o.lab, o.keep)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.takeDown()) }()
	var verdicts []verdict
	for i, m := range chosen {
		if err := m.prepare(ctx, l.scratch); err != nil {
			return fmt.Errorf("%s %s: %w", m.suite, m.name, err)
		}
		v, err := judge(ctx, l, m)
		if err != nil {
			return fmt.Errorf("%s %s: %w", m.suite, m.name, err)
		}
		fmt.Print(v.text())
		verdicts = append(verdicts, v)
		// What a suite took minutes to find is not lost if the next cannot be judged.
		if o.docs != "" && (i+1 == len(chosen) || chosen[i+1].suite != m.suite) {
			if err := updatePage(o.docs, verdicts); err != nil {
				return err
			}
		}
	}
	fmt.Print("\n" + table(verdicts))
	if !intercepted(verdicts) {
		return errors.New("no module got a socket through Heddle: nothing was compared")
	}
	if slices.ContainsFunc(verdicts, verdict.differs) {
		return errDiffers
	}
	return nil
}

// intercepted reports whether any module's run through Heddle was that.
func intercepted(verdicts []verdict) bool {
	return slices.ContainsFunc(verdicts, func(v verdict) bool { return v.through.sockets > 0 })
}

// suites are all of them, in the order they run.
var suites = []struct {
	name    string
	modules []module
}{
	{"cpython", cpythonModules},
	{"go", goModules},
	{"stress-ng", stressModules},
}

func suiteNames() []string {
	var out []string
	for _, s := range suites {
		out = append(out, s.name)
	}
	return out
}

// choose gives the modules of the named suites that are named, all if names is empty.
func choose(suiteNames, names []string) ([]module, error) {
	var out []module
	left := slices.Clone(names)
	for _, want := range suiteNames {
		known := false
		for _, s := range suites {
			if s.name != want {
				continue
			}
			known = true
			for _, m := range s.modules {
				if len(names) == 0 || slices.Contains(names, m.name) {
					left = slices.DeleteFunc(left, func(n string) bool { return n == m.name })
					out = append(out, m)
				}
			}
		}
		if !known {
			return nil, fmt.Errorf("no suite %q", want)
		}
	}
	if len(left) > 0 {
		return nil, fmt.Errorf("no module %s in %s", strings.Join(left, ", "), strings.Join(suiteNames, ", "))
	}
	return out, nil
}

// absolute gives a path that does not depend on the working directory.
func absolute(path string) (string, error) {
	out, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("find %s: %w", path, err)
	}
	return out, nil
}

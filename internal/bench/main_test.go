package bench

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench/peer"
)

// The test binary stands in for the heddle program: `bench peer` is the real peer, and `lab` is a lab
// whose every container is this machine's loopback.
func TestMain(m *testing.M) {
	args := os.Args[1:]
	var err error
	switch {
	case len(args) > 1 && args[0] == "bench" && args[1] == "peer":
		err = peer.Main(context.Background(), args[2:], peer.Streams{In: os.Stdin, Out: os.Stdout, Err: os.Stderr})
	case len(args) > 1 && args[0] == "lab":
		err = fakeLab(args[1], args[2:])
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// fakeLab answers `lab ip` and `lab exec` for the lab named "loop" and knows no other.
func fakeLab(verb string, args []string) error {
	if len(args) < 2 || args[0] != "--lab" || args[1] != "loop" {
		return fmt.Errorf("lab %v: no such lab", args)
	}
	switch verb {
	case "ip":
		fmt.Println("127.0.0.1")
		return nil
	case "exec":
		words := args[slices.Index(args, "--")+1:]
		path, err := exec.LookPath(words[0])
		if err != nil {
			return err
		}
		return syscall.Exec(path, words, os.Environ())
	default:
		return fmt.Errorf("lab %s: unknown", verb)
	}
}

// testProgram gives the words that run the peer in this test binary.
func testProgram(t *testing.T) []string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return []string{self, "bench", "peer"}
}

// loopPlace runs everything on this machine's loopback, through a prefix for each command.
type loopPlace struct {
	prefix func(mode Mode, container string) []string
	ip     func(mode Mode, container string) (netip.Addr, error)
}

func (p loopPlace) Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd {
	if p.prefix != nil {
		args = append(slices.Clone(p.prefix(mode, container)), args...)
	}
	return exec.CommandContext(ctx, args[0], args[1:]...)
}

func (p loopPlace) IP(_ context.Context, mode Mode, container string) (netip.Addr, error) {
	if p.ip != nil {
		return p.ip(mode, container)
	}
	return netip.MustParseAddr("127.0.0.1"), nil
}

// quickOptions is a bench that takes a second or so.
func quickOptions(t *testing.T, workloads ...string) Options {
	t.Helper()
	w, err := ParseWorkloads(workloads)
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Workloads: w, Scopes: []Scope{Inter}, Modes: []Mode{Host, Heddle}, Runs: 1,
		Duration: 200 * time.Millisecond, Program: testProgram(t),
	}
}

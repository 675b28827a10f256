package bench

import (
	"bytes"
	"context"
	_ "embed" // the client's source
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Pooled is the container of Heddle with the preloaded pool of sockets. Only `heddle bench pool` measures it.
const Pooled Mode = "heddle+pool"

// PoolWorkloads are what is measured with and without the pool.
var PoolWorkloads = connectWorkloads

// poolClient is the source of a client that is dynamically linked: only such a one can have a library preloaded.
//
//go:embed poolclient/crr.c
var poolClient []byte

// PoolPlace is a lab whose containers have the preloaded pool of sockets. It runs the workloads crr with a dynamically
// linked client, in all modes, and without the pool in all but Pooled.
type PoolPlace struct {
	Lab
	Client string // path of the client
}

// BuildPoolClient compiles the client into dir, which containers must see, too.
func BuildPoolClient(ctx context.Context, dir string) (client string, err error) {
	source := filepath.Join(dir, "crr.c")
	if err := os.WriteFile(source, poolClient, 0o644); err != nil {
		return "", fmt.Errorf("write client: %w", err)
	}
	client = filepath.Join(dir, "crr")
	out, err := exec.CommandContext(ctx, "cc", "-O2", "-pthread", "-o", client, source).CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("compile client: %w: install Debian's packages gcc and libc6-dev", err)
	}
	if err != nil {
		return "", fmt.Errorf("compile client: %w\n%s", err, out)
	}
	return client, nil
}

// Exec runs the peer's arguments in the container, with the other client.
func (p PoolPlace) Exec(ctx context.Context, mode Mode, container string, args ...string) *exec.Cmd {
	if i := slices.Index(args, "crr"); i >= 0 {
		args = append([]string{p.Client}, args[i+1:]...)
	}
	switch mode {
	case Pooled:
		return p.Lab.Exec(ctx, Heddle, container, args...)
	case Heddle:
		args = append([]string{"env", "-u", "LD_PRELOAD"}, args...)
	}
	return p.Lab.Exec(ctx, mode, container, args...)
}

// IP asks the lab.
func (p PoolPlace) IP(ctx context.Context, mode Mode, container string) (netip.Addr, error) {
	if mode == Pooled {
		mode = Heddle
	}
	return p.Lab.IP(ctx, mode, container)
}

// HasPool reports whether the lab's containers have the pool; the error says what to do.
func (p PoolPlace) HasPool(ctx context.Context) error {
	if _, err := runClient(p.Lab.Exec(ctx, Heddle, "n1/c1", "sh", "-c", `test -n "$LD_PRELOAD"`)); err != nil {
		return fmt.Errorf("the lab's containers have no pool: make it anew with --socket-pool, or use --up: %w", err)
	}
	return nil
}

// The table stands between these lines of the document.
const (
	PoolDocBegin = "<!-- `heddle bench pool report` writes from here -->\n"
	PoolDocEnd   = "<!-- to here: pool -->\n"
)

// PoolResult is what `heddle bench pool` found.
type PoolResult struct {
	Machine    string   `json:"machine"`
	Background float64  `json:"background"` // processors that other programs kept busy before
	Results    []Result `json:"results"`
}

// ReplacePoolDoc writes results into a document, between its two marks.
func ReplacePoolDoc(document []byte, r PoolResult) ([]byte, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s; other programs kept %.1f processors busy before.", r.Machine, r.Background)
	if r.Background > QuietMachine {
		b.WriteString(" **That is a busy machine: not to judge by.**")
	}
	fmt.Fprintf(&b, " Goal: `socket()`+`connect()` at most %.2f of host, connections a second at least the overlay's. Met with the pool in %s.\n\n",
		poolGoal, r.verdict(Pooled))
	t := connectTable(r.Results, []Mode{Host, Overlay, Heddle, Pooled})
	b.Write(bytes.TrimPrefix(t.text(), []byte("\n")))
	return ReplaceBetween(document, []byte(b.String()), PoolDocBegin, PoolDocEnd)
}

// poolGoal is the most that socket() and connect() may take, as a multiple of the host's.
const poolGoal = 1.35

// verdict counts in how many of the measured cases a mode meets the goals.
func (r PoolResult) verdict(mode Mode) string {
	var p50, p99, rate, of int
	for _, scope := range Scopes {
		for _, w := range connectWorkloads {
			f, ok := findResult(r.Results, scope, w, "socket_connect_p50_us", mode)
			if !ok {
				continue
			}
			of++
			if f.RatioToHost <= poolGoal {
				p50++
			}
			if f, _ := findResult(r.Results, scope, w, "socket_connect_p99_us", mode); f.RatioToHost <= poolGoal {
				p99++
			}
			mine, _ := findResult(r.Results, scope, w, "connections_per_s", mode)
			if overlay, _ := findResult(r.Results, scope, w, "connections_per_s", Overlay); mine.Median >= overlay.Median {
				rate++
			}
		}
	}
	return fmt.Sprintf("%d (p50), %d (p99) and %d (connections a second) of %d cases", p50, p99, rate, of)
}

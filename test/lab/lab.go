package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/patience"
	"heddle.dev/heddle/internal/testutil"
)

// Command runs `heddle lab` for this lab.
func Command(verb string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience.For(2*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, Bin, append([]string{"lab", verb, "--lab", Name}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("heddle lab %s: %w\n%s", verb, err, out)
	}
	return nil
}

// Dump prints what the nodes know, their sockets and maps, and their agents' logs, for a run that
// failed.
func Dump(w io.Writer) {
	for _, args := range [][]string{{"status"}, {"endpoints"}, {"connections", "--all"}} {
		out, _ := exec.Command(Bin, append(args, "--lab", Name)...).CombinedOutput()
		fmt.Fprintf(w, "--- heddle %s\n%s\n", strings.Join(args, " "), out)
	}
	nodes, _ := filepath.Glob("/run/heddle/lab/" + Name + "/*/bpf/heddle")
	for _, pins := range nodes {
		node := filepath.Base(filepath.Dir(filepath.Dir(pins)))
		out, err := exec.Command("nsenter", "--net=/run/netns/"+Name+"-"+node, "ss", "-Htanp").CombinedOutput()
		fmt.Fprintf(w, "--- sockets of %s (%v)\n%s\n", node, err, out)
		dumpMaps(w, pins)
	}
	logs, _ := filepath.Glob("/run/heddle/lab/" + Name + "/*/heddled.log")
	for _, log := range logs {
		raw, _ := os.ReadFile(log)
		fmt.Fprintf(w, "--- %s\n%s\n", log, raw)
	}
}

// dumpMaps prints how many entries each map of a node has, of those that can be walked. Links and
// programs are pinned there, too.
func dumpMaps(w io.Writer, pins string) {
	paths, _ := filepath.Glob(filepath.Join(pins, "*"))
	for _, path := range paths {
		m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			continue // no map
		}
		n := uint32(0)
		key, err := m.NextKeyBytes(nil)
		for key != nil && err == nil && n < m.MaxEntries() { // a walk may begin again when its entry goes
			n++
			key, err = m.NextKeyBytes(key)
		}
		if err == nil {
			fmt.Fprintf(w, "map %s: %d of %d entries\n", filepath.Base(path), n, m.MaxEntries())
		}
		_ = m.Close()
	}
}

// Heddle runs the command line for this lab, unless args name another, and gives its standard
// output; a failure fails the test.
func Heddle(t testing.TB, args ...string) string {
	t.Helper()
	if !slices.Contains(args, "--lab") {
		args = append(slices.Clone(args), "--lab", Name)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testutil.WaitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, Bin, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("heddle %s: %v\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return string(out)
}

// Query decodes what the command line answers in JSON, a list mostly, into what into points to.
func Query(t testing.TB, into any, args ...string) {
	t.Helper()
	raw := Heddle(t, append(args, "--output", "json")...)
	if err := json.Unmarshal([]byte(raw), into); err != nil {
		t.Fatalf("heddle %s: %v\n%s", strings.Join(args, " "), err, raw)
	}
}

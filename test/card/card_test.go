// Package card_test tries the router of the verbs plane with a card (rdma_rxe) in emulated
// machines: `make test-rdma-card`. HEDDLE_KERNEL is the file of a kernel's Debian package,
// HEDDLE_BIN the folder of Heddle's programs, HEDDLE_CARD that of those which are for this test:
// what stands in for the agent, and a hostile container (rust/heddle-rdma/examples), and a router
// that can do without protections. Without them the test is skipped.
package card_test

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/machine"
)

// timeout bounds what the machines may take for a test that takes two minutes.
const timeout = 15 * time.Minute

// common is what both machines' scripts begin with.
//
//go:embed testdata/common.sh
var common string

// nodes is for two nodes with a router and a card each.
//
//go:embed testdata/node.sh
var nodes string

// peers is for one, and a machine with a card and without Heddle.
//
//go:embed testdata/peer.sh
var peers string

const providers = "/usr/lib/x86_64-linux-gnu/libibverbs"

// TestCard has Debian's programs communicate between two machines with a card each, and tries what
// goes wrong.
func TestCard(t *testing.T) { run(t, nodes) }

// TestPeerWithoutHeddle has programs of a container communicate with those of a machine that has a
// card and nothing of Heddle's.
func TestPeerWithoutHeddle(t *testing.T) { run(t, peers) }

// run runs a script in two machines.
func run(t *testing.T, script string) {
	kernel, bin, own := os.Getenv("HEDDLE_KERNEL"), os.Getenv("HEDDLE_BIN"), os.Getenv("HEDDLE_CARD")
	if kernel == "" || bin == "" || own == "" {
		t.Skip("HEDDLE_KERNEL, HEDDLE_BIN and HEDDLE_CARD do not name a kernel's package and programs: make test-rdma-card does")
	}
	image := machine.Image{
		Kernel:  kernel,
		Modules: []string{"virtio_pci", "virtio_net", "crc32_generic", "rdma_rxe", "ib_uverbs", "macvlan", "sch_tbf"},
		Programs: []string{"ip", "tc", "rdma", "rping", "ibv_devinfo", "ibv_rc_pingpong", "ibv_uc_pingpong", "ibv_srq_pingpong", "ib_send_bw", "ib_send_lat", "ib_write_bw", "ib_write_lat",
			"ib_read_bw", "ib_read_lat", "ib_atomic_bw", "ib_atomic_lat"},
		Files: map[string]string{
			"/heddle/heddle-rdma":                 filepath.Join(bin, "heddle-rdma"),
			"/heddle/libibverbs.so.1":             filepath.Join(bin, "libheddle-verbs.so"),
			"/heddle/agent":                       filepath.Join(own, "agent"),
			"/heddle/hostile":                     filepath.Join(own, "hostile"),
			"/heddle/attack/heddle-rdma":          filepath.Join(own, "heddle-rdma"),
			providers:                             providers, // of the card, for the router
			"/etc/libibverbs.d/rxe.driver":        "/etc/libibverbs.d/rxe.driver",
			"/lib/x86_64-linux-gnu/libgcc_s.so.1": "/lib/x86_64-linux-gnu/libgcc_s.so.1", // of threads that end
		},
	}
	built, err := image.Build(t.TempDir())
	testutil.NoError(t, err)
	var links [2][]*os.File
	for range 2 {
		a, b, err := machine.Link()
		testutil.NoError(t, err)
		defer a.Close()
		defer b.Close()
		links[0], links[1] = append(links[0], a), append(links[1], b)
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	var ran sync.WaitGroup
	for i, ends := range links {
		ran.Go(func() {
			console := machine.Lines(func(line string) { t.Logf("node %d: %s", i+1, line) })
			text := fmt.Sprintf("node=%d other=%d\n%s%s", i+1, 2-i, common, script)
			code, err := built.Run(ctx, text, machine.Options{Links: ends, Console: console})
			if err != nil || code != 0 {
				t.Errorf("node %d ends with %d, %v", i+1, code, err)
				cancel() // the other one waits for it
			}
		})
	}
	ran.Wait()
}

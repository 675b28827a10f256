package ui

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os/exec"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	pages "heddle.dev/heddle/internal/ui"
	"heddle.dev/heddle/internal/ui/uitest"
)

// seen is what a view has put into the browser.
type seen struct {
	Paint, Shown, Fetched float64 // milliseconds, and bytes
	Elements, Rows        int
	Said                  string
}

// TestLargeNetwork: in front of 5,000 nodes and 100,000 endpoints each view draws a part that a
// browser bears, and says so. How long that takes is logged, for docs/benchmarks/log.md.
func TestLargeNetwork(t *testing.T) {
	driver, err := exec.LookPath("chromedriver")
	if err != nil {
		t.Skip("chromedriver is not installed: make test-ui installs Debian's")
	}
	log := slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(context.Background())
	agent, err := api.Listen(filepath.Join(t.TempDir(), "api.sock"))
	testutil.NoError(t, err)
	front, err := net.Listen("tcp", "127.0.0.1:0")
	testutil.NoError(t, err)
	client := api.Dial(agent.Addr().String())
	ended := make(chan error, 2)
	go func() { ended <- api.ServeOn(ctx, agent, api.NewHandler(uitest.New(5000, 20), nil, log)) }()
	go func() { ended <- api.ServeOn(ctx, front, pages.Handler(ctx, pages.Config{Agent: client, Log: log})) }()
	b := start(t, driver)
	t.Cleanup(func() {
		cancel()
		testutil.NoError(t, <-ended)
		testutil.NoError(t, <-ended)
		client.Close()
	})
	for view, want := range map[string]string{"map": "5000 nodes", "flows": "of each node", "endpoints": "100000 endpoints", "nodes": "5000 live", "faults": "faults"} {
		b.open("http://" + front.Addr().String() + "/?view=" + view)
		b.awaitText(want)
		var got seen
		testutil.Eventually(t, "the browser to have measured "+view, func() (bool, string) {
			err := b.run(`const entries = (kind, name) => performance.getEntriesByType(kind).filter((e) => !name || e.name === name);
				return {Paint: entries("paint", "first-contentful-paint")[0].startTime, Shown: entries("mark", "shown")[0].startTime,
				Fetched: entries("resource").reduce((n, e) => n + e.transferSize, 0), Elements: document.querySelectorAll("*").length,
				Rows: document.querySelectorAll("tbody tr").length, Said: document.getElementById("updated").textContent}`, &got)
			return err == nil, fmt.Sprint(err)
		})
		text, err := json.Marshal(got)
		testutil.NoError(t, err)
		t.Logf("%s: %s", view, text)
		if got.Elements > 4000 || got.Rows > 400 || got.Fetched > 8<<20 {
			t.Errorf("%s: %s", view, text)
		}
	}
	for _, c := range b.complaints() {
		t.Errorf("the browser complains: %s", c)
	}
}

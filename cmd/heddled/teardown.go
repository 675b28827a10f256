package main

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/datapath"
	"heddle.dev/heddle/internal/intercept/park"
	"heddle.dev/heddle/internal/netcfg"
)

// teardown is what an agent leaves in place when it stops, and where.
type teardown struct {
	pinDir, stateDir, apiSocket string
	force                       bool
}

// newTeardownCommand removes what an agent leaves in place when it stops.
func newTeardownCommand() *cobra.Command {
	var t teardown
	cmd := &cobra.Command{
		Use: "teardown", Short: "Remove Heddle's devices, routes, rules and pins from this node (its containers lose the network)",
		Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error { return t.run() },
	}
	p := cmd.Flags()
	p.StringVar(&t.pinDir, "bpf-dir", "/sys/fs/bpf/heddle", "directory of the pins")
	p.StringVar(&t.stateDir, "state-dir", "/var/lib/heddle", "the agent's own files")
	p.StringVar(&t.apiSocket, "api-socket", api.DefaultSocket, "Unix socket of the agent, which must not run")
	p.BoolVar(&t.force, "force", false, "even if containers live: they lose the network, and the guards around them go")
	return cmd
}

func (t teardown) run() error {
	if err := t.check(); err != nil {
		return err
	}
	stop := park.NewClient(filepath.Join(t.stateDir, "holder.sock")).Stop()
	if errors.Is(stop, unix.ENOENT) {
		stop = nil // there is none
	}
	return errors.Join(netcfg.Teardown(), datapath.Unpin(t.pinDir), stop)
}

// check refuses while something lives that would be hurt.
func (t teardown) check() error {
	if t.force {
		return nil
	}
	if conn, err := net.Dial("unix", t.apiSocket); err == nil {
		return errors.Join(fmt.Errorf("an agent serves %s: stop it first, or give --force", t.apiSocket), conn.Close())
	}
	live, err := netcfg.Endpoints()
	if err != nil || len(live) == 0 {
		return err
	}
	const most = 10
	var names []string
	for _, l := range live[:min(len(live), most)] {
		names = append(names, l.Name)
	}
	if len(live) > most {
		names = append(names, "...")
	}
	return fmt.Errorf("%d containers live that would lose their network (devices %s; `ip link show DEVICE` names each): "+
		"end them first, or give --force", len(live), strings.Join(names, ", "))
}

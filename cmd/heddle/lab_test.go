package main

import (
	"strings"
	"testing"
)

func TestSplitCommand(t *testing.T) {
	for _, c := range []struct{ args, container, command string }{
		{"n1/c1", "n1/c1", ""},
		{"n1/c1 --", "n1/c1", ""},
		{"n1/c1 ls -l", "n1/c1", "ls -l"},
		{"n1/c1 -- ls -- -l", "n1/c1", "ls -- -l"},
	} {
		container, command := splitCommand(strings.Fields(c.args))
		if container != c.container || strings.Join(command, " ") != c.command {
			t.Errorf("%s: %q %q", c.args, container, command)
		}
	}
}

// TestLabExecLeavesFlagsToTheCommand: what follows the container is not ours to read.
func TestLabExecLeavesFlagsToTheCommand(t *testing.T) {
	cmd, _, err := newRootCmd().Find([]string{"lab", "exec"})
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.ParseFlags(strings.Fields("--mode host -e A=1 n1/c1 -- iperf3 --mode x -e B")); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(cmd.Flags().Args(), " "); got != "n1/c1 -- iperf3 --mode x -e B" {
		t.Errorf("arguments %q", got)
	}
	if mode := cmd.Flag("mode").Value.String(); mode != "host" {
		t.Errorf("--mode %s", mode)
	}
}

func TestLabRefusesBadInput(t *testing.T) {
	for args, want := range map[string]string{
		"lab up --nodes 0":              "--nodes",
		"lab up --lab A":                "lab name",
		"lab ip --mode x n1/c1":         "--mode",
		"lab exec":                      "no container",
		"lab exec -e =x n1/c1 -- true":  "--env",
		"lab ip --lab none-such n1/c1":  "heddle lab up --lab none-such",
		"lab down --lab ../../etc/netn": "lab name",
	} {
		root := newRootCmd()
		root.SetArgs(strings.Fields(args))
		if err := root.Execute(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("heddle %s: %v, want %q", args, err, want)
		}
	}
}

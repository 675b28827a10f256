package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestUnknownCommand: what is no command is refused at every level, with what is near.
func TestUnknownCommand(t *testing.T) {
	for given, want := range map[string][2]string{
		"polcy":      {`unknown command "polcy" for "heddle"`, "policy"},
		"bench peer": {`unknown command "peer" for "heddle bench"`, "peers"},
		"lab uo":     {`unknown command "uo" for "heddle lab"`, "up"},
		"limit st x": {`unknown command "st" for "heddle limit"`, "set"},
	} {
		_, err := runInspect(t, newRootCmd(), strings.Fields(given)...)
		if err == nil || !strings.HasPrefix(err.Error(), want[0]+"\n\nDid you mean this?\n") || !strings.Contains(err.Error(), "\t"+want[1]+"\n") {
			t.Errorf("heddle %s: %v, want %s, and %s", given, err, want[0], want[1])
		}
	}
	if _, err := runInspect(t, newRootCmd(), "policy", "xxxxxx"); err == nil || err.Error() != `unknown command "xxxxxx" for "heddle policy"` {
		t.Errorf("heddle policy xxxxxx: %v", err)
	}
	if out, err := runInspect(t, newRootCmd(), "policy"); err != nil || !strings.Contains(out, "heddle policy [command]") {
		t.Errorf("heddle policy: %v: %s", err, out)
	}
}

// TestFlagValueNames: what stands between backquotes in a usage is the name of the flag's value.
func TestFlagValueNames(t *testing.T) {
	var look func(*cobra.Command)
	look = func(cmd *cobra.Command) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if name, _ := pflag.UnquoteUsage(f); strings.ContainsAny(name, " -") {
				t.Errorf("%s --%s: a value named %q", cmd.CommandPath(), f.Name, name)
			}
		})
		for _, sub := range cmd.Commands() {
			look(sub)
		}
	}
	look(newRootCmd())
}

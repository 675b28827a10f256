package main

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"heddle.dev/heddle/internal/node"
)

// TestEncryptFlags: what cannot be meant is refused with the flag's name; nothing but wireguard
// switches encryption on.
func TestEncryptFlags(t *testing.T) {
	for args, want := range map[string]string{
		"":                    "",
		"--encrypt=none":      "",
		"--encrypt-port=7":    "",
		"--encrypt=wireguard": "100.72.0.0/16",
		"--encrypt=WireGuard": "want wireguard or none",
		"--encrypt=":          "want wireguard or none",
		"--encrypt=wireguard --encrypt-prefix=10.1.0.0/16":   "10.1.0.0/16",
		"--encrypt=wireguard --encrypt-prefix=10.1.0.1/16":   "did you mean 10.1.0.0/16",
		"--encrypt=wireguard --rdma-device=rxe0":             "what the card sends would not be encrypted",
		"--encrypt=none --rdma-device=rxe0":                  "",
		"--encrypt=wireguard --encrypt-prefix=fd00::/64":     "want an IPv4 prefix",
		"--encrypt=wireguard --encrypt-prefix=100.72.0.0/31": "want an IPv4 prefix",
	} {
		var f flags
		cmd := &cobra.Command{}
		f.register(cmd)
		if err := cmd.Flags().Parse(strings.Fields(args + " --underlay=192.0.2.1")); err != nil {
			t.Fatal(err)
		}
		cfg := f.cfg
		err := f.setEncryption(&cfg)
		if err == nil && cfg.Encrypts() {
			err = validates(cfg)
		}
		switch {
		case err != nil && (want == "" || !strings.Contains(err.Error(), want)), err == nil && cfg.Encrypts() != (want != ""),
			err == nil && cfg.Encrypts() && cfg.EncryptPrefix.String() != want:
			t.Errorf("%s: %v, %v, want %q", args, cfg.EncryptPrefix, err, want)
		}
	}
}

// validates gives what is wrong with a prefix as an agent that starts would.
func validates(cfg node.Config) error {
	cfg.Name, cfg.Underlay = "n1", netip.MustParseAddr("192.0.2.1")
	err := cfg.Validate()
	if err != nil && !strings.Contains(err.Error(), "inner addresses") {
		return nil // of other settings, which are not given here
	}
	return err
}

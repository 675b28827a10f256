package runtime

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// Flags of seccomp filters, as configurations name them.
const (
	// flagWaitKillable keeps signals from interrupting a call that the agent is answering. It needs
	// Linux 5.19, and a runtime with libseccomp 2.6.
	flagWaitKillable = "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV"
	// flagSpecAllow is what runc sets for a profile that says nothing of flags.
	flagSpecAllow = "SECCOMP_FILTER_FLAG_SPEC_ALLOW"
)

// featuresTimeout bounds the question what a runtime can do; it takes some 10 ms (knownFeatures
// seldom asks).
const featuresTimeout = 5 * time.Second

// features is what is read of the answer to `features`, which the OCI runtime specification
// defines.
type features struct {
	Linux struct {
		Seccomp struct {
			SupportedFlags []string `json:"supportedFlags"`
		} `json:"seccomp"`
	} `json:"linux"`
	Annotations map[string]string `json:"annotations"`
}

// featuresOf asks a runtime what it can do. One that does not say (ok is false) can do nothing of
// what is asked here.
func featuresOf(program string) (_ features, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), featuresTimeout)
	defer cancel()
	var f features
	out, err := exec.CommandContext(ctx, program, "features").Output()
	if err != nil || json.Unmarshal(out, &f) != nil {
		return features{}, false
	}
	return f, true
}

// flags gives the flags of a profile that has some (have), or says nothing of them (nil), with
// flagWaitKillable; nil if the runtime or its kernel does not know that, or what it would do
// without a list is not known.
func (f features) flags(have []any) []any {
	can := f.Linux.Seccomp.SupportedFlags
	if !slices.Contains(can, flagWaitKillable) || slices.Contains(have, any(flagWaitKillable)) {
		return nil
	}
	if have != nil {
		return append(slices.Clone(have), flagWaitKillable)
	}
	if f.Annotations["org.opencontainers.runc.version"] == "" {
		return nil
	}
	flags := []any{flagWaitKillable}
	if slices.Contains(can, flagSpecAllow) {
		flags = append(flags, flagSpecAllow)
	}
	return flags
}

// waitKillable has the runtime program keep signals from the calls that the agent answers, if it
// can. The bundle has the listener already.
func waitKillable(bundle, program string) error {
	path := filepath.Join(bundle, "config.json")
	config, err := readConfig(path)
	if err != nil {
		return err
	}
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	profile, err := readObject(linux, "linux.seccomp", "seccomp")
	if err != nil || profile["listenerPath"] == nil {
		return err
	}
	have, _ := profile["flags"].([]any)
	if profile["flags"] != nil && have == nil {
		return nil // the runtime's to refuse
	}
	socket, err := readString(profile, "linux.seccomp", "listenerPath")
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	flags := knownFeatures(filepath.Dir(socket), program).flags(have)
	if flags == nil {
		return nil
	}
	profile["flags"] = flags
	return writeConfig(path, config)
}

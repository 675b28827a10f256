package datapath

import (
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Layout describes the maps that this version pins, a line each, so that another version can tell
// by CheckLayout whether the two can follow each other.
func Layout() (string, error) {
	spec, err := loadHeddle()
	if err != nil {
		return "", fmt.Errorf("read BPF object: %w", err)
	}
	return formatLayout(abiOf(spec)), nil
}

func formatLayout(a abi) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(a)) {
		hash := a[name]
		fmt.Fprintf(&b, "%s\t%s\n", hex.EncodeToString(hash[:]), name)
	}
	return b.String()
}

// CheckLayout reports an ErrABI if an agent whose maps have the given layout, another version's
// Layout, would refuse the pins in dir. It changes nothing. No pins, or no directory, are no error.
func CheckLayout(dir, layout string) error {
	want, err := parseLayout(layout)
	if err != nil {
		return fmt.Errorf("layout of maps: %w", err)
	}
	_, err = checkPins(dir, want)
	return err
}

func parseLayout(text string) (abi, error) {
	out := abi{}
	for line := range strings.Lines(text) {
		digits, name, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		raw, err := hex.DecodeString(digits)
		var hash abiHash
		if !ok || err != nil || len(raw) != len(hash) || name == "" || len(name) > len(abiName{}) {
			return nil, fmt.Errorf("line %.100q: want a SHA-256 and the name of a map", line)
		}
		copy(hash[:], raw)
		if _, twice := out[name]; twice {
			return nil, fmt.Errorf("%q is there twice", name)
		}
		out[name] = hash
	}
	if _, ok := out[versionEntry]; !ok {
		return nil, fmt.Errorf("no line for %q", versionEntry)
	}
	return out, nil
}

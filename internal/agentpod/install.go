package agentpod

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/durable"
)

// Layout of what Install makes.
const (
	// ConflistFile is Heddle's network, for nodes where it is the pods' network.
	ConflistFile = "10-heddle.conflist"
	// ChainedFile is a copy of another network's list with heddle-cni behind its plugins. It sorts
	// before the original.
	ChainedFile = "05-heddle.conflist"
)

// Network is what pods get from CNI.
type Network string

// Networks that Install knows.
const (
	// Main makes Heddle the pods' network.
	Main Network = "main"
	// Chained puts Heddle behind the network that the node has already.
	Chained Network = "chained"
	// None leaves the node's CNI configuration to its operator.
	None Network = "none"
)

// Installation is where Heddle's programs come from, and where on the node they go. All are
// absolute paths, as this process sees them.
type Installation struct {
	// From is the directory with the programs: ours and those beside it.
	From string
	// Programs and CNIPrograms get the programs, CNIConfig the network's list.
	Programs, CNIPrograms, CNIConfig string
	Network                          Network
	// CNIVersion is that of the list of Main.
	CNIVersion string
	// Kubernetes is the socket of heddle-kube, where heddle-cni asks for pods' labels; "" for none.
	Kubernetes string
	// Adopted are the prefixes of the network before heddle-cni, on all nodes, for Chained.
	Adopted []string
}

// libraries are what heddle-runtime, beside which they lie, gives to containers that ask for it.
var libraries = []string{"libheddle-guest.so", "libheddle-pool.so", "libheddle-verbs.so"}

// programs and the directory each goes to.
func (i Installation) programs() map[string]string {
	to := map[string]string{"heddle": i.Programs, "heddle-runtime": i.Programs, "heddle-cni": i.CNIPrograms}
	for _, l := range libraries {
		to[l] = i.Programs
	}
	return to
}

// Install copies the programs, each in one step, so that a runtime which starts one now gets the
// old or the new one, and then writes the CNI configuration. It can be repeated.
func (i Installation) Install() error {
	programs := i.programs()
	for _, name := range slices.Sorted(maps.Keys(programs)) {
		dir := programs[name]
		raw, err := os.ReadFile(filepath.Join(i.From, name))
		if slices.Contains(libraries, name) && errors.Is(err, fs.ErrNotExist) {
			continue // images that others build may do without
		}
		if err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
		if err := place(filepath.Join(dir, name), raw, 0o755); err != nil {
			return fmt.Errorf("install %s: %w", name, err)
		}
	}
	switch i.Network {
	case Main:
		return i.write(ConflistFile, ChainedFile, map[string]any{
			"cniVersion": i.CNIVersion, "name": "heddle",
			"plugins": []any{i.plugin(map[string]any{"capabilities": map[string]any{"ips": true, "portMappings": true, "bandwidth": true}})},
		})
	case Chained:
		list, err := i.chain()
		if err != nil {
			return err
		}
		return i.write(ChainedFile, ConflistFile, list)
	case None:
		return nil
	}
	return fmt.Errorf("CNI network %q: want %s, %s or %s", i.Network, Main, Chained, None)
}

// plugin gives heddle-cni's fields with those that every network has.
func (i Installation) plugin(fields map[string]any) map[string]any {
	fields["type"] = "heddle-cni"
	if i.Kubernetes != "" {
		fields["kubernetes"] = i.Kubernetes
	}
	return fields
}

// write makes one list of Heddle's the node's, and takes the other kind away.
func (i Installation) write(name, other string, list map[string]any) error {
	raw, err := json.MarshalIndent(list, "", "  ")
	if err != nil {
		return fmt.Errorf("CNI configuration: %w", err)
	}
	if err := place(filepath.Join(i.CNIConfig, name), append(raw, '\n'), 0o644); err != nil {
		return fmt.Errorf("CNI configuration: %w", err)
	}
	if err := os.Remove(filepath.Join(i.CNIConfig, other)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("CNI configuration: %w", err)
	}
	return nil
}

// chain gives the node's network, the first of its CNI configurations that is not Heddle's, with
// heddle-cni as its last plugin.
func (i Installation) chain() (map[string]any, error) {
	entries, err := os.ReadDir(i.CNIConfig) // sorted, as runtimes take them
	if err != nil {
		return nil, fmt.Errorf("CNI configuration: %w", err)
	}
	for _, e := range entries {
		ext := filepath.Ext(e.Name())
		if e.Name() == ConflistFile || e.Name() == ChainedFile || !slices.Contains([]string{".conflist", ".conf", ".json"}, ext) {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(i.CNIConfig, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("CNI configuration: %w", err)
		}
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.UseNumber() // what others mean by their numbers is not ours to round
		var list map[string]any
		if err := dec.Decode(&list); err != nil {
			return nil, fmt.Errorf("CNI configuration: %s: %w", e.Name(), err)
		}
		plugins, isList := list["plugins"].([]any)
		if !isList { // one plugin, in the form from before there were lists
			plugins = []any{list}
			list = map[string]any{"cniVersion": list["cniVersion"], "name": list["name"]}
		}
		ours := i.plugin(map[string]any{"capabilities": map[string]any{"bandwidth": true}})
		if len(i.Adopted) > 0 {
			ours["carried"] = i.Adopted
		}
		plugins = slices.DeleteFunc(slices.Clone(plugins), func(p any) bool {
			plugin, _ := p.(map[string]any)
			return plugin["type"] == "heddle-cni"
		})
		list["plugins"] = append(plugins, ours)
		return list, nil
	}
	return nil, fmt.Errorf("CNI configuration: %s has no network to stand behind; install that first, or make Heddle the network", i.CNIConfig)
}

// place writes a file in one step. One that is the same already is left alone: runtimes reload what
// changes.
func place(path string, raw []byte, mode fs.FileMode) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%s: want an absolute path", path)
	}
	if had, err := os.ReadFile(path); err == nil && bytes.Equal(had, raw) {
		if info, err := os.Stat(path); err == nil && info.Mode().Perm() == mode {
			return nil
		}
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return durable.WriteFile(path, raw, mode)
}

// ParseNetwork reads a Network as operators write it.
func ParseNetwork(text string) (Network, error) {
	n := Network(strings.TrimSpace(text))
	if n != Main && n != Chained && n != None {
		return "", fmt.Errorf("CNI network %q: want %s, %s or %s", text, Main, Chained, None)
	}
	return n, nil
}

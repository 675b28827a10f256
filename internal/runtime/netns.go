package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
)

// inEndpoint reports whether a container that names no endpoint is in the network namespace of one,
// or, if all is set, in any of its own. problem says why that could not be told.
func inEndpoint(config object, socket string, all bool) (ours bool, problem string, err error) {
	linux, ok := config["linux"].(object)
	if !ok {
		return false, "", nil // for the real runtime to judge, as is the rest of what is not Heddle's
	}
	list, _ := linux["namespaces"].([]any)
	for _, e := range list {
		namespace, _ := e.(object)
		if namespace["type"] != "network" {
			continue
		}
		path, _ := namespace["path"].(string)
		if path == "" { // made by the real runtime: no endpoint can be there yet
			return all || networksComeLate(config), "", nil
		}
		own, err := hasNamespace(config, "network", "/proc/self/ns/net")
		if err != nil || !own || all {
			return own, "", err
		}
		ours, err = recorded(filepath.Dir(socket), path)
		if err != nil {
			return false, err.Error(), nil
		}
		return ours, "", nil
	}
	return false, "", nil
}

// recorded reports whether the agent's record, in the directory of its sockets, has an intercepted
// endpoint with the network namespace at path.
func recorded(dir, path string) (bool, error) {
	in, err := inNetns(dir, path)
	return slices.ContainsFunc(in, func(e model.Endpoint) bool { return e.Planes.TCP.Intercepted }), err
}

// readRecord gives all endpoints of the agent's record.
func readRecord(dir string) ([]model.Endpoint, error) {
	return recordWith(dir, func() ([]model.Endpoint, error) { return endpointfile.All(dir) })
}

// recordWith gives the endpoints that have files, and those of the record of an agent that is older
// than such files. The record is there while no agent runs, too.
func recordWith(dir string, files func() ([]model.Endpoint, error)) ([]model.Endpoint, error) {
	name := filepath.Join(dir, endpointfile.Node)
	raw, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return nil, nil // no agent was ever started here, or the engine is not root's
	}
	if err != nil {
		return nil, fmt.Errorf("read endpoints of the node: %w", err)
	}
	var r struct {
		Endpoints []model.Endpoint `json:"endpoints"`
	}
	if err := json.Unmarshal(raw, &r); err != nil {
		return nil, fmt.Errorf("endpoints of the node: %s: %w", name, err)
	}
	more, err := files()
	return append(r.Endpoints, more...), err
}

// inNetns gives the endpoints of the record that are in the network namespace at path; none if
// there is no such namespace, which the real runtime will say.
func inNetns(dir, path string) (in []model.Endpoint, err error) {
	there, err := os.Stat(path)
	if err != nil {
		return nil, nil
	}
	inode := there.Sys().(*syscall.Stat_t).Ino
	near, err := recordWith(dir, func() ([]model.Endpoint, error) { return endpointfile.Near(dir, inode) })
	for _, e := range near {
		if has, err := os.Stat(e.NetnsPath); err == nil && os.SameFile(has, there) {
			in = append(in, e)
		}
	}
	return in, err
}

// netnsPath gives the path of the network namespace that a container is to be in; "" if the real
// runtime makes it, or there is none.
func netnsPath(config object) string {
	linux, _ := config["linux"].(object)
	list, _ := linux["namespaces"].([]any)
	for _, e := range list {
		if namespace, _ := e.(object); namespace["type"] == "network" {
			path, _ := namespace["path"].(string)
			return path
		}
	}
	return ""
}

// Hooks by which engines give a container networks in the namespace that the real runtime makes:
// Docker moves devices into it, nerdctl has CNI attach it.
const (
	dockerHook  = "libnetwork-setkey"
	nerdctlHook = "oci-hook"
)

// networksComeLate reports whether the container's engine gives it networks once its namespace is
// there: one may be Heddle's.
func networksComeLate(config object) bool {
	hooks, _ := config["hooks"].(object)
	has := func(when, arg string) bool {
		list, _ := hooks[when].([]any)
		return slices.ContainsFunc(list, func(e any) bool {
			hook, _ := e.(object)
			args, _ := hook["args"].([]any)
			return slices.Contains(args, any(arg))
		})
	}
	return has("prestart", dockerHook) || has("createRuntime", nerdctlHook)
}

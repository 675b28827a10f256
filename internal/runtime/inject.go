package runtime

import (
	"cmp"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// injection declares what a container gets that its bundle does not have: by the file name of a
// library, by paths of the node, by numbers of devices. inject adds it to the bundle's config.json.
type injection struct {
	// annotation has it added, if it says "true"; "false" is as good as none. Empty: it is always
	// added.
	annotation string
	// intercepted says that containers get it whose TCP sockets the agent makes, and no others.
	intercepted bool
	libraries   []library
	// env has variables, as NAME=VALUE.
	env     []string
	binds   []bind
	devices []device
	// check says what is wrong with further annotations; it is asked whether or not the container
	// gets the injection. nil: there are none.
	check func(annotations object) error
	// find gives binds that depend on the container's image, or its endpoint. lacks says why the
	// container starts without all of this. nil: there are none.
	find func(config object, to target, dirs []string) (binds []bind, lacks string, err error)
}

// library is a file of Heddle's that the container's first program, and what that starts, preload.
type library struct {
	file string // its name; it is beside this program, or where the Debian package has it
	at   string // in the container
}

// bind is a file, a directory or a Unix socket of the node's that a container has.
type bind struct {
	source   func(target) string
	at       string // in the container
	writable bool   // a socket must be, to be connected to
	noexec   bool
	device   bool // the file is a device
}

// device is a character device.
type device struct {
	at           string // in the container
	major, minor uint64
}

// target is the container that something is added to.
type target struct {
	bundle, socket string // as EditBundle's
	endpoint       string // its name, or model.EndpointByNetns; empty if it names none
	intercepted    bool   // its listener was added now
	apart          bool   // as EditBundle's
}

// targetOf gives the target that a configuration describes.
func targetOf(config object, bundle, socket string) (target, error) {
	endpoint, annotated, err := readAnnotations(config)
	return target{bundle: bundle, socket: cmp.Or(socket, annotated), endpoint: endpoint}, err
}

// dir gives the directory of the agent's sockets.
func (to target) dir() string { return filepath.Dir(to.socket) }

// injections are all that containers can ask for.
var injections = []injection{socketPool, guest, verbs}

// libraryDirs are the places where libraries may be.
func libraryDirs() []string {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	dir := filepath.Dir(self)
	return []string{dir, filepath.Join(dir, "../lib/heddle")}
}

// inject adds to a configuration what the container asks for. What it has already, because its
// bundle was edited before, is not added twice. lacks says what it goes without, and why.
func inject(config object, list []injection, to target, dirs []string) (added bool, lacks []string, err error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil || isSandbox(config) {
		return false, nil, err
	}
	for _, in := range list {
		if in.intercepted && !to.intercepted {
			continue
		}
		wanted := in.annotation == ""
		if !wanted {
			if wanted, err = isTrue(annotations, in.annotation); err != nil {
				return false, nil, err
			}
		}
		if in.check != nil {
			if err := in.check(annotations); err != nil {
				return false, nil, err
			}
		}
		if !wanted {
			continue
		}
		lack, err := in.add(config, to, dirs)
		if err != nil {
			return false, nil, fmt.Errorf("annotations.%s: %w", in.annotation, err)
		}
		if lack != "" {
			lacks = append(lacks, lack+", or take the annotation "+in.annotation+" away")
		}
		added = added || lack == ""
	}
	return added, lacks, nil
}

// isTrue reads an annotation that asks for an injection.
func isTrue(annotations object, name string) (bool, error) {
	switch v := annotations[name]; v {
	case nil, "false":
		return false, nil
	case "true":
		return true, nil
	default:
		return false, fmt.Errorf("annotations.%s: %v: want \"true\" or \"false\"", name, v)
	}
}

// add adds one injection, unless the container lacks something for it.
func (in injection) add(config object, to target, dirs []string) (lacks string, err error) {
	binds := slices.Clone(in.binds)
	if in.find != nil {
		found, lacks, err := in.find(config, to, dirs)
		if err != nil || lacks != "" {
			return lacks, err
		}
		binds = append(binds, found...)
	}
	for _, l := range in.libraries {
		source, err := findLibrary(l.file, dirs)
		if err != nil {
			return "", err
		}
		binds = append(binds, bind{source: func(target) string { return source }, at: l.at})
	}
	for _, b := range binds {
		if err := addBind(config, b, to); err != nil {
			return "", err
		}
	}
	for _, d := range in.devices {
		if err := addDevice(config, d); err != nil {
			return "", err
		}
	}
	return "", in.addEnv(config)
}

// fits says why a container cannot have the libraries.
func (in injection) fits(config object, dirs []string) error {
	for _, l := range in.libraries {
		source, err := findLibrary(l.file, dirs)
		if err != nil {
			return err
		}
		if _, err := taken(config, l.at, isBindOf(source)); err != nil {
			return err
		}
	}
	return nil
}

func findLibrary(file string, dirs []string) (string, error) {
	for _, dir := range dirs {
		name := filepath.Join(dir, file)
		if info, err := os.Stat(name); err == nil && info.Mode().IsRegular() {
			return name, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: want it in one of %s", file, strings.Join(dirs, ", "))
}

// isBindOf tells the mount of a file of the node's.
func isBindOf(source string) func(entry object) bool {
	return func(entry object) bool { return entry["type"] == "bind" && entry["source"] == source }
}

// addBind adds a bind mount, unless the bundle has it.
func addBind(config object, b bind, to target) error {
	source := b.source(to)
	there, err := taken(config, b.at, isBindOf(source))
	if there || err != nil {
		return err
	}
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return err
	}
	// Private: where the bundle has its root file system shared, what a container mounts over its
	// own would be mounted over the node's.
	options := []any{"bind", "private", "nosuid"}
	if !b.device {
		options = append(options, "nodev")
	}
	if !b.writable {
		options = slices.Insert(options, 1, any("ro"))
	}
	if b.noexec {
		options = append(options, "noexec")
	}
	config["mounts"] = append(mounts, object{"destination": b.at, "type": "bind", "source": source, "options": options})
	return nil
}

// addDevice adds a device node and the right to use the device, unless the bundle has the node.
func addDevice(config object, d device) error {
	there, err := taken(config, d.at, func(entry object) bool {
		return entry["type"] == "c" && entry["major"] == number(d.major) && entry["minor"] == number(d.minor)
	})
	if there || err != nil {
		return err
	}
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return err
	}
	if linux == nil {
		linux = object{}
	}
	nodes, err := readList(linux, "linux", "devices")
	if err != nil {
		return err
	}
	resources, err := readObject(linux, "linux.resources", "resources")
	if err != nil {
		return err
	}
	if resources == nil {
		resources = object{}
	}
	rules, err := readList(resources, "linux.resources", "devices")
	if err != nil {
		return err
	}
	linux["devices"] = append(nodes, object{
		"path": d.at, "type": "c", "major": number(d.major), "minor": number(d.minor), "fileMode": number(0o666), "uid": number(0), "gid": number(0),
	})
	resources["devices"] = append(rules, object{"allow": true, "type": "c", "major": number(d.major), "minor": number(d.minor), "access": "rw"})
	linux["resources"], config["linux"] = resources, linux
	return nil
}

// taken looks whether something can be at a path of the container's: in /dev, which must be memory
// of its own so that nothing is written to its image, and where the bundle has nothing else itself.
// It reports whether the bundle has the same there: it was copied from one that was edited.
func taken(config object, at string, same func(entry object) bool) (there bool, err error) {
	if kind, err := mountedAs(config, "/dev"); err != nil {
		return false, err
	} else if kind != "tmpfs" {
		return false, fmt.Errorf("the container's /dev is no tmpfs, which is to have %s: give it one, or take the annotation away", at)
	}
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return false, err
	}
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return false, err
	}
	nodes, err := readList(linux, "linux", "devices")
	if err != nil {
		return false, err
	}
	for _, list := range []struct {
		entries     []any
		field, name string
	}{{mounts, "destination", "mounts"}, {nodes, "path", "linux.devices"}} {
		for i, e := range list.entries {
			entry, _ := e.(object)
			if has, _ := entry[list.field].(string); path.Clean(has) != at {
				continue
			} else if same(entry) {
				there = true
			} else {
				return false, fmt.Errorf("%s[%d]: the bundle has something at %s itself: take that or the annotation away", list.name, i, at)
			}
		}
	}
	return there, nil
}

// mountedAs gives the type of what a container has mounted at path, "" for nothing.
func mountedAs(config object, path string) (kind string, err error) {
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return "", err
	}
	for _, e := range mounts {
		if m, _ := e.(object); m["destination"] == path {
			kind, _ = m["type"].(string)
		}
	}
	return kind, nil
}

// preloadVariable names the libraries that the dynamic linker loads before others, separated by
// colons.
const preloadVariable = "LD_PRELOAD"

// addEnv adds the libraries to those that are preloaded, and the variables.
func (in injection) addEnv(config object) error {
	process, err := readObject(config, "process", "process")
	if err != nil || process == nil { // without a process it is for the real runtime to judge
		return err
	}
	env, err := readStrings(process, "process", "env")
	if err != nil {
		return err
	}
	for _, l := range in.libraries {
		env = preload(env, l.at)
	}
	for _, variable := range in.env {
		name, _, _ := strings.Cut(variable, "=")
		i := slices.IndexFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		if i >= 0 && env[i] != variable {
			return fmt.Errorf("process.env[%d]: %s is to be %q: take the variable or the annotation away", i, name, variable)
		} else if i < 0 {
			env = append(env, variable)
		}
	}
	process["env"] = toAny(env)
	return nil
}

// preload gives an environment whose programs preload a library, too.
func preload(env []string, library string) []string {
	found := false
	for i, e := range env {
		// Of a variable that is there twice, programs take the first or the last.
		if value, ok := strings.CutPrefix(e, preloadVariable+"="); ok {
			found = true
			if slices.Contains(strings.Split(value, ":"), library) {
				continue
			}
			if value != "" {
				value += ":"
			}
			env[i] = preloadVariable + "=" + value + library
		}
	}
	if !found {
		env = append(env, preloadVariable+"="+library)
	}
	return env
}

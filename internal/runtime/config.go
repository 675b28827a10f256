package runtime

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"heddle.dev/heddle/internal/endpointfile"
	"heddle.dev/heddle/internal/model"
)

// Annotations that make a container Heddle's.
const (
	// AnnotationEndpoint holds the name of the container's endpoint at the node's agent, or
	// model.EndpointByNetns. A container without it is Heddle's if its network namespace is that of
	// an endpoint, and else left alone.
	AnnotationEndpoint = "io.heddle.endpoint"
	// AnnotationSocket holds the path of the agent's seccomp socket, if it is not the default.
	AnnotationSocket = "io.heddle.seccomp-socket"
	// AnnotationIntercept says "false" of a container that is to stay on the plain overlay although
	// it has an endpoint. It is the one that may come from who writes a pod: it can only take away.
	AnnotationIntercept = "io.heddle.intercept"
)

// Kubernetes' runtimes mark the process that only holds a pod's namespaces open: it makes no
// sockets.
const (
	annotationKind = "io.kubernetes.cri.container-type"
	kindSandbox    = "sandbox"
)

// DefaultSocket is where the node's agent waits for seccomp notification fds.
const DefaultSocket = "/run/heddle/seccomp.sock"

// EditBundle makes the container of an OCI bundle one whose TCP sockets the agent makes: it adds
// the seccomp listener to the bundle's config.json, if the container carries AnnotationEndpoint or
// is in the network namespace of an endpoint. socket overrides the annotation and the default; ""
// does not. all adds the listener to every container with a network namespace of its own: its
// endpoint is then looked for as long as it has none. It reports whether the file was changed; one
// that was edited before is left as it is, and so is one whose profile forbids TCP sockets and
// ioctls of devices already. A container also gets what its annotations ask for (injections),
// unless its image cannot use it; lacks says what it goes without and why. apart says that this
// program is called once more to start it, when it has its network. A container that must
// not be intercepted gets AnnotationLeft instead; kept says why, "" of any other. One that is not
// Heddle's, or has opted out, has its ioctls trapped.
func EditBundle(bundle, socket string, all, apart bool) (changed bool, kept string, lacks []string, err error) {
	path := filepath.Join(bundle, "config.json")
	config, err := readConfig(path)
	if err != nil {
		return false, "", nil, err
	}
	to, dirs := target{}, libraryDirs()
	without, err := defaultAnnotations(config, os.Getenv(EnvAnnotations), injections, dirs)
	if err == nil {
		to, err = targetOf(config, bundle, socket)
	}
	if err == nil {
		changed, kept, err = edit(config, &to, all)
	}
	if err == nil {
		var added bool
		to.apart = apart
		added, lacks, err = inject(config, injections, to, dirs)
		changed = changed || added
	}
	for _, in := range without {
		if !in.intercepted || to.intercepted {
			lacks = append(lacks, in.why)
		}
	}
	if err != nil {
		return false, "", nil, fmt.Errorf("%s: %w", path, err)
	}
	if !changed {
		return false, kept, lacks, nil
	}
	return true, kept, lacks, writeConfig(path, config)
}

// unfit is an injection that a container cannot have, and why.
type unfit struct {
	injection
	why string
}

// defaultAnnotations gives a configuration the annotations of list (EnvAnnotations) that it does
// not have itself. Nobody has asked for them in this container: it starts without those whose
// injection it cannot have, which are given back.
func defaultAnnotations(config object, list string, all []injection, dirs []string) (without []unfit, err error) {
	if list == "" {
		return nil, nil
	}
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return nil, err
	}
	if annotations == nil {
		annotations = object{}
	}
	for _, one := range strings.Split(list, ",") {
		key, value, found := strings.Cut(one, "=")
		if !found || !strings.HasPrefix(key, "io.heddle.") {
			return nil, fmt.Errorf("%s: %.80q: want io.heddle.NAME=VALUE, with commas between", EnvAnnotations, one)
		}
		if annotations[key] != nil {
			continue
		}
		i := slices.IndexFunc(all, func(in injection) bool { return in.annotation == key && value == "true" })
		if i >= 0 {
			if err := all[i].fits(config, dirs); err != nil {
				without = append(without, unfit{all[i], fmt.Sprintf("goes without %s of %s: %v", key, EnvAnnotations, err)})
				continue
			}
		}
		annotations[key] = value
	}
	config["annotations"] = annotations
	return without, nil
}

// edit has the calls of the container trapped, in its whole configuration in place.
func edit(config object, to *target, all bool) (changed bool, kept string, err error) {
	if out, err := optsOut(config); out || err != nil {
		return out && !isSandbox(config) && trapIoctls(config, to.socket), "", err
	}
	record := ""
	if to.endpoint == "" {
		record = filepath.Join(to.dir(), endpointfile.Node)
		ours, problem, err := inEndpoint(config, to.socket, all)
		if err != nil || !ours {
			return err == nil && trapIoctls(config, to.socket), problem, err
		}
		to.endpoint = model.EndpointByNetns
	}
	why, found, err := whyLeft(config)
	if err != nil {
		return false, "", err
	}
	if found {
		changed, err = leave(config, why, to.socket)
		return changed, why.String(), err
	}
	mounts, kernels, err := procMounts(config, to.socket)
	if err != nil {
		return false, "", err
	}
	calls := traps
	if mounts != nil {
		calls = append(slices.Clone(traps), sockDiag)
	}
	if calls, err = addStackTraps(config, calls); err != nil {
		return false, "", err
	}
	if calls, err = addGuestTraps(config, calls); err != nil {
		return false, "", err
	}
	if to.intercepted, err = addListener(config, to.endpoint, to.socket, calls); err != nil || !to.intercepted {
		return false, "", err
	}
	return true, "", addProcNet(config, to.bundle, mounts, kernels, record)
}

// addListener edits a whole configuration in place: the listener gets these calls.
func addListener(config object, endpoint, socket string, calls []trap) (changed bool, err error) {
	if !filepath.IsAbs(socket) {
		return false, fmt.Errorf("annotations.%s: %q: want an absolute path", AnnotationSocket, socket)
	}
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return false, err
	}
	if linux == nil {
		linux = object{}
	}
	profile, err := readObject(linux, "linux.seccomp", "seccomp")
	if err != nil {
		return false, err
	}
	if profile == nil {
		profile = newProfile()
	}
	if there, err := hasListener(profile, socket, endpoint); there || err != nil {
		return false, err
	}
	if trapped, err := addTraps(profile, calls); !trapped || err != nil {
		return false, err
	}
	profile["listenerPath"] = socket
	profile["listenerMetadata"] = endpoint
	linux["seccomp"] = profile
	config["linux"] = linux
	return true, nil
}

// readAnnotations gives the endpoint's name, "" for a container that names none, and the agent's
// socket.
func readAnnotations(config object) (endpoint, socket string, err error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return "", "", err
	}
	socket = DefaultSocket
	if annotations[AnnotationSocket] != nil {
		if socket, err = readString(annotations, "annotations", AnnotationSocket); err != nil {
			return "", "", err
		}
	}
	if annotations[AnnotationEndpoint] == nil {
		return "", socket, nil
	}
	if endpoint, err = readString(annotations, "annotations", AnnotationEndpoint); err != nil {
		return "", "", err
	}
	if endpoint == "" {
		return "", "", fmt.Errorf("annotations.%s: empty: want the name of an endpoint", AnnotationEndpoint)
	}
	return endpoint, socket, nil
}

// optsOut reports whether a container is not to be intercepted by its own wish, or is the one that
// holds a pod's namespaces.
func optsOut(config object) (bool, error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return false, err
	}
	switch v := annotations[AnnotationIntercept]; v {
	case "false":
		return true, nil
	case nil, "true":
		return isSandbox(config), nil
	default:
		return false, fmt.Errorf("annotations.%s: %v: want \"true\" or \"false\"", AnnotationIntercept, v)
	}
}

// isSandbox reports whether a container only holds a pod's namespaces open.
func isSandbox(config object) bool {
	annotations, _ := config["annotations"].(object)
	return annotations[annotationKind] == kindSandbox
}

// hasListener reports whether the profile has our listener already. Another's is an error: the
// kernel gives a task tree one listener (EBUSY).
func hasListener(profile object, socket, endpoint string) (bool, error) {
	if profile["listenerPath"] == nil {
		return false, nil
	}
	path, err := readString(profile, "linux.seccomp", "listenerPath")
	if err != nil || path == "" {
		return false, err
	}
	metadata, _ := profile["listenerMetadata"].(string)
	if path == socket && metadata == endpoint {
		return true, nil
	}
	return false, fmt.Errorf("linux.seccomp.listenerPath: the profile has a listener already (%q, metadata %q), and the kernel gives a container one only: take it out of the profile, or the %s annotation off the container", path, metadata, AnnotationEndpoint)
}

// readConfig reads a config.json; errors name the file and, where there is one, the line.
func readConfig(path string) (object, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%w: want an OCI bundle there: give its directory by --bundle", err)
	}
	if err != nil {
		return nil, fmt.Errorf("read bundle: %w", err)
	}
	return decodeConfig(path, data)
}

// decodeConfig reads the bytes of the config.json at path, numbers as they are written.
func decodeConfig(path string, data []byte) (object, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var v any
	if err := dec.Decode(&v); err != nil {
		offset := dec.InputOffset()
		if syntax := new(json.SyntaxError); errors.As(err, &syntax) {
			offset = syntax.Offset
		}
		line := 1 + bytes.Count(data[:min(offset, int64(len(data)))], []byte("\n"))
		return nil, fmt.Errorf("%s: line %d: %w", path, line, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: data after the configuration's closing brace", path)
	}
	config, ok := v.(object)
	if !ok {
		return nil, fmt.Errorf("%s: want an object, have %s", path, describe(v))
	}
	return config, nil
}

// writeConfig replaces the file at path in one step, so that a runtime never reads half of it, with
// the owner and the mode it had.
func writeConfig(path string, config object) (err error) {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".config.json.*")
	if err != nil {
		return fmt.Errorf("write bundle: %w", err)
	}
	defer func() {
		if err != nil {
			os.Remove(tmp.Name())
			err = fmt.Errorf("write bundle: %w", err)
		}
	}()
	enc := json.NewEncoder(tmp)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "\t")
	if err := errors.Join(enc.Encode(config), tmp.Chmod(info.Mode().Perm())); err != nil {
		return errors.Join(err, tmp.Close())
	}
	if owner, ok := info.Sys().(*syscall.Stat_t); ok {
		if err := tmp.Chown(int(owner.Uid), int(owner.Gid)); err != nil {
			return errors.Join(err, tmp.Close())
		}
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}

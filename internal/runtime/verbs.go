package runtime

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// What a container with verbs has mounted. /dev is memory of the container's own: nothing is
// written to its files.
const (
	verbsFile = "libheddle-verbs.so"
	// verbsInContainer is where the library looks for the router (clib/verbs/control.c).
	verbsInContainer = "/dev/heddle-verbs"
	ibverbs          = "libibverbs.so.1"
)

// verbsDevices stand for the kernel's devices in programs that look whether there are some (UCX).
// Nobody uses them: librdmacm's open() of the second is taken by our library (clib/verbs/cm.c).
var verbsDevices = []string{"/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"}

// imageLibraryDirs are where images of Debian's and Red Hat's kinds have their libraries.
var imageLibraryDirs = []string{
	"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu",
	"/usr/lib64", "/lib64", "/usr/lib", "/lib", "/usr/local/lib", "/usr/local/lib64",
}

// verbs is an endpoint's RDMA device. Our library is mounted over the image's own libibverbs, and
// not put first by an environment variable: what is started in the container later gets an
// environment of its engine's, and set-user-ID programs none. An image that cannot use it goes
// without.
var verbs = injection{
	annotation: model.AnnotationVerbs,
	check:      func(annotations object) error { _, err := readSpin(annotations); return err },
	find:       findVerbs,
}

// readSpin gives model.VerbsEndpoint.SpinMicros as annotations have it; nil leaves what the
// endpoint has.
func readSpin(annotations object) (*uint32, error) {
	if annotations[model.AnnotationVerbsSpin] == nil {
		return nil, nil
	}
	text, _ := annotations[model.AnnotationVerbsSpin].(string)
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n > model.MaxSpinMicros {
		return nil, fmt.Errorf("annotations.%s: %v: want microseconds, a string of 0 to %d; without the annotation its endpoint's stay",
			model.AnnotationVerbsSpin, annotations[model.AnnotationVerbsSpin], model.MaxSpinMicros)
	}
	spin := uint32(n)
	return &spin, nil
}

// findVerbs gives the socket of the container's endpoint, and the library at each place at which
// the image has its own.
func findVerbs(config object, to target, dirs []string) (binds []bind, lacks string, err error) {
	root, err := rootPath(config, to.bundle)
	if err != nil {
		return nil, "", err
	}
	targets, err := librariesIn(root, ibverbs)
	if err != nil {
		return nil, "", err
	}
	if len(targets) == 0 {
		glibc, err := librariesIn(root, "libc.so.6")
		if err == nil && len(glibc) == 0 {
			return nil, "no RDMA device: the image has no glibc (musl?), for which the library is: use an image of Debian's or Red Hat's kind", nil
		}
		return nil, "", errors.Join(err, fmt.Errorf("the image has no %s in %s, for which ours could stand in: install it there (Debian: libibverbs1; Red Hat: libibverbs)",
			ibverbs, strings.Join(imageLibraryDirs, ", ")))
	}
	library, err := findLibrary(verbsFile, dirs)
	if err != nil {
		return nil, "", err
	}
	from := func(path string) func(target) string { return func(target) string { return path } }
	switch later := (to.endpoint == "" || to.endpoint == model.EndpointByNetns) && netnsPath(config) == ""; {
	case later && networksComeLate(config):
		err = addLateVerbs(config, to)
	case later && to.apart:
		_, err = addPlace(config, verbsAtStart)
	default:
		var e model.Endpoint
		e, err = verbsEndpoint(config, to, dirs)
		binds = []bind{{source: from(folder.Of(to.socket, e.ID)), at: verbsInContainer, noexec: true}}
	}
	if err != nil {
		return nil, "", err
	}
	for _, device := range verbsDevices {
		binds = append(binds, bind{source: from("/dev/null"), at: device, writable: true, noexec: true, device: true})
	}
	for _, at := range targets {
		binds = append(binds, bind{source: from(library), at: at})
	}
	return binds, "", nil
}

// VerbsLibrary gives the path of what containers with verbs have mounted, if it is where this
// program would look for it.
func VerbsLibrary() (string, error) { return findLibrary(verbsFile, libraryDirs()) }

// verbsEndpoint gives the container's endpoint, for which the agent has a socket. If it has none
// yet, or is to spin for another time, the agent is asked for that.
func verbsEndpoint(config object, to target, dirs []string) (model.Endpoint, error) {
	e, err := endpointOf(config, to)
	if err != nil {
		return e, err
	}
	annotations, _ := config["annotations"].(object)
	spin, err := readSpin(annotations)
	if err != nil {
		return e, err
	}
	return e, haveVerbs(e, to.socket, spin, dirs)
}

// haveVerbs makes sure that the agent has a socket for an endpoint, whose programs spin for as long
// as the container wishes; nil: as they do.
func haveVerbs(e model.Endpoint, socket string, spin *uint32, dirs []string) error {
	if !e.Planes.Verbs.Wanted || spin != nil && *spin != e.Planes.Verbs.SpinMicros {
		if err := setVerbs(e.Name, socket, spin, dirs); err != nil {
			return fmt.Errorf("give its endpoint %s verbs: %w", e.Name, err)
		}
	}
	if _, err := os.Stat(folder.Of(socket, e.ID)); err != nil {
		return fmt.Errorf("the agent has no socket for its endpoint %s (%w): `heddle status` says why", e.Name, err)
	}
	return nil
}

// setVerbs has the agent give an endpoint verbs. It is done by the program heddle: this one, which
// runs for every container, is smaller without a client of the API.
func setVerbs(endpoint, socket string, spin *uint32, dirs []string) error {
	program, err := findLibrary("heddle", dirs)
	if err != nil {
		return err
	}
	args := []string{"endpoints", "verbs", endpoint, "--api", filepath.Join(filepath.Dir(socket), apiSocketFile)}
	if spin != nil {
		args = append(args, "--spin-us", strconv.FormatUint(uint64(*spin), 10))
	}
	ctx, cancel := context.WithTimeout(context.Background(), agentTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("the agent has not answered for %v: `heddle status` says why", agentTimeout)
	}
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// agentTimeout bounds how long a container's start waits for an agent that does not answer: it
// fails then, and its engine goes on with others. A router takes less than a second to start.
var agentTimeout = 30 * time.Second

// apiSocketFile is the agent's API, beside its seccomp socket.
const apiSocketFile = "api.sock"

// endpointOf gives the container's endpoint by the agent's record.
func endpointOf(config object, to target) (e model.Endpoint, err error) {
	var found []model.Endpoint
	if to.endpoint != "" && to.endpoint != model.EndpointByNetns {
		found, err = readRecord(to.dir())
		found = slices.DeleteFunc(found, func(e model.Endpoint) bool { return e.Name != to.endpoint })
	} else if netns := netnsPath(config); netns != "" {
		found, err = inNetns(to.dir(), netns)
	} else {
		return e, fmt.Errorf("the container names no endpoint by %s, and its network namespace is yet to be made: its engine gives it a network too late for verbs: "+
			"start it in a network namespace that there is, or name an endpoint", AnnotationEndpoint)
	}
	if err != nil {
		return e, err
	}
	if len(found) == 0 {
		return e, errors.New("the container has no endpoint at this node's agent: make one with `heddle endpoints add`")
	}
	return found[0], nil
}

// librariesIn gives the paths at which an image has a library, each file once; none: it has not.
func librariesIn(root, library string) (found []string, err error) {
	var files []os.FileInfo
	for _, dir := range imageLibraryDirs {
		info, err := statIn(root, path.Join(dir, library))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(files, func(f os.FileInfo) bool { return os.SameFile(f, info) }) {
			files, found = append(files, info), append(found, path.Join(dir, library))
		}
	}
	return found, nil
}

// maxLinks bounds the symbolic links on the way to a file.
const maxLinks = 40

// statIn looks at a file of an image as its programs do: absolute links and dots do not lead out of
// root.
func statIn(root, name string) (os.FileInfo, error) {
	at, left := "/", strings.Split(path.Clean(name), "/")
	for links := 0; len(left) > 0; {
		next := path.Join(at, left[0]) // ".." of the root is the root
		left = left[1:]
		info, err := os.Lstat(filepath.Join(root, next))
		if err != nil {
			return nil, err
		}
		if info.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return nil, fmt.Errorf("%s: too many symbolic links", name)
		}
		target, err := os.Readlink(filepath.Join(root, next))
		if err != nil {
			return nil, err
		}
		if path.IsAbs(target) {
			at = "/"
		}
		left = append(strings.Split(target, "/"), left...)
	}
	return os.Lstat(filepath.Join(root, at))
}

package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// What a container with verbs has mounted. /dev is memory of the container's own: nothing is
// written to its files.
const (
	verbsFile = "libheddle-verbs.so"
	// verbsInContainer is where the library looks for the router (clib/verbs/control.c).
	verbsInContainer = "/dev/heddle-verbs"
	// verbsDevice stands for the kernel's device in programs that look for one and do not use it
	// (UCX).
	verbsDevice = "/dev/infiniband/uverbs0"
	ibverbs     = "libibverbs.so.1"
)

// verbsLibraries are the places where our library may be: beside this program, or where the Debian
// package has it.
func verbsLibraries() []string {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	dir := filepath.Dir(self)
	return []string{filepath.Join(dir, verbsFile), filepath.Join(dir, "../lib/heddle", verbsFile)}
}

// imageLibraryDirs are where images of Debian's and Red Hat's kinds have their libraries.
var imageLibraryDirs = []string{
	"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu",
	"/usr/lib64", "/lib64", "/usr/lib", "/lib", "/usr/local/lib", "/usr/local/lib64",
}

// addVerbs gives the container its endpoint's RDMA device, if it asks for it
// (model.AnnotationVerbs). Our library is mounted over the image's own libibverbs, and not put
// first by an environment variable: what is started in the container later gets an environment of
// its engine's, and set-user-ID programs none. socket is as EditBundle's.
func addVerbs(config object, bundle, socket string, libraries []string) (changed bool, err error) {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return false, err
	}
	refuse := func(format string, args ...any) (bool, error) {
		return false, fmt.Errorf("annotations."+model.AnnotationVerbs+": "+format, args...)
	}
	switch v := annotations[model.AnnotationVerbs]; v {
	case nil, "false":
		return false, nil
	case "true":
	default:
		return refuse("%v: want \"true\" or \"false\"", v)
	}
	mounts, err := readList(config, "config", "mounts")
	if err != nil || isSandbox(config) || mountsTo(mounts, verbsInContainer) {
		return false, err
	}
	if kind, err := mountedAs(config, "/dev"); kind != "tmpfs" || err != nil {
		return refuse("the container's /dev is no tmpfs, which has the device: give it one, or take the annotation away")
	}
	library := slices.IndexFunc(libraries, isRegular)
	if library < 0 {
		return refuse("%s is not installed: want it at one of %s", verbsFile, strings.Join(libraries, ", "))
	}
	endpoint, annotated, err := readAnnotations(config)
	if err != nil {
		return false, err
	}
	if socket == "" {
		socket = annotated
	}
	e, err := verbsEndpoint(config, endpoint, socket)
	if err != nil {
		return refuse("%w", err)
	}
	root, err := rootPath(config, bundle)
	if err != nil {
		return false, err
	}
	targets, err := librariesIn(root)
	if err != nil {
		return refuse("%w", err)
	}
	mount := func(destination, source string, options ...any) {
		mounts = append(mounts, object{"destination": destination, "type": "bind", "source": source, "options": append([]any{"bind"}, options...)})
	}
	for _, target := range targets {
		mount(target, libraries[library], "ro", "nosuid", "nodev")
	}
	mount(verbsInContainer, folder.Of(socket, e.ID), "ro", "nosuid", "nodev", "noexec")
	mount(verbsDevice, "/dev/null", "rw", "nosuid", "noexec")
	config["mounts"] = mounts
	return true, nil
}

// verbsEndpoint gives the container's endpoint, which must have verbs.
func verbsEndpoint(config object, name, socket string) (e model.Endpoint, err error) {
	all, err := readRecord(filepath.Join(filepath.Dir(socket), recordFile))
	if err != nil {
		return e, err
	}
	var found []model.Endpoint
	if name != "" && name != model.EndpointByNetns {
		found = slices.DeleteFunc(all, func(e model.Endpoint) bool { return e.Name != name })
	} else if netns := netnsPath(config); netns != "" {
		found = inNetns(all, netns)
	} else {
		return e, fmt.Errorf("the container names no endpoint by %s, and its network namespace is yet to be made: its engine (Docker) gives it a network too late for verbs",
			AnnotationEndpoint)
	}
	if len(found) == 0 {
		return e, errors.New("the container has no endpoint at this node's agent: make one with `heddle endpoints add --verbs`")
	}
	if e = found[0]; !e.Planes.Verbs.Wanted {
		return e, fmt.Errorf("its endpoint %s has no verbs: delete it, and make it with `heddle endpoints add --verbs`", e.Name)
	}
	if _, err := os.Stat(folder.Of(socket, e.ID)); err != nil {
		return e, fmt.Errorf("the agent has no socket for its endpoint %s (%w): `heddle status` says why", e.Name, err)
	}
	return e, nil
}

// mountsTo reports whether something is mounted at a path.
func mountsTo(mounts []any, path string) bool {
	return slices.ContainsFunc(mounts, func(e any) bool {
		m, _ := e.(object)
		return m["destination"] == path
	})
}

func isRegular(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// librariesIn gives the paths at which an image has libibverbs, each file once.
func librariesIn(root string) (found []string, err error) {
	var files []os.FileInfo
	for _, dir := range imageLibraryDirs {
		info, err := statIn(root, path.Join(dir, ibverbs))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if !slices.ContainsFunc(files, func(f os.FileInfo) bool { return os.SameFile(f, info) }) {
			files, found = append(files, info), append(found, path.Join(dir, ibverbs))
		}
	}
	if found == nil {
		return nil, fmt.Errorf("the image has no %s in %s, for which ours could stand in: install it there (Debian: libibverbs1; Red Hat: libibverbs)",
			ibverbs, strings.Join(imageLibraryDirs, ", "))
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

package runtime

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/procnet"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// Docker and nerdctl give a container its network, and so its endpoint, when the namespaces are
// there that the real runtime makes; ctr when the container was created, before it is started. What
// the container has of its endpoint is mounted then.

const (
	// verbsCommand is the argument by which the real runtime calls this program back.
	verbsCommand = "heddle-late-verbs"
	// verbsAtStart is in the place of what is mounted when the container is started.
	verbsAtStart = "heddle-verbs-at-start"
)

// addLateVerbs has the socket of the container's endpoint mounted when that is known. Until then
// there is an empty directory in its place.
func addLateVerbs(config object, to target) error {
	there, err := addPlace(config, verbsCommand)
	if there || err != nil {
		return err
	}
	root, err := rootPath(config, to.bundle)
	if err != nil {
		return err
	}
	annotations, _ := config["annotations"].(object)
	spin, _ := annotations[model.AnnotationVerbsSpin].(string)
	return addHook(config, verbsCommand, root, to.socket, spin)
}

// isPlace tells the empty directory with this source.
func isPlace(source string) func(entry object) bool {
	return func(entry object) bool { return entry["type"] == "tmpfs" && entry["source"] == source }
}

// addPlace adds the empty directory over which the endpoint's socket is mounted later, unless it is
// there: its source says when that is.
func addPlace(config object, source string) (there bool, err error) {
	if there, err := taken(config, verbsInContainer, isPlace(source)); there || err != nil {
		return there, err
	}
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return false, err
	}
	config["mounts"] = append(mounts, object{"destination": verbsInContainer, "type": "tmpfs", "source": source,
		"options": []any{"ro", "nosuid", "nodev", "noexec", "mode=755", "size=4k"}})
	return false, nil
}

// addVerbsNow mounts the socket of its endpoint into a container that is about to be started, if it
// has the place for it. A container that fails it does not start.
func addVerbsNow(cmd commandLine, program string) error {
	if cmd.root == "" || cmd.id == "" {
		return nil
	}
	known, wished := wishesVerbs(cmd.root, cmd.id)
	if known && !wished {
		return nil
	}
	state, err := exec.Command(program, "--root", cmd.root, "state", cmd.id).Output()
	if err != nil && !known {
		return nil // for the real runtime to say
	}
	if err != nil {
		said := ""
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			said = string(bytes.TrimSpace(exit.Stderr))
		}
		return fmt.Errorf("ask for the state of a container that may wish for verbs: %w: %s", err, said)
	}
	args, err := lateArgs(state)
	if args == nil || err != nil {
		return err
	}
	// A process of its own, as it stays in the container's mount namespace.
	late := exec.Command("/proc/self/exe", args...)
	late.Stdin = bytes.NewReader(state)
	out, err := late.CombinedOutput()
	if err == nil {
		return nil
	}
	// As where a hook of the runtime's own fails. Engines delete what has ended.
	kill := exec.Command(program, "--root", cmd.root, "kill", cmd.id, "KILL").Run()
	return errors.Join(fmt.Errorf("%w: %s", err, bytes.TrimSpace(out)), kill)
}

// wishesVerbs looks for the wish for verbs where real runtimes keep what they were told of a
// container: runc, youki and crun. To ask the runtime for its state takes as long as all else that
// is done here, for every container. The word may be there for another reason. Others' files are
// not known.
func wishesVerbs(root, id string) (known, wished bool) {
	for _, name := range []string{"state.json", "config.json"} {
		kept, err := os.ReadFile(filepath.Join(root, id, name))
		known = known || err == nil
		wished = wished || bytes.Contains(kept, []byte(model.AnnotationVerbs))
	}
	return known, wished
}

// lateArgs gives this program's arguments for a container with this state; none if it is not about
// to be started, or has no place for verbs in its bundle, which is the engine's.
func lateArgs(state []byte) ([]string, error) {
	var container struct{ Status, Bundle string }
	if err := json.Unmarshal(state, &container); err != nil {
		return nil, fmt.Errorf("state of the container: %w", err)
	}
	if container.Status != "created" {
		return nil, nil
	}
	config, err := readConfig(filepath.Join(container.Bundle, "config.json"))
	if err != nil {
		return nil, err
	}
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil || annotations[model.AnnotationVerbs] != "true" || isSandbox(config) {
		return nil, err
	}
	mounts, err := readList(config, "config", "mounts")
	if err != nil || !slices.ContainsFunc(mounts, func(e any) bool {
		entry, _ := e.(object)
		return entry["destination"] == verbsInContainer && isPlace(verbsAtStart)(entry)
	}) {
		return nil, err
	}
	to, err := targetOf(config, container.Bundle, os.Getenv(EnvSocket))
	spin, _ := annotations[model.AnnotationVerbsSpin].(string)
	return []string{verbsCommand, "/", to.socket, spin}, err
}

// lateVerbs mounts the socket of its endpoint into the container of this state, whose root file
// system is at root in its mount namespace: by the hook, in the runtime's namespaces, before that
// becomes its root. A container that fails it does not start.
func lateVerbs(root, socket, spin string, state io.Reader) error {
	var container struct {
		Pid int `json:"pid"`
	}
	if err := json.NewDecoder(state).Decode(&container); err != nil {
		return fmt.Errorf("state of the container: %w", err)
	}
	var wish *uint32
	if spin != "" {
		n, err := strconv.ParseUint(spin, 10, 32)
		if err != nil {
			return err
		}
		micros := uint32(n)
		wish = &micros
	}
	network, mounts, err := openNamespaces(container.Pid)
	if err != nil {
		return err
	}
	defer network.Close()
	defer mounts.Close()
	found, err := inNetns(filepath.Dir(socket), fmt.Sprintf("/proc/self/fd/%d", network.Fd()))
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return errors.New("no RDMA device: none of the container's networks is Heddle's: give it one, or take the wish for verbs away")
	}
	if err := haveVerbs(found[0], socket, wish, libraryDirs()); err != nil {
		return err
	}
	if err := mountInto(mounts, root, verbsInContainer, folder.Of(socket, found[0].ID)); err != nil {
		return fmt.Errorf("mount the endpoint's socket into the container: %w", err)
	}
	return nil
}

// openNamespaces opens the network and mount namespaces of a container's first process. The agent
// may take its time to answer: the process may have ended by then, and another have its number.
func openNamespaces(pid int) (network, mounts *os.File, err error) {
	process, err := os.Open(fmt.Sprintf("/proc/%d", pid))
	if err == nil {
		defer process.Close()
		network, err = os.Open(fmt.Sprintf("/proc/self/fd/%d/ns/net", process.Fd()))
	}
	if err == nil {
		mounts, err = os.Open(fmt.Sprintf("/proc/self/fd/%d/ns/mnt", process.Fd()))
	}
	if err != nil {
		_ = network.Close() // a nil one, too
		return nil, nil, fmt.Errorf("the container's first process may have ended: %w", err)
	}
	return network, mounts, nil
}

// mountInto mounts source, of this mount namespace, read-only at a directory of a container whose
// root file system is at root in its mount namespace. It leaves the calling thread there.
func mountInto(mounts *os.File, root, at, source string) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("take %s: %w", source, err)
	}
	defer unix.Close(tree)
	// It is a peer of the node's mount where that is shared, as systemd makes all: what a container
	// mounts over its own would be mounted over the agent's.
	attr := unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC,
		Propagation: unix.MS_PRIVATE,
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &attr); err != nil {
		return fmt.Errorf("make it read-only and private: %w", err)
	}
	if err := procnet.EnterMounts(mounts); err != nil {
		return fmt.Errorf("enter the container's mount namespace: %w", err)
	}
	top, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", root, err)
	}
	defer unix.Close(top)
	// The image's links are not followed out of root.
	target, err := unix.Openat2(top, at[1:], &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return fmt.Errorf("open %s: %w", at, err)
	}
	defer unix.Close(target)
	return os.NewSyscallError("move_mount", unix.MoveMount(tree, "", target, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH))
}

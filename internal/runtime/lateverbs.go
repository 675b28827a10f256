package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/procnet"
	"heddle.dev/heddle/internal/plane/verbs/folder"
)

// Docker and nerdctl give a container its network, and so its endpoint, when the namespaces are
// there that the real runtime makes. What the container has of its endpoint is mounted then.

// verbsCommand is the argument by which the real runtime calls this program back.
const verbsCommand = "heddle-late-verbs"

// addLateVerbs has the socket of the container's endpoint mounted when that is known. Until then
// there is an empty directory in its place.
func addLateVerbs(config object, to target) error {
	same := func(entry object) bool { return entry["type"] == "tmpfs" && entry["source"] == verbsCommand }
	if there, err := taken(config, verbsInContainer, same); there || err != nil {
		return err
	}
	root, err := rootPath(config, to.bundle)
	if err != nil {
		return err
	}
	annotations, _ := config["annotations"].(object)
	if _, err := readSpin(annotations); err != nil {
		return err
	}
	spin, _ := annotations[model.AnnotationVerbsSpin].(string)
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return err
	}
	config["mounts"] = append(mounts, object{"destination": verbsInContainer, "type": "tmpfs", "source": verbsCommand,
		"options": []any{"ro", "nosuid", "nodev", "noexec", "mode=755", "size=4k"}})
	return addHook(config, verbsCommand, root, to.socket, spin)
}

// lateVerbs is what the hook does, in the runtime's namespaces, before the container's root file
// system, at root in its mount namespace, becomes its root. A container that fails it does not
// start.
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
	found, err := inNetns(filepath.Dir(socket), fmt.Sprintf("/proc/%d/ns/net", container.Pid))
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return errors.New("no RDMA device: none of the container's networks is Heddle's: give it one, or take the wish for verbs away")
	}
	if err := haveVerbs(found[0], socket, wish, libraryDirs()); err != nil {
		return err
	}
	if err := mountInto(container.Pid, root, verbsInContainer, folder.Of(socket, found[0].ID)); err != nil {
		return fmt.Errorf("mount the endpoint's socket into the container: %w", err)
	}
	return nil
}

// mountInto mounts source, of this mount namespace, read-only at a directory of a container whose
// root file system is at root in the mount namespace of pid. It leaves the calling thread there.
func mountInto(pid int, root, at, source string) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("take %s: %w", source, err)
	}
	defer unix.Close(tree)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("make it read-only: %w", err)
	}
	if err := procnet.EnterMounts(pid); err != nil {
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

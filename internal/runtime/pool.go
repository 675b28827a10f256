package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"heddle.dev/heddle/internal/model"
)

// Where the library for pools of sockets is in containers. /dev is memory of the container's own: nothing is
// written to its files.
const (
	poolInContainer = "/dev/heddle-pool.so"
	poolFile        = "libheddle-pool.so"
	preloadVariable = "LD_PRELOAD"
)

// poolLibraries are the places where the library may be: beside this program, or where the Debian package has it.
func poolLibraries() []string {
	self, err := os.Executable()
	if err != nil {
		return nil
	}
	dir := filepath.Dir(self)
	return []string{filepath.Join(dir, poolFile), filepath.Join(dir, "../lib/heddle", poolFile)}
}

// addPool has the container's first program, and what that starts, preload the pool of sockets, if the container asks for it
// (model.AnnotationSocketPool). The configuration was not edited before.
func addPool(config object, libraries []string) error {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return err
	}
	switch v := annotations[model.AnnotationSocketPool]; v {
	case nil, "false":
		return nil
	case "true":
	default:
		return fmt.Errorf("annotations.%s: %v: want \"true\" or \"false\"", model.AnnotationSocketPool, v)
	}
	library := ""
	for _, path := range libraries {
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			library = path
			break
		}
	}
	if library == "" {
		return fmt.Errorf("annotations.%s: %s is not installed: want it at one of %s", model.AnnotationSocketPool, poolFile, strings.Join(libraries, ", "))
	}
	if err := mountPool(config, library); err != nil {
		return err
	}
	return preload(config)
}

// mountPool adds the library to the container's files.
func mountPool(config object, library string) error {
	mounts, err := readList(config, "config", "mounts")
	if err != nil {
		return err
	}
	kind, err := mountedAs(config, "/dev")
	if err != nil {
		return err
	}
	if kind != "tmpfs" {
		return fmt.Errorf("annotations.%s: the container's /dev is no tmpfs, which has the library: give it one, or take the annotation away", model.AnnotationSocketPool)
	}
	config["mounts"] = append(mounts, object{
		"destination": poolInContainer, "type": "bind", "source": library, "options": []any{"bind", "ro", "nosuid", "nodev"},
	})
	return nil
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

// preload adds the library to those that the dynamic linker loads before others.
func preload(config object) error {
	process, err := readObject(config, "process", "process")
	if err != nil {
		return err
	}
	if process == nil {
		return nil // for the real runtime to judge
	}
	env, err := readStrings(process, "process", "env")
	if err != nil {
		return err
	}
	found := false
	for i, e := range env {
		// Of a variable that is there twice, programs take the first or the last.
		if value, ok := strings.CutPrefix(e, preloadVariable+"="); ok {
			found = true
			if value != "" {
				value += ":"
			}
			env[i] = preloadVariable + "=" + value + poolInContainer
		}
	}
	if !found {
		env = append(env, preloadVariable+"="+poolInContainer)
	}
	process["env"] = toAny(env)
	return nil
}

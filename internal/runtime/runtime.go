// Package runtime is Heddle's OCI runtime wrapper. It is called as runc is, by Docker, containerd,
// podman or the lab; before a container is created it adds Heddle's seccomp listener to the
// bundle's config.json, and then it becomes the real runtime, with the same arguments. Nothing of
// it stays running. `exec` needs no edit: the runtime connects the listener again from the
// configuration it saved.
package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// Environment variables of the wrapper.
const (
	// EnvSocket is the path of the agent's seccomp socket. It outranks the annotation, because who
	// starts the engine outranks who starts a container.
	EnvSocket = "HEDDLE_SECCOMP_SOCKET"
	// EnvRuntime is the real runtime: a path, or a name to be found in PATH.
	EnvRuntime = "HEDDLE_RUNC"
	// EnvIntercept chooses the containers that are Heddle's: "" those that name an endpoint or are
	// in the network namespace of one when they are made, "all" also those whose network namespace
	// may get one later.
	EnvIntercept = "HEDDLE_INTERCEPT"
	// EnvAnnotations has annotations for containers that do not have them themselves, KEY=VALUE
	// with commas between: for engines that give containers none (Docker before 24), where a
	// runtime is a script that sets it. It is for whoever starts the engine.
	EnvAnnotations = "HEDDLE_ANNOTATIONS"
)

// defaultRuntime is Debian's runc.
const defaultRuntime = "runc"

// sbin are searched after PATH: engines are often started without them.
var sbin = []string{"/usr/local/sbin/", "/usr/sbin/", "/sbin/"}

// Exec edits the bundle args name, if there is one to edit, and replaces the process by the real
// runtime. It returns only with an error, which is also written to the file of --log: the place
// where engines look for what to tell their user; or without one, if the real runtime has called
// back.
func Exec(args []string) error {
	if len(args) == 3 && args[0] == coverCommand {
		cover(args[1], args[2], os.Stdin)
		return nil
	}
	if len(args) == 4 && args[0] == verbsCommand {
		return lateVerbs(args[1], args[2], args[3], os.Stdin)
	}
	cmd := parseArgs(args)
	err := prepareAndExec(cmd, args)
	if logErr := cmd.logError(err); logErr != nil {
		return errors.Join(err, logErr)
	}
	return err
}

func prepareAndExec(cmd commandLine, args []string) error {
	program, err := FindRuntime(os.Getenv(EnvRuntime))
	if err != nil {
		return err
	}
	if cmd.edits() {
		intercept := os.Getenv(EnvIntercept)
		if intercept != "" && intercept != "all" {
			return fmt.Errorf("%s=%q: want \"all\" or nothing", EnvIntercept, intercept)
		}
		changed, kept, lacks, err := EditBundle(cmd.bundle, os.Getenv(EnvSocket), intercept == "all", cmd.startsApart())
		if err != nil {
			return err
		}
		if changed && kept == "" {
			if err := waitKillable(cmd.bundle, program); err != nil {
				return err
			}
		}
		if kept != "" {
			lacks = append([]string{"not intercepted, its TCP takes the overlay: " + kept}, lacks...)
		}
		for _, text := range lacks {
			if err := cmd.warn(text); err != nil {
				return err
			}
		}
	}
	if cmd.name == startCommand {
		if err := addVerbsNow(cmd, program); err != nil {
			return err
		}
	}
	err = syscall.Exec(program, append([]string{program}, args...), os.Environ())
	return fmt.Errorf("exec %s: %w", program, err)
}

// FindRuntime gives the path of the real OCI runtime: name, or runc if name is "".
func FindRuntime(name string) (string, error) {
	wanted := name
	if wanted == "" {
		wanted = defaultRuntime
	}
	self, _ := os.Stat("/proc/self/exe")
	candidates := []string{wanted}
	if wanted == defaultRuntime {
		for _, dir := range sbin {
			candidates = append(candidates, dir+wanted)
		}
	}
	for _, c := range candidates {
		path, err := exec.LookPath(c)
		if err != nil {
			continue
		}
		// An installation may call the wrapper "runc"; it must not run itself for ever.
		if info, err := os.Stat(path); err == nil && self != nil && os.SameFile(info, self) {
			continue
		}
		return path, nil
	}
	if name != "" {
		return "", fmt.Errorf("OCI runtime %q (%s): no such program, or it is this wrapper", name, EnvRuntime)
	}
	return "", fmt.Errorf("OCI runtime runc: not in PATH: install Debian's package runc, or name another by %s", EnvRuntime)
}

// logError appends err to the file of --log in the format of --log-format.
func (c commandLine) logError(failure error) error { return c.writeLog("error", failure.Error()) }

// warn says something on standard error and in the file of --log.
func (c commandLine) warn(text string) error {
	fmt.Fprintln(os.Stderr, "heddle-runtime: "+text)
	return c.writeLog("warning", text)
}

// writeLog appends a line to the file of --log, if there is one, in the format of --log-format.
func (c commandLine) writeLog(level, text string) (err error) {
	if c.log == "" {
		return nil
	}
	f, err := os.OpenFile(c.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("write --log: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	now := time.Now().Format(time.RFC3339)
	message := "heddle-runtime: " + text
	if c.logFormat == "json" {
		return json.NewEncoder(f).Encode(map[string]string{"level": level, "msg": message, "time": now})
	}
	_, err = io.WriteString(f, fmt.Sprintf("time=%q level=%s msg=%q\n", now, level, message))
	return err
}

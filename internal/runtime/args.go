package runtime

import (
	"slices"
	"strings"
)

// commandLine is what a runtime's arguments say that matters here.
type commandLine struct {
	name      string // the subcommand: "create", "exec", ...; "" without one
	root      string // --root, where the real runtime has its containers; "" if it is not given
	id        string // the container of start
	bundle    string // --bundle of create and run, "." if it is not given
	log       string // --log, where an engine looks for the reason of a failure
	logFormat string // --log-format: "text" or "json"
}

// Flags of runc and crun that take a value in the next argument. Any other flag is a switch. The
// two sets are written down because a value could look like a subcommand: `--root create`.
var (
	globalValues  = []string{"log", "log-format", "log-level", "root", "criu", "rootless", "cgroup-manager"}
	createValues  = []string{"b", "bundle", "console-socket", "pid-file", "preserve-fds", "f", "config"}
	bundleNames   = []string{"b", "bundle"}
	editsCommands = []string{"create", "run"}
)

// startCommand is the subcommand that has a container that was created run.
const startCommand = "start"

// parseArgs reads the arguments after the program's name. It never refuses any: what it does not
// know, the real runtime judges.
func parseArgs(args []string) commandLine {
	cmd := commandLine{bundle: ".", logFormat: "text"}
	rest := eachFlag(args, globalValues, true, func(name, value string) {
		switch name {
		case "root":
			cmd.root = value
		case "log":
			cmd.log = value
		case "log-format":
			cmd.logFormat = value
		}
	})
	if len(rest) == 0 {
		return cmd
	}
	cmd.name = rest[0]
	if cmd.edits() {
		// runc takes flags after the container's id as well.
		eachFlag(rest[1:], createValues, false, func(name, value string) {
			if slices.Contains(bundleNames, name) {
				cmd.bundle = value
			}
		})
	}
	if cmd.name == startCommand {
		if rest = eachFlag(rest[1:], nil, true, func(string, string) {}); len(rest) > 0 {
			cmd.id = rest[0]
		}
	}
	return cmd
}

// startsApart reports whether the container of this command is started by another one, which will
// find it.
func (c commandLine) startsApart() bool { return c.name == "create" && c.root != "" }

// edits reports whether the subcommand starts a container from a bundle.
func (c commandLine) edits() bool { return slices.Contains(editsCommands, c.name) }

// eachFlag calls found for every flag with its value ("" for a switch). It ends after "--", and, if
// stop is set, at the first argument that is no flag; it gives what is left.
func eachFlag(args, values []string, stop bool, found func(name, value string)) (rest []string) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return args[i+1:]
		}
		if len(arg) < 2 || arg[0] != '-' {
			if stop {
				return args[i:]
			}
			continue
		}
		name, value, joined := strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
		if !joined && slices.Contains(values, name) && i+1 < len(args) {
			i++
			value = args[i]
		}
		found(name, value)
	}
	return nil
}

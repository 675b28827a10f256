// Package folder says where an endpoint of the verbs plane has its control socket: the agent makes
// it, and heddle-runtime mounts what it is in into the endpoint's containers.
package folder

import (
	"path/filepath"
	"strconv"

	"heddle.dev/heddle/internal/model"
)

// Dir is the directory, beside the seccomp socket, that has a folder for each endpoint with verbs,
// by its id.
const Dir = "verbs"

// Socket is the socket's name in the folder: docs/protocols/verbs-control.md.
const Socket = "control"

// All gives the directory that has all folders, by the agent's seccomp socket.
func All(seccompSocket string) string { return filepath.Join(filepath.Dir(seccompSocket), Dir) }

// Of gives an endpoint's folder.
func Of(seccompSocket string, id model.EndpointID) string {
	return filepath.Join(All(seccompSocket), strconv.FormatUint(uint64(id), 10))
}

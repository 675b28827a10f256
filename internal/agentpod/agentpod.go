// Package agentpod runs the agent of a Kubernetes node as a container of a DaemonSet: it installs
// Heddle's programs and the CNI configuration on the node, gives the agent the settings that the
// cluster knows, and starts it outside of the container's control groups, so that what has to
// outlive an agent outlives its pod.
package agentpod

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"heddle.dev/heddle/internal/model"
)

// nameBytes is the longest name that a node of Heddle's can have.
const nameBytes = 32

// NodeName gives the name in Heddle's network of the Kubernetes node called name. It is the same if
// that is a name which Heddle knows, one label of at most 32 bytes; else it is made of as much of
// it as fits and of a hash of the whole.
func NodeName(name string) string {
	if model.ValidateName("node", name) == nil {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := hex.EncodeToString(sum[:5])
	label := strings.ReplaceAll(name, ".", "-")
	if most := nameBytes - len(hash) - 1; len(label) > most {
		label = label[:most]
	}
	return strings.TrimRight(label, "-") + "-" + hash
}

package runtime

import (
	"net"
	"time"

	"heddle.dev/heddle/internal/model"
)

// answersWithin bounds the question whether an agent, or the fd keeper for it, listens. The kernel
// answers at once.
const answersWithin = time.Second

// trapIoctls has the agent make the ioctls of network devices for a container that is not
// intercepted, too, and reports whether that changed its configuration. An intercepted container
// may pass it a socket of the node (SCM_RIGHTS), and the kernel asks only who calls: with
// CAP_NET_ADMIN, SIOCGSKNS would open the node's network namespace. Where nobody answers such
// calls, or the configuration is not for this program to judge, it stays as it is: the container
// must start without Heddle.
func trapIoctls(config object, socket string) (changed bool) {
	if _, itself, err := whyLeft(config); itself || err != nil {
		return false // the node's own namespace, or as good as its root
	}
	if !answers(socket) {
		return false
	}
	changed, err := addListener(config, model.EndpointNone, socket, ioctlTraps)
	return changed && err == nil
}

// answers reports whether somebody listens at the agent's seccomp socket. It hangs up without a
// word.
func answers(socket string) bool {
	c, err := net.DialTimeout("unix", socket, answersWithin)
	if err != nil {
		return false
	}
	_ = c.Close() // nothing was written
	return true
}

package runtime

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// AnnotationLeft says in a container's configuration why it was not intercepted although it has an
// endpoint.
const AnnotationLeft = "io.heddle.not-intercepted"

// Reasons for which a container is left on the overlay.
const (
	leftCapability = "capability_in_node" // it could do as root of the node does, with sockets of the node in its hands
	leftNetwork    = "node_network"       // it has the node's own sockets already
)

// rootsOwn are capabilities that, in the node's user namespace, make a container as good as the
// node's root: no protection around a node socket holds against them. NET_ADMIN is not one of them:
// what it allows on a node socket is refused or acts on the container's own network namespace.
var rootsOwn = []string{"SYS_ADMIN", "SYS_MODULE", "SYS_RAWIO", "BPF", "PERFMON"}

// left is why a container must not be intercepted.
type left struct {
	reason string // one of the constants above
	detail string
}

func (l left) String() string { return l.reason + ": " + l.detail }

// whyLeft gives the reason why a container must not be intercepted, if there is one.
func whyLeft(config object) (_ left, found bool, err error) {
	own, err := hasNamespace(config, "network", "/proc/self/ns/net")
	if err != nil {
		return left{}, false, err
	}
	if !own {
		return left{leftNetwork, "the container is in the node's network namespace"}, true, nil
	}
	if own, err = hasNamespace(config, "user", "/proc/self/ns/user"); err != nil || own {
		return left{}, false, err
	}
	capability, err := strongest(config)
	if err != nil || capability == "" {
		return left{}, false, err
	}
	return left{leftCapability, "the container has CAP_" + capability + " in the node's user namespace"}, true, nil
}

// hasNamespace reports whether the container has a namespace of this type that is not the one at
// nodes, this process's.
func hasNamespace(config object, kind, nodes string) (bool, error) {
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return false, err
	}
	list, err := readList(linux, "linux", "namespaces")
	if err != nil {
		return false, err
	}
	for i, e := range list {
		namespace, ok := e.(object)
		if !ok {
			return false, fmt.Errorf("linux.namespaces[%d]: want an object, have %s", i, describe(e))
		}
		if namespace["type"] != kind {
			continue
		}
		path, _ := namespace["path"].(string)
		if path == "" {
			return true, nil
		}
		there, err := os.Stat(path)
		if err != nil {
			return true, nil // the real runtime will say so
		}
		here, err := os.Stat(nodes)
		if err != nil {
			return false, fmt.Errorf("look at own namespace: %w", err)
		}
		return !os.SameFile(there, here), nil
	}
	return false, nil
}

// strongest gives the first of rootsOwn that any of the container's sets holds; "" if none does.
func strongest(config object) (string, error) {
	process, err := readObject(config, "process", "process")
	if err != nil {
		return "", err
	}
	sets, err := readObject(process, "process.capabilities", "capabilities")
	if err != nil {
		return "", err
	}
	for _, name := range []string{"bounding", "effective", "permitted", "inheritable", "ambient"} {
		have, err := readStrings(sets, "process.capabilities", name)
		if err != nil {
			return "", err
		}
		for _, c := range have {
			if c = strings.TrimPrefix(strings.ToUpper(c), "CAP_"); slices.Contains(rootsOwn, c) {
				return c, nil
			}
		}
	}
	return "", nil
}

// leave notes in a configuration why its container is not intercepted, and reports whether that is
// news.
func leave(config object, why left, socket string) (changed bool, err error) {
	linux, err := readObject(config, "linux", "linux")
	if err != nil {
		return false, err
	}
	if profile, err := readObject(linux, "linux.seccomp", "seccomp"); err != nil || profile["listenerPath"] == socket {
		if err == nil {
			err = fmt.Errorf("linux.seccomp.listenerPath: the bundle has Heddle's listener, but must not: %s: make the bundle anew", why)
		}
		return false, err
	}
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil || annotations[AnnotationLeft] == why.String() {
		return false, err
	}
	return true, annotate(config, AnnotationLeft, why.String())
}

// annotate writes an annotation into a configuration.
func annotate(config object, name, value string) error {
	annotations, err := readObject(config, "annotations", "annotations")
	if err != nil {
		return err
	}
	if annotations == nil {
		annotations = object{}
		config["annotations"] = annotations
	}
	annotations[name] = value
	return nil
}

// Package congestion registers congestion controls of the operator's own with the node's kernel:
// BPF objects with a struct_ops of type tcp_congestion_ops. Once one is registered, any socket of
// the machine can be given it by name.
package congestion

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"heddle.dev/heddle/internal/stack"
)

// opsType is the struct that a congestion control fills in.
const opsType = "tcp_congestion_ops"

// verifierLines is how many of the last lines of the verifier's log are told.
const verifierLines = 12

// Name gives the name of the congestion control in a BPF object, or why there is none that could be
// loaded. The kernel is not asked.
func Name(object []byte) (string, error) {
	spec, err := read(object)
	if err != nil {
		return "", err
	}
	return spec.name, nil
}

// object is a congestion control that has been read.
type object struct {
	name       string
	collection *ebpf.CollectionSpec
	ops        string // the map's name in the collection
}

// read takes an object apart: one congestion control, its programs, and maps for these alone.
func read(elf []byte) (*object, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(elf))
	if err != nil {
		return nil, fmt.Errorf("no BPF object: %w", err)
	}
	o := &object{collection: spec}
	for key, m := range spec.Maps {
		if m.Pinning != ebpf.PinNone {
			return nil, fmt.Errorf("map %s is to be pinned: a congestion control has maps of its own only", key)
		}
		if m.Type != ebpf.StructOpsMap {
			continue
		}
		if o.ops != "" {
			return nil, fmt.Errorf("%s and %s are both struct_ops: put one into an object", o.ops, key)
		}
		if o.name, err = nameIn(m); err != nil {
			return nil, fmt.Errorf("struct_ops %s: %w", key, err)
		}
		o.ops = key
	}
	if o.ops == "" {
		return nil, fmt.Errorf("no struct_ops in it: define a struct %s in section .struct_ops.link", opsType)
	}
	for key, p := range spec.Programs {
		if p.Type != ebpf.StructOps {
			return nil, fmt.Errorf("program %s is a %s: a congestion control has programs in sections struct_ops/... only", key, p.Type)
		}
	}
	return o, nil
}

// nameIn gives the name that a struct_ops has in its member.
func nameIn(m *ebpf.MapSpec) (string, error) {
	ops, ok := m.Value.(*btf.Struct)
	if !ok || ops.Name != opsType {
		return "", fmt.Errorf("its type is no struct %s", opsType)
	}
	if len(m.Contents) != 1 {
		return "", errors.New("it has no value")
	}
	value, ok := m.Contents[0].Value.([]byte)
	if !ok {
		return "", errors.New("it has no value")
	}
	for _, member := range ops.Members {
		if member.Name != "name" {
			continue
		}
		size, err := btf.Sizeof(member.Type)
		at := int(member.Offset.Bytes())
		if err != nil || at+size > len(value) {
			return "", errors.New("its name has no place in it")
		}
		name, _, _ := bytes.Cut(value[at:at+size], []byte{0})
		return string(name), stack.ValidateCongestion(string(name))
	}
	return "", errors.New(`it has no member "name"`)
}

// mapName is what the kernel calls the map of an object, by which agents of one kernel find what
// another has registered: it has 15 bytes.
func mapName(sum string) string { return "hd" + sum[:12] }

// load has the kernel verify an object. The caller closes what it gives.
func (o *object) load(sum string) (*ebpf.Collection, error) {
	m := o.collection.Maps[o.ops]
	m.Name = mapName(sum)
	m.Flags |= linkFlag
	c, err := ebpf.NewCollection(o.collection)
	if err == nil {
		return c, nil
	}
	var refused *ebpf.VerifierError
	if errors.As(err, &refused) {
		return nil, fmt.Errorf("the kernel's verifier refuses it: %w\n%s", refused.Cause, lastLines(refused.Log))
	}
	return nil, fmt.Errorf("the kernel refuses it: %w", err)
}

// lastLines gives the end of a verifier's log.
func lastLines(log []string) string {
	if len(log) > verifierLines {
		log = log[len(log)-verifierLines:]
	}
	return strings.Join(log, "\n")
}

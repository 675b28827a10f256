package store

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// SchemaVersion is the version of the schema in docs/protocols/store-schema.md; it is part of every
// key.
const SchemaVersion = 1

// maxKeyBytes is more than any key of the schema has.
const maxKeyBytes = 256

// Keys builds and reads the keys of one network.
type Keys struct{ root string }

// KeysOf gives the keys of network id.
func KeysOf(id model.NetworkID) Keys {
	return Keys{root: fmt.Sprintf("/heddle/v%d/%d/", SchemaVersion, id)}
}

// Root is the prefix of every key of the network, with the slash at its end.
func (k Keys) Root() string { return k.root }

// Network is the key of the network's parameters.
func (k Keys) Network() string { return k.root + "network" }

// Nodes is the prefix of all node keys.
func (k Keys) Nodes() string { return k.root + "nodes/" }

// Node is the key of one node.
func (k Keys) Node(name string) string { return k.Nodes() + name }

// NameLease is the key of the lease of a node's name.
func (k Keys) NameLease(node string) string { return k.root + "holders/" + node }

// Offline is the key that notes since when a node's agent holds no name.
func (k Keys) Offline(node string) string { return k.root + "away/" + node }

// Endpoints is the prefix of the keys of a node's endpoints.
func (k Keys) Endpoints(node string) string { return k.root + "endpoints/" + node + "/" }

// Endpoint is the key of one endpoint.
func (k Keys) Endpoint(node string, id model.EndpointID) string {
	return k.Endpoints(node) + strconv.FormatUint(uint64(id), 10)
}

// AllAddrs is the prefix of the keys of all addresses that are held. They are for writers only.
func (k Keys) AllAddrs() string { return k.root + "addrs/" }

// Addrs is the prefix of the keys of the addresses that a node's endpoints hold.
func (k Keys) Addrs(node string) string { return k.AllAddrs() + node + "/" }

// Addr is the key that says which endpoint holds an IPv4 address, and with it the IPv6 one that
// follows.
func (k Keys) Addr(node string, a netip.Addr) string { return k.Addrs(node) + a.String() }

// Policies is the prefix of all policies' keys.
func (k Keys) Policies() string { return k.root + "policies/" }

// Policy is the key of one policy.
func (k Keys) Policy(name string) string { return k.Policies() + name }

// PolicyTotals is the key of the size of all policies together.
func (k Keys) PolicyTotals() string { return k.root + "policy_totals" }

// Namespaces is the prefix of the keys of namespaces that somebody described.
func (k Keys) Namespaces() string { return k.root + "namespaces/" }

// Namespace is the key of one namespace.
func (k Keys) Namespace(name string) string { return k.Namespaces() + name }

// Stacks is the prefix of all stack profiles' keys.
func (k Keys) Stacks() string { return k.root + "stacks/" }

// Stack is the key of one stack profile.
func (k Keys) Stack(name string) string { return k.Stacks() + name }

// Congestion is the prefix of the keys of all congestion controls' objects.
func (k Keys) Congestion() string { return k.root + "congestion/" }

// CongestionObject is the key of the object of one congestion control.
func (k Keys) CongestionObject(name string) string { return k.Congestion() + name }

// Moves is the prefix of the keys of addresses that have moved to another node.
func (k Keys) Moves() string { return k.root + "moves/" }

// Move is the key that says on which node an IPv4 address lives that has moved.
func (k Keys) Move(a netip.Addr) string { return k.Moves() + a.String() }

// KeyKind says what a key stands for.
type KeyKind uint8

// The kinds of keys.
const (
	KeyUnknown KeyKind = iota // of a later revision of the schema: to be ignored
	KeyNetwork
	KeyNode
	KeyEndpoint
	KeyAddr
	KeyPolicy
	KeyNamespace
	KeyNameLease
	KeyOffline
	KeyMove
	KeyStack
	KeyCongestion
)

// Key is a parsed key.
type Key struct {
	Kind     KeyKind
	Node     string           // KeyNode, KeyEndpoint, KeyAddr, KeyNameLease, KeyOffline
	Endpoint model.EndpointID // KeyEndpoint
	Addr     netip.Addr       // KeyAddr, KeyMove
	Name     string           // KeyPolicy, KeyNamespace, KeyStack, KeyCongestion
}

// Parse reads a key. A key of no kind known here is KeyUnknown and no error; a key of a known kind
// that is not spelled as this package spells it is an error.
func (k Keys) Parse(key string) (Key, error) {
	rest, ok := strings.CutPrefix(key, k.root)
	if !ok || len(key) > maxKeyBytes {
		return Key{}, fmt.Errorf("key %.80q: want one below %s, of at most %d bytes", key, k.root, maxKeyBytes)
	}
	kind, rest, _ := strings.Cut(rest, "/")
	var parsed Key
	switch kind {
	case "network":
		parsed = Key{Kind: KeyNetwork}
		return parsed, k.checkSpelling(key, k.Network())
	case "nodes":
		parsed = Key{Kind: KeyNode, Node: rest}
		return parsed, model.ValidateName("node", rest)
	case "policies":
		return Key{Kind: KeyPolicy, Name: rest}, policy.ValidateName(rest)
	case "namespaces":
		return Key{Kind: KeyNamespace, Name: rest}, policy.ValidateNamespace(rest)
	case "stacks":
		return Key{Kind: KeyStack, Name: rest}, stack.ValidateName(rest)
	case "congestion":
		return Key{Kind: KeyCongestion, Name: rest}, stack.ValidateCongestion(rest)
	case "holders":
		parsed = Key{Kind: KeyNameLease, Node: rest}
		return parsed, model.ValidateName("node", rest)
	case "away":
		parsed = Key{Kind: KeyOffline, Node: rest}
		return parsed, model.ValidateName("node", rest)
	case "moves":
		a, err := parseAddr4(key, rest)
		if err != nil {
			return Key{}, err
		}
		return Key{Kind: KeyMove, Addr: a}, k.checkSpelling(key, k.Move(a))
	case "endpoints":
		node, text, _ := strings.Cut(rest, "/")
		id, err := strconv.ParseUint(text, 10, 32)
		if err != nil || id == 0 || model.EndpointID(id) > model.MaxEndpointID {
			return Key{}, fmt.Errorf("key %q: endpoint id %q: want 1..%d", key, text, model.MaxEndpointID)
		}
		parsed = Key{Kind: KeyEndpoint, Node: node, Endpoint: model.EndpointID(id)}
		if err := model.ValidateName("node", node); err != nil {
			return Key{}, fmt.Errorf("key %q: %w", key, err)
		}
		return parsed, k.checkSpelling(key, k.Endpoint(node, parsed.Endpoint))
	case "addrs":
		node, text, _ := strings.Cut(rest, "/")
		a, err := parseAddr4(key, text)
		if err != nil {
			return Key{}, err
		}
		parsed = Key{Kind: KeyAddr, Node: node, Addr: a}
		if err := model.ValidateName("node", node); err != nil {
			return Key{}, fmt.Errorf("key %q: %w", key, err)
		}
		return parsed, k.checkSpelling(key, k.Addr(node, a))
	}
	return Key{}, nil
}

// parseAddr4 reads the IPv4 address at the end of a key.
func parseAddr4(key, text string) (netip.Addr, error) {
	a, err := netip.ParseAddr(text)
	if err == nil && !a.Is4() {
		err = fmt.Errorf("address %s: want an IPv4 address", a)
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("key %q: %w", key, err)
	}
	return a, nil
}

// checkSpelling makes sure that nothing has two keys: "endpoints/n1/07" is not "endpoints/n1/7".
func (k Keys) checkSpelling(key, canonical string) error {
	if key != canonical {
		return fmt.Errorf("key %q: want %q", key, canonical)
	}
	return nil
}

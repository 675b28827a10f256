package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"heddle.dev/heddle/internal/model"
)

// Limits of values. Writers refuse more, readers reject more.
const (
	maxValueBytes = 64 << 10
	maxNetnsPath  = 4096
	maxBootID     = 64
	maxLabels     = 64
	maxLabelKey   = 317
	maxLabelValue = 256
)

// EncodeNetwork gives the value stored for n, or why n is no valid network.
func EncodeNetwork(n Network) ([]byte, error) {
	if err := n.Validate(); err != nil {
		return nil, err
	}
	return encode(n)
}

// ParseNetwork reads the value stored for the parameters of network id.
func ParseNetwork(id model.NetworkID, value []byte) (Network, error) {
	var n Network
	if err := decode(value, &n); err != nil {
		return Network{}, fmt.Errorf("network: %w", err)
	}
	if n.ID != id {
		return Network{}, fmt.Errorf("network: id %d stands under the key of network %d", n.ID, id)
	}
	if err := n.Validate(); err != nil {
		return Network{}, fmt.Errorf("network: %w", err)
	}
	return n, nil
}

// EncodeNode gives the value stored for n, or why n is no valid node.
func EncodeNode(n model.Node) ([]byte, error) {
	if err := validateNode(n); err != nil {
		return nil, err
	}
	return encode(n)
}

// ParseNode reads the value stored for the node called name.
func ParseNode(name string, value []byte) (model.Node, error) {
	var n model.Node
	if err := decode(value, &n); err != nil {
		return model.Node{}, fmt.Errorf("node %s: %w", name, err)
	}
	if n.Name != name {
		return model.Node{}, fmt.Errorf("node %s: its value says name %q", name, n.Name)
	}
	return n, validateNode(n)
}

// EncodeEndpoint gives the value stored for e, or why e is no valid endpoint.
func EncodeEndpoint(e model.Endpoint) ([]byte, error) {
	if err := validateEndpoint(e); err != nil {
		return nil, err
	}
	return encode(e)
}

// ParseEndpoint reads the value stored for endpoint id of a node.
func ParseEndpoint(node string, id model.EndpointID, value []byte) (model.Endpoint, error) {
	var e model.Endpoint
	if err := decode(value, &e); err != nil {
		return model.Endpoint{}, fmt.Errorf("endpoint %s/%d: %w", node, id, err)
	}
	if e.Node != node || e.ID != id {
		return model.Endpoint{}, fmt.Errorf("endpoint %s/%d: its value says node %q, id %d", node, id, e.Node, e.ID)
	}
	return e, validateEndpoint(e)
}

// EncodeOwner gives the value stored for an address that endpoint id holds: the id in decimal.
func EncodeOwner(id model.EndpointID) []byte { return strconv.AppendUint(nil, uint64(id), 10) }

// ParseOwner reads what EncodeOwner wrote.
func ParseOwner(value []byte) (model.EndpointID, error) {
	id, err := strconv.ParseUint(string(value), 10, 32)
	if err != nil || id == 0 || model.EndpointID(id) > model.MaxEndpointID || !bytes.Equal(EncodeOwner(model.EndpointID(id)), value) {
		return 0, fmt.Errorf("address owner %.40q: want an endpoint id", value)
	}
	return model.EndpointID(id), nil
}

func encode(v any) ([]byte, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode value: %w", err)
	}
	if len(b) > maxValueBytes {
		return nil, fmt.Errorf("value of %d bytes: at most %d fit: use fewer labels", len(b), maxValueBytes)
	}
	return b, nil
}

// decode reads one JSON object. encoding/json lets pass what would make two readers see two values
// (a member twice, names in another case, bytes that are no UTF-8), so those are refused first.
// Members it does not know are ignored: a later revision of the schema may add some.
func decode(value []byte, v any) error {
	if err := checkObject(value, maxValueBytes); err != nil {
		return err
	}
	return json.Unmarshal(value, v)
}

// checkObject makes sure that value is one JSON object of at most limit bytes that every reader
// takes for the same.
func checkObject(value []byte, limit int) error {
	if len(value) > limit {
		return fmt.Errorf("%d bytes, at most %d are allowed", len(value), limit)
	}
	if !utf8.Valid(value) {
		return errors.New("not UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(value))
	if t, err := d.Token(); err != nil {
		return fmt.Errorf("want a JSON object: %w", err)
	} else if t != json.Delim('{') {
		return errors.New("want a JSON object")
	}
	if err := checkMembers(d, ""); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("data after the JSON object")
	}
	return nil
}

// checkMembers reads the rest of an object and refuses a name that occurs twice, and one that
// encoding/json might take for another because it folds case. Names of labels are data and may have
// any.
func checkMembers(d *json.Decoder, name string) error {
	seen := make(map[string]bool)
	for {
		t, err := d.Token()
		if err != nil {
			return err
		}
		member, ok := t.(string)
		if !ok {
			return nil // the closing brace: the decoder lets nothing else stand here
		}
		if name != "labels" && !isMemberName(member) {
			return fmt.Errorf("member %.40q: names consist of a-z, 0-9 and '_'", member)
		}
		if seen[member] {
			return fmt.Errorf("member %.40q: stands there twice", member)
		}
		seen[member] = true
		if err := checkValue(d, member); err != nil {
			return err
		}
	}
}

func isMemberName(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
	}) < 0
}

// checkValue reads one value and applies checkMembers to the objects in it.
func checkValue(d *json.Decoder, name string) error {
	t, err := d.Token()
	if err != nil {
		return err
	}
	switch t {
	case json.Delim('{'):
		return checkMembers(d, name)
	case json.Delim('['):
		for d.More() {
			if err := checkValue(d, ""); err != nil {
				return err
			}
		}
		_, err = d.Token()
	}
	return err
}

func validateNode(n model.Node) error {
	if err := model.ValidateName("node", n.Name); err != nil {
		return err
	}
	if err := validateAddr(n.Underlay); err != nil {
		return fmt.Errorf("node %s: underlay: %w", n.Name, err)
	}
	if n.Encrypts() {
		if err := n.WireGuard.Validate(n.Underlay); err != nil {
			return fmt.Errorf("node %s: wireguard: %w", n.Name, err)
		}
	}
	if n.Translated() {
		if n.Encrypts() {
			return fmt.Errorf("node %s: ipv6_underlay: a node that encrypts has its address in wireguard's endpoint", n.Name)
		}
		if err := n.IPv6.Validate(n.Underlay); err != nil {
			return fmt.Errorf("node %s: ipv6_underlay: %w", n.Name, err)
		}
	}
	if len(n.Prefixes) == 0 || len(n.Prefixes) > maxNodePrefixes {
		return fmt.Errorf("node %s: %d prefixes, want 1 to %d", n.Name, len(n.Prefixes), maxNodePrefixes)
	}
	for i, p := range n.Prefixes {
		if err := validatePrefix(p); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
		for _, q := range n.Prefixes[:i] {
			if p.Overlaps(q) {
				return fmt.Errorf("node %s: its %w", n.Name, &OverlapError{Prefix: p, With: q.String() + " of the same node"})
			}
		}
	}
	if n.VTEPMAC != "" {
		mac, err := net.ParseMAC(n.VTEPMAC)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 || mac.String() != n.VTEPMAC {
			return fmt.Errorf("node %s: vtep_mac %.40q: want a unicast address like 02:00:00:00:00:01", n.Name, n.VTEPMAC)
		}
	}
	if at := n.PeerAPI; at != (model.PeerAPI{}) {
		if err := at.Validate(); err != nil {
			return fmt.Errorf("node %s: peer_api: %w", n.Name, err)
		}
	}
	if card := n.Planes.Verbs.Card; card != nil {
		if err := card.Validate(); err != nil {
			return fmt.Errorf("node %s: planes.verbs.card: %w", n.Name, err)
		}
	}
	if n.Direct() {
		if err := n.Planes.TCP.DirectPorts.Validate(); err != nil {
			return fmt.Errorf("node %s: direct_ports: %w", n.Name, err)
		}
	}
	return nil
}

func validateEndpoint(e model.Endpoint) error {
	wrap := func(err error) error { return fmt.Errorf("endpoint %s/%d: %w", e.Node, e.ID, err) }
	if err := model.ValidateName("node", e.Node); err != nil {
		return wrap(err)
	}
	if e.ID == 0 || e.ID > model.MaxEndpointID {
		return wrap(fmt.Errorf("id: want 1..%d", model.MaxEndpointID))
	}
	if err := model.ValidateEndpointName(e.Name); err != nil {
		return wrap(err)
	}
	if err := validateAddrs(e.Addrs); err != nil {
		return wrap(err)
	}
	if len(e.NetnsPath) > maxNetnsPath || e.NetnsPath != "" && !isAbsolutePath(e.NetnsPath) {
		return wrap(fmt.Errorf("netns_path %.40q: want an absolute path", e.NetnsPath))
	}
	if len(e.Netns.Boot) > maxBootID || !isPrintable(e.Netns.Boot) {
		return wrap(fmt.Errorf("netns: boot %.40q: want at most %d printable bytes", e.Netns.Boot, maxBootID))
	}
	if err := model.ValidateDevice(e.Device); err != nil {
		return wrap(fmt.Errorf("device %w", err))
	}
	if e.Adopted != nil {
		if err := e.Adopted.Validate(); err != nil {
			return wrap(fmt.Errorf("carried: %w", err))
		}
	}
	if e.CNI != nil {
		if err := e.CNI.Validate(); err != nil {
			return wrap(fmt.Errorf("cni: %w", err))
		}
	}
	if e.Limits != nil {
		if err := e.Limits.Validate(); err != nil {
			return wrap(fmt.Errorf("limits: %w", err))
		}
	}
	if err := model.ValidatePorts(e.Ports); err != nil {
		return wrap(fmt.Errorf("ports: %w", err))
	}
	if err := e.Planes.Verbs.Validate(); err != nil {
		return wrap(fmt.Errorf("verbs: %w", err))
	}
	if err := validateLabels(e.Labels); err != nil {
		return wrap(err)
	}
	return nil
}

func validateLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return fmt.Errorf("%d labels, at most %d are allowed", len(labels), maxLabels)
	}
	for k, v := range labels {
		if k == "" || len(k) > maxLabelKey || len(v) > maxLabelValue || !isPrintable(k) || !isPrintable(v) {
			return fmt.Errorf("label %.63q: want a printable key of 1..%d bytes and value of at most %d", k, maxLabelKey, maxLabelValue)
		}
	}
	return nil
}

// validateAddrs accepts an IPv4 address, alone or followed by its IPv6 form.
func validateAddrs(addrs []netip.Addr) error {
	for _, a := range addrs {
		if err := validateAddr(a); err != nil {
			return err
		}
	}
	if len(addrs) == 0 || len(addrs) > 2 || !addrs[0].Is4() {
		return fmt.Errorf("addresses %s: want an IPv4 address and at most one more", addrs)
	}
	if len(addrs) == 2 && !model.Embeds(addrs[1], addrs[0]) {
		return fmt.Errorf("addresses %s: the second has to be IPv6 and end in the 32 bits of the first", addrs)
	}
	return nil
}

// validateAddr accepts unicast addresses, each in one spelling only: no zones, no IPv4 in IPv6.
func validateAddr(a netip.Addr) error {
	if !a.IsValid() || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() {
		return fmt.Errorf("address %s: want a unicast address without zone", a)
	}
	return nil
}

// validatePrefix accepts prefixes that a node or a pool may have, each in one spelling only.
func validatePrefix(p netip.Prefix) error {
	switch {
	case !p.IsValid():
		return fmt.Errorf("prefix %s: want ADDRESS/LENGTH", p)
	case !p.Addr().Is4():
		return fmt.Errorf("prefix %s: want an IPv4 prefix; IPv6 addresses follow from the network's prefix6", p)
	case p != p.Masked():
		return fmt.Errorf("prefix %s: has bits beyond its length: write %s", p, p.Masked())
	case p.Bits() < minPrefixLen || p.Bits() > maxPrefixLen:
		return fmt.Errorf("prefix %s: want a length of %d..%d", p, minPrefixLen, maxPrefixLen)
	}
	if a := p.Addr(); a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a.IsLinkLocalUnicast() {
		return fmt.Errorf("prefix %s: want unicast addresses that routers carry", p)
	}
	return nil
}

func isAbsolutePath(s string) bool { return strings.HasPrefix(s, "/") && isPrintable(s) }

func isPrintable(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) < 0
}

package dockernet

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"path"
	"strings"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// Names that Docker gives to options.
const (
	optionGateway     = "com.docker.network.gateway"
	optionAddressType = "RequestAddressType"
)

// LabelOption begins the names of endpoint options (docker run --network
// name=NETWORK,driver-opt=NAME=VALUE) that become labels of the endpoint.
const LabelOption = "io.heddle.label."

// routeConnected is libnetwork's type of a route without next hop.
const routeConnected = 1

// Bounds of a request.
const (
	maxRequestBytes = 1 << 20
	maxPath         = 4095
	// idBytes is the length of Docker's ids: 256 bits in hexadecimal.
	idBytes = 64
	// nameDigits is how much of one stands in an endpoint's name, as in Docker's own lists.
	nameDigits = 12
)

// The requests, with the fields that matter here. Docker sends others, which differ by version.
type (
	createNetworkRequest struct {
		NetworkID          string
		IPv4Data, IPv6Data []ipamData
	}
	ipamData struct {
		Pool string // a prefix
	}
	endpointRequest struct {
		NetworkID, EndpointID string
	}
	createEndpointRequest struct {
		endpointRequest
		Interface *struct {
			Address, AddressIPv6 string // prefixes
			MacAddress           string
		}
		Options map[string]any
	}
	joinRequest struct {
		endpointRequest
		SandboxKey string // path of the network namespace
	}
	publishRequest struct {
		endpointRequest
		Options struct {
			PortMap []portBinding `json:"com.docker.network.portmap"`
		}
	}
	// portBinding is libnetwork's types.PortBinding. Its IP is of the container, which has one.
	portBinding struct {
		Proto                       uint8
		Port, HostPort, HostPortEnd uint16
		HostIP                      string
	}
	poolRequest struct {
		Pool, SubPool string // prefixes
		V6            bool
	}
	addressRequest struct {
		PoolID, Address string
		Options         map[string]string
	}
)

// The answer to a join.
type (
	joinResponse struct {
		InterfaceName         interfaceName
		Gateway               string
		StaticRoutes          []staticRoute
		DisableGatewayService bool
	}
	interfaceName struct {
		SrcName, DstPrefix string
	}
	staticRoute struct {
		Destination string
		RouteType   int
		NextHop     string
	}
)

// checker is a request with rules beyond the types of its fields.
type checker interface{ check() error }

// parse reads a request's body: one JSON object and nothing behind it. Fields that are not known
// are passed over.
func parse[T any](body []byte) (T, error) {
	var req T
	dec := json.NewDecoder(bytes.NewReader(body))
	if t := bytes.TrimLeft(body, " \t\r\n"); len(t) == 0 || t[0] != '{' {
		return req, errors.New("malformed request: want a JSON object")
	}
	if err := dec.Decode(&req); err != nil {
		return req, fmt.Errorf("malformed request: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return req, errors.New("malformed request: data after the JSON object")
	}
	if c, ok := any(req).(checker); ok {
		return req, c.check()
	}
	return req, nil
}

func (r createNetworkRequest) check() error { return checkID("NetworkID", r.NetworkID) }

func (r endpointRequest) check() error {
	if err := checkID("NetworkID", r.NetworkID); err != nil {
		return err
	}
	return checkID("EndpointID", r.EndpointID)
}

func (r joinRequest) check() error {
	if err := r.endpointRequest.check(); err != nil {
		return err
	}
	if p := r.SandboxKey; !path.IsAbs(p) || path.Clean(p) != p || len(p) > maxPath || strings.ContainsRune(p, 0) {
		return fmt.Errorf("SandboxKey %.100q: want a clean absolute path", p)
	}
	return nil
}

// checkID checks one of Docker's ids.
func checkID(field, id string) error {
	if len(id) != idBytes || strings.Trim(id, "0123456789abcdef") != "" {
		return fmt.Errorf("%s %.70q: want %d hexadecimal digits", field, id, idBytes)
	}
	return nil
}

// namePrefix begins the names of Docker's endpoints.
const namePrefix = "docker/"

// endpointName gives the name of the endpoint that Docker calls id.
func endpointName(id string) string { return namePrefix + id[:nameDigits] }

// Owns reports whether the endpoint of this name is Docker's.
func Owns(name string) bool { return strings.HasPrefix(name, namePrefix) }

// address gives the IPv4 address that Docker's IPAM gave the endpoint.
func (r createEndpointRequest) address() (netip.Addr, error) {
	if r.Interface == nil || r.Interface.Address == "" {
		return netip.Addr{}, errors.New("endpoint without address: create the network with --ipam-driver of the same name as its driver")
	}
	if r.Interface.MacAddress != "" {
		return netip.Addr{}, errors.New("--mac-address: not supported; the address follows from the endpoint")
	}
	p, err := netip.ParsePrefix(r.Interface.Address)
	if err != nil || !p.Addr().Is4() {
		return netip.Addr{}, fmt.Errorf("interface address %.60q: want an IPv4 address with its prefix", r.Interface.Address)
	}
	return p.Addr(), nil
}

// labels gives the endpoint's labels. Options that are none are Docker's business.
func (r createEndpointRequest) labels() (map[string]string, error) {
	var out map[string]string
	for name, v := range r.Options {
		key, ours := strings.CutPrefix(name, LabelOption)
		if !ours {
			continue
		}
		value, ok := v.(string)
		if !ok {
			return nil, fmt.Errorf("option %.100q: want text", name)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[key] = value
	}
	return out, nil
}

// ports gives what is to be published.
func (r publishRequest) ports() (out []model.PortRequest, err error) {
	names := map[uint8]string{6: model.PortTCP, 17: model.PortUDP}
	for _, b := range r.Options.PortMap {
		p := model.PortRequest{PublishedPort: model.PublishedPort{HostPort: b.HostPort, Port: b.Port, Protocol: names[b.Proto]}}
		if p.Protocol == "" {
			return nil, fmt.Errorf("-p %d: protocol %d: want tcp or udp", b.Port, b.Proto)
		}
		if b.HostPortEnd > b.HostPort {
			p.HostPortEnd = b.HostPortEnd
		}
		if b.HostIP != "" {
			if p.HostAddr, err = netip.ParseAddr(b.HostIP); err != nil {
				return nil, fmt.Errorf("-p: %.60q is no IP address", b.HostIP)
			}
			p.HostAddr = p.HostAddr.Unmap()
		}
		out = append(out, p)
	}
	return out, api.PortsRequest{Ports: out}.Validate()
}

// optionalAddr reads an IPv4 address; "" gives the zero Addr.
func optionalAddr(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil || !a.Is4() {
		return a, fmt.Errorf("address %.60q: want an IPv4 address", text)
	}
	return a, nil
}

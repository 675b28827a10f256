// Package dockernet lets Docker attach containers to Heddle: it speaks the protocol of libnetwork's
// remote network and IPAM drivers (JSON over HTTP on a Unix socket in Docker's plugin directory)
// and turns it into endpoints of the node. It has no lasting state: what Docker calls an endpoint
// is found again by its name, "docker/" and the first digits of Docker's id.
package dockernet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// Node is what the drivers need of the agent. Implementations are called from many goroutines at
// once.
type Node interface {
	// DockerPool gives the node's IPv4 overlay prefix, for Docker to show, and the node's own
	// address in it.
	DockerPool() (prefix netip.Prefix, gateway netip.Addr)
	// ReserveAddr keeps an overlay address, want unless it is the zero Addr, until it is attached
	// or given back.
	ReserveAddr(want netip.Addr) (netip.Addr, error)
	// ReleaseAddr gives back what ReserveAddr kept. An address that is not reserved is no error: it
	// went with its endpoint.
	ReleaseAddr(addr netip.Addr)
	// AwaitContainer attaches an endpoint whose network namespace Docker has yet to mount at
	// req.NetnsPath, and gives the name of the device that Docker is to move there.
	AwaitContainer(ctx context.Context, req api.EndpointRequest) (device string, err error)
	// SetPorts makes ports of the node lead to an endpoint, in place of those that did.
	// api.ErrNotFound if there is none of that name.
	SetPorts(ctx context.Context, name string, ports []model.PortRequest) (model.Endpoint, error)
	// DeleteEndpoint detaches it. api.ErrNotFound if there is none of that name.
	DeleteEndpoint(ctx context.Context, name string) error
}

// Bounds of what the drivers keep between two requests for one endpoint.
const (
	maxPending = 4096
	pendingFor = 5 * time.Minute
)

// devicePrefix begins the name of a container's device; Docker adds a number.
const devicePrefix = "eth"

// NewHandler serves node's network to Docker.
func NewHandler(node Node, log *slog.Logger) http.Handler {
	s := &server{node: node, log: log, pending: map[string]pending{}}
	mux := http.NewServeMux()
	for path, h := range map[string]handlerFunc{
		"/Plugin.Activate":                           s.activate,
		"/NetworkDriver.GetCapabilities":             s.capabilities,
		"/NetworkDriver.CreateNetwork":               s.createNetwork,
		"/NetworkDriver.DeleteNetwork":               nothing,
		"/NetworkDriver.CreateEndpoint":              s.createEndpoint,
		"/NetworkDriver.EndpointOperInfo":            s.operInfo,
		"/NetworkDriver.DeleteEndpoint":              s.deleteEndpoint,
		"/NetworkDriver.Join":                        s.join,
		"/NetworkDriver.Leave":                       nothing, // Docker takes the device out, then deletes the endpoint
		"/NetworkDriver.ProgramExternalConnectivity": s.publish,
		"/NetworkDriver.RevokeExternalConnectivity":  s.unpublish,
		"/NetworkDriver.DiscoverNew":                 nothing,
		"/NetworkDriver.DiscoverDelete":              nothing,
		"/IpamDriver.GetCapabilities":                s.ipamCapabilities,
		"/IpamDriver.GetDefaultAddressSpaces":        s.addressSpaces,
		"/IpamDriver.RequestPool":                    s.requestPool,
		"/IpamDriver.ReleasePool":                    nothing,
		"/IpamDriver.RequestAddress":                 s.requestAddress,
		"/IpamDriver.ReleaseAddress":                 s.releaseAddress,
	} {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { s.answer(w, r, h) })
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		s.answer(w, r, func(context.Context, []byte) (any, error) {
			return nil, fmt.Errorf("no such method: %.100q", r.URL.Path)
		})
	})
	return mux
}

// server is the two drivers. Docker tells of an endpoint's options before it says where the
// endpoint belongs: pending keeps them so long.
type server struct {
	node Node
	log  *slog.Logger

	mu      sync.Mutex // guards pending
	pending map[string]pending
}

// pending is an endpoint that Docker has created and not yet joined to a container.
type pending struct {
	addr    netip.Addr
	labels  map[string]string
	created time.Time
}

// handlerFunc answers the request with this body; nil stands for an empty answer.
type handlerFunc func(ctx context.Context, body []byte) (any, error)

// mediaType is what Docker asks of plugins' answers.
const mediaType = "application/vnd.docker.plugins.v1.1+json"

// answer runs h. Failures are answered with status 200 and a text in Err, which is the protocol's
// way.
func (s *server) answer(w http.ResponseWriter, r *http.Request, h handlerFunc) {
	body, err := io.ReadAll(io.LimitReader(r.Body, maxRequestBytes+1))
	var result any
	switch {
	case err != nil:
		err = fmt.Errorf("read request: %w", err)
	case len(body) > maxRequestBytes:
		err = fmt.Errorf("request body exceeds %d bytes", maxRequestBytes)
	default:
		result, err = h(r.Context(), body)
	}
	if err != nil {
		s.log.Warn("docker request refused", "method", strings.TrimPrefix(r.URL.Path, "/"), "err", err)
		result = map[string]string{"Err": "heddle: " + err.Error()}
	}
	if result == nil {
		result = struct{}{}
	}
	raw, err := json.Marshal(result)
	if err != nil {
		s.log.Error("docker request", "method", r.URL.Path, "err", err)
		raw = []byte(`{"Err":"heddle: the agent met a bug; its log has the details"}`)
	}
	w.Header().Set("Content-Type", mediaType)
	if _, err := w.Write(append(raw, '\n')); err != nil {
		s.log.Debug("docker went away", "err", err)
	}
}

// nothing is the handler of what needs nothing to be done.
func nothing(context.Context, []byte) (any, error) { return nil, nil }

func (s *server) activate(context.Context, []byte) (any, error) {
	return map[string][]string{"Implements": {"NetworkDriver", "IpamDriver"}}, nil
}

// capabilities: each node's Docker has networks of its own, and containers reach those of other
// nodes.
func (s *server) capabilities(context.Context, []byte) (any, error) {
	return map[string]string{"Scope": "local", "ConnectivityScope": "global"}, nil
}

func (s *server) createNetwork(_ context.Context, body []byte) (any, error) {
	req, err := parse[createNetworkRequest](body)
	if err != nil {
		return nil, err
	}
	prefix, _ := s.node.DockerPool()
	for _, p := range req.IPv4Data {
		if p.Pool != prefix.String() && p.Pool != anyPool {
			return nil, fmt.Errorf("subnet %.50s is not this node's %s: create the network with --ipam-driver of the same name as its driver", p.Pool, prefix)
		}
	}
	if len(req.IPv4Data) != 1 {
		return nil, fmt.Errorf("%d IPv4 subnets: want one, this node's %s", len(req.IPv4Data), prefix)
	}
	if len(req.IPv6Data) > 0 {
		return nil, errIPv6
	}
	return nil, nil
}

var errIPv6 = errors.New("containers have IPv6 addresses without being asked: create the network without --ipv6")

func (s *server) createEndpoint(_ context.Context, body []byte) (any, error) {
	req, err := parse[createEndpointRequest](body)
	if err != nil {
		return nil, err
	}
	addr, err := req.address()
	if err != nil {
		return nil, err
	}
	labels, err := req.labels()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, p := range s.pending {
		if time.Since(p.created) > pendingFor {
			delete(s.pending, id)
		}
	}
	if len(s.pending) >= maxPending {
		return nil, fmt.Errorf("%d endpoints wait to be joined: try again later", len(s.pending))
	}
	s.pending[req.EndpointID] = pending{addr: addr, labels: labels, created: time.Now()}
	// Docker takes the address that it asked for if none is given here.
	return map[string]any{"Interface": struct{}{}}, nil
}

func (s *server) operInfo(context.Context, []byte) (any, error) {
	return map[string]any{"Value": struct{}{}}, nil
}

// join makes the devices. Docker moves the container's side into the namespace when that is there,
// and gives it the address and these routes.
func (s *server) join(ctx context.Context, body []byte) (any, error) {
	req, err := parse[joinRequest](body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	p, known := s.pending[req.EndpointID]
	delete(s.pending, req.EndpointID)
	s.mu.Unlock()
	if !known {
		return nil, fmt.Errorf("endpoint %.12s was not created, or before the agent started: start the container again", req.EndpointID)
	}
	_, gateway := s.node.DockerPool()
	device, err := s.node.AwaitContainer(ctx, api.EndpointRequest{
		Name: endpointName(req.EndpointID), NetnsPath: req.SandboxKey, Intercepted: true, Addr: p.addr, Labels: p.labels,
	})
	if err != nil {
		return nil, err
	}
	return joinResponse{
		InterfaceName: interfaceName{SrcName: device, DstPrefix: devicePrefix},
		Gateway:       gateway.String(),
		// The gateway is no neighbour by its address, which has no network: a route leads to it.
		StaticRoutes:          []staticRoute{{Destination: netip.PrefixFrom(gateway, gateway.BitLen()).String(), RouteType: routeConnected}},
		DisableGatewayService: true,
	}, nil
}

func (s *server) deleteEndpoint(ctx context.Context, body []byte) (any, error) {
	req, err := parse[endpointRequest](body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	delete(s.pending, req.EndpointID)
	s.mu.Unlock()
	err = s.node.DeleteEndpoint(ctx, endpointName(req.EndpointID))
	if errors.Is(err, api.ErrNotFound) {
		return nil, nil // as after a restart of Docker
	}
	return nil, err
}

// publish has ports of the node lead to a container. Docker tells so of the container's first
// network only, after Join, and fails to start the container if it is refused.
func (s *server) publish(ctx context.Context, body []byte) (any, error) {
	req, err := parse[publishRequest](body)
	if err != nil {
		return nil, err
	}
	ports, err := req.ports()
	if err != nil || len(ports) == 0 {
		return nil, err
	}
	_, err = s.node.SetPorts(ctx, endpointName(req.EndpointID), ports)
	return nil, err
}

// unpublish undoes publish.
func (s *server) unpublish(ctx context.Context, body []byte) (any, error) {
	req, err := parse[endpointRequest](body)
	if err != nil {
		return nil, err
	}
	_, err = s.node.SetPorts(ctx, endpointName(req.EndpointID), nil)
	if errors.Is(err, api.ErrNotFound) {
		return nil, nil // they went with it
	}
	return nil, err
}

func (s *server) ipamCapabilities(context.Context, []byte) (any, error) {
	return map[string]bool{"RequiresMACAddress": false, "RequiresRequestReplay": false}, nil
}

// addressSpace names the overlay's addresses, of which there is one set.
const addressSpace = "heddle"

func (s *server) addressSpaces(context.Context, []byte) (any, error) {
	return map[string]string{"LocalDefaultAddressSpace": addressSpace, "GlobalDefaultAddressSpace": addressSpace}, nil
}

// anyPool stands for the node's prefix where no subnet was asked for. Docker compares a prefix that
// it did not choose with the node's routes and asks for another, again and again, if they overlap:
// those to the containers would.
const anyPool = "0.0.0.0/0"

func (s *server) requestPool(_ context.Context, body []byte) (any, error) {
	req, err := parse[poolRequest](body)
	if err != nil {
		return nil, err
	}
	prefix, gateway := s.node.DockerPool()
	switch {
	case req.V6:
		return nil, errIPv6
	case req.Pool != "" && req.Pool != prefix.String():
		return nil, fmt.Errorf("--subnet %.50s: this node's is %s; give that or none", req.Pool, prefix)
	case req.SubPool != "":
		return nil, fmt.Errorf("--ip-range %.50s: not supported", req.SubPool)
	}
	pool := req.Pool
	if pool == "" {
		pool = anyPool
	}
	return map[string]any{
		"PoolID": pool, "Pool": pool,
		"Data": map[string]string{optionGateway: netip.PrefixFrom(gateway, prefix.Bits()).String()},
	}, nil
}

func (s *server) requestAddress(_ context.Context, body []byte) (any, error) {
	req, err := parse[addressRequest](body)
	if err != nil {
		return nil, err
	}
	want, err := optionalAddr(req.Address)
	if err != nil {
		return nil, err
	}
	if prefix, gateway := s.node.DockerPool(); req.Options[optionAddressType] == optionGateway {
		if want.IsValid() && want != gateway {
			return nil, fmt.Errorf("--gateway %s: it is %s; give that or none", want, gateway)
		}
		return map[string]string{"Address": netip.PrefixFrom(gateway, prefix.Bits()).String()}, nil
	}
	addr, err := s.node.ReserveAddr(want)
	if err != nil {
		return nil, err
	}
	return map[string]string{"Address": netip.PrefixFrom(addr, addr.BitLen()).String()}, nil
}

func (s *server) releaseAddress(_ context.Context, body []byte) (any, error) {
	req, err := parse[addressRequest](body)
	if err != nil {
		return nil, err
	}
	addr, err := optionalAddr(req.Address)
	if err != nil {
		return nil, err
	}
	if addr.IsValid() {
		s.node.ReleaseAddr(addr)
	}
	return nil, nil
}

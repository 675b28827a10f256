package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/firewall"
)

// Ports that are published without a number are chosen from these, as Docker's own are.
const firstChosenPort, lastChosenPort = 49153, 65535

// containerLoopback has the node's aliases of containers' loopback addresses (model.LoopbackAlias).
var containerLoopback = netip.MustParsePrefix("127.128.0.0/9")

// SetPorts makes ports of this node lead to an endpoint of it, in place of those that did.
func (es *endpoints) SetPorts(ctx context.Context, name string, requests []model.PortRequest) (model.Endpoint, error) {
	es.change.Lock()
	defer es.change.Unlock()
	old, ok := es.known.named(name)
	if !ok {
		return old, api.ErrNotFound
	}
	e := old
	var err error
	if e.Ports, err = es.choosePorts(old, requests); err != nil {
		return old, err
	}
	if slices.Equal(old.Ports, e.Ports) {
		return old, nil
	}
	if err := es.publish(e); err != nil {
		return old, errors.Join(err, es.publish(old))
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if err := es.store.PutEndpoint(ctx, e); err != nil {
		return old, errors.Join(storeError(err), es.publish(old))
	}
	es.known.add(e)
	es.saveEndpoint(e.ID)
	es.log.Info("ports published", "endpoint", e.Name, "ports", e.Ports)
	return e, nil
}

// publish brings the node to the published ports of its endpoints, e as it is here. The caller
// holds change.
func (es *endpoints) publish(e model.Endpoint) error {
	return es.devices.Firewall.SetPublished(publishedOf(es.known.all(), &e))
}

// publishedOf gives the published ports of endpoints, changed, if there is one, in place of what is
// known of it.
func publishedOf(all []model.Endpoint, changed *model.Endpoint) (out []firewall.Published) {
	if changed != nil {
		all = append(slices.DeleteFunc(slices.Clone(all), func(x model.Endpoint) bool { return x.ID == changed.ID }), *changed)
	}
	for _, x := range all {
		for _, p := range x.Ports {
			out = append(out, firewall.Published{PublishedPort: p, To: x.Addrs})
		}
	}
	return out
}

// portSteps are those that publish an endpoint's ports: the last, when it can be reached.
func (es *endpoints) portSteps(e model.Endpoint) []step {
	if len(e.Ports) == 0 {
		return nil
	}
	without := e
	without.Ports = nil
	return []step{{"publish ports", func() error { return es.publish(e) }, func() error { return es.publish(without) }}}
}

// choosePorts gives the ports that an endpoint gets for requests, or says which it cannot have, and
// why. Those that it has already it keeps. The caller holds change.
func (es *endpoints) choosePorts(e model.Endpoint, requests []model.PortRequest) (out []model.PublishedPort, err error) {
	if len(requests) > 0 && e.Adopted != nil {
		return nil, &api.Error{Code: api.CodeUnsupported, Field: "ports", Message: "the container's address is another network's",
			Remedy: "have that network publish them: with CNI, by the plugin portmap before heddle-cni"}
	}
	if len(requests) == 0 {
		return nil, nil
	}
	taken := make(map[uint16][]portHolder)
	for _, x := range es.known.all() {
		if x.ID != e.ID {
			for _, p := range x.Ports {
				taken[p.HostPort] = append(taken[p.HostPort], portHolder{p, x.Name})
			}
		}
	}
	for _, r := range requests {
		p, err := es.choosePort(e, r, taken)
		if err != nil {
			return nil, err
		}
		taken[p.HostPort] = append(taken[p.HostPort], portHolder{p, "the same endpoint"})
		out = append(out, p)
	}
	return out, nil
}

// portHolder is a published port, and whose it is.
type portHolder struct {
	model.PublishedPort
	name string
}

// choosePort gives the first port of those that r takes which is free.
func (es *endpoints) choosePort(e model.Endpoint, r model.PortRequest, taken map[uint16][]portHolder) (model.PublishedPort, error) {
	first, last := r.HostPort, max(r.HostPort, r.HostPortEnd)
	if first == 0 {
		first, last = firstChosenPort, lastChosenPort
	}
	var why error
	for n := int(first); n <= int(last); n++ {
		p := r.PublishedPort
		p.HostPort = uint16(n)
		if why = es.mayPublish(e, p, taken[p.HostPort]); why == nil {
			return p, nil
		}
		var refused *api.Error
		if !errors.As(why, &refused) || refused.Code != api.CodeConflict {
			return p, why
		}
	}
	if first == last {
		return model.PublishedPort{}, why
	}
	return model.PublishedPort{}, &api.Error{Code: api.CodeConflict, Field: "ports", Message: fmt.Sprintf("%s: no port of %d-%d is free; the last: %s", r, first, last, why),
		Remedy: "publish at other ports, or end who has these"}
}

// mayPublish reports why a port of the node may not lead to e.
func (es *endpoints) mayPublish(e model.Endpoint, p model.PublishedPort, taken []portHolder) error {
	refuse := func(code api.Code, why, remedy string) error {
		return &api.Error{Code: code, Field: "ports", Message: fmt.Sprintf("%s: %s", p, why), Remedy: remedy}
	}
	for _, x := range taken {
		if p.Overlaps(x.PublishedPort) {
			return refuse(api.CodeConflict, "the port leads to "+x.name, "publish at another port, or end that one first")
		}
	}
	if slices.Contains(e.Ports, p) {
		return nil
	}
	if p.HostAddr.Is6() && !es.prefix6.IsValid() {
		return refuse(api.CodeInvalid, "containers of this node have no IPv6 address", "publish at an IPv4 address, or give the network IPv6")
	}
	if direct := es.self.Planes.TCP.DirectPorts; p.Protocol == model.PortTCP && direct.Contains(p.HostPort) {
		return refuse(api.CodeConflict, fmt.Sprintf("%s are Heddle's own ports, of direct connections", direct), "publish at another port, or change --direct-ports")
	}
	containers := append(model.WithOverlay6(es.prefix6, es.network.Pool), containerLoopback, model.MirrorRange)
	switch err := netcfg.CheckPort(p, containers); {
	case errors.Is(err, netcfg.ErrPortTaken):
		return refuse(api.CodeConflict, err.Error(), fmt.Sprintf("see which one by `ss -lnp 'sport = :%d'`; publish at another port, or end it", p.HostPort))
	case errors.Is(err, netcfg.ErrNotLocal):
		return refuse(api.CodeInvalid, err.Error(), "`ip address` lists those it has; or give none, for all of them")
	default:
		return err
	}
}

// published reports whether an endpoint has what is asked for.
func published(e model.Endpoint, requests []model.PortRequest) bool {
	return len(e.Ports) == len(requests) && !slices.ContainsFunc(requests, func(r model.PortRequest) bool {
		return !slices.ContainsFunc(e.Ports, r.Meets)
	})
}

package kube

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/tools/cache"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// Labels of Services by which kube-proxy leaves them to others, and so does heddle-kube.
const (
	otherProxy = "service.kubernetes.io/service-proxy-name"
	headless   = "service.kubernetes.io/headless"
)

// byService is the index of EndpointSlices by the Service they are of.
const byService = "service"

// serviceAgent is what services need of the agent.
type serviceAgent interface {
	Services(ctx context.Context) ([]model.Service, error)
	EditServices(ctx context.Context, edit api.ServiceEdit) error
}

// services keeps this node's services as those of the API server: their ClusterIPs and ports of TCP
// and UDP.
type services struct {
	services, slices cache.SharedIndexInformer
	node             string
	agent            serviceAgent
	objects          *objects
	m                *metrics
	dirty            *dirty
	log              *slog.Logger

	// inForce are the services that the agent has, ofKey their addresses by the Service they are
	// of; nil: not known.
	inForce map[model.ServiceAddr]model.Service
	ofKey   map[string][]model.ServiceAddr
}

func newServices(c *cluster, node string, agent serviceAgent, o *objects, m *metrics, log *slog.Logger) *services {
	s := &services{node: node, agent: agent, objects: o, m: m, dirty: newDirty(), log: log}
	s.services = informer[*corev1.Service](c.core, "services", &corev1.Service{}, func(o *metav1.ListOptions) { o.LabelSelector = "!" + otherProxy }, m, log, func(svc *corev1.Service) {
		s.dirty.add(svc.Namespace + "/" + svc.Name)
	})
	s.slices = informer[*discoveryv1.EndpointSlice](c.discovery, "endpointslices", &discoveryv1.EndpointSlice{}, func(o *metav1.ListOptions) { o.LabelSelector = "!" + otherProxy + ",!" + headless }, m, log, func(slice *discoveryv1.EndpointSlice) {
		s.dirty.add(slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName])
	})
	utilruntime.Must(s.slices.AddIndexers(cache.Indexers{byService: func(o any) ([]string, error) {
		slice, ok := o.(*discoveryv1.EndpointSlice)
		if !ok {
			return nil, nil
		}
		return []string{slice.Namespace + "/" + slice.Labels[discoveryv1.LabelServiceName]}, nil
	}}))
	return s
}

func (s *services) synced() bool { return s.services.HasSynced() && s.slices.HasSynced() }

// run keeps the agent's services until ctx ends.
func (s *services) run(ctx context.Context) {
	if !cache.WaitForCacheSync(ctx.Done(), s.services.HasSynced, s.slices.HasSynced) {
		return
	}
	s.dirty.all()
	s.dirty.drain(ctx, func(keys map[string]bool, all bool) error {
		if all || s.inForce == nil {
			if err := s.read(ctx); err != nil {
				s.m.failures.WithLabelValues("service").Inc()
				return err
			}
			for _, key := range s.services.GetStore().ListKeys() {
				keys[key] = true
			}
			return s.bring(ctx, keys, true)
		}
		return s.bring(ctx, keys, false)
	}, s.log.With("of", "services"))
}

// read asks the agent what is in force.
func (s *services) read(ctx context.Context) error {
	s.inForce, s.ofKey = nil, make(map[string][]model.ServiceAddr)
	have, err := s.agent.Services(ctx)
	if err != nil {
		return err
	}
	s.inForce = make(map[model.ServiceAddr]model.Service, len(have))
	for _, svc := range have {
		slices.SortFunc(svc.Backends, netip.AddrPort.Compare)
		s.inForce[svc.Addr] = svc
	}
	return nil
}

// bring puts what has changed of the Services named into force. all: what belongs to none of them
// is deleted.
func (s *services) bring(ctx context.Context, keys map[string]bool, all bool) error {
	var edit api.ServiceEdit
	gone, wanted := make(map[model.ServiceAddr]bool), make(map[model.ServiceAddr]bool)
	if all {
		for addr := range s.inForce {
			gone[addr] = true
		}
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		for _, addr := range s.ofKey[key] {
			gone[addr] = true
		}
		delete(s.ofKey, key)
		for _, svc := range s.wanted(ctx, key) {
			if wanted[svc.Addr] {
				continue // the API server gives no address twice
			}
			wanted[svc.Addr] = true
			s.ofKey[key] = append(s.ofKey[key], svc.Addr)
			if have, there := s.inForce[svc.Addr]; !there || have.Affinity != svc.Affinity || !slices.Equal(have.Backends, svc.Backends) {
				edit.Put = append(edit.Put, svc)
			}
		}
	}
	for addr := range gone {
		if !wanted[addr] {
			edit.Delete = append(edit.Delete, addr)
		}
	}
	return s.change(ctx, edit)
}

// Steps of changes: a body of the agent's API has room for them.
const (
	stepServices = 1000
	stepBackends = 20000
)

func (s *services) change(ctx context.Context, edit api.ServiceEdit) error {
	for len(edit.Put)+len(edit.Delete) > 0 {
		var step api.ServiceEdit
		n := min(len(edit.Delete), stepServices)
		step.Delete, edit.Delete = edit.Delete[:n], edit.Delete[n:]
		backends := 0
		n = 0
		for n < len(edit.Put) && n < stepServices && (n == 0 || backends+len(edit.Put[n].Backends) <= stepBackends) {
			backends += len(edit.Put[n].Backends)
			n++
		}
		step.Put, edit.Put = edit.Put[:n], edit.Put[n:]
		if err := s.agent.EditServices(ctx, step); err != nil {
			s.m.failures.WithLabelValues("service").Inc()
			s.inForce = nil
			return fmt.Errorf("change services: %w", err)
		}
		for _, addr := range step.Delete {
			delete(s.inForce, addr)
			s.m.changes.WithLabelValues("service", "deleted").Inc()
		}
		for _, svc := range step.Put {
			s.inForce[svc.Addr] = svc
			s.m.changes.WithLabelValues("service", "changed").Inc()
			s.log.Debug("service is in force", "service", svc.Addr, "backends", len(svc.Backends))
		}
	}
	return nil
}

// wanted gives what a Service is to be on this node: one for each ClusterIP and port of TCP or UDP.
func (s *services) wanted(ctx context.Context, key string) (out []model.Service) {
	o, there, _ := s.services.GetStore().GetByKey(key)
	svc, _ := o.(*corev1.Service)
	namespace, name, _ := strings.Cut(key, "/")
	of := objectKey{apiVersion: "v1", kind: "Service", namespace: namespace, name: name}
	if !there || svc == nil || svc.Spec.Type == corev1.ServiceTypeExternalName {
		s.objects.refuse(ctx, of, "", nil) // nothing of it is left to be refused
		return nil
	}
	endpoints, err := s.slices.GetIndexer().ByIndex(byService, key)
	if err != nil {
		return nil
	}
	var refused []string
	for _, text := range svc.Spec.ClusterIPs {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			continue // "None": headless
		}
		for _, port := range svc.Spec.Ports {
			made := model.Service{Addr: model.ServiceAddr{AddrPort: netip.AddrPortFrom(ip.Unmap(), uint16(port.Port)), UDP: port.Protocol == corev1.ProtocolUDP}}
			switch port.Protocol {
			case corev1.ProtocolTCP, "":
				made.Affinity = affinityOf(svc)
			case corev1.ProtocolUDP: // which backend it is, kube-proxy says
			default:
				continue
			}
			made.Backends = s.backends(svc, port, ip.Unmap().Is4(), endpoints)
			if err := made.Validate(); err != nil {
				refused = append(refused, fmt.Sprintf("%s: %v: left to kube-proxy", made.Addr, err))
				continue
			}
			out = append(out, made)
		}
	}
	s.objects.refuse(ctx, of, svc.UID, refused)
	return out
}

// affinityOf gives the seconds for which a client keeps its backend.
func affinityOf(svc *corev1.Service) uint32 {
	if svc.Spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	c := svc.Spec.SessionAffinityConfig
	if c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return uint32(corev1.DefaultClientIPServiceAffinitySeconds)
	}
	return uint32(max(*c.ClientIP.TimeoutSeconds, 1))
}

// backends gives the addresses behind a port, sorted: those that are ready; if none is, those that
// end and still serve, as kube-proxy does. With internalTrafficPolicy Local, those of this node
// only.
func (s *services) backends(svc *corev1.Service, port corev1.ServicePort, is4 bool, endpoints []any) []netip.AddrPort {
	local := svc.Spec.InternalTrafficPolicy != nil && *svc.Spec.InternalTrafficPolicy == corev1.ServiceInternalTrafficPolicyLocal
	ready, ending := make(map[netip.AddrPort]bool), make(map[netip.AddrPort]bool)
	for _, o := range endpoints {
		slice, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || (slice.AddressType == discoveryv1.AddressTypeIPv4) != is4 || slice.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		number := portOf(slice, port)
		if number == 0 {
			continue
		}
		for _, e := range slice.Endpoints {
			if len(e.Addresses) == 0 || local && (e.NodeName == nil || *e.NodeName != s.node) {
				continue
			}
			a, err := netip.ParseAddr(e.Addresses[0]) // the others are of no meaning: see its documentation
			if err != nil {
				continue
			}
			is := func(condition *bool, without bool) bool {
				return condition == nil && without || condition != nil && *condition
			}
			switch at := netip.AddrPortFrom(a.Unmap(), number); {
			case is(e.Conditions.Ready, true):
				ready[at] = true
			case is(e.Conditions.Serving, false) && is(e.Conditions.Terminating, false):
				ending[at] = true
			}
		}
	}
	if len(ready) == 0 {
		ready = ending
	}
	return slices.SortedFunc(maps.Keys(ready), netip.AddrPort.Compare)
}

// portOf gives the number of a slice's port that a Service's port leads to; 0 if it has none.
func portOf(slice *discoveryv1.EndpointSlice, port corev1.ServicePort) uint16 {
	protocol := func(p corev1.Protocol) corev1.Protocol { return cmp.Or(p, corev1.ProtocolTCP) }
	for _, p := range slice.Ports {
		if p.Port == nil || p.Protocol != nil && *p.Protocol != protocol(port.Protocol) || p.Protocol == nil && protocol(port.Protocol) != corev1.ProtocolTCP || p.Name != nil && *p.Name != port.Name || p.Name == nil && port.Name != "" {
			continue
		}
		return uint16(*p.Port)
	}
	return 0
}

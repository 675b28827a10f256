package kube

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/policy"
)

// What one step of changes may be: well below what the store takes.
const (
	stepChanges = 1000
	stepBytes   = 800 << 10
)

// policyAgent is what policies need of the agent.
type policyAgent interface {
	Policies(ctx context.Context) (api.PolicyDocuments, error)
	EditPolicies(ctx context.Context, edit api.PolicyEdit) ([]api.PolicyOutcome, error)
	Status(ctx context.Context) (api.Status, error)
}

// agentAnswers bounds an answer to one question of policies: an agent that says nothing is as good
// as none.
const agentAnswers = time.Minute

// policies keeps namespaces and NetworkPolicies in the store as the API server has them. What it
// writes has the source policy.SourceKubernetes. Of what others keep it touches only what has the
// name of something that the API server has: that one takes its place.
type policies struct {
	networkPolicies, namespaces cache.SharedIndexInformer
	agent                       policyAgent
	objects                     *objects
	m                           *metrics
	log                         *slog.Logger
	dirty                       *dirty
	newPorts                    func() *podPorts
	ports                       *podPorts // of who leads

	// stored are digests of what the store has of this source, by document; nil: not known.
	stored map[docKey][sha256.Size]byte
}

// docKey names a document of Heddle's: a namespace, or a policy.
type docKey struct{ kind, name string }

const (
	kindPolicy    = "policy"
	kindNamespace = "namespace"
	kindPort      = "port" // of what has changed: its policies are looked at anew
)

func newPolicies(c *cluster, agent policyAgent, o *objects, m *metrics, log *slog.Logger) *policies {
	p := &policies{agent: agent, objects: o, m: m, log: log, dirty: newDirty()}
	everything := func(*metav1.ListOptions) {}
	p.networkPolicies = informer[*networkingv1.NetworkPolicy](c.networking, "networkpolicies", &networkingv1.NetworkPolicy{}, everything, m, log, func(np *networkingv1.NetworkPolicy) {
		p.dirty.add(kindPolicy + " " + np.Namespace + "/" + np.Name)
	})
	p.newPorts = func() *podPorts {
		return newPodPorts(c, m, log, func(port namedPort) { p.dirty.add(kindPort + " " + port.label()) })
	}
	p.namespaces = informer[*corev1.Namespace](c.core, "namespaces", &corev1.Namespace{}, everything, m, log, func(ns *corev1.Namespace) {
		p.dirty.add(kindNamespace + " " + ns.Name)
	})
	return p
}

func (p *policies) synced() bool { return p.networkPolicies.HasSynced() && p.namespaces.HasSynced() }

// able says why the agent could not bring policies into the store now; nil if it could.
func (p *policies) able(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, agentAnswers)
	defer cancel()
	status, err := p.agent.Status(ctx)
	if err == nil && !status.Store.Healthy {
		err = fmt.Errorf("the agent does not reach its store: %s", status.Store.Error)
	}
	return err
}

// lead keeps the store's policies until ctx ends, or its agent has not taken them for as long as
// the Lease lasts. What another one wrote before is compared first.
func (p *policies) lead(ctx context.Context) {
	p.m.leader.Set(1)
	defer p.m.leader.Set(0)
	if !cache.WaitForCacheSync(ctx.Done(), p.networkPolicies.HasSynced, p.namespaces.HasSynced) {
		return
	}
	p.stored, p.ports = nil, p.newPorts()
	p.dirty.all()
	p.dirty.drain(ctx, func(keys map[string]bool, all bool) error {
		if all || p.stored == nil {
			return p.everything(ctx)
		}
		return p.some(ctx, keys)
	}, p.log.With("of", "policies"))
}

// change is one document as it is to be; nil of both: to be deleted.
type change struct {
	key       docKey
	policy    *policy.Policy
	namespace *policy.Namespace
	digest    [sha256.Size]byte
	size      int
	from      objectKey // the object it was made from
	object    metav1.Object
	refused   []string // what of the object is not honoured
	closed    bool     // instead of policy, which the store does not take, something that allows nothing
}

func digest(document any) ([sha256.Size]byte, int) {
	raw, err := json.Marshal(document)
	if err != nil {
		return [sha256.Size]byte{}, 0 // the agent will say
	}
	return sha256.Sum256(raw), len(raw)
}

// withoutPorts gives keys with the NetworkPolicies that name a port in the place of it.
func (p *policies) withoutPorts(keys map[string]bool) map[string]bool {
	isPort := func(key string, _ bool) bool { return strings.HasPrefix(key, kindPort+" ") }
	out := maps.Clone(keys)
	if maps.DeleteFunc(out, isPort); len(out) == len(keys) {
		return keys
	}
	for _, o := range p.networkPolicies.GetStore().List() {
		np, ok := o.(*networkingv1.NetworkPolicy)
		if !ok {
			continue
		}
		for n := range names(np) {
			if keys[kindPort+" "+n.label()] {
				out[kindPolicy+" "+np.Namespace+"/"+np.Name] = true
			}
		}
	}
	return out
}

// ofPolicy says what is to be of the NetworkPolicy of this name: of itself, and of its parts, those
// that are no more among them.
func (p *policies) ofPolicy(ctx context.Context, key string) ([]change, error) {
	namespace, name, _ := strings.Cut(key, "/")
	c := change{key: docKey{kindPolicy, policyName(namespace, name)}, from: objectKey{apiVersion: networkingv1.SchemeGroupVersion.String(), kind: "NetworkPolicy", namespace: namespace, name: name}}
	o, there, _ := p.networkPolicies.GetStore().GetByKey(key)
	np, _ := o.(*networkingv1.NetworkPolicy)
	var parts []part
	var changes []change
	if there && np != nil {
		var refused []string
		whole := np
		if len(names(np)) > 0 {
			if !p.ports.ready(ctx) {
				return nil, ctx.Err()
			}
			whole, parts, refused = byNumber(np, p.ports.numbers)
		}
		c.object = np
		c.policy, c.refused = convert(whole)
		c.refused = append(refused, c.refused...)
		changes = append(changes, c.sized())
	} else {
		changes = append(changes, c)
	}
	prefix := partPrefix(namespace, name)
	wanted := make(map[docKey]bool, len(parts))
	for _, x := range parts {
		x.policy.Name = prefix + x.suffix
		d := change{key: docKey{kindPolicy, namespace + "/" + x.policy.Name}, from: c.from, object: np}
		d.from.part = x.suffix
		d.policy, d.refused = convertPart(x.policy)
		changes, wanted[d.key] = append(changes, d.sized()), true
	}
	for have := range p.stored {
		if suffix, is := strings.CutPrefix(have.name, namespace+"/"+prefix); is && have.kind == kindPolicy && !wanted[have] {
			gone := change{key: have, from: c.from}
			gone.from.part = suffix
			changes = append(changes, gone)
		}
	}
	return changes, nil
}

// sized is c with its policy's digest and size.
func (c change) sized() change {
	if c.policy != nil {
		c.digest, c.size = digest(c.policy)
	}
	return c
}

// ofNamespace says what is to be of the Namespace of this name. False: it cannot be described, and
// stays as it is.
func (p *policies) ofNamespace(ctx context.Context, name string) (change, bool) {
	c := change{key: docKey{kindNamespace, name}, from: objectKey{apiVersion: "v1", kind: "Namespace", name: name}}
	o, there, _ := p.namespaces.GetStore().GetByKey(name)
	ns, _ := o.(*corev1.Namespace)
	if !there || ns == nil {
		return c, true
	}
	made, err := describe(ns)
	if err != nil {
		p.objects.refuse(ctx, c.from, ns.UID, []string{reason(err) + ": the namespace keeps the labels it had"})
		return c, false
	}
	c.namespace, c.object = &made, ns
	c.digest, c.size = digest(made)
	return c, true
}

// some brings what has changed into the store.
func (p *policies) some(ctx context.Context, keys map[string]bool) error {
	var changes []change
	for _, key := range slices.Sorted(maps.Keys(p.withoutPorts(keys))) { // namespaces before policies
		kind, name, _ := strings.Cut(key, " ")
		if kind == kindPolicy {
			of, err := p.ofPolicy(ctx, name)
			if err != nil {
				return err
			}
			changes = append(changes, of...)
		} else if c, ok := p.ofNamespace(ctx, name); ok {
			changes = append(changes, c)
		}
	}
	return p.bring(ctx, changes)
}

// everything compares all of the API server's with all of the store's. What is in the store only is
// deleted, if it is of this source.
func (p *policies) everything(ctx context.Context) error {
	asked, cancel := context.WithTimeout(ctx, agentAnswers)
	docs, err := p.agent.Policies(asked)
	cancel()
	if err != nil {
		p.m.failures.WithLabelValues(kindPolicy).Inc()
		return err
	}
	p.stored = make(map[docKey][sha256.Size]byte, len(docs.Policies)+len(docs.Namespaces))
	for _, n := range docs.Namespaces {
		if n.Source == policy.SourceKubernetes {
			p.stored[docKey{kindNamespace, n.Name}], _ = digest(n)
		}
	}
	for _, pol := range docs.Policies {
		if pol.Source == policy.SourceKubernetes {
			p.stored[docKey{kindPolicy, pol.Name}], _ = digest(pol)
		}
	}
	var changes []change
	wanted := make(map[docKey]bool)
	for _, name := range slices.Sorted(slices.Values(p.namespaces.GetStore().ListKeys())) {
		c, ok := p.ofNamespace(ctx, name)
		wanted[c.key] = true
		if ok {
			changes = append(changes, c)
		}
	}
	for _, key := range slices.Sorted(slices.Values(p.networkPolicies.GetStore().ListKeys())) {
		of, err := p.ofPolicy(ctx, key)
		if err != nil {
			return err
		}
		for _, c := range of {
			wanted[c.key] = true
		}
		changes = append(changes, of...)
	}
	for key := range p.stored {
		if !wanted[key] {
			changes = append(changes, change{key: key})
		}
	}
	return p.bring(ctx, changes)
}

// bring makes changes in as few steps as they need. Those that make no difference are left out.
func (p *policies) bring(ctx context.Context, changes []change) error {
	changes = slices.DeleteFunc(changes, func(c change) bool {
		have, there := p.stored[c.key]
		same := there && have == c.digest
		if c.policy == nil && c.namespace == nil {
			same = !there
		}
		if same {
			p.tell(ctx, c)
		}
		return same
	})
	for len(changes) > 0 {
		n, size := 0, 0
		for n < len(changes) && n < stepChanges && (n == 0 || size+changes[n].size < stepBytes) {
			size += changes[n].size
			n++
		}
		if err := p.step(ctx, changes[:n]); err != nil {
			p.m.failures.WithLabelValues(kindPolicy).Inc()
			p.stored = nil // of what failed it is not known whether it was done
			return err
		}
		changes = changes[n:]
	}
	return nil
}

// tell says what of a change's object is not honoured.
func (p *policies) tell(ctx context.Context, c change) {
	if c.object == nil {
		p.objects.refuse(ctx, c.from, "", nil)
		return
	}
	p.objects.refuse(ctx, c.from, c.object.GetUID(), c.refused)
}

// close puts what allows nothing in the place of a policy that the store does not take.
func (p *policies) close(ctx context.Context, c change, why error) error {
	c.policy, c.closed = closed(c.policy), true
	c.digest, c.size = digest(c.policy)
	c.refused = append(slices.Clone(c.refused), "the store does not take it: "+why.Error()+": its rules are left out and its subject is held closed")
	if p.stored[c.key] == c.digest {
		p.tell(ctx, c)
		return nil
	}
	return p.step(ctx, []change{c})
}

// step makes changes in one step. If they are too much together each is tried alone, so that one
// that is too much does not hold up the others.
func (p *policies) step(ctx context.Context, changes []change) error {
	edit := api.PolicyEdit{Source: policy.SourceKubernetes}
	for _, c := range changes {
		switch {
		case c.policy != nil:
			edit.Policies = append(edit.Policies, c.policy)
		case c.namespace != nil:
			edit.Namespaces = append(edit.Namespaces, *c.namespace)
		case c.key.kind == kindPolicy:
			edit.Delete = append(edit.Delete, c.key.name)
		default:
			edit.DeleteNamespaces = append(edit.DeleteNamespaces, c.key.name)
		}
	}
	asked, cancel := context.WithTimeout(ctx, agentAnswers)
	outcomes, err := p.agent.EditPolicies(asked, edit)
	cancel()
	tooMuch := errors.Is(err, api.ErrExhausted) || errors.Is(err, api.ErrInvalid) || errors.Is(err, &api.Error{Code: api.CodeTooLarge})
	switch {
	case tooMuch && len(changes) > 1:
		for i := range changes {
			if err := p.step(ctx, changes[i:i+1]); err != nil {
				return err
			}
		}
		return nil
	case tooMuch && changes[0].policy != nil && !changes[0].closed:
		return p.close(ctx, changes[0], err)
	case tooMuch && changes[0].object != nil:
		c := changes[0]
		c.refused = append(slices.Clone(c.refused), "the store does not take it: "+err.Error()+": NOT in force, what it was before holds")
		p.tell(ctx, c)
		return nil
	case err != nil:
		return err
	}
	for _, o := range outcomes {
		p.m.changes.WithLabelValues(o.Kind, o.Change).Inc()
		if _, own := p.stored[docKey{o.Kind, o.Name}]; !own && o.Change == "changed" {
			p.log.Warn("the API server's takes the place of what somebody else kept", o.Kind, o.Name)
		}
		p.log.Info("brought into the store", o.Kind, o.Name, "change", o.Change)
	}
	for _, c := range changes {
		p.tell(ctx, c)
		if c.policy == nil && c.namespace == nil {
			delete(p.stored, c.key)
		} else {
			p.stored[c.key] = c.digest
		}
	}
	return nil
}

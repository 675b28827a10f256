package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
	"heddle.dev/heddle/internal/policy"
)

// configHash is the annotation of a pod that the node's own files say, in the API server's copy:
// the UID that the node knows it by, which is not that of the copy.
const configHash = "kubernetes.io/config.hash"

// podAgent is what pods need of the agent.
type podAgent interface {
	Endpoints(ctx context.Context) ([]model.Endpoint, error)
	LabelEndpoint(ctx context.Context, name string, req api.LabelRequest) (model.Endpoint, error)
}

// pods keeps the labels of this node's endpoints as those of their pods: when they are made, by
// answers to heddle-cni, and when pods' labels change.
type pods struct {
	informer cache.SharedIndexInformer
	agent    podAgent
	objects  *objects
	m        *metrics
	log      *slog.Logger
	dirty    *dirty

	again time.Duration // between looks at a pod whose endpoint is being made

	mu      sync.Mutex
	changed chan struct{}      // closed and made anew with every change of a pod
	awaited map[string]awaited // by the pod's key
}

// awaited is an endpoint that heddle-cni has asked labels for, and is about to make.
type awaited struct {
	uid   string
	until time.Time
	look  *time.Timer // has the pod looked at again
}

func newPods(c *cluster, node string, agent podAgent, o *objects, m *metrics, log *slog.Logger) *pods {
	p := &pods{agent: agent, objects: o, m: m, log: log, dirty: newDirty(), changed: make(chan struct{}), again: lookAgain, awaited: make(map[string]awaited)}
	p.informer = informer[*corev1.Pod](c.core, "pods", &corev1.Pod{}, func(o *metav1.ListOptions) { o.FieldSelector = "spec.nodeName=" + node }, m, log, p.tell)
	return p
}

func (p *pods) tell(pod *corev1.Pod) {
	if pod.Spec.HostNetwork {
		return // it has no endpoint
	}
	p.dirty.add(pod.Namespace + "/" + pod.Name)
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.changed)
	p.changed = make(chan struct{})
}

// labelsOf gives the labels of a pod's endpoint. A named port has one as long as there is room for
// it; leftOut says which has not.
func labelsOf(pod *corev1.Pod) (labels map[string]string, leftOut []string) {
	labels = make(map[string]string, len(pod.Labels)+3)
	for k, v := range pod.Labels {
		if !strings.HasPrefix(k, podlabels.Reserved) {
			labels[k] = v
		}
	}
	labels[policy.NamespaceLabel], labels[podlabels.Pod], labels[podlabels.UID] = pod.Namespace, pod.Name, uidOf(pod)
	ports := portsOf(pod)
	for _, p := range slices.SortedFunc(maps.Keys(ports), func(a, b namedPort) int { return strings.Compare(a.label(), b.label()) }) {
		if len(labels) >= api.MaxLabels {
			leftOut = append(leftOut, fmt.Sprintf("port %q: %d labels are all that an endpoint can have: policies that name the port do not find it here", p.name, api.MaxLabels))
			continue
		}
		labels[p.label()] = strconv.Itoa(int(ports[p]))
	}
	return labels, leftOut
}

// uidOf gives the UID by which the node knows a pod.
func uidOf(pod *corev1.Pod) string {
	if hash := pod.Annotations[configHash]; hash != "" {
		return hash
	}
	return string(pod.UID)
}

func (p *pods) get(namespace, name string) *corev1.Pod {
	o, there, err := p.informer.GetStore().GetByKey(namespace + "/" + name)
	if err != nil || !there {
		return nil
	}
	pod, _ := o.(*corev1.Pod)
	return pod
}

// lookup answers heddle-cni. The API server may tell of a pod later than it told kubelet, so it
// waits.
func (p *pods) lookup(ctx context.Context, q podlabels.Question) (map[string]string, error) {
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		pod := p.get(q.Namespace, q.Name)
		if pod != nil && (q.UID == "" || q.UID == uidOf(pod) || q.UID == string(pod.UID)) {
			p.m.asked.WithLabelValues("answered").Inc()
			labels, _ := labelsOf(pod)
			p.await(q.Namespace+"/"+q.Name, labels[podlabels.UID])
			return labels, nil
		}
		select {
		case <-ctx.Done():
			p.m.asked.WithLabelValues("unknown").Inc()
			if !p.informer.HasSynced() {
				return nil, fmt.Errorf("the API server has not told which pods there are")
			}
			return nil, podlabels.ErrUnknown
		case <-changed:
		}
	}
}

// seenPod is one whose endpoint is there, and has its labels.
type seenPod struct{ key, uid string }

// lookAgain is how long most endpoints take to be there, once heddle-cni has asked about them.
const lookAgain = 2 * time.Second

// await has a pod looked at until its endpoint is there: what changes between an answer to
// heddle-cni and the endpoint's making is told while there is nothing to be labelled.
func (p *pods) await(key, uid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if before, is := p.awaited[key]; is {
		before.look.Stop()
	}
	p.awaited[key] = awaited{uid, time.Now().Add(podlabels.Making), time.AfterFunc(p.again, func() { p.dirty.add(key) })}
}

// awaitOn ends the waiting for endpoints that have been seen, and for those that nobody makes any
// more. Of the others those that were looked at are looked at again.
func (p *pods) awaitOn(seen map[seenPod]bool, looked func(key string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, a := range p.awaited {
		switch {
		case seen[seenPod{key, a.uid}] || time.Now().After(a.until):
			a.look.Stop()
			delete(p.awaited, key)
		case looked(key):
			a.look.Reset(p.again)
		}
	}
}

// run brings changes of labels to endpoints until ctx ends.
func (p *pods) run(ctx context.Context) {
	if !cache.WaitForCacheSync(ctx.Done(), p.informer.HasSynced) {
		return
	}
	p.dirty.all()
	p.dirty.drain(ctx, func(keys map[string]bool, all bool) error { return p.pass(ctx, keys, all) }, p.log.With("of", "pods"))
}

// pass compares the endpoints of these pods with them, or all.
func (p *pods) pass(ctx context.Context, keys map[string]bool, all bool) error {
	endpoints, err := p.agent.Endpoints(ctx)
	if err != nil {
		p.m.failures.WithLabelValues("pod").Inc()
		return err
	}
	for key := range keys {
		if namespace, name, _ := strings.Cut(key, "/"); p.get(namespace, name) == nil {
			p.objects.refuse(ctx, podKey(namespace, name), "", nil) // nothing of it is left to be refused
		}
	}
	var failed error
	seen := make(map[seenPod]bool)
	looked := func(key string) bool { return all || keys[key] }
	for _, e := range endpoints {
		namespace, name, uid := e.Labels[policy.NamespaceLabel], e.Labels[podlabels.Pod], e.Labels[podlabels.UID]
		if uid == "" || !looked(namespace+"/"+name) {
			continue
		}
		if err := p.relabel(ctx, e, p.get(namespace, name)); err != nil {
			p.m.failures.WithLabelValues("pod").Inc()
			failed = err
			continue
		}
		seen[seenPod{namespace + "/" + name, uid}] = true
	}
	p.awaitOn(seen, looked)
	return failed
}

func podKey(namespace, name string) objectKey {
	return objectKey{apiVersion: "v1", kind: "Pod", namespace: namespace, name: name}
}

// relabel gives endpoint e the labels of its pod. Without a pod, or with another one of the name,
// it keeps what it has: it is about to go.
func (p *pods) relabel(ctx context.Context, e model.Endpoint, pod *corev1.Pod) error {
	if pod == nil || uidOf(pod) != e.Labels[podlabels.UID] && string(pod.UID) != e.Labels[podlabels.UID] {
		return nil
	}
	want, leftOut := labelsOf(pod)
	key := podKey(pod.Namespace, pod.Name)
	want[podlabels.UID] = e.Labels[podlabels.UID]
	if maps.Equal(want, e.Labels) {
		p.objects.refuse(ctx, key, pod.UID, leftOut)
		return nil
	}
	req := api.LabelRequest{Set: map[string]string{}}
	for k, v := range want {
		if have, there := e.Labels[k]; !there || have != v {
			req.Set[k] = v
		}
	}
	for k := range e.Labels {
		if _, there := want[k]; !there {
			req.Remove = append(req.Remove, k)
		}
	}
	_, err := p.agent.LabelEndpoint(ctx, e.Name, req)
	switch {
	case errors.Is(err, api.ErrInvalid), errors.Is(err, api.ErrExhausted):
		// Trying again would not help. The labels from before hold.
		p.objects.refuse(ctx, key, pod.UID, append(leftOut, "labels: "+err.Error()+": the endpoint keeps those it had"))
		return nil
	case errors.Is(err, api.ErrNotFound):
		return nil // it went meanwhile
	case err != nil:
		return fmt.Errorf("label endpoint %s: %w", e.Name, err)
	}
	p.objects.refuse(ctx, key, pod.UID, leftOut)
	p.m.changes.WithLabelValues("pod", "changed").Inc()
	p.log.Info("labels of a pod have changed", "pod", pod.Namespace+"/"+pod.Name, "endpoint", e.Name)
	return nil
}

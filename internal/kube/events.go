package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// eventTimeout bounds the writing of an Event: it is news for people, and nothing waits for it to
// be read.
const eventTimeout = 5 * time.Second

// maxMessage is what an Event's message may be long.
const maxMessage = 1000

// objects says in logs, Events and a metric which objects Heddle cannot honour as they are. An
// object is told of once, and again when there is something else to tell.
type objects struct {
	core rest.Interface
	node string // whose heddle-kube says it
	m    *metrics
	log  *slog.Logger

	mu   sync.Mutex
	told map[objectKey]string
}

type objectKey struct {
	apiVersion, kind, namespace, name string
	part                              string // of what is told of by itself (see part); else empty
}

func newObjects(core rest.Interface, node string, m *metrics, log *slog.Logger) *objects {
	return &objects{core: core, node: node, m: m, log: log, told: make(map[objectKey]string)}
}

// refuse says what is left out of an object, or, without reasons, that all of it is honoured
// (again).
func (o *objects) refuse(ctx context.Context, key objectKey, uid types.UID, reasons []string) {
	message := strings.Join(reasons, "; ")
	if len(message) > maxMessage {
		message = message[:maxMessage] + " ..."
	}
	message = strings.ToValidUTF8(message, "?")
	o.mu.Lock()
	before, there := o.told[key]
	switch {
	case message == "" && !there, message != "" && message == before:
		o.mu.Unlock()
		return
	case message == "":
		delete(o.told, key)
	default:
		o.told[key] = message
	}
	refused := make(map[objectKey]bool)
	for k := range o.told {
		if k.part = ""; k.kind == key.kind {
			refused[k] = true
		}
	}
	o.m.refused.WithLabelValues(key.kind).Set(float64(len(refused)))
	o.mu.Unlock()
	if message == "" {
		o.log.Info("object is honoured as a whole now", "kind", key.kind, "namespace", key.namespace, "name", key.name)
		return
	}
	o.log.Warn("object is not honoured as it is", "kind", key.kind, "namespace", key.namespace, "name", key.name, "reason", message)
	if err := o.post(ctx, key, uid, message); err != nil {
		o.log.Warn("write event", "kind", key.kind, "namespace", key.namespace, "name", key.name, "error", err)
	}
}

func (o *objects) post(ctx context.Context, key objectKey, uid types.UID, message string) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	now := metav1.Now()
	namespace := key.namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault // where events of objects without a namespace are
	}
	name := key.name[:min(len(key.name), 200)]
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%s.%x", strings.TrimRight(name, ".-"), now.UnixNano())},
		InvolvedObject: corev1.ObjectReference{APIVersion: key.apiVersion, Kind: key.kind, Namespace: key.namespace, Name: key.name, UID: uid},
		Reason:         "NotSupported", Message: message, Type: corev1.EventTypeWarning, Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source: corev1.EventSource{Component: "heddle-kube", Host: o.node}, ReportingController: "heddle-kube", ReportingInstance: o.node,
	}
	return o.core.Post().Namespace(namespace).Resource("events").Body(e).Do(ctx).Error()
}

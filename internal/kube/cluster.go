package kube

import (
	"context"
	"fmt"
	"log/slog"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"

	"heddle.dev/heddle/internal/version"
)

// cluster has a client for each group of the API that is used. They are made here rather than taken
// from client-go's clientset, which has clients of all groups: four times the code.
type cluster struct {
	core, networking, discovery, coordination rest.Interface
}

var scheme = runtime.NewScheme()

func init() {
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, networkingv1.AddToScheme, discoveryv1.AddToScheme, coordinationv1.AddToScheme} {
		utilruntime.Must(add(scheme))
	}
}

// clientConfig reads a kubeconfig file; without one, what a pod of the cluster is given.
func clientConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("not in a pod with a service account, and no --kubeconfig: %w", err)
		}
		return c, nil
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	return c, nil
}

func connect(config *rest.Config) (*cluster, error) {
	codecs := serializer.NewCodecFactory(scheme)
	client := func(gv schema.GroupVersion) (rest.Interface, error) {
		c := rest.CopyConfig(config)
		c.GroupVersion, c.APIPath = &gv, "/apis"
		if gv.Group == "" {
			c.APIPath = "/api"
		}
		c.NegotiatedSerializer = codecs.WithoutConversion()
		c.UserAgent = "heddle-kube/" + version.String()
		c.AcceptContentTypes, c.ContentType = "application/vnd.kubernetes.protobuf,application/json", "application/json"
		return rest.RESTClientFor(c)
	}
	var c cluster
	for gv, to := range map[schema.GroupVersion]*rest.Interface{
		corev1.SchemeGroupVersion: &c.core, networkingv1.SchemeGroupVersion: &c.networking,
		discoveryv1.SchemeGroupVersion: &c.discovery, coordinationv1.SchemeGroupVersion: &c.coordination,
	} {
		got, err := client(gv)
		if err != nil {
			return nil, fmt.Errorf("client of %s: %w", gv, err)
		}
		*to = got
	}
	return &c, nil
}

// informer follows one kind of object. changed is told of each object that came, changed or went.
// Nothing of a lost connection is seen but that news stop: what was there stays, and what went
// meanwhile is told once it is back.
func informer[T runtime.Object](client rest.Interface, resource string, example T, selection func(*metav1.ListOptions), m *metrics, log *slog.Logger, changed func(T)) cache.SharedIndexInformer {
	lw := cache.NewFilteredListWatchFromClient(client, resource, metav1.NamespaceAll, selection)
	inf := cache.NewSharedIndexInformer(lw, example, 0, cache.Indexers{})
	// Errors of these come only once the informer runs.
	utilruntime.Must(inf.SetTransform(func(o any) (any, error) {
		if m, ok := o.(metav1.Object); ok {
			m.SetManagedFields(nil) // half of most objects
		}
		return o, nil
	}))
	utilruntime.Must(inf.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) {
		m.watchErrors.WithLabelValues(resource).Inc()
		log.Warn("API server does not tell of changes; what it said last holds", "resource", resource, "error", err)
	}))
	tell := func(o any) {
		if unknown, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = unknown.Obj
		}
		if object, ok := o.(T); ok {
			changed(object)
		}
	}
	_, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, UpdateFunc: func(_, o any) { tell(o) }, DeleteFunc: tell})
	utilruntime.Must(err)
	return inf
}

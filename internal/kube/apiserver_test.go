package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// apiServer is an API server that keeps objects as they are given to it: lists, watches, gets, puts
// and posts, over HTTP, so that what is tested is all that heddle-kube has of client-go.
type apiServer struct {
	t      *testing.T
	server *httptest.Server

	mu       sync.Mutex
	changed  *sync.Cond
	revision int
	objects  map[string]map[string]object // by resource, by namespace/name
	log      []logEntry
	oldest   int  // revisions before it are forgotten
	away     bool // answers nothing, and no watch goes on
	watchers int
	lists    map[string]int
	posted   []corev1.Event
}

type object struct {
	revision int
	raw      json.RawMessage
}

type logEntry struct {
	revision       int
	resource, kind string
	raw            json.RawMessage
}

func newAPIServer(t *testing.T) *apiServer {
	a := &apiServer{t: t, objects: make(map[string]map[string]object), lists: make(map[string]int), revision: 10}
	a.changed = sync.NewCond(&a.mu)
	a.server = httptest.NewServer(http.HandlerFunc(a.serve))
	t.Cleanup(func() {
		a.setAway(true)
		a.server.Close()
	})
	return a
}

func (a *apiServer) config() *rest.Config { return &rest.Config{Host: a.server.URL, QPS: -1} }

// put adds or changes an object.
func (a *apiServer) put(resource string, o metav1.Object) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.putLocked(resource, o)
}

func (a *apiServer) putLocked(resource string, o metav1.Object) {
	a.revision++
	o.SetResourceVersion(strconv.Itoa(a.revision))
	if o.GetUID() == "" {
		o.SetUID("uid-of-a")
	}
	raw := a.encode(o)
	key := o.GetNamespace() + "/" + o.GetName()
	if a.objects[resource] == nil {
		a.objects[resource] = make(map[string]object)
	}
	kind := "ADDED"
	if _, there := a.objects[resource][key]; there {
		kind = "MODIFIED"
	}
	a.objects[resource][key] = object{a.revision, raw}
	a.log = append(a.log, logEntry{a.revision, resource, kind, raw})
	a.changed.Broadcast()
}

// encode gives the object with its kind, as an API server does.
func (a *apiServer) encode(o any) json.RawMessage {
	kinds, _, err := scheme.ObjectKinds(o.(runtime.Object))
	if err != nil {
		panic(err)
	}
	o.(runtime.Object).GetObjectKind().SetGroupVersionKind(kinds[0])
	raw, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	return raw
}

func (a *apiServer) delete(resource, key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	o, there := a.objects[resource][key]
	if !there {
		a.t.Errorf("no %s %s to delete", resource, key)
		return
	}
	a.revision++
	delete(a.objects[resource], key)
	raw := []byte(strings.Replace(string(o.raw), fmt.Sprintf(`"resourceVersion":"%d"`, o.revision), fmt.Sprintf(`"resourceVersion":"%d"`, a.revision), 1))
	a.log = append(a.log, logEntry{a.revision, resource, "DELETED", raw})
	a.changed.Broadcast()
}

// setAway makes the server answer nothing, or come back.
func (a *apiServer) setAway(away bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.away = away
	a.changed.Broadcast()
	for away && a.watchers > 0 {
		a.changed.Wait()
	}
}

// forget lets no watch begin at a revision of before.
func (a *apiServer) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.oldest, a.log = a.revision, nil
}

func (a *apiServer) events() []corev1.Event {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]corev1.Event(nil), a.posted...)
}

func (a *apiServer) listed(resource string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists[resource]
}

var listKinds = map[string]string{"pods": "v1 PodList", "namespaces": "v1 NamespaceList", "networkpolicies": "networking.k8s.io/v1 NetworkPolicyList",
	"services": "v1 ServiceList", "endpointslices": "discovery.k8s.io/v1 EndpointSliceList"}

func (a *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.away {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	// /api/v1/pods, /apis/GROUP/v1/networkpolicies, /apis/GROUP/v1/namespaces/NS/leases/NAME
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")[2:]
	if parts[0] == "v1" {
		parts = parts[1:]
	}
	var namespace, name string
	if len(parts) > 2 {
		namespace, parts = parts[1], parts[2:]
	}
	if len(parts) > 1 {
		name = parts[1]
	}
	resource := parts[0]
	q := r.URL.Query()
	switch {
	case q.Get("sendInitialEvents") != "": // an API server that cannot: the client lists then
		status(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case q.Get("watch") != "":
		a.watch(w, r, resource)
	case r.Method == http.MethodGet && name == "" && listKinds[resource] != "":
		a.lists[resource]++
		a.list(w, resource)
	case r.Method == http.MethodGet:
		o, there := a.objects[resource][namespace+"/"+name]
		if !there {
			status(w, http.StatusNotFound, metav1.StatusReasonNotFound)
			return
		}
		_, _ = w.Write(o.raw)
	default:
		a.write(w, r, resource, namespace)
	}
}

func status(w http.ResponseWriter, code int, reason metav1.StatusReason) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: int32(code), Reason: reason})
}

func (a *apiServer) list(w http.ResponseWriter, resource string) {
	version, kind, _ := strings.Cut(listKinds[resource], " ")
	items := []json.RawMessage{}
	for _, o := range a.objects[resource] {
		items = append(items, o.raw)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"apiVersion": version, "kind": kind,
		"metadata": map[string]string{"resourceVersion": strconv.Itoa(a.revision)}, "items": items})
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, resource string) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	send := func(kind string, o any) {
		_ = json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	if from < a.oldest {
		send("ERROR", metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Code: http.StatusGone, Reason: metav1.StatusReasonExpired})
		return
	}
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	go func() {
		<-r.Context().Done()
		a.changed.Broadcast()
	}()
	a.watchers++
	defer func() {
		a.watchers--
		a.changed.Broadcast()
	}()
	for !a.away && r.Context().Err() == nil {
		for _, e := range a.log {
			if e.revision > from && e.resource == resource {
				send(e.kind, e.raw)
			}
		}
		from = a.revision
		a.changed.Wait()
	}
	if a.away {
		panic(http.ErrAbortHandler)
	}
}

// write takes leases, with the API server's check of revisions, and Events.
func (a *apiServer) write(w http.ResponseWriter, r *http.Request, resource, namespace string) {
	if resource == "events" {
		var e corev1.Event
		if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
			a.t.Errorf("event: %v", err)
		}
		a.posted = append(a.posted, e)
		_, _ = w.Write(a.encode(&e))
		return
	}
	l, err := decodeLease(r.Body)
	if err != nil {
		a.t.Errorf("%s %s: %v", r.Method, r.URL, err)
		status(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
		return
	}
	have, there := a.objects[resource][namespace+"/"+l.Name]
	switch {
	case r.Method == http.MethodPost && there:
		status(w, http.StatusConflict, metav1.StatusReasonAlreadyExists)
		return
	case r.Method == http.MethodPut && l.ResourceVersion != strconv.Itoa(have.revision):
		status(w, http.StatusConflict, metav1.StatusReasonConflict)
		return
	}
	a.putLocked(resource, l)
	_, _ = w.Write(a.objects[resource][namespace+"/"+l.Name].raw)
}

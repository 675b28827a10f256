// Package podlabels is what heddle-cni asks heddle-kube when a pod is attached: the labels of its
// endpoint. An endpoint of Kubernetes is made with its pod's labels or not at all, so that there is
// no moment at which policies that select the pod do not hold. It is one request over a Unix
// socket: docs/howto/kubernetes.md.
package podlabels

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// DefaultSocket is where heddle-kube listens.
const DefaultSocket = "/run/heddle/kube.sock"

// Labels of an endpoint that are not its pod's own. Those of a pod that begin with Reserved are
// left out: whoever writes pods must not choose what only the node knows.
const (
	Reserved = "io.heddle."
	Pod      = "io.heddle.pod"     // the pod's name
	UID      = "io.heddle.pod.uid" // the pod's UID: one that is made anew under the same name has another
	Port     = "io.heddle.port."   // before "tcp/NAME" or "udp/NAME": the number of a port of the pod's containers
)

// Wait bounds an answer: a pod may be started before the watch has told of it.
const Wait = 20 * time.Second

// Making bounds an operation of heddle-cni: an endpoint that it has asked about is there by then,
// or is not made.
const Making = 100 * time.Second

// maxAnswer is more than the labels of a pod that an endpoint can have.
const maxAnswer = 1 << 20

// maxName is the length of a name in Kubernetes.
const maxName = 253

// Question names a pod. Without a UID the pod of the name is meant that there is now.
type Question struct{ Namespace, Name, UID string }

// Validate reports what is wrong with a question.
func (q Question) Validate() error {
	for what, s := range map[string]string{"namespace": q.Namespace, "name": q.Name} {
		if s == "" || len(s) > maxName || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == '/' || r > '~' }) {
			return fmt.Errorf("%s %.60q is no %s of a pod", what, s, what)
		}
	}
	if len(q.UID) > maxName {
		return fmt.Errorf("UID of %d bytes", len(q.UID))
	}
	return nil
}

// ErrUnknown says that there is no such pod, as far as the API server has told.
var ErrUnknown = errors.New("the API server has not told of this pod")

type answer struct {
	Labels map[string]string `json:"labels,omitempty"`
	Error  string            `json:"error,omitempty"`
}

// Handler answers questions by lookup. What lookup returns as an error is the answer's text.
func Handler(lookup func(context.Context, Question) (map[string]string, error)) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/pods/{namespace}/{name}/labels", func(w http.ResponseWriter, r *http.Request) {
		q := Question{r.PathValue("namespace"), r.PathValue("name"), r.URL.Query().Get("uid")}
		if err := q.Validate(); err != nil {
			reply(w, http.StatusBadRequest, answer{Error: err.Error()})
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), Wait)
		defer cancel()
		labels, err := lookup(ctx, q)
		switch {
		case errors.Is(err, ErrUnknown):
			reply(w, http.StatusNotFound, answer{Error: err.Error()})
		case err != nil:
			reply(w, http.StatusServiceUnavailable, answer{Error: err.Error()})
		default:
			reply(w, http.StatusOK, answer{Labels: labels})
		}
	})
	return mux
}

func reply(w http.ResponseWriter, status int, a answer) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(a) // who asked is gone
}

// Ask asks heddle-kube at socket. The labels have those that are not the pod's own, too.
func Ask(ctx context.Context, socket string, q Question) (map[string]string, error) {
	if err := q.Validate(); err != nil {
		return nil, err
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}}
	target := "http://heddle-kube/v1/pods/" + url.PathEscape(q.Namespace) + "/" + url.PathEscape(q.Name) + "/labels?uid=" + url.QueryEscape(q.UID)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		var wrapped *url.Error // its URL is made up
		if errors.As(err, &wrapped) {
			err = wrapped.Err
		}
		return nil, fmt.Errorf("ask heddle-kube at %s: %w", socket, err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("ask heddle-kube at %s: %w", socket, err)
	}
	var a answer
	if err := json.Unmarshal(raw, &a); err != nil {
		return nil, fmt.Errorf("ask heddle-kube at %s: answer %d: %w", socket, resp.StatusCode, err)
	}
	switch {
	case resp.StatusCode == http.StatusNotFound:
		return nil, fmt.Errorf("pod %s/%s: %w", q.Namespace, q.Name, ErrUnknown)
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("labels of pod %s/%s: %s", q.Namespace, q.Name, a.Error)
	case a.Labels[UID] == "":
		return nil, fmt.Errorf("ask heddle-kube at %s: the answer names no pod", socket)
	}
	return a.Labels, nil
}

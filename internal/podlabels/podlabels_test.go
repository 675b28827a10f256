package podlabels

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
)

func serve(t *testing.T, lookup func(context.Context, Question) (map[string]string, error)) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: Handler(lookup)}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return socket
}

func TestAsk(t *testing.T) {
	labels := map[string]string{"app": "web", "example.org/x": "1 ", UID: "u1"}
	asked := make(chan Question, 10)
	socket := serve(t, func(_ context.Context, q Question) (map[string]string, error) {
		asked <- q
		switch q.Name {
		case "web-1":
			return labels, nil
		case "gone":
			return nil, ErrUnknown
		case "nobody":
			return map[string]string{"app": "web"}, nil
		}
		return nil, errors.New("no API server")
	})
	q := Question{"shop", "web-1", "u1"}
	got, err := Ask(t.Context(), socket, q)
	if err != nil || !maps.Equal(got, labels) {
		t.Errorf("got %v, %v", got, err)
	}
	if seen := <-asked; seen != q {
		t.Errorf("asked %+v", seen)
	}
	if _, err := Ask(t.Context(), socket, Question{"shop", "gone", ""}); !errors.Is(err, ErrUnknown) {
		t.Errorf("unknown pod: %v", err)
	}
	if _, err := Ask(t.Context(), socket, Question{"shop", "other", ""}); err == nil || !strings.Contains(err.Error(), "no API server") {
		t.Errorf("error of lookup: %v", err)
	}
	if _, err := Ask(t.Context(), socket, Question{"shop", "nobody", ""}); err == nil {
		t.Error("an answer that names no pod is taken")
	}
	if _, err := Ask(t.Context(), socket, Question{"shop", "a/b", ""}); err == nil {
		t.Error("name with a slash is taken")
	}
	if _, err := Ask(t.Context(), socket+"x", q); err == nil || !strings.Contains(err.Error(), "heddle-kube at") {
		t.Errorf("nobody there: %v", err)
	}
}

// FuzzHandler gives the handler targets: it answers each, and never asks about a pod that no pod
// can be.
func FuzzHandler(f *testing.F) {
	f.Add("/v1/pods/shop/web-1/labels?uid=u1")
	f.Add("/v1/pods/shop/a%2fb/labels")
	f.Add("/v1/pods//x/labels?uid=%zz")
	h := Handler(func(_ context.Context, q Question) (map[string]string, error) {
		if err := q.Validate(); err != nil {
			panic(err)
		}
		return map[string]string{UID: "1"}, nil
	})
	f.Fuzz(func(t *testing.T, target string) {
		r, err := http.NewRequest(http.MethodGet, "http://x"+target, nil)
		if err != nil || r.URL.Host != "x" {
			return
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code < 200 || w.Code > 599 {
			t.Errorf("status %d", w.Code)
		}
	})
}

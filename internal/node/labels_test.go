package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/store"
)

// putStore is a store that takes endpoints, unless it fails.
type putStore struct {
	store.Store
	fails error
	has   map[string]string // the labels of the last endpoint that it took
}

func (s *putStore) PutEndpoint(_ context.Context, e model.Endpoint) error {
	if s.fails == nil {
		s.has = e.Labels
	}
	return s.fails
}

// TestLabelsAllOrNone: labels that a part of the agent or the store cannot have, nobody has.
func TestLabelsAllOrNone(t *testing.T) {
	verdicts := &fakeVerdicts{}
	h := recordingHost(t.TempDir())
	tcp, kept := &countedTCP{told: make(map[model.EndpointID]stack.Choice)}, &putStore{}
	h.store = kept
	h.stacker = newStacker("n1", newAway(func() {}), &h.faults, h.log)
	h.stacker.planes, h.stacker.kernel = tcp, tcp
	var state store.State
	h.enforcer, state = testEnforcer(verdicts)
	defer h.enforcer.close()
	e := endpointOf(1, "n1/c1", "10.244.1.2")
	state.Endpoints = model.EndpointsOf(e)
	if err := errors.Join(h.enforcer.follow(state, nil), h.enforcer.set(e), h.stacker.set(e)); err != nil {
		t.Fatal(err)
	}
	h.known.add(e)
	es := &endpoints{host: h}
	label := func(what string, ok bool, want map[string]string) {
		t.Helper()
		_, err := es.LabelEndpoint(t.Context(), e.Name, api.LabelRequest{Set: map[string]string{"a": "b"}})
		known, _ := h.known.named(e.Name)
		for who, has := range map[string]map[string]string{"store": kept.has, "agent": known.Labels, "policy": h.enforcer.own[e.ID].Labels, "stack": h.stacker.own[e.ID].Labels} {
			if !maps.Equal(has, want) {
				t.Errorf("%s: the %s has %v, want %v", what, who, has, want)
			}
		}
		if (err == nil) != ok {
			t.Errorf("%s: %v", what, err)
		}
	}
	verdicts.failApply = 1
	label("policy fails", false, nil)
	tcp.fails = errors.New("no such stack")
	label("stack fails", false, nil)
	tcp.fails, kept.fails = nil, errors.New("no space")
	label("store fails", false, nil)
	kept.fails = nil
	label("nothing fails", true, map[string]string{"a": "b"})
	other := api.EndpointRequest{Name: e.Name, NetnsPath: e.NetnsPath, Intercepted: e.Planes.TCP.Intercepted, Labels: map[string]string{"a": "c"}}
	var refusal *api.Error
	if _, err := es.CreateEndpoint(t.Context(), other); !errors.As(err, &refusal) || refusal.Field != "labels" || !strings.Contains(refusal.Remedy, "label n1/c1") {
		t.Errorf("made again with another label: %v", err)
	}
}

// TestLabelsFitTheStore: labels that the API lets pass are taken by the store, and those that it
// refuses are refused by name, with what to do.
func TestLabelsFitTheStore(t *testing.T) {
	many := func(n int, key, value string) map[string]string {
		labels := make(map[string]string, n)
		for i := range n {
			k := fmt.Sprint(i) + key
			for len(k) > api.MaxLabelKey { // cut at the end of a character
				_, size := utf8.DecodeLastRuneInString(k)
				k = k[:len(k)-size]
			}
			labels[k] = value
		}
		return labels
	}
	long := strings.Repeat
	for what, c := range map[string]struct {
		labels map[string]string
		fits   bool
	}{
		"none":                      {nil, true},
		"as many and long as taken": {many(api.MaxLabels, long("k", api.MaxLabelKey), long("v", api.MaxLabelValue)), true},
		"many bytes a character":    {many(api.MaxLabels, long("é", api.MaxLabelKey), long("世", api.MaxLabelValue/3)), true},
		"longer as JSON":            {many(20, long("<", api.MaxLabelKey), long("&", api.MaxLabelValue)), false},
		"a bit longer as JSON":      {many(10, long("<", api.MaxLabelKey), long("&", api.MaxLabelValue)), true},
		"one too many":              {many(api.MaxLabels+1, "k", "v"), false},
		"key too long":              {map[string]string{long("k", api.MaxLabelKey+1): "v"}, false},
		"no key":                    {map[string]string{"": "v"}, false},
		"value too long":            {map[string]string{"k": long("v", api.MaxLabelValue+1)}, false},
		"control character":         {map[string]string{"k": "a\nb"}, false},
		"not UTF-8":                 {map[string]string{"k\xff": "v"}, false},
		"replacement character":     {map[string]string{"k": "\uFFFD"}, false}, // what the decoder makes of bad bytes
	} {
		err := api.LabelRequest{Set: c.labels, Remove: []string{"other"}}.Validate()
		if (err == nil) != c.fits {
			t.Errorf("%s: the API says %v", what, err)
		}
		var refusal *api.Error
		if err != nil && (!errors.As(err, &refusal) || refusal.Code != api.CodeInvalid || refusal.Field != "labels" || refusal.Remedy == "") {
			t.Errorf("%s: %v names no field or no remedy", what, err)
		}
		e := endpointOf(1, "c1", "10.244.1.2")
		e.Node, e.NetnsPath, e.Labels = "n1", "/"+long("x", 4094), c.labels
		if _, err := store.EncodeEndpoint(e); err != nil && c.fits {
			t.Errorf("%s: the store refuses what the API takes: %v", what, err)
		}
	}
}

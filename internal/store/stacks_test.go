package store

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/stack"
)

// The values of this schema, byte by byte: agents of other builds read them.
const (
	goldenStack  = `{"name":"wan","priority":10,"selector":{"labels":{"tier":"wan"}},"stack":"kernel","fallback":"refuse","settings":{"congestion":"bbr","initial_window":32,"pacing_rate":"12mbit","keepalive":{"idle":"1m0s","interval":"10s","count":5},"user_timeout":"30s","ecn":true},"changeable":["congestion"]}`
	goldenObject = `{"name":"c","sha256":"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881","object":"eA=="}`
)

func TestStacksAreReadAsTheyAreWritten(t *testing.T) {
	p, err := ParseStack("wan", []byte(goldenStack))
	if err != nil {
		t.Fatal(err)
	}
	if value, err := EncodeStack(p); err != nil || string(value) != goldenStack {
		t.Errorf("%s, %v", value, err)
	}
	o, err := ParseObject("c", []byte(goldenObject))
	if err != nil {
		t.Fatal(err)
	}
	if value, err := EncodeObject(o); err != nil || string(value) != goldenObject {
		t.Errorf("%s, %v", value, err)
	}
	k := KeysOf(1)
	v := NewView(k, slog.New(slog.DiscardHandler), func() { t.Error("a value was skipped") })
	v.Set(k.Stack("wan"), []byte(goldenStack), 1)
	v.Set(k.CongestionObject("c"), []byte(goldenObject), 2)
	s := v.State(2)
	if len(s.Stacks) != 1 || s.Stacks[0].Settings.Congestion != "bbr" || len(s.Congestion) != 1 || string(s.Congestion[0].Object) != "x" {
		t.Errorf("%+v", s)
	}
	if again := v.State(3); again.Stacks[0] != s.Stacks[0] || &again.Stacks[0] != &s.Stacks[0] {
		t.Error("profiles that did not change are others")
	}
	v.Delete(k.Stack("wan"))
	v.Delete(k.CongestionObject("c"))
	if s := v.State(4); len(s.Stacks)+len(s.Congestion) != 0 {
		t.Errorf("%+v", s)
	}
}

// TestBrokenStacks: what is not understood as a whole is absent, and said so.
func TestBrokenStacks(t *testing.T) {
	k := KeysOf(1)
	for key, value := range map[string]string{
		k.Stack("p"):            `{"name":"p","selector":{},"stack":"kernel","later":1}`,
		k.Stack("q"):            `{"name":"p","selector":{},"stack":"kernel"}`,
		k.Stack("r"):            `{"name":"r","selector":{},"stack":"tcp"}`,
		k.CongestionObject("c"): strings.Replace(goldenObject, "2d71", "2d72", 1),
	} {
		skipped := 0
		v := NewView(k, slog.New(slog.DiscardHandler), func() { skipped++ })
		v.Set(key, []byte(value), 1)
		if s := v.State(1); len(s.Stacks)+len(s.Congestion) != 0 || len(s.StackFaults) != 1 || skipped != 1 {
			t.Errorf("%s: %+v, %d skipped", value, s, skipped)
		}
		v.Delete(key)
		if s := v.State(2); len(s.StackFaults) != 0 {
			t.Errorf("deleted, but %q", s.StackFaults)
		}
	}
}

func TestPlanStackEdit(t *testing.T) {
	k := KeysOf(1)
	profile := func(name, congestion string) *stack.Profile {
		return &stack.Profile{Name: name, Stack: stack.Kernel, Settings: stack.Settings{Congestion: congestion}}
	}
	have := func(list ...*stack.Profile) map[string][]byte {
		m := make(map[string][]byte)
		for _, p := range list {
			m[p.Name], _ = EncodeStack(p)
		}
		return m
	}
	objects := func() map[string][]byte { return map[string][]byte{"c": []byte(goldenObject)} }
	edit := StackEdit{Put: []*stack.Profile{profile("a", "c"), profile("b", "x"), profile("n", "")}, Delete: []string{"d"}}
	writes, made, err := PlanStackEdit(k, edit, have(profile("a", "c"), profile("b", "c"), profile("d", "c")), objects())
	if err != nil || len(writes) != 3 || fmt.Sprint(made) != "[{profile a unchanged} {profile b changed} {profile n created} {profile d deleted}]" {
		t.Errorf("%v, %v, %v", writes, made, err)
	}
	var inUse *StackInUseError
	if _, _, err := PlanStackEdit(k, StackEdit{DeleteObjects: []string{"c"}}, have(profile("a", "c")), objects()); !errors.As(err, &inUse) || inUse.Profiles[0] != "a" {
		t.Errorf("unload what is used: %v", err)
	}
	if _, _, err := PlanStackEdit(k, StackEdit{Delete: []string{"a"}, DeleteObjects: []string{"c"}}, have(profile("a", "c")), objects()); err != nil {
		t.Errorf("unload with its last profile: %v", err)
	}
	var unknown *UnknownPolicyError
	if _, _, err := PlanStackEdit(k, StackEdit{Delete: []string{"z"}}, have(), objects()); !errors.As(err, &unknown) {
		t.Errorf("delete what is not there: %v", err)
	}
	if _, _, err := PlanStackEdit(k, StackEdit{Put: []*stack.Profile{profile("a", ""), profile("a", "")}}, have(), objects()); err == nil {
		t.Error("one name twice is accepted")
	}
	many := make(map[string][]byte)
	for i := range stack.MaxProfiles {
		many[fmt.Sprint(i)] = nil
	}
	var limit *PolicyLimitError
	if _, _, err := PlanStackEdit(k, StackEdit{Put: []*stack.Profile{profile("one-more", "")}}, many, objects()); !errors.As(err, &limit) {
		t.Errorf("one more than fit: %v", err)
	}
}

package etcd

import (
	"errors"
	"testing"

	"heddle.dev/heddle/internal/stack"
	"heddle.dev/heddle/internal/store"
)

// TestEditStacks: profiles and congestion controls arrive at another node whole; what is used stays.
func TestEditStacks(t *testing.T) {
	t.Parallel()
	a := embedded(t, EmbeddedConfig{})
	b := connect(t, a)
	p := &stack.Profile{Name: "p", Stack: stack.Kernel, Settings: stack.Settings{Congestion: "big"}}
	if _, err := a.EditStacks(t.Context(), store.StackEdit{Put: []*stack.Profile{p}}); !errors.Is(err, store.ErrNoNetwork) {
		t.Errorf("before there is a network: %v", err)
	}
	initNetwork(t, a, store.Network{})
	states := watch(t, b)
	<-states
	elf := make([]byte, stack.MaxObject)
	o := &stack.Object{Name: "big", SHA256: stack.Sum(elf), Object: elf}
	if made, err := a.EditStacks(t.Context(), store.StackEdit{Put: []*stack.Profile{p}, PutObjects: []*stack.Object{o}}); err != nil || len(made) != 2 {
		t.Fatalf("%v, %v", made, err)
	}
	if s := <-states; len(s.Stacks) != 1 || len(s.Congestion) != 1 || s.Congestion[0].SHA256 != o.SHA256 {
		t.Errorf("the other node sees %d profiles, %d congestion controls", len(s.Stacks), len(s.Congestion))
	}
	var inUse *store.StackInUseError
	if _, err := b.EditStacks(t.Context(), store.StackEdit{DeleteObjects: []string{"big"}}); !errors.As(err, &inUse) {
		t.Errorf("unload what a profile names: %v", err)
	}
	if _, err := b.EditStacks(t.Context(), store.StackEdit{Delete: []string{"p"}, DeleteObjects: []string{"big"}}); err != nil {
		t.Error(err)
	}
	if s := <-states; len(s.Stacks)+len(s.Congestion) != 0 {
		t.Errorf("left: %v, %v", s.Stacks, s.Congestion)
	}
}

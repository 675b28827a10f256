package stack

import (
	"errors"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/policy"
)

func profile(name string, priority int, labels map[string]string) *Profile {
	return &Profile{Name: name, Priority: priority, Stack: Kernel, Selector: policy.Selector{Requirements: policy.Requirements{Labels: labels}}}
}

// TestChoose: the greatest priority holds, then the first name, whatever the order of the list.
func TestChoose(t *testing.T) {
	web := map[string]string{"app": "web"}
	list := []*Profile{profile("b", 0, web), profile("a", 0, web), profile("z", 5, web), profile("y", 9, map[string]string{"app": "db"})}
	inShop := profile("shop", 20, nil)
	inShop.Selector.Namespace = &policy.NamespaceSelector{Requirements: policy.Requirements{Labels: map[string]string{"team": "a"}}}
	list = append(list, inShop)
	e := model.Endpoint{Name: "n1/c1", Labels: web}
	for range list {
		if got := Choose(list, e, nil); got == nil || got.Name != "z" {
			t.Errorf("chose %+v, want z", got)
		}
		list = append(list[1:], list[0])
	}
	if got := Choose([]*Profile{profile("b", 0, web), profile("a", 0, nil)}, e, nil); got.Name != "a" {
		t.Errorf("of one priority: chose %s, want a", got.Name)
	}
	if got := Choose(list, e, []policy.Namespace{{Name: "n1", Labels: map[string]string{"team": "a"}}}); got.Name != "shop" {
		t.Errorf("by its namespace: chose %s", got.Name)
	}
	if got := Choose(list, model.Endpoint{Name: "c"}, nil); got != nil {
		t.Errorf("chose %s for nobody", got.Name)
	}
}

// TestServe: what a node cannot serve falls back as the profile says, setting by setting.
func TestServe(t *testing.T) {
	lacks := errors.New("not here")
	only := func(kind Kind, congestion string) func(Kind, Settings) error {
		return func(k Kind, s Settings) error {
			if k != kind || s.Congestion != "" && s.Congestion != congestion {
				return lacks
			}
			return nil
		}
	}
	p := profile("p", 0, nil)
	p.Settings = Settings{Congestion: "dctcp", MSS: 1000, Memory: 1 << 20}
	p.Stack = Netstack
	if c := Serve(p, only(Netstack, "dctcp")); c.Stack != Netstack || c.Fault != nil || c.Settings != p.Settings {
		t.Errorf("served: %+v", c)
	}
	if c := Serve(p, only(Kernel, "dctcp")); c.Stack != Kernel || c.Fault != lacks || c.Settings != (Settings{Congestion: "dctcp", MSS: 1000}) {
		t.Errorf("fallen back: %+v", c)
	}
	if c := Serve(p, only(Kernel, "bbr")); c.Stack != Kernel || c.Settings != (Settings{MSS: 1000}) {
		t.Errorf("fallen back without the congestion control: %+v", c)
	}
	p.Fallback = Refuse
	if c := Serve(p, only(Kernel, "bbr")); !c.Refused() || c.Fault != lacks || c.Settings != (Settings{}) {
		t.Errorf("refused: %+v", c)
	}
	if c := Serve(nil, only(Kernel, "")); c.Refused() || c.Stack != Kernel {
		t.Errorf("without a profile: %+v", c)
	}
}

// TestModule: a profile may name a module of the operator's own, by what is the name of a file.
func TestModule(t *testing.T) {
	p := profile("p", 0, nil)
	p.Settings.Memory = 1 << 30
	for _, name := range []string{"a", "my-stack2", "0"} {
		p.Stack = ModuleKind(name)
		if got, own := p.Stack.Module(); got != name || !own || p.Stack.IsKernels() {
			t.Errorf("%s is %q, %v", p.Stack, got, own)
		}
		if err := p.Validate(); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"", "-a", "a-", "A", "a/b", "..", "a.b", "a b", strings.Repeat("a", MaxModuleName+1)} {
		p.Stack = ModuleKind(name)
		if err := p.Validate(); err == nil || !strings.Contains(err.Error(), "stack") {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestObject(t *testing.T) {
	o := Object{Name: "dctcp", Object: []byte("x"), SHA256: Sum([]byte("x"))}
	if err := o.Validate(); err != nil {
		t.Error(err)
	}
	for _, bad := range []Object{{}, {Name: "a", SHA256: Sum(nil)}, {Name: "a", Object: []byte("x"), SHA256: Sum([]byte("y"))},
		{Name: "a b", Object: []byte("x"), SHA256: Sum([]byte("x"))}, {Name: "a", Object: make([]byte, MaxObject+1)}} {
		if bad.Validate() == nil {
			t.Errorf("%.40q is accepted", bad.Name)
		}
	}
}

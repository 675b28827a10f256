package planetest

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
)

// label is what a name may look like: it is a value of a metric's label, and stands in tables.
var label = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

// prefixes are what names of reasons begin with, by kind, unless they begin with their plane's.
var prefixes = map[model.Kind]string{
	model.KindFallback: "fallback_", model.KindDrop: "drop_", model.KindRefusal: "refuse_", model.KindCut: "cut_", model.KindMend: "mend_", model.KindLost: "lost_",
}

// CheckDeclaration fails a test if what the plane of that name declares is not complete, or its
// names are not of the form that names have.
func CheckDeclaration(t testing.TB, plane string, d plane.Declaration) {
	t.Helper()
	all := slices.Clone(d.Protocols)
	for _, p := range d.Paths {
		all = append(all, string(p))
	}
	for _, f := range d.Faults {
		all = append(all, string(f))
	}
	for i, r := range d.Reasons {
		named := strings.HasPrefix(r.Name, prefixes[r.Kind]) || strings.HasPrefix(r.Name, plane+"_")
		if !named || !slices.Contains(model.Kinds, r.Kind) || r.Help == "" {
			t.Errorf("reason %+v: want a kind, a name that begins with %q or %q, and help", r, prefixes[r.Kind], plane+"_")
		}
		if slices.ContainsFunc(d.Reasons[:i], func(other model.Reason) bool { return other.Name == r.Name }) {
			t.Errorf("reason %s is declared twice", r.Name)
		}
		all = append(all, r.Name)
	}
	for _, name := range all {
		if !label.MatchString(name) {
			t.Errorf("name %q: want small letters, digits and underscores", name)
		}
	}
}

// CheckReports fails a test if a plane reports by names that it does not declare.
func CheckReports(t testing.TB, p plane.Plane) {
	t.Helper()
	d := p.Declares()
	CheckDeclaration(t, p.Name(), d)
	counters, err := p.Counters()
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range counters {
		if i >= len(d.Reasons) || c.Name != d.Reasons[i].Name || c.Kind != d.Reasons[i].Kind || c.Help != d.Reasons[i].Help {
			t.Errorf("counter %d is %+v, want that of the reason declared at its place", i, c)
		}
	}
	if len(counters) != len(d.Reasons) {
		t.Errorf("%d counters of %d reasons", len(counters), len(d.Reasons))
	}
	connections, err := p.Connections()
	if err != nil {
		t.Fatal(err)
	}
	paths := append([]model.Path{model.PathNone, model.PathListen}, d.Paths...)
	for _, c := range connections {
		known := c.Reason == "" || slices.ContainsFunc(d.Reasons, func(r model.Reason) bool { return r.Name == c.Reason })
		if !known || !slices.Contains(paths, c.Path) || c.Protocol != "" && !slices.Contains(d.Protocols, c.Protocol) {
			t.Errorf("connection %+v: its path, protocol or reason is not declared", c)
		}
	}
}

package document

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"heddle.dev/heddle/internal/policy"
)

// reader is one value of a document. A reader without a node is a field that is not there.
type reader struct {
	file     string
	document int
	path     string
	node     *yaml.Node
	lines    map[string]int // of the fields read so far, by path
}

// fields are the members of an object that have not been read yet.
type fields struct {
	of   reader
	left map[string]*yaml.Node
}

func (r reader) there() bool { return r.node != nil }

func (r reader) fail(remedy, reason string, args ...any) error {
	e := &Error{File: r.file, Document: r.document, Path: r.path, Reason: fmt.Sprintf(reason, args...), Remedy: remedy}
	if r.node != nil {
		e.Line = r.node.Line
	}
	return e
}

// locate makes an Error of what Validate of package policy says about the document that r is the
// root of.
func (r reader) locate(err error, places map[string]string) error {
	var f *policy.FieldError
	if !errors.As(err, &f) {
		return r.fail("", "%v", err)
	}
	path := f.Path
	if places != nil {
		path = longest(f.Path, func(p string) string { return places[p] })
	} else if r.path != "" {
		path = r.path + "." + path
	}
	line := r.node.Line
	longest(path, func(p string) string {
		if l, ok := r.lines[p]; ok {
			line = l
			return p
		}
		return ""
	})
	return &Error{File: r.file, Document: r.document, Line: line, Path: path, Reason: f.Reason, Remedy: f.Remedy}
}

// longest gives what of says about path, or about the nearest thing around it.
func longest(path string, of func(string) string) string {
	for p := path; p != ""; {
		if found := of(p); found != "" {
			return found
		}
		i := max(strings.LastIndexByte(p, '.'), strings.LastIndexByte(p, '['))
		if i < 0 {
			break
		}
		p = p[:i]
	}
	return path
}

// check refuses what makes one text two things: aliases, keys that are no strings, keys that stand
// there twice.
func (r reader) check(n *yaml.Node, depth int) error {
	at := r
	at.node = n
	switch {
	case depth > maxDepth:
		return at.fail("", "objects and lists are more than %d deep", maxDepth)
	case n.Kind == yaml.AliasNode || n.Anchor != "":
		return at.fail("write the value out", "anchors and aliases are not taken")
	case n.Kind == yaml.MappingNode:
		seen := make(map[string]bool, len(n.Content)/2)
		for i := 0; i+1 < len(n.Content); i += 2 {
			k := n.Content[i]
			at.node = k
			if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
				return at.fail("", "a key has to be text")
			}
			if seen[k.Value] {
				return at.fail("remove one of the two", "field %.60q stands there twice", k.Value)
			}
			seen[k.Value] = true
		}
	}
	for _, c := range n.Content {
		if err := r.check(c, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// object reads a mapping.
func (r reader) object() (fields, error) {
	if !r.there() {
		return fields{}, r.missing()
	}
	if r.node.Kind != yaml.MappingNode {
		return fields{}, r.fail("", "want an object with fields, not %s", describe(r.node))
	}
	f := fields{of: r, left: make(map[string]*yaml.Node, len(r.node.Content)/2)}
	for i := 0; i+1 < len(r.node.Content); i += 2 {
		f.left[r.node.Content[i].Value] = r.node.Content[i+1]
	}
	return f, nil
}

func (r reader) missing() error { return r.fail("add it", "is missing") }

// take gives one field, and notes that it was read. A field that is null counts as not there.
func (f fields) take(name string) reader {
	path := name
	if f.of.path != "" {
		path = f.of.path + "." + name
	}
	r := reader{file: f.of.file, document: f.of.document, path: path, lines: f.of.lines}
	if n, ok := f.left[name]; ok {
		delete(f.left, name)
		r.lines[path] = n.Line
		if n.Tag != "!!null" {
			r.node = n
		}
	}
	return r
}

func (f fields) ignore(names ...string) {
	for _, name := range names {
		delete(f.left, name)
	}
}

// rest refuses the fields that nobody has read: the first in the order of the document.
func (f fields) rest() error {
	for i := 0; i+1 < len(f.of.node.Content); i += 2 {
		k := f.of.node.Content[i]
		if _, left := f.left[k.Value]; left {
			at := f.of
			at.node = k
			return at.fail("remove it, or correct its name", "field %.60q is not known", k.Value)
		}
	}
	return nil
}

func (r reader) list() ([]reader, error) {
	if !r.there() {
		return nil, nil
	}
	if r.node.Kind != yaml.SequenceNode {
		return nil, r.fail("", "want a list, not %s", describe(r.node))
	}
	out := make([]reader, len(r.node.Content))
	for i, n := range r.node.Content {
		path := fmt.Sprintf("%s[%d]", r.path, i)
		r.lines[path] = n.Line
		out[i] = reader{file: r.file, document: r.document, path: path, node: n, lines: r.lines}
	}
	return out, nil
}

// text reads a string that has to be there.
func (r reader) text() (string, error) {
	if !r.there() {
		return "", r.missing()
	}
	if r.node.Kind != yaml.ScalarNode || r.node.Tag != "!!str" {
		return "", r.fail("put it in quotes if it is meant as text", "want text, not %s", describe(r.node))
	}
	return r.node.Value, nil
}

// optional reads a string that may be missing.
func (r reader) optional() (string, error) {
	if !r.there() {
		return "", nil
	}
	return r.text()
}

func (r reader) texts() ([]string, error) {
	items, err := r.list()
	if err != nil {
		return nil, err
	}
	out := make([]string, 0, len(items))
	for _, item := range items {
		s, err := item.text()
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

func (r reader) isText() bool {
	return r.there() && r.node.Kind == yaml.ScalarNode && r.node.Tag == "!!str"
}

func (r reader) number() (int, error) {
	if r.node.Kind == yaml.ScalarNode && r.node.Tag == "!!int" {
		if n, err := strconv.Atoi(r.node.Value); err == nil {
			return n, nil
		}
	}
	return 0, r.fail("", "want a number in decimal, not %s", describe(r.node))
}

func (r reader) labels() (map[string]string, error) {
	if !r.there() {
		return nil, nil
	}
	f, err := r.object()
	if err != nil {
		return nil, err
	}
	if len(f.left) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(f.left))
	for i := 0; i+1 < len(r.node.Content); i += 2 {
		key := r.node.Content[i].Value
		v := f.take(key)
		if !v.there() {
			v.node = r.node.Content[i+1]
		}
		if out[key], err = v.text(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// prefix reads a prefix. With masked, bits beyond its length are cut off, as Kubernetes does,
// instead of refused.
func (r reader) prefix(masked bool) (netip.Prefix, error) {
	s, err := r.text()
	if err != nil {
		return netip.Prefix{}, err
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, r.fail("write ADDRESS/LENGTH", "%.60q is no prefix", s)
	}
	if masked {
		p = p.Masked()
	}
	return p, nil
}

func (r reader) prefixes(masked bool) ([]netip.Prefix, error) {
	items, err := r.list()
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, item := range items {
		p, err := item.prefix(masked)
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "an object"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.Tag {
	case "!!null":
		return "nothing"
	case "!!int", "!!float":
		return fmt.Sprintf("the number %.40s", n.Value)
	case "!!bool":
		return "the boolean " + n.Value
	}
	return fmt.Sprintf("%.40q", n.Value)
}

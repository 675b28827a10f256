// Package document reads policies from files: Heddle's own documents and Kubernetes' NetworkPolicy
// (v1) and Namespace objects, in YAML or JSON, several to a file; and stack profiles, from files of
// their own. It is strict: a document that is not understood as a whole, down to every field, is
// refused together with all others, and the error names the place.
//
// The types of Kubernetes objects are read field by field from the YAML tree rather than through
// k8s.io/api: that keeps line numbers, refuses what Heddle cannot honour instead of dropping it,
// and spares the agent a large dependency for two small types.
package document

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"heddle.dev/heddle/internal/policy"
	"heddle.dev/heddle/internal/stack"
)

// Limits of files.
const (
	MaxBytes     = 1 << 20 // of a file
	MaxDocuments = 10000   // of a file
	maxDepth     = 32      // of objects and lists in each other
)

// Set is what files say.
type Set struct {
	Policies   []*policy.Policy
	Namespaces []policy.Namespace
}

// Error says what is wrong with a file, and where.
type Error struct {
	File     string
	Document int    // 1 for the first of the file; 0: the file as a whole
	Line     int    // in the file; 0 if not known
	Path     string // of the field, such as "spec.ingress[0].ports[1].port"; "" for the whole document
	Reason   string
	Remedy   string // may be empty
}

// Error implements error: "FILE:LINE: document N: PATH: reason: remedy".
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	if e.Document > 0 {
		fmt.Fprintf(&b, ": document %d", e.Document)
	}
	if e.Path != "" {
		b.WriteString(": " + e.Path)
	}
	b.WriteString(": " + e.Reason)
	if e.Remedy != "" {
		b.WriteString(": " + e.Remedy)
	}
	return b.String()
}

// File is a file's name, for errors, and its content.
type File struct {
	Name string
	Data []byte
}

// Parse reads files, all or none of them. The error is an *Error.
func Parse(files ...File) (Set, error) {
	p := parser{seen: make(map[string]string)}
	for _, f := range files {
		if err := p.file(f); err != nil {
			return Set{}, err
		}
	}
	return p.set, nil
}

// parser collects what files say. seen has the place of each object by its kind and name.
type parser struct {
	set        Set
	stacks     []*stack.Profile
	wantStacks bool // the files are of stack profiles, and nothing else
	seen       map[string]string
}

// wanted names the documents that the files may have.
func (p *parser) wanted() string {
	if p.wantStacks {
		return "a StackProfile"
	}
	return "a Policy or a NetworkPolicy"
}

func (p *parser) file(f File) error {
	if len(f.Data) > MaxBytes {
		return &Error{File: f.Name, Reason: fmt.Sprintf("%d bytes, at most %d are read", len(f.Data), MaxBytes), Remedy: "split it into several files"}
	}
	dec := yaml.NewDecoder(bytes.NewReader(f.Data))
	found := 0
	for number := 1; ; number++ {
		if number > MaxDocuments {
			return &Error{File: f.Name, Reason: fmt.Sprintf("more than %d documents", MaxDocuments), Remedy: "split it into several files"}
		}
		var n yaml.Node
		err := decodeNode(dec, &n)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return &Error{File: f.Name, Document: number, Reason: "no YAML or JSON: " + strings.TrimPrefix(err.Error(), "yaml: ")}
		}
		root, empty := documentRoot(&n)
		if empty {
			continue // "---" with nothing, as tools leave behind
		}
		r := reader{file: f.Name, document: number, node: root, lines: make(map[string]int)}
		if err := r.check(root, 0); err != nil {
			return err
		}
		if err := p.object(r); err != nil {
			return err
		}
		found++
	}
	if found == 0 {
		return &Error{File: f.Name, Reason: "no document in it", Remedy: "write " + p.wanted()}
	}
	return nil
}

// decodeNode reads one document. The library panics on some malformed input; that is an error like
// any other.
func decodeNode(dec *yaml.Decoder, n *yaml.Node) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("malformed: %v", p)
		}
	}()
	return dec.Decode(n)
}

func documentRoot(n *yaml.Node) (_ *yaml.Node, empty bool) {
	if n.Kind == yaml.DocumentNode {
		if len(n.Content) == 0 {
			return nil, true
		}
		n = n.Content[0]
	}
	return n, n.Kind == 0 || n.Kind == yaml.ScalarNode && n.Tag == "!!null"
}

// object reads one document, or one item of a List.
func (p *parser) object(r reader) error {
	fields, err := r.object()
	if err != nil {
		return err
	}
	version, err := fields.take("apiVersion").text()
	if err != nil {
		return err
	}
	kind, err := fields.take("kind").text()
	if err != nil {
		return err
	}
	what := version + " " + kind
	if p.wantStacks != (what == stackDocument) && what != listDocument {
		return p.unknownKind(r, version, kind)
	}
	switch what {
	case stackDocument:
		return p.stackProfile(r, fields)
	case policyDocument:
		return p.native(r, fields)
	case "networking.k8s.io/v1 NetworkPolicy":
		return p.networkPolicy(r, fields)
	case "v1 Namespace":
		return p.namespace(r, fields)
	case listDocument, "networking.k8s.io/v1 NetworkPolicyList", "v1 NamespaceList":
		return p.list(fields)
	}
	return p.unknownKind(r, version, kind)
}

// Documents that are read by more than one command, or refused by one.
const (
	stackDocument  = "heddle.dev/v1 StackProfile"
	policyDocument = "heddle.dev/v1 Policy"
	listDocument   = "v1 List"
)

func (p *parser) unknownKind(r reader, version, kind string) error {
	switch what := version + " " + kind; {
	case what == stackDocument:
		return r.fail("give it to heddle stack apply", "a StackProfile is no policy")
	case p.wantStacks && what == policyDocument:
		return r.fail("give it to heddle policy apply", "a Policy is no stack profile")
	case p.wantStacks:
		return r.fail("apiVersion heddle.dev/v1 and kind StackProfile, or a List of them", "apiVersion %.60q with kind %.60q is not known", version, kind)
	}
	return r.fail("apiVersion heddle.dev/v1 and kind Policy; networking.k8s.io/v1 NetworkPolicy; v1 Namespace; or a List of them",
		"apiVersion %.60q with kind %.60q is not known", version, kind)
}

func (p *parser) list(fields fields) error {
	fields.ignore("metadata")
	items, err := fields.take("items").list()
	if err != nil {
		return err
	}
	for _, item := range items {
		if err := p.object(item); err != nil {
			return err
		}
	}
	return fields.rest()
}

// add takes a policy in, once it is known to be valid. places maps fields of the policy to those of
// the document, for documents of another form.
func (p *parser) add(r reader, pol *policy.Policy, places map[string]string) error {
	if err := pol.Validate(); err != nil {
		return r.locate(err, places)
	}
	if err := p.unique(r, "policy "+pol.Name); err != nil {
		return err
	}
	p.set.Policies = append(p.set.Policies, pol)
	return nil
}

func (p *parser) unique(r reader, what string) error {
	if at, again := p.seen[what]; again {
		return r.fail("remove one of the two", "%s is described twice: also at %s", what, at)
	}
	p.seen[what] = fmt.Sprintf("%s:%d", r.file, r.node.Line)
	return nil
}

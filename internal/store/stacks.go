package store

import (
	"encoding/json"
	"fmt"
	"strings"

	"heddle.dev/heddle/internal/stack"
)

// StacksSchema is the revision of the schema from which on agents read stack profiles.
const StacksSchema = 3

// maxObjects is how many congestion controls a network may have: each node's kernel has them all.
const maxObjects = 32

// StackEdit is a set of changes of stack profiles and of congestion controls. What is put replaces
// what is there under the same name.
type StackEdit struct {
	Put           []*stack.Profile
	Delete        []string
	PutObjects    []*stack.Object
	DeleteObjects []string
}

// StackInUseError says that a congestion control is not deleted because profiles name it.
type StackInUseError struct {
	Name     string
	Profiles []string
}

// Error implements error.
func (e *StackInUseError) Error() string {
	return fmt.Sprintf("congestion control %s is named by profile %s: delete or change that first", e.Name, strings.Join(e.Profiles, ", "))
}

// EncodeStack gives the value stored for p, or why p is no valid profile.
func EncodeStack(p *stack.Profile) ([]byte, error) {
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("stack profile %.60q: %w", p.Name, err)
	}
	return encode(p)
}

// ParseStack reads the value stored for the profile called name. It is refused for a member that is
// not known: what is not understood might be why an endpoint has a stack of its own.
func ParseStack(name string, value []byte) (*stack.Profile, error) {
	p := &stack.Profile{}
	if err := decodeStrictly(value, p); err != nil {
		return nil, fmt.Errorf("stack profile %s: %w", name, err)
	}
	if p.Name != name {
		return nil, fmt.Errorf("stack profile %s: its value says name %.60q", name, p.Name)
	}
	if err := p.Validate(); err != nil {
		return nil, fmt.Errorf("stack profile %s: %w", name, err)
	}
	return p, nil
}

// EncodeObject gives the value stored for a congestion control, or why it is none.
func EncodeObject(o *stack.Object) ([]byte, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("congestion control %.40q: %w", o.Name, err)
	}
	return json.Marshal(o)
}

// ParseObject reads the value stored for the congestion control called name.
func ParseObject(name string, value []byte) (*stack.Object, error) {
	o := &stack.Object{}
	err := checkObject(value, maxPolicyBytes)
	if err == nil {
		err = json.Unmarshal(value, o)
	}
	if err != nil {
		return nil, fmt.Errorf("congestion control %s: %w", name, err)
	}
	if o.Name != name {
		return nil, fmt.Errorf("congestion control %s: its value says name %.40q", name, o.Name)
	}
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("congestion control %s: %w", name, err)
	}
	return o, nil
}

// stackPlan collects what an edit writes.
type stackPlan struct {
	plan
	profiles map[string][]byte // as they are to be
	objects  map[string][]byte
}

// PlanStackEdit decides what an edit writes, given the values of all profiles and of all congestion
// controls, by name.
func PlanStackEdit(keys Keys, edit StackEdit, profiles, objects map[string][]byte) ([]Written, []PolicyOutcome, error) {
	p := &stackPlan{profiles: profiles, objects: objects}
	before, beforeObjects := len(profiles), len(objects)
	for _, s := range edit.Put {
		value, err := EncodeStack(s)
		if err == nil {
			err = p.change("profile", s.Name, keys.Stack(s.Name), value, p.profiles)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	for _, name := range edit.Delete {
		if err := p.change("profile", name, keys.Stack(name), nil, p.profiles); err != nil {
			return nil, nil, err
		}
	}
	for _, o := range edit.PutObjects {
		value, err := EncodeObject(o)
		if err == nil {
			err = p.change("congestion", o.Name, keys.CongestionObject(o.Name), value, p.objects)
		}
		if err != nil {
			return nil, nil, err
		}
	}
	for _, name := range edit.DeleteObjects {
		if err := p.change("congestion", name, keys.CongestionObject(name), nil, p.objects); err != nil {
			return nil, nil, err
		}
		if users := p.users(name); len(users) > 0 {
			return nil, nil, &StackInUseError{name, users}
		}
	}
	switch {
	case p.size > maxEditBytes:
		return nil, nil, &PolicyLimitError{"bytes of profiles and congestion controls in one step", p.size, maxEditBytes, "apply them in several steps"}
	case len(p.profiles) > stack.MaxProfiles && len(p.profiles) > before:
		return nil, nil, &PolicyLimitError{"stack profiles in the network", len(p.profiles), stack.MaxProfiles, "delete some"}
	case len(p.objects) > maxObjects && len(p.objects) > beforeObjects:
		return nil, nil, &PolicyLimitError{"congestion controls in the network", len(p.objects), maxObjects, "delete some"}
	}
	return p.writes, p.outcomes, nil
}

// change takes one change in; a nil value deletes.
func (p *stackPlan) change(kind, name, key string, value []byte, have map[string][]byte) error {
	changed, err := p.plan.change(kind, name, key, value, have)
	if changed && value == nil {
		delete(have, name)
	} else if changed {
		have[name] = value
	}
	return err
}

// users names the profiles that will name a congestion control.
func (p *stackPlan) users(congestion string) (names []string) {
	for _, name := range inOrder(p.profiles) {
		var s struct {
			Name     string `json:"name"`
			Settings struct {
				Congestion string `json:"congestion"`
			} `json:"settings"`
		}
		if json.Unmarshal(name, &s) == nil && s.Settings.Congestion == congestion {
			names = append(names, s.Name)
		}
	}
	return names
}

// stacks is the part of a View that is about them.
type stacks struct {
	profiles map[string]*stack.Profile
	objects  map[string]*stack.Object
	wrong    map[string]string // by kind and name
	// The last state's; nil after a change.
	sortedProfiles []*stack.Profile
	sortedObjects  []*stack.Object
}

func (v *stacks) reset() {
	*v = stacks{profiles: make(map[string]*stack.Profile), objects: make(map[string]*stack.Object), wrong: make(map[string]string)}
}

func (v *stacks) setStack(name string, value []byte) error {
	v.deleteStack(name)
	p, err := ParseStack(name, value)
	if err != nil {
		v.wrong["profile "+name] = err.Error()
		return err
	}
	v.profiles[name] = p
	return nil
}

func (v *stacks) deleteStack(name string) {
	delete(v.profiles, name)
	delete(v.wrong, "profile "+name)
	v.sortedProfiles = nil
}

func (v *stacks) setObject(name string, value []byte) error {
	v.deleteObject(name)
	o, err := ParseObject(name, value)
	if err != nil {
		v.wrong["congestion "+name] = err.Error()
		return err
	}
	v.objects[name] = o
	return nil
}

func (v *stacks) deleteObject(name string) {
	delete(v.objects, name)
	delete(v.wrong, "congestion "+name)
	v.sortedObjects = nil
}

func (v *stacks) addTo(s *State) {
	if v.sortedProfiles == nil {
		v.sortedProfiles = inOrder(v.profiles)
	}
	if v.sortedObjects == nil {
		v.sortedObjects = inOrder(v.objects)
	}
	s.Stacks, s.Congestion, s.StackFaults = v.sortedProfiles, v.sortedObjects, inOrder(v.wrong)
}

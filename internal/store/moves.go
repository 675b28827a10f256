package store

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"heddle.dev/heddle/internal/model"
)

// EncodeMove gives the value stored for m, or why m is no valid move.
func EncodeMove(m model.Move) ([]byte, error) {
	if err := validateMove(m); err != nil {
		return nil, err
	}
	return encode(m)
}

// ParseMove reads the value stored for the move of address a.
func ParseMove(a netip.Addr, value []byte) (model.Move, error) {
	var m model.Move
	if err := decode(value, &m); err != nil {
		return model.Move{}, fmt.Errorf("move of %s: %w", a, err)
	}
	if m.Addr != a {
		return model.Move{}, fmt.Errorf("move of %s: its value says address %s", a, m.Addr)
	}
	return m, validateMove(m)
}

func validateMove(m model.Move) error {
	wrap := func(err error) error { return fmt.Errorf("move of %s: %w", m.Addr, err) }
	if err := validateAddr(m.Addr); err != nil || !m.Addr.Is4() {
		return wrap(fmt.Errorf("want a unicast IPv4 address"))
	}
	for field, name := range map[string]string{"node": m.Node, "from": m.From, "home": m.Home} {
		if err := model.ValidateName(field, name); err != nil {
			return wrap(err)
		}
	}
	if err := model.ValidateEndpointName(m.Name); err != nil {
		return wrap(err)
	}
	if m.Limits != nil {
		if err := m.Limits.Validate(); err != nil {
			return wrap(fmt.Errorf("limits: %w", err))
		}
	}
	if err := validateLabels(m.Labels); err != nil {
		return wrap(err)
	}
	return nil
}

// MovedError says that an address lives on another node than was thought.
type MovedError struct{ Move model.Move }

// Error implements error.
func (e *MovedError) Error() string {
	return fmt.Sprintf("address %s has moved to node %s: delete endpoint %s there, or migrate it back", e.Move.Addr, e.Move.Node, e.Move.Name)
}

// MoveInUseError says that an address cannot be given to another node, because an endpoint has it.
type MoveInUseError struct{ Move model.Move }

// Error implements error.
func (e *MoveInUseError) Error() string {
	return fmt.Sprintf("address %s is in use on node %s: run `heddle migrate %s` there", e.Move.Addr, e.Move.Node, e.Move.Name)
}

// UnknownMoveError says that there is neither such an endpoint nor such a move.
type UnknownMoveError struct{ Addr netip.Addr }

// Error implements error.
func (e *UnknownMoveError) Error() string {
	return fmt.Sprintf("address %s: no endpoint to migrate has it", e.Addr)
}

// setMove takes in a value, or that there is none (nil).
func (v *View) setMove(a netip.Addr, m *model.Move) {
	v.movesChanged[a] = true
	if m == nil {
		delete(v.moves, a)
		return
	}
	v.moves[a] = *m
}

// refreshMoves decides anew which moves there are, and tells the accepted nodes. A move to a node
// that is not there, or of an address that no endpoint may have, is none. It costs what there are
// of moves, which are few.
func (v *View) refreshMoves(note func(node string)) {
	before, beforeOn := v.movedTo, v.movedOn
	if len(v.moves)+len(before)+len(v.excludedMoves) > 0 {
		v.acceptMoves()
	}
	for name := range mergedKeys(beforeOn, v.movedOn) {
		if n, is := v.accepted[name]; is && !slices.Equal(beforeOn[name], v.movedOn[name]) {
			note(name)
			n.Moved = v.movedOn[name]
			v.accepted[name] = n
		}
	}
	for a := range mergedKeys(before, v.movedTo) {
		if v.movedTo[a] != before[a] {
			v.movesChanged[a] = true
		}
	}
	// The endpoints at these addresses have to be looked at again, wherever they are.
	for a := range v.movesChanged {
		home, _ := v.prefixes.Holder(a)
		for _, name := range []string{before[a], v.movedTo[a], home} {
			if name != "" {
				v.changedOn[name] = nil
			}
		}
	}
	clear(v.movesChanged)
}

func (v *View) acceptMoves() {
	excluded := make(map[string]string)
	exclude := v.excluder(excluded, v.excludedMoves)
	v.movedTo, v.movedOn, v.last.Moves = make(map[netip.Addr]string, len(v.moves)), make(map[string][]netip.Addr), nil
	for _, a := range slices.SortedFunc(maps.Keys(v.moves), netip.Addr.Compare) {
		m := v.moves[a]
		if _, ok := v.accepted[m.Node]; !ok {
			exclude(v.keys.Move(a), "its node is not in the network")
			continue
		}
		if home, ok := v.prefixes.Holder(a); ok {
			if err := CheckAddr(v.accepted[home], a); err != nil {
				exclude(v.keys.Move(a), err.Error())
				continue
			}
		}
		v.movedTo[a] = m.Node
		v.movedOn[m.Node] = append(v.movedOn[m.Node], a)
		v.last.Moves = append(v.last.Moves, m)
	}
	v.excludedMoves = excluded
}

func mergedKeys[K comparable, A any](a, b map[K]A) map[K]bool {
	out := make(map[K]bool, len(a)+len(b))
	for k := range a {
		out[k] = true
	}
	for k := range b {
		out[k] = true
	}
	return out
}

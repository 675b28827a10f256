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

// homeOf gives the node whose prefixes a lies in.
func homeOf(nodes map[string]model.Node, a netip.Addr) (model.Node, bool) {
	for _, n := range nodes {
		if slices.ContainsFunc(n.Prefixes, func(p netip.Prefix) bool { return p.Contains(a) }) {
			return n, true
		}
	}
	return model.Node{}, false
}

// setMove takes in a value, or that there is none (nil).
func (v *View) setMove(a netip.Addr, m *model.Move) {
	v.nodesChanged = true
	v.movesChanged[a] = true
	if m == nil {
		delete(v.moves, a)
		return
	}
	v.moves[a] = *m
}

// refreshMoves decides anew which moves there are, and tells the accepted nodes. A move to a node that is not there, or
// of an address that no endpoint may have, is none.
func (v *View) refreshMoves(exclude func(key, why string)) {
	if len(v.moves) == 0 && len(v.movedTo) == 0 {
		return
	}
	before := v.movedTo
	v.movedTo = make(map[netip.Addr]string, len(v.moves))
	v.last.Moves = nil
	for _, a := range slices.SortedFunc(maps.Keys(v.moves), netip.Addr.Compare) {
		m := v.moves[a]
		n, ok := v.accepted[m.Node]
		if !ok {
			exclude(v.keys.Move(a), "its node is not in the network")
			continue
		}
		if home, ok := homeOf(v.accepted, a); ok {
			if err := CheckAddr(home, a); err != nil {
				exclude(v.keys.Move(a), err.Error())
				continue
			}
		}
		v.movedTo[a] = m.Node
		v.last.Moves = append(v.last.Moves, m)
		n.Moved = append(slices.Clip(n.Moved), a)
		v.accepted[m.Node] = n
	}
	for a := range before {
		if v.movedTo[a] != before[a] {
			v.movesChanged[a] = true
		}
	}
	for a := range v.movedTo {
		if v.movedTo[a] != before[a] {
			v.movesChanged[a] = true
		}
	}
	// The endpoints at these addresses have to be looked at again, wherever they are.
	for a := range v.movesChanged {
		for _, name := range []string{before[a], v.movedTo[a]} {
			if name != "" {
				v.changedOn[name] = true
			}
		}
		if home, ok := homeOf(v.accepted, a); ok {
			v.changedOn[home.Name] = true
		}
	}
	clear(v.movesChanged)
}

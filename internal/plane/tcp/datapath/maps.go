package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
)

// syncMap brings m to the contents of want: new and changed entries first, then stale ones out, so
// no key that stays is ever missing.
func syncMap[K, V comparable](m *ebpf.Map, want map[K]V) error {
	var (
		k     K
		v     V
		stale []K
	)
	have := make(map[K]V)
	it := m.Iterate()
	for it.Next(&k, &v) {
		have[k] = v
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("list %s: %w", m, err)
	}
	for k, v := range want {
		if old, ok := have[k]; ok && old == v {
			continue
		}
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("update: %w", err)
		}
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			stale = append(stale, k)
		}
	}
	_, err := deleteAll(m, stale)
	return err
}

// deleteAll deletes what is there of keys, and says how many that were.
func deleteAll[K any](m *ebpf.Map, keys []K) (deleted int, err error) {
	for _, k := range keys {
		switch err := m.Delete(&k); {
		case err == nil:
			deleted++
		case ignoreAbsent(err) != nil:
			return deleted, fmt.Errorf("delete: %w", err)
		}
	}
	return deleted, nil
}

func ignoreAbsent(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// changeMap brings entries of m from what they were to what now says: new and changed ones first,
// so that no key that stays is ever missing. The zero value is none. Before it is written, a value
// passes through written.
func changeMap[K, V comparable](m *ebpf.Map, was map[K]V, now func(K) V, written func(V) V) error {
	var none V
	for k, old := range was {
		v := now(k)
		if v == old || v == none {
			continue
		}
		v = written(v)
		if err := m.Put(&k, &v); err != nil {
			return fmt.Errorf("update %s: %w", m, err)
		}
	}
	for k, old := range was {
		if old == none || now(k) != none {
			continue
		}
		if err := ignoreAbsent(m.Delete(&k)); err != nil {
			return fmt.Errorf("delete from %s: %w", m, err)
		}
	}
	return nil
}

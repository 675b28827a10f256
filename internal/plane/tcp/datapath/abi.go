package datapath

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"heddle.dev/heddle/internal/model"
)

// abiVersion changes when what is in a map changes its meaning and none of its types shows that: a
// flag that is used for something else, another byte order. Changes of layout are found without it.
const abiVersion = 2 // since 2, tags say who opened a connection

// Pins that are no map of the programs.
const (
	abiPin    = "abi_by_map"
	lastIDPin = "last_endpoint"
	linkPin   = "link_" // and the hook's name; of an earlier cgroup, its id as well (retire.go)
)

// versionEntry is the record's entry for abiVersion; no map can have the name.
const versionEntry = "abi version"

// countersMap is the one map whose content is carried over when its size changes: a version with
// more reasons than the last. Reasons are only ever added at the end.
const countersMap = "count_by_reason"

// ErrABI says that what is pinned was made by a version of Heddle whose maps these programs cannot
// share.
var ErrABI = errors.New("pinned maps are of another version of Heddle")

// abiName and abiHash are key and value of the record that is pinned beside the maps.
type (
	abiName [32]byte
	abiHash [32]byte
)

// abi tells the layout of every map that is pinned, and the version.
type abi map[string]abiHash

// abiOf describes the maps of an object: kind, sizes, flags and the types of key and value, to the
// last member.
func abiOf(spec *ebpf.CollectionSpec) abi {
	out := abi{versionEntry: sha256.Sum256(fmt.Append(nil, abiVersion))}
	for name, m := range spec.Maps {
		if name[0] == '.' {
			continue
		}
		var b strings.Builder
		fmt.Fprintf(&b, "%v %d %d %d %#x ", m.Type, m.KeySize, m.ValueSize, m.MaxEntries, m.Flags)
		describe(&b, m.Key)
		b.WriteString(" -> ")
		describe(&b, m.Value)
		out[name] = sha256.Sum256([]byte(b.String()))
	}
	return out
}

// describe writes a type so that any two that programs would read differently are written
// differently.
func describe(b *strings.Builder, t btf.Type) {
	switch t := t.(type) {
	case nil:
		b.WriteString("none")
	case *btf.Struct:
		describeMembers(b, "struct", t.Size, t.Members)
	case *btf.Union:
		describeMembers(b, "union", t.Size, t.Members)
	case *btf.Array:
		fmt.Fprintf(b, "[%d]", t.Nelems)
		describe(b, t.Type)
	case *btf.Typedef:
		fmt.Fprintf(b, "%s=", t.Name) // __be16 and __u16 are not the same
		describe(b, t.Type)
	case *btf.Int:
		fmt.Fprintf(b, "int%d/%v", t.Size, t.Encoding)
	case *btf.Enum:
		fmt.Fprintf(b, "enum%d%v", t.Size, t.Values)
	default:
		fmt.Fprintf(b, "%T %s", t, t.TypeName()) // none of ours yet: pointers have no place in a map
	}
}

func describeMembers(b *strings.Builder, kind string, size uint32, members []btf.Member) {
	fmt.Fprintf(b, "%s%d{", kind, size)
	for _, m := range members {
		fmt.Fprintf(b, "%s@%d:%d ", m.Name, m.Offset, m.BitfieldSize)
		describe(b, m.Type)
		b.WriteByte(';')
	}
	b.WriteByte('}')
}

// CheckPins reports an ErrABI if dir has maps that the programs of this version cannot share. It
// changes nothing. No pins, or no directory, are no error.
func CheckPins(dir string) error {
	spec, err := loadHeddle()
	if err != nil {
		return fmt.Errorf("read BPF object: %w", err)
	}
	_, err = checkPins(dir, abiOf(spec))
	return err
}

// checkPins compares the record in dir with want. counters says that the counters have to be
// carried over.
func checkPins(dir string, want abi) (counters bool, err error) {
	pinned, err := pinnedMaps(dir)
	if err != nil || len(pinned) == 0 {
		return false, err
	}
	have, err := readABI(dir)
	if errors.Is(err, os.ErrNotExist) {
		return false, refusal(dir, "it left no record of its maps")
	}
	if err != nil {
		return false, err
	}
	if have[versionEntry] != want[versionEntry] {
		return false, refusal(dir, "what they hold means something else")
	}
	var differ []string
	for _, name := range pinned {
		hash, ours := want[name]
		switch {
		case !ours || have[name] == hash:
		case name == countersMap:
			counters = true
		default:
			differ = append(differ, name)
		}
	}
	if len(differ) > 0 {
		return false, refusal(dir, "another layout of "+strings.Join(differ, ", "))
	}
	return counters, nil
}

func refusal(dir, why string) error {
	return fmt.Errorf("%w: %s: %s; the node's containers go on without an agent. Start the version that made them, "+
		"or end the node's containers, run `heddled teardown --bpf-dir %s` and start this one", ErrABI, dir, why, dir)
}

// pinnedMaps lists the pins in dir that are maps of some version's programs, sorted.
func pinnedMaps(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list pins: %w", err)
	}
	for _, e := range entries {
		if n := e.Name(); n != abiPin && n != lastIDPin && !strings.HasPrefix(n, linkPin) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names, nil
}

func readABI(dir string) (abi, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, abiPin), nil)
	if err != nil {
		return nil, fmt.Errorf("open record of maps: %w", err)
	}
	defer m.Close()
	var (
		name abiName
		hash abiHash
		out  = abi{}
	)
	it := m.Iterate()
	for it.Next(&name, &hash) {
		out[strings.TrimRight(string(name[:]), "\x00")] = hash
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("read record of maps: %w", err)
	}
	return out, nil
}

// writeABI makes the record in dir equal to want, before any of its maps is pinned: pins without a
// record are refused, a record without pins does no harm.
func writeABI(dir string, want abi) error {
	m, err := ebpf.NewMapWithOptions(&ebpf.MapSpec{
		Name: abiPin, Type: ebpf.Hash, KeySize: uint32(len(abiName{})), ValueSize: uint32(len(abiHash{})), MaxEntries: 256,
		Pinning: ebpf.PinByName,
	}, ebpf.MapOptions{PinPath: dir})
	if err != nil {
		return fmt.Errorf("pin record of maps: %w", err)
	}
	defer m.Close()
	entries := make(map[abiName]abiHash)
	for n, hash := range want {
		var name abiName
		if copy(name[:], n) < len(n) {
			return fmt.Errorf("map %s: name longer than %d characters", n, len(name))
		}
		entries[name] = hash
	}
	if err := syncMap(m, entries); err != nil {
		return fmt.Errorf("write record of maps: %w", err)
	}
	return nil
}

// takeCounters reads the pinned counters of an earlier version and removes their pin.
func takeCounters(dir string) (totals []uint64, err error) {
	pin := filepath.Join(dir, countersMap)
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return nil, fmt.Errorf("open counters of the earlier version: %w", err)
	}
	defer m.Close()
	for i := range m.MaxEntries() {
		n, err := sum(m, i)
		if err != nil {
			return nil, fmt.Errorf("read counters of the earlier version: %w", err)
		}
		totals = append(totals, n)
	}
	return totals, os.Remove(pin)
}

// putCounters starts the counters at totals, all on the first CPU.
func putCounters(m *ebpf.Map, totals []uint64) error {
	perCPU := make([]uint64, ebpf.MustPossibleCPU())
	for i, n := range totals[:min(len(totals), int(m.MaxEntries()))] {
		perCPU[0] = n
		if err := m.Put(uint32(i), perCPU); err != nil {
			return fmt.Errorf("carry counters over: %w", err)
		}
	}
	return nil
}

// removeStalePins removes what earlier versions pinned and this one does not have: hooks, that
// would go on with programs nobody knows, and maps.
func (d *Datapath) removeStalePins(known abi) error {
	keep := map[string]bool{abiPin: true, lastIDPin: true}
	for name := range known {
		keep[name] = true
	}
	hooks := d.hooks()
	for _, h := range hooks {
		keep[linkPin+h.name] = true
	}
	for name := range lsmHooks(&lsmObjects{}) {
		keep[linkPin+name] = true
	}
	for name := range d.procFiles() {
		keep[filepath.Base(d.ProcFile(name))] = true
	}
	entries, err := os.ReadDir(d.cfg.PinDir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	var errs []error
	for _, e := range entries {
		earlier := slices.ContainsFunc(hooks, func(h hook) bool { return h.isEarlierPin(e.Name()) })
		if !keep[e.Name()] && !earlier {
			errs = append(errs, os.Remove(filepath.Join(d.cfg.PinDir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// openLastID opens the map that remembers the endpoint id given out last. It is pinned, because it
// has to be known for as long as there are tags.
func openLastID(dir string) (*ebpf.Map, error) {
	m, err := ebpf.NewMapWithOptions(&ebpf.MapSpec{
		Name: lastIDPin, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1, Pinning: ebpf.PinByName,
	}, ebpf.MapOptions{PinPath: dir})
	if err != nil {
		return nil, fmt.Errorf("pin last endpoint id: %w", err)
	}
	return m, nil
}

// LastID gives the endpoint id that was given out last on this node, 0 if none was since the maps
// were made.
func (d *Datapath) LastID() (model.EndpointID, error) {
	var id uint32
	if err := d.lastID.Lookup(uint32(0), &id); err != nil {
		return 0, fmt.Errorf("read last endpoint id: %w", err)
	}
	return model.EndpointID(id), nil
}

// SetLastID remembers an id that is being given out.
func (d *Datapath) SetLastID(id model.EndpointID) error {
	if err := d.lastID.Put(uint32(0), uint32(id)); err != nil {
		return fmt.Errorf("write last endpoint id: %w", err)
	}
	return nil
}

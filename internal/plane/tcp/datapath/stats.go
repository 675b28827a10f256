package datapath

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// ProgramStats is what the kernel says of a loaded BPF program.
type ProgramStats struct {
	Name string // as the kernel keeps it: 15 characters at most
	ID   uint32
	// Instructions are BPF's after the verifier has rewritten them; 0 if the kernel does not say.
	Instructions int
	// MachineCode is the size of the compiled program in bytes, 0 without a compiler.
	MachineCode int
	// Verified is how many instructions the verifier went through, all paths together; 0 if the
	// kernel does not say.
	Verified int
	// Runs and RunTime grow while CountRuns is on; before, they are what earlier counting left.
	Runs    uint64
	RunTime time.Duration
}

// Programs are the BPF programs of one node, kept loaded until Close.
type Programs struct {
	programs []*ebpf.Program
	about    []ProgramStats // without Runs and RunTime
}

// OpenPrograms gives the programs of the node whose pins are in dir: those that use one of its
// maps. Programs that an agent attaches to devices are among them, which have no pins of their own.
// Needs CAP_SYS_ADMIN.
func OpenPrograms(dir string) (_ *Programs, err error) {
	maps, err := pinnedMapIDs(dir)
	if err != nil {
		return nil, fmt.Errorf("maps of the node: %w", err)
	}
	p := &Programs{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	for id := ebpf.ProgramID(0); ; {
		if id, err = ebpf.ProgramGetNextID(id); errors.Is(err, os.ErrNotExist) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("list BPF programs: %w", err)
		}
		if err := p.take(id, maps); err != nil {
			return nil, fmt.Errorf("BPF program %d: %w", id, err)
		}
	}
	if len(p.programs) == 0 {
		return nil, fmt.Errorf("no BPF program uses the maps in %s: is the agent running?", dir)
	}
	return p, nil
}

// take keeps the program if it uses one of the maps.
func (p *Programs) take(id ebpf.ProgramID, maps []ebpf.MapID) error {
	program, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it went meanwhile
	}
	if err != nil {
		return err
	}
	info, err := program.Info()
	if err != nil {
		return errors.Join(err, program.Close())
	}
	uses, _ := info.MapIDs()
	if !slices.ContainsFunc(uses, func(m ebpf.MapID) bool { return slices.Contains(maps, m) }) {
		return program.Close()
	}
	about := ProgramStats{Name: info.Name, ID: uint32(id)}
	if n, err := info.TranslatedSize(); err == nil {
		about.Instructions = n / asm.InstructionSize
	}
	if n, err := info.JitedSize(); err == nil {
		about.MachineCode = int(n)
	}
	if n, ok := info.VerifiedInstructions(); ok {
		about.Verified = int(n)
	}
	p.programs, p.about = append(p.programs, program), append(p.about, about)
	return nil
}

// pinnedMapIDs gives the ids of the maps pinned in dir.
func pinnedMapIDs(dir string) (ids []ebpf.MapID, err error) {
	names, err := pinnedMaps(dir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return nil, fmt.Errorf("open pin %s: %w", name, err)
		}
		info, err := m.Info()
		if err = errors.Join(err, m.Close()); err != nil {
			return nil, fmt.Errorf("pin %s: %w", name, err)
		}
		if id, ok := info.ID(); ok {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Read gives what each program is and how often and how long it has run.
func (p *Programs) Read() ([]ProgramStats, error) {
	all := slices.Clone(p.about)
	for i, program := range p.programs {
		s, err := program.Stats()
		if err != nil {
			return nil, fmt.Errorf("statistics of %s: %w", all[i].Name, err)
		}
		all[i].Runs, all[i].RunTime = s.RunCount, s.Runtime
	}
	return all, nil
}

// Close gives the programs up. Those that are attached stay.
func (p *Programs) Close() error {
	var errs []error
	for _, program := range p.programs {
		errs = append(errs, program.Close())
	}
	return errors.Join(errs...)
}

// CountRuns has the kernel count runs and run time of all BPF programs of the machine until the
// Closer is closed. Each run costs two readings of the clock more meanwhile. Needs Linux 5.8.
func CountRuns() (io.Closer, error) {
	stop, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("count runs of BPF programs: %w", err)
	}
	return stop, nil
}

// emptyRuns is how often EmptyRun runs its program.
const emptyRuns = 200000

// EmptyRun gives the nanoseconds that the kernel counts for a run of a program that does nothing:
// what counting itself adds to each run of others. Counting must be on.
func EmptyRun() (ns float64, err error) {
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "empty", Type: ebpf.SchedCLS, License: "MIT",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		return 0, fmt.Errorf("load an empty BPF program: %w", err)
	}
	defer func() { err = errors.Join(err, program.Close()) }()
	const ethernetFrame = 64
	if _, _, err := program.Benchmark(make([]byte, ethernetFrame), emptyRuns, nil); err != nil {
		return 0, fmt.Errorf("run an empty BPF program: %w", err)
	}
	s, err := program.Stats()
	if err != nil {
		return 0, fmt.Errorf("statistics of an empty BPF program: %w", err)
	}
	if s.RunCount == 0 {
		return 0, errors.New("the kernel did not count the runs of an empty BPF program")
	}
	return float64(s.Runtime) / float64(s.RunCount), nil
}

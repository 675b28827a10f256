package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// Feature is the outcome of one probe of the running kernel. What lacking it means, and what to do
// about it, is internal/doctor's to say.
type Feature struct {
	// Name is stable: what was probed, behind "bpf_" if it is of BPF.
	Name string
	// Detail says what was tried, in a few words.
	Detail string
	// Err is nil if the kernel did it. It says what the kernel answered otherwise; "not supported"
	// and "not permitted" come to the same for the caller.
	Err error
}

// Features probes the running kernel for what the datapath is built on, by loading a minimal
// program or making a map for each; nothing is attached and nothing stays. It needs CAP_BPF and
// CAP_NET_ADMIN: without them every probe reports the refusal.
func Features() []Feature {
	types := btf.NewCache() // to decode the kernel's takes a tenth of an agent's start
	with := func(probe func(*btf.Cache) error) func() error { return func() error { return probe(types) } }
	probes := []struct {
		name, detail string
		probe        func() error
	}{
		{"bpf_btf", "kernel types in /sys/kernel/btf/vmlinux", with(probeBTF)},
		{"bpf_maps", "LPM trie, LRU hash, per-CPU array", probeMaps},
		{"bpf_sk_storage", "socket storage that accepted sockets inherit", probeSkStorage},
		{"bpf_connect", "cgroup connect4, connect6", sockAddr(ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect)},
		{"bpf_bind", "cgroup bind4, bind6", sockAddr(ebpf.AttachCGroupInet4Bind, ebpf.AttachCGroupInet6Bind)},
		{"bpf_getname", "cgroup getpeername4/6, getsockname4/6", sockAddr(
			ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername,
			ebpf.AttachCgroupInet4GetSockname, ebpf.AttachCgroupInet6GetSockname)},
		{"bpf_sockopt", "cgroup getsockopt, setsockopt", probeSockopt},
		{"bpf_header_option", "sockops programs that write and read TCP header options", helpers(ebpf.SockOps,
			asm.FnReserveHdrOpt, asm.FnStoreHdrOpt, asm.FnLoadHdrOpt, asm.FnGetsockopt, asm.FnSkStorageGet)},
		{"bpf_sk_assign", "tc programs that look a socket up and assign a packet to it", helpers(ebpf.SchedCLS,
			asm.FnSkcLookupTcp, asm.FnSkAssign, asm.FnSkRelease, asm.FnRedirect)},
		{"bpf_loop", "tc programs that walk over a packet's options in a loop", helpers(ebpf.SchedCLS, asm.FnLoop)},
		{"bpf_sk_assign_reuseport", "SO_REUSEPORT groups behind an assigned listener", probeReuseport},
		{"bpf_tcp_iterator", "iterator over TCP sockets", probeTCPIterator},
		{"bpf_storage_iterator", "iterator over socket storage", probeStorageIterator},
		{"bpf_sock_destroy", "ending a connection from the TCP iterator", with(probeSockDestroy)},
		{"sock_destroy", "ending one connection by sock_diag", probeSockDiag},
		{"bpf_task_from_pid", "looking at the caller of socket() where its socket is counted", with(probeTask)},
		{"bpf_struct_ops", "congestion controls of one's own", probeCongestion},
		{"bpf_jit", "programs are compiled to machine code", probeJIT},
		{"bpf_lsm", "BPF programs on security hooks", probeLSM},
	}
	found := make([]Feature, len(probes))
	for i, p := range probes {
		found[i] = Feature{Name: p.name, Detail: p.detail, Err: p.probe()}
	}
	return found
}

// probeErr says in a few words what the kernel answered: a verifier's log, or the library's guess
// at a cause, helps nobody here.
func probeErr(what any, err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		err = errno
	}
	return fmt.Errorf("%v: %w", what, err)
}

func probeBTF(types *btf.Cache) error {
	if _, err := types.Kernel(); err != nil {
		return fmt.Errorf("load kernel BTF: %w", err)
	}
	return nil
}

// probeCongestion loads a program that is a member of a congestion control.
func probeCongestion() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.StructOps, AttachType: ebpf.AttachStructOps, AttachTo: "tcp_congestion_ops:undo_cwnd", License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		return probeErr(ebpf.StructOps, err)
	}
	return p.Close()
}

func probeMaps() error {
	for _, t := range []ebpf.MapType{ebpf.LPMTrie, ebpf.LRUHash, ebpf.PerCPUArray} {
		if err := features.HaveMapType(t); err != nil {
			return probeErr(t, err)
		}
	}
	return nil
}

// probeSkStorage makes the kind of map that tags sockets (with BPF_F_CLONE, which features does not
// try), and asks for its helper in each program type that reads tags.
func probeSkStorage() error {
	const (
		fNoPrealloc = 1 << 0 // BPF_F_NO_PREALLOC
		fClone      = 1 << 9 // BPF_F_CLONE
	)
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.SkStorage, Flags: fNoPrealloc | fClone, KeySize: 4, ValueSize: 4,
		Key:   &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed},
		Value: &btf.Int{Name: "unsigned int", Size: 4},
	})
	if err != nil {
		return probeErr(ebpf.SkStorage, err)
	}
	if err := m.Close(); err != nil {
		return fmt.Errorf("close probe map: %w", err)
	}
	for _, t := range []ebpf.ProgramType{ebpf.CGroupSockAddr, ebpf.CGroupSockopt, ebpf.SchedCLS} {
		if err := helpers(t, asm.FnSkStorageGet)(); err != nil {
			return err
		}
	}
	return nil
}

// helpers gives a probe for helper functions in programs of type t.
func helpers(t ebpf.ProgramType, fns ...asm.BuiltinFunc) func() error {
	return func() error {
		for _, fn := range fns {
			if err := features.HaveProgramHelper(t, fn); err != nil {
				return probeErr(fmt.Sprintf("%v in %v", fn, t), err)
			}
		}
		return nil
	}
}

// sockAddr gives a probe that loads a socket address program for each hook. The hook is checked at
// load, and the program type alone says nothing about it: hooks came one by one.
func sockAddr(hooks ...ebpf.AttachType) func() error {
	return func() error {
		for _, hook := range hooks {
			if err := load(&ebpf.ProgramSpec{Type: ebpf.CGroupSockAddr, AttachType: hook}); err != nil {
				return probeErr(hook, err)
			}
		}
		return nil
	}
}

// probeSockopt stands for CONFIG_CGROUP_BPF too, without which this program type does not exist.
func probeSockopt() error {
	for _, hook := range []ebpf.AttachType{ebpf.AttachCGroupGetsockopt, ebpf.AttachCGroupSetsockopt} {
		if err := load(&ebpf.ProgramSpec{Type: ebpf.CGroupSockopt, AttachType: hook}); err != nil {
			return probeErr(hook, err)
		}
	}
	return nil
}

// probeReuseport goes by the version: the behaviour itself shows only in traffic, and the function
// that came with the change (inet_lookup_reuseport) was put into stable kernels without it. What
// another kernel has of it is used all the same: only what it refuses is relayed.
func probeReuseport() error {
	const since = 6<<16 | 6<<8
	v, err := features.LinuxVersionCode()
	if err != nil {
		return fmt.Errorf("read the kernel's version: %w", err)
	}
	if v < since {
		return fmt.Errorf("kernel %d.%d: %w", v>>16, v>>8&0xff, ebpf.ErrNotSupported)
	}
	return nil
}

func probeTCPIterator() error {
	return load(&ebpf.ProgramSpec{Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "tcp", Instructions: ret(0)})
}

func probeStorageIterator() error {
	return load(&ebpf.ProgramSpec{Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "bpf_sk_storage_map", Instructions: ret(0)})
}

// probeSockDestroy loads the smallest iterator program that calls the kernel function
// bpf_sock_destroy.
func probeSockDestroy(types *btf.Cache) error {
	const skCommonOffset = 8 // of sk_common in struct bpf_iter__tcp: {meta, sk_common, uid}
	call, err := kernelFunction(types, "bpf_sock_destroy")
	if err != nil {
		return err
	}
	body := asm.Instructions{
		asm.LoadMem(asm.R1, asm.R1, skCommonOffset, asm.DWord),
		asm.JEq.Imm(asm.R1, 0, "end"),
		call,
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"),
		asm.Return(),
	}
	return load(&ebpf.ProgramSpec{Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "tcp", Instructions: body})
}

// probeSockDiag asks for the end of a socket that there is not.
func probeSockDiag() error {
	diag, err := openSockDiag()
	if err != nil {
		return err
	}
	defer diag.Close()
	loopback := fromAddr(netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	if _, err := diag.Write(destroyRequest(&heddleSocketRecord{Local: loopback, Remote: loopback})); err != nil {
		return err
	}
	answer := make([]byte, unix.Getpagesize())
	n, err := diag.Read(answer)
	if err != nil {
		return err
	}
	if err := destroyed(answer[:n]); !errors.Is(err, unix.ENOENT) {
		return errors.Join(errors.New("the kernel does not look for the socket"), err)
	}
	return nil
}

// probeTask loads the smallest program that looks a thread up where the agent asks for a socket to
// be counted.
func probeTask(types *btf.Cache) error {
	find, err := kernelFunction(types, "bpf_task_from_pid")
	if err != nil {
		return err
	}
	release, err := kernelFunction(types, "bpf_task_release")
	if err != nil {
		return err
	}
	return load(&ebpf.ProgramSpec{Type: ebpf.CGroupSockopt, AttachType: ebpf.AttachCGroupSetsockopt, Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R1, 1),
		find,
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Reg(asm.R1, asm.R0),
		release,
		asm.Mov.Imm(asm.R0, 1).WithSymbol("end"),
		asm.Return(),
	}})
}

// kernelFunction gives the call of a function that the kernel lends to programs (kfunc).
func kernelFunction(types *btf.Cache, name string) (call asm.Instruction, err error) {
	kernel, err := types.Kernel()
	if err != nil {
		return call, fmt.Errorf("load kernel BTF: %w", err)
	}
	var fn *btf.Func
	if err := kernel.TypeByName(name, &fn); err != nil {
		return call, fmt.Errorf("kernel function %s: %w", name, err)
	}
	id, err := kernel.TypeID(fn)
	if err != nil {
		return call, fmt.Errorf("kernel function %s: %w", name, err)
	}
	return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: int64(id)}, nil
}

// probeJIT looks at what became of a program: the sysctl is not to be seen from other network
// namespaces than the machine's own.
func probeJIT() error {
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, Instructions: ret(0), License: "GPL"})
	if err != nil {
		return probeErr("load "+ebpf.SocketFilter.String(), err)
	}
	defer func() { _ = prog.Close() }() // nothing was written
	info, err := prog.Info()
	if err != nil {
		return probeErr("program info", err)
	}
	if _, err := info.JitedSize(); err != nil {
		return errors.New("programs are interpreted")
	}
	return nil
}

// ret is a program that does nothing but return v.
func ret(v int32) asm.Instructions {
	return asm.Instructions{asm.Mov.Imm(asm.R0, v), asm.Return()}
}

// load loads spec and drops it again. Without instructions it returns 1, which every cgroup hook
// takes.
func load(spec *ebpf.ProgramSpec) error {
	if spec.Instructions == nil {
		spec.Instructions = ret(1)
	}
	spec.License = "GPL"
	prog, err := ebpf.NewProgram(spec)
	if err != nil {
		return probeErr("load "+spec.Type.String(), err)
	}
	if err := prog.Close(); err != nil {
		return fmt.Errorf("close probe program: %w", err)
	}
	return nil
}

package netstack

import (
	"encoding/binary"
	"fmt"
	"log"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

// hostFD is where a tenant's process has its connection to the host.
const hostFD = 3

// process is a tenant's.
type process struct {
	id, generation uint64
	name           string
	cmd            *exec.Cmd
	mail           *mailbox
	done           chan struct{} // closed when it has ended

	// Guarded by host.mu.
	named      bool // since BEGIN
	ending     bool // it was told to end
	unanswered bool // and nobody waits for its answer
	parts      int  // how often it was told of another agent, and has not said so yet
	last       protocol.Stats
	asked      chan struct{} // closed when last is new; nil: nobody has asked

	reaping sync.Mutex // a process that was waited for is not killed: its number may be another's
	reaped  bool
}

// starter starts processes from a thread that never ends: they end with the thread that has started
// them (PR_SET_PDEATHSIG).
type starter chan func()

func newStarter() starter {
	s := make(starter)
	go func() {
		runtime.LockOSThread()
		for f := range s {
			f()
		}
	}()
	return s
}

func (h *host) startProcess(m *protocol.Tenant) (*process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	its := os.NewFile(uintptr(fds[1]), "tenant's end")
	defer its.Close()
	own := os.NewFile(uintptr(fds[0]), "host's end")
	defer own.Close()
	conn, err := net.FileConn(own)
	if err != nil {
		return nil, err
	}
	p := &process{
		id: m.Head.Tenant, generation: m.Generation, name: strings.TrimRight(string(m.Name[:]), "\x00"), done: make(chan struct{}), named: true,
	}
	// The program that runs, though another may lie in its place by now.
	p.cmd = exec.Command("/proc/self/exe", "--tenant", fmt.Sprintf("%d:%s", p.id, p.name))
	p.cmd.Args[0] = os.Args[0]
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr, p.cmd.ExtraFiles = "/", os.Stderr, os.Stderr, []*os.File{its}
	p.cmd.Env = []string{fmt.Sprintf("GOMEMLIMIT=%d", memoryOf(m)), "GOMAXPROCS=" + tenantProcs}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	h.start <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		_ = conn.Close()
		return nil, err
	}
	p.weigh(m.Limits.Weight)
	p.mail = newMailbox(conn.(*net.UnixConn))
	go p.hear(h)
	return p, nil
}

// tenantProcs is how many threads of a tenant run at a time. What a packet causes goes from one
// goroutine to the next: with two threads they wake each other for each step.
const tenantProcs = "1"

// memoryOf is the memory from which on a tenant's process collects its garbage at once.
func memoryOf(m *protocol.Tenant) uint64 {
	const base = 64 << 20
	if m.Limits.Memory == 0 {
		return tenantMemory + base
	}
	return m.Limits.Memory + base
}

// hear passes on what the process says until it has ended.
func (p *process) hear(h *host) {
	conn := p.mail.conn
	for {
		b, fds, err := receive(conn)
		if err != nil {
			break
		}
		if err := h.heard(p, b, fds); err != nil {
			log.Printf("heddle-netstack: the process of tenant %d (%s) is ended: %v", p.id, p.name, err)
			break
		}
	}
	p.mail.close()
	p.kill() // what does not speak is over
	p.reaping.Lock()
	err := p.cmd.Wait()
	p.reaped = true
	p.reaping.Unlock()
	h.ended(p, err)
	close(p.done)
}

func (p *process) kill() {
	if p.reaping.TryLock() {
		defer p.reaping.Unlock()
		if !p.reaped {
			_ = unix.Kill(p.cmd.Process.Pid, unix.SIGKILL) // or it has ended
		}
	}
}

// may reports whether the process may say such a message: somebody may have taken it over, who is
// to speak for no other tenant, nor have the agent hang up.
func (p *process) may(h protocol.Head, length, descriptors int) bool {
	var least, most int
	switch h.Type {
	case protocol.TypeBegin, protocol.TypeStats | protocol.Answer:
		if h.Tenant == 0 {
			return descriptors == 0
		}
	case protocol.TypeAccepted:
		least, most = 1, 1
	case protocol.TypeConnect | protocol.Answer: // a pair may come back
		most = 1
	}
	if h.Tenant != p.id || descriptors < least || descriptors > most {
		return false
	}
	switch h.Type {
	case protocol.TypeAccepted:
		return length == binary.Size(protocol.Accepted{})
	case protocol.TypeEnded, protocol.TypeListed:
		return length == binary.Size(protocol.Info{})
	case protocol.TypeSent:
		return length == binary.Size(protocol.Plain{})
	}
	return h.Type&protocol.Answer != 0
}

// part tells the process that its agent is gone. host.mu is held.
func (p *process) part() {
	p.parts++
	p.mail.send(protocol.Append(nil, &protocol.Plain{Head: protocol.Head{Type: protocol.TypeBegin}}), -1)
}

// counted takes what the process says of itself. host.mu is held.
func (p *process) counted(b []byte) {
	s, err := protocol.Parse[protocol.Stats](b)
	if err != nil {
		return
	}
	p.last = s
	if p.asked != nil {
		close(p.asked)
	}
	p.asked = nil
}

// weigh gives the process its share of the machine beside those of other tenants: a step of nice is
// a quarter more.
func (p *process) weigh(weight uint32) {
	nice := -int(math.Round(math.Log(float64(min(max(weight, 1), 100))) / math.Log(1.25)))
	// Without privilege it stays as it is: weights are shares among those who may have them.
	_ = unix.Setpriority(unix.PRIO_PGRP, p.cmd.Process.Pid, max(nice, -20))
}

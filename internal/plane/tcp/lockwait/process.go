// Package lockwait makes system calls that wait for the locks of sockets in a process of its own. A
// program holds the lock of its socket for as long as it likes: by send() from memory that does not
// come (userfaultfd, FUSE, a network file system). Who waits for that lock can neither be woken nor
// killed. So the agent does not wait itself: it looks at the thread that does, gives a call up that
// waits too long, and can end and be replaced all the same.
package lockwait

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrStuck says that a call waits for a lock, and was given up. It goes on in its process until the
// lock is free.
var ErrStuck = errors.New("it waits for the lock of a socket whose program is in a call with memory that does not come (userfaultfd, FUSE, a network file system)")

const (
	// look is between two looks at a call that has said nothing. A call that was seen to wait at
	// stuckLooks of them is given up: locks that are not held on purpose are held for microseconds.
	look       = 30 * time.Millisecond
	stuckLooks = 5
	// longest bounds a call that does not wait: no node has sockets for half a minute.
	longest = 30 * time.Second
	// ends bounds the wait for a process whose calls have all come back.
	ends = 2 * time.Second
)

// Stuck is a call that was given up and has not come back.
type Stuck struct {
	Name  string
	Since time.Time
}

// Process makes calls. Its methods may be called from any goroutine. The zero value is ready; the
// process is started by the first call.
type Process struct {
	// Changed, which may be nil, is called when a call has got stuck or one that was has come back.
	Changed func()

	mu       sync.Mutex // guards the rest
	requests *os.File   // to the process; nil: there is none
	pid      int
	ended    chan struct{} // closed when the process has ended
	turns    map[string]*turn
}

// turn is of one name: calls of a name are made one after the other.
type turn struct {
	mu    sync.Mutex // of who makes the call
	users int        // who has the turn, or waits for it
	since time.Time  // the last call is stuck since then
}

// Do has the process make a call of file, and gives what it brought: with a request that is written
// to it and answered once, and without one it is read to its end. file is opened by open, in the
// calling thread, and closed. While a call of that name is stuck, others are ErrStuck at once. What
// came before an error is given with it.
func (p *Process) Do(name string, open func() (*os.File, error), request []byte) (got []byte, err error) {
	t := p.enter(name)
	defer p.leave(name, t)
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.isStuck(t) {
		return nil, ErrStuck
	}
	file, err := open()
	if err != nil {
		return nil, err
	}
	answers, pid, err := p.begin(file, request)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	c := call{answers: answers, pid: pid}
	err = c.await(time.Now().Add(longest))
	if !errors.Is(err, ErrStuck) {
		return c.got, errors.Join(err, answers.Close())
	}
	p.stuck(t, time.Now())
	p.enter(name) // the call keeps its turn
	got = slices.Clone(c.got)
	go func() {
		_ = c.drain()
		_ = answers.Close()
		p.stuck(t, time.Time{})
		p.leave(name, t)
	}()
	return got, ErrStuck
}

// Stuck lists the calls that were given up, by name.
func (p *Process) Stuck() (all []Stuck) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, t := range p.turns {
		if !t.since.IsZero() {
			all = append(all, Stuck{name, t.since})
		}
	}
	slices.SortFunc(all, func(a, b Stuck) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Close has the process end, and waits for that unless a call is stuck: those end when they can.
func (p *Process) Close() error {
	stuck := len(p.Stuck()) > 0
	p.mu.Lock()
	running, ended := p.requests != nil, p.ended
	err := p.end()
	p.mu.Unlock()
	if !running || stuck {
		return err
	}
	select {
	case <-ended:
	case <-time.After(ends): // it waits for a lock since now
	}
	return err
}

// end gives the process up. The caller holds mu.
func (p *Process) end() error {
	if p.requests == nil {
		return nil
	}
	err := p.requests.Close()
	p.requests = nil
	return err
}

func (p *Process) enter(name string) *turn {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.turns[name]
	if t == nil {
		t = new(turn)
		if p.turns == nil {
			p.turns = make(map[string]*turn)
		}
		p.turns[name] = t
	}
	t.users++
	return t
}

func (p *Process) leave(name string, t *turn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(p.turns, name)
	}
}

func (p *Process) isStuck(t *turn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !t.since.IsZero()
}

// stuck notes that a call is stuck since then; the zero time: no more.
func (p *Process) stuck(t *turn, since time.Time) {
	p.mu.Lock()
	t.since = since
	p.mu.Unlock()
	if p.Changed != nil {
		p.Changed()
	}
}

// begin hands a call to the process, which it starts if there is none, and gives where the answers
// come.
func (p *Process) begin(file *os.File, request []byte) (answers *os.File, pid int, err error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, theirs.Close()) }()
	p.mu.Lock()
	defer p.mu.Unlock()
	for again := true; ; again = false {
		if err = p.start(); err != nil {
			break
		}
		rights := unix.UnixRights(int(file.Fd()), int(theirs.Fd()))
		err = unix.Sendmsg(int(p.requests.Fd()), append([]byte{callFrame}, request...), rights, nil, unix.MSG_NOSIGNAL)
		if err == nil {
			return ours, p.pid, nil
		}
		err = errors.Join(fmt.Errorf("hand a call to %s: %w", processName, err), p.end()) // it has ended
		if !again {
			break
		}
	}
	return nil, 0, errors.Join(err, ours.Close())
}

// start starts the process unless it is there. The caller holds mu.
func (p *Process) start() error {
	if p.requests != nil {
		return nil
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	cmd := exec.Cmd{Path: "/proc/self/exe", Args: []string{processName}, Env: []string{}, Dir: "/", ExtraFiles: []*os.File{theirs}}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // what ends the agent from a terminal leaves it the time to
	err = errors.Join(cmd.Start(), theirs.Close())
	if err != nil {
		return errors.Join(fmt.Errorf("start %s: %w", processName, err), ours.Close())
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // or it stays a zombie
		close(ended)
	}()
	p.requests, p.pid, p.ended = ours, cmd.Process.Pid, ended
	return nil
}

// socketPair gives two ends of a socket of messages. The first one's calls do not block.
func socketPair() (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fds[0], true)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("socket to %s: %w", processName, err)
	}
	return os.NewFile(uintptr(fds[0]), "socket"), os.NewFile(uintptr(fds[1]), "socket"), nil
}

// call is a call under way.
type call struct {
	answers  *os.File
	pid, tid int // of the thread that makes it
	got      []byte
}

// await reads the answers until the call ends, waits too long, or it is too late.
func (c *call) await(late time.Time) error {
	for waits := 0; ; {
		if err := c.answers.SetReadDeadline(time.Now().Add(look)); err != nil {
			return err
		}
		done, err := c.answer()
		switch {
		case !errors.Is(err, os.ErrDeadlineExceeded):
			if done || err != nil {
				return err
			}
			continue
		case c.waits():
			waits++
		}
		if waits >= stuckLooks || time.Now().After(late) {
			return ErrStuck
		}
	}
}

// drain reads the answers until the call ends.
func (c *call) drain() error {
	if err := c.answers.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	for {
		if done, err := c.answer(); done || err != nil {
			return err
		}
		c.got = nil
	}
}

// answer reads one frame. done says that it was the last.
func (c *call) answer() (done bool, err error) {
	frame := make([]byte, maxFrame)
	n, err := c.answers.Read(frame)
	if errors.Is(err, io.EOF) {
		return false, fmt.Errorf("%s ended in the midst of a call", processName)
	}
	if err != nil {
		return false, err
	}
	return c.take(frame[:n])
}

// waits reports whether the thread that makes the call waits for something that it cannot be woken
// from.
func (c *call) waits() bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/stat", c.pid, c.tid))
	_, fields, found := strings.Cut(string(text), ") ") // its name has none
	return err == nil && found && strings.HasPrefix(fields, "D")
}

package queues

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/hang"
	"heddle.dev/heddle/internal/plane/guest"
	"heddle.dev/heddle/internal/plane/process"
	"heddle.dev/heddle/internal/plane/queues/protocol"
)

// Run keeps the service for the endpoints that want it, until ctx ends. It lives on.
func (p *Plane) Run(ctx context.Context) error {
	program := Program(p.cfg.Self, p.cfg.StateDir)
	var log sync.WaitGroup
	defer log.Wait()
	log.Go(func() { program.BoundLog(ctx, p.cfg.Log) })
	// One that runs has what programs of before have: nothing more is put into their rings.
	l, err := process.Adopt(program.Socket, dial)
	for pause := firstPause; ctx.Err() == nil; {
		if l == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-p.wake:
			}
			l, err = process.Reach(program, dial)
		}
		if l != nil {
			err = p.serve(ctx, l)
			l, pause = nil, firstPause
		}
		if ctx.Err() != nil {
			return nil
		}
		p.cfg.Log.Warn("the service of queues is not there", "err", err)
		p.start() // for whoever wanted it
		select {
		case <-ctx.Done():
		case <-time.After(pause):
			pause = min(2*pause, lastPause)
		}
	}
	return nil
}

// serve greets the service and hears it until it ends.
func (p *Plane) serve(ctx context.Context, l *link) error {
	stop := context.AfterFunc(ctx, l.Close)
	defer stop()
	pidfd, _ := unix.PidfdOpen(l.PID, 0) // or it is killed by nobody
	defer closeFD(pidfd)
	heard := make(chan error, 1)
	go func() { heard <- p.hear(l) }()
	hello := protocol.Plain{Head: protocol.Head{Type: protocol.TypeHello}, Value: protocol.Version}
	greets, cancel := context.WithTimeout(ctx, process.Answers)
	greeting, _, err := request[protocol.Plain, protocol.Plain](greets, l, &hello, &hello.Head, -1)
	cancel()
	greeted := err == nil
	if greeted {
		l.owners = greeting.Value&protocol.Owners != 0
		p.mu.Lock()
		p.link = l
		p.mu.Unlock()
		err = p.watch(ctx, l, heard)
	}
	l.Close()
	p.mu.Lock()
	p.link = nil
	p.ended++
	p.mu.Unlock()
	// One that has not answered may be of another version, or slow: it has what programs of before
	// have, and no region of this agent's.
	if greeted && ctx.Err() == nil {
		endProcess(pidfd)
		p.lose()
	}
	return fmt.Errorf("service of queues, process %d: %w", l.PID, err)
}

// endProcess ends a service that has left the agent's connection, and waits until it has ended: of
// what it would still take of rings, programs could send the same once more.
func endProcess(pidfd int) {
	if pidfd < 0 || unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) != nil {
		return // it has ended
	}
	for until := time.Now().Add(process.Answers); ; {
		_, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(0, time.Until(until)).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// watch waits until the service has ended, and gives why. One that hangs is ended: what programs
// have sent waits for it.
func (p *Plane) watch(ctx context.Context, l *link, heard <-chan error) error {
	tick := time.NewTicker(askEvery)
	defer tick.Stop()
	for {
		select {
		case err := <-heard:
			return err
		case <-tick.C:
		}
		bound, cancel := hang.Bound(ctx, l.PID)
		_, err := l.useOf(bound, 0)
		hangs := err != nil && errors.Is(context.Cause(bound), hang.Err)
		cancel()
		if hangs {
			p.why.hangs.Add()
			_ = unix.Kill(l.PID, unix.SIGKILL) // it may have ended just now
			<-heard                            // until then it could be reached once more
			return fmt.Errorf("hangs and was killed: for %s %w", hang.After, hang.Err)
		}
	}
}

// hear hears the service until its connection ends.
func (p *Plane) hear(l *link) error {
	for {
		head, message, err := l.receive()
		if err != nil {
			l.Close()
			return err
		}
		switch head.Type {
		case protocol.TypeGone:
			p.forget(head.Region)
		case protocol.TypeMake:
			m, err := protocol.Parse[protocol.Make](message)
			if err != nil {
				l.Close()
				return err
			}
			go p.makeSocket(l, m)
		default:
			l.Close()
			return fmt.Errorf("%w: type %d", protocol.ErrMalformed, head.Type)
		}
	}
}

// forget gives up what the agent has of a region.
func (p *Plane) forget(id uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.regions[id]; r != nil {
		delete(p.regions, id)
		r.of.leave(r.capacity)
		closeFD(r.memory)
	}
}

// makeSocket answers MAKE.
func (p *Plane) makeSocket(l *link, m protocol.Make) {
	p.mu.Lock()
	r := p.regions[m.Head.Region]
	makes := r != nil && r.of.attached && r.flags&protocol.Control != 0
	p.mu.Unlock()
	answer := protocol.Make{Head: m.Head, Family: m.Family}
	answer.Head.Type |= protocol.Answer
	fd := -1
	if !makes {
		answer.Head.Error = int32(unix.ENETDOWN)
	} else if file, err := p.cfg.Sockets.SocketAs(r.of.ID, m.Family == 6); err != nil {
		answer.Head.Error = int32(unix.ENETDOWN)
		var errno unix.Errno
		if errors.As(err, &errno) {
			answer.Head.Error = int32(errno)
		}
	} else {
		defer file.Close()
		fd = int(file.Fd())
	}
	_ = l.Write(protocol.Append(nil, &answer), fd) // who receives learns that the service has ended
}

// cutsAtOnce is how many connections are cut at a time: a module may take long to answer.
const cutsAtOnce = 16

// lose ends what a service had that has ended: connections whose rings had bytes are over, and
// programs learn of it; the others go on without one. A program may be putting bytes into an empty
// ring: all are told that the service has died before any ring is looked at, and a program looks
// for that when it has put some (docs/protocols/stack-queues.md).
func (p *Plane) lose() {
	p.mu.Lock()
	regions := p.regions
	p.regions = map[uint64]*region{}
	for _, r := range regions {
		r.of.leave(r.capacity)
	}
	p.mu.Unlock()
	for _, r := range regions {
		r.giveUp()
	}
	var cuts []func()
	for _, r := range regions {
		for number, cut := range r.given {
			if r.lost(number) {
				r.end(number)
				cuts = append(cuts, cut)
			}
		}
		closeFD(r.memory)
	}
	var wg sync.WaitGroup
	turns := make(chan struct{}, cutsAtOnce)
	for _, cut := range cuts {
		turns <- struct{}{}
		wg.Go(func() { cut(); <-turns })
	}
	wg.Wait()
}

// cut ends a connection that a program has still.
func (p *Plane) cut(g guest.Connection) {
	fd, found := p.programs.Find(g)
	if !found {
		return
	}
	defer closeFD(fd)
	// By a RST: the peer is not to take what came for all there was.
	if err := disconnect(fd); err != nil {
		p.cfg.Log.Error("a connection whose queues have ended is not", "err", err)
	}
}

// disconnect ends a connection at once, and by a RST: connect() with AF_UNSPEC, for which the
// library has no address. One that is over stays so.
func disconnect(fd int) error {
	none := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&none)), unsafe.Sizeof(none)); errno != 0 {
		return fmt.Errorf("disconnect: %w", errno)
	}
	return nil
}

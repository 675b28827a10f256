// Command executor carries out the steps of differ's programs inside a container. `executor serve
// SOCKET POOL N` keeps N workers running until its standard input ends; each connects to the Hub at
// SOCKET and says which pool it belongs to. A worker carries out one program after another and
// closes all descriptors in between; it ends when its connection does, and is then replaced.
//
// It makes raw system calls, and keeps its own few descriptors far above those of the programs, so
// that descriptor numbers can be compared.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "executor:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 4 && args[0] == "serve":
		n, err := strconv.Atoi(args[3])
		if err != nil {
			return fmt.Errorf("number of workers: %w", err)
		}
		return serve(args[1], args[2], n)
	case len(args) == 3 && args[0] == "work":
		return work(args[1], args[2])
	case len(args) == 1 && args[0] == "child":
		return child()
	}
	return fmt.Errorf("usage: executor serve SOCKET POOL N")
}

// serve keeps n workers running until standard input ends or SIGTERM comes.
func serve(socket, pool string, n int) error {
	ending := make(chan struct{})
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for quick := 0; quick < 20; quick++ { // a worker that cannot even start is not tried for ever
				began := time.Now()
				_ = runWorker(socket, pool, ending) // the Hub ends a worker by closing its connection
				select {
				case <-ending:
					return
				default:
				}
				if time.Since(began) > time.Second {
					quick = 0
				}
			}
		})
	}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, unix.SIGTERM)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		terminated <- unix.SIGTERM
	}()
	<-terminated
	close(ending) // the workers go first: what has their streams open would wait for them
	all.Wait()
	return nil
}

func runWorker(socket, pool string, ending <-chan struct{}) error {
	p, err := os.StartProcess("/proc/self/exe", []string{"executor", "work", socket, pool}, &os.ProcAttr{
		Files: []*os.File{nil, nil, os.Stderr},
		Env:   append(os.Environ(), "GODEBUG=asyncpreemptoff=1", "GOMAXPROCS=2"),
	})
	if err != nil {
		return fmt.Errorf("start worker: %w", err)
	}
	ended := make(chan struct{})
	go func() {
		select {
		case <-ending:
			_ = p.Kill()
		case <-ended:
		}
	}()
	_, err = p.Wait()
	close(ended)
	return err
}

// Descriptors of the worker's own, above those of programs, which start at firstFd. What the
// runtime has open is below them: newWorker makes it open all that it ever does, and fills the
// holes.
const (
	firstFd = 20
	lastFd  = 899
	ctlFd   = 900 + iota
	pipeRFd
	pipeWFd
	fileFd
	childCtlFd    // in a parent: to its child
	childPassedFd // in a child that has just started: to its parent
)

// worker carries out steps.
type worker struct {
	slots   map[int]int // descriptors by slot
	mu      sync.Mutex  // guards slots, pending and done: calls that block have threads of their own
	pending map[int]*call
	done    []differ.Done
	child   int // process id, 0 if there is none
	hosts   map[string]differ.Addrs
	ports   map[string]int
}

// work connects to the Hub and carries out what it says.
func work(socket, pool string) error {
	w, err := newWorker()
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make control socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return fmt.Errorf("connect to the hub: %w", err)
	}
	if err := unix.Dup3(fd, ctlFd, unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("move control socket: %w", err)
	}
	if err := w.closeAll(); err != nil {
		return err
	}
	if _, err := unix.Write(ctlFd, differ.Marshal(differ.Hello{Pool: pool})); err != nil {
		return fmt.Errorf("greet the hub: %w", err)
	}
	return w.loop()
}

func newWorker() (*worker, error) {
	r, w, err := os.Pipe() // with its first pipe the runtime makes an epoll and an eventfd descriptor
	if err != nil {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	_, _ = r.Close(), w.Close()
	for {
		fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("fill low descriptors: %w", err)
		}
		if fd >= firstFd {
			_ = unix.Close(fd)
			break
		}
	}
	if err := interruptible(); err != nil {
		return nil, err
	}
	if err := ownFiles(); err != nil {
		return nil, err
	}
	return &worker{slots: map[int]int{}, pending: map[int]*call{}}, nil
}

// interruptible makes SIGUSR1 end system calls with EINTR: the runtime's handlers restart them.
func interruptible() error {
	signal.Notify(make(chan os.Signal, 1), unix.SIGUSR1)
	var act struct {
		handler, flags, restorer uintptr
		mask                     uint64
	}
	if err := sigaction(unix.SIGUSR1, nil, &act); err != nil {
		return err
	}
	const restart = 0x10000000 // SA_RESTART
	act.flags &^= restart
	return sigaction(unix.SIGUSR1, &act, nil)
}

// loop answers requests until the Hub hangs up.
func (w *worker) loop() error {
	buf := make([]byte, differ.MaxPacket)
	for {
		n, err := unix.Read(ctlFd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			w.endChild()
			return nil
		}
		var q differ.Request
		reply := differ.Reply{}
		if err := json.Unmarshal(buf[:n], &q); err != nil {
			reply.Mistake = err.Error()
		} else {
			reply = w.answer(q)
		}
		if _, err := unix.Write(ctlFd, differ.Marshal(reply)); err != nil {
			return fmt.Errorf("answer the hub: %w", err)
		}
	}
}

func (w *worker) answer(q differ.Request) differ.Reply {
	if q.Hosts != nil {
		w.hosts, w.ports = q.Hosts, q.Ports
	}
	switch q.Kind {
	case "step":
		var reply differ.Reply
		if q.Child {
			reply = w.askChild(q)
		} else {
			reply = w.step(q)
		}
		seen := w.sample(differ.Request{})
		reply.Slots, reply.Child, reply.Moving = seen.Slots, seen.Child, seen.Moving
		reply.Done = append(reply.Done, seen.Done...)
		if seen.Mistake != "" {
			reply.Mistake = seen.Mistake
		}
		return reply
	case "sample":
		return w.sample(q)
	case "interrupt":
		return w.interrupt(q)
	case "reset":
		w.interrupt(differ.Request{})
		w.endChild()
		if err := w.closeAll(); err != nil {
			return differ.Reply{Mistake: err.Error()}
		}
		return differ.Reply{}
	}
	return differ.Reply{Mistake: "no request " + q.Kind}
}

// closeAll closes what a program left open.
func (w *worker) closeAll() error {
	w.slots = map[int]int{}
	w.done = nil
	if err := unix.CloseRange(firstFd, lastFd, 0); err != nil {
		return fmt.Errorf("close descriptors: %w", err)
	}
	// Something of an earlier program in the pipe would be data of the next.
	drain := make([]byte, 64<<10)
	for {
		if n, err := unix.Read(pipeRFd, drain); n <= 0 || err != nil {
			return nil
		}
	}
}

// ownFiles makes the pipe that splice and the file that sendfile needs.
func ownFiles() error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return fmt.Errorf("make pipe: %w", err)
	}
	file, err := unix.MemfdCreate("differ", unix.MFD_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make file: %w", err)
	}
	if _, err := unix.Write(file, pattern(0, 64<<10)); err != nil {
		return fmt.Errorf("fill file: %w", err)
	}
	for from, to := range map[int]int{p[0]: pipeRFd, p[1]: pipeWFd, file: fileFd} {
		if err := unix.Dup3(from, to, unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("move descriptor: %w", err)
		}
		_ = unix.Close(from)
	}
	return nil
}

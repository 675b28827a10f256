package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/differ"
)

// inheritance is what a child learns of its parent before it carries out steps.
type inheritance struct {
	Slots map[int]int // descriptors by slot
	Exec  []int       // those of them to mark close-on-exec: a fork keeps the mark
	Hosts map[string]differ.Addrs
	Ports map[string]int
}

// startChild makes a child process that shares the open descriptors: all of them, as after fork, or
// those that are not close-on-exec, as after fork and exec. What it has is part of the answer.
func (w *worker) startChild(fork bool) differ.Result {
	w.endChild()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return result(0, fmt.Errorf("make control sockets: %w", err))
	}
	for from, to := range map[int]int{pair[0]: childCtlFd, pair[1]: childPassedFd} {
		flags := unix.O_CLOEXEC
		if to == childPassedFd {
			flags = 0
		}
		if err := unix.Dup3(from, to, flags); err != nil {
			return result(0, fmt.Errorf("move control socket: %w", err))
		}
		_ = unix.Close(from)
	}
	w.mu.Lock()
	state := inheritance{Slots: maps.Clone(w.slots), Hosts: w.hosts, Ports: w.ports}
	w.mu.Unlock()
	files := []uintptr{0, 1, 2}
	if fork {
		for _, fd := range state.Slots {
			for len(files) <= fd {
				files = append(files, ^uintptr(0))
			}
			files[fd] = uintptr(fd)
			if n, err := sys(unix.SYS_FCNTL, uintptr(fd), unix.F_GETFD); err == nil && n&unix.FD_CLOEXEC != 0 {
				state.Exec = append(state.Exec, fd)
			}
		}
	}
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"executor", "child"}, &syscall.ProcAttr{Env: os.Environ(), Files: files,
		Sys: &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}})
	_ = unix.Close(childPassedFd)
	if err != nil {
		return result(0, fmt.Errorf("start child: %w", err))
	}
	w.child = pid
	if _, err := unix.Write(childCtlFd, differ.Marshal(state)); err != nil {
		return result(0, fmt.Errorf("tell the child: %w", err))
	}
	buf := make([]byte, differ.MaxPacket)
	n, err := unix.Read(childCtlFd, buf)
	return result(0, err, string(buf[:max(n, 0)]))
}

// endChild ends the child and waits until it has gone, and with it its descriptors.
func (w *worker) endChild() {
	if w.child == 0 {
		return
	}
	_ = unix.Kill(w.child, unix.SIGKILL)
	var status unix.WaitStatus
	for {
		if _, err := unix.Wait4(w.child, &status, 0, nil); err != unix.EINTR {
			break
		}
	}
	_ = unix.Close(childCtlFd)
	w.child = 0
}

// askChild passes a request on.
func (w *worker) askChild(q differ.Request) differ.Reply {
	if w.child == 0 {
		return differ.Reply{Result: differ.Result{Ret: -1, Errno: "no child"}}
	}
	if q.Step.Op == "exit" {
		w.endChild()
		return differ.Reply{}
	}
	q.Child = false
	if _, err := unix.Write(childCtlFd, differ.Marshal(q)); err != nil {
		return differ.Reply{Mistake: "ask the child: " + err.Error()}
	}
	buf := make([]byte, differ.MaxPacket)
	for {
		n, err := unix.Read(childCtlFd, buf)
		if err == unix.EINTR {
			continue
		}
		var reply differ.Reply
		if err == nil {
			err = json.Unmarshal(buf[:n], &reply)
		}
		if err != nil {
			return differ.Reply{Mistake: "child's answer: " + err.Error()}
		}
		return reply
	}
}

// child is what the new process does.
func child() error {
	if err := unix.Dup3(childPassedFd, ctlFd, unix.O_CLOEXEC); err != nil {
		return fmt.Errorf("move control socket: %w", err)
	}
	_ = unix.Close(childPassedFd)
	buf := make([]byte, differ.MaxPacket)
	n, err := unix.Read(ctlFd, buf)
	if err != nil {
		return fmt.Errorf("hear from the parent: %w", err)
	}
	var state inheritance
	if err := json.Unmarshal(buf[:n], &state); err != nil {
		return fmt.Errorf("hear from the parent: %w", err)
	}
	var open []string
	slots := map[int]int{}
	for slot, fd := range state.Slots {
		if _, err := sys(unix.SYS_FCNTL, uintptr(fd), unix.F_GETFD); err == nil {
			slots[slot] = fd
			open = append(open, fmt.Sprintf("f%d", slot))
		}
	}
	for _, fd := range state.Exec {
		_, _ = sys(unix.SYS_FCNTL, uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC)
	}
	slices.Sort(open)
	if _, err := unix.Write(ctlFd, []byte("has "+strings.Join(open, " "))); err != nil {
		return fmt.Errorf("answer the parent: %w", err)
	}
	w, err := newWorker()
	if err != nil {
		return err
	}
	w.slots, w.hosts, w.ports = slots, state.Hosts, state.Ports
	return w.loop()
}

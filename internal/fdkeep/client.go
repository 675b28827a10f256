package fdkeep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// Kept is one listener a keeper keeps.
type Kept struct {
	Key  string
	Meta []byte
	FD   int // the seccomp listener; the receiver's to close
	Page int // memfd of the call being answered; the receiver's to close
}

// Client talks to the keeper at a socket. Its methods may be called from several goroutines: each
// call is a connection of its own, so a keeper that was restarted is no matter.
type Client struct{ path string }

// NewClient gives a client for the keeper at socketPath. It does not connect.
func NewClient(socketPath string) *Client { return &Client{path: socketPath} }

// Put keeps a listener and its page under key, replacing what the key held. The descriptors stay
// the caller's: the keeper gets duplicates.
func (c *Client) Put(key string, meta []byte, fd, page int) error {
	r := request{Op: opPut, Key: key, Meta: meta}
	if err := r.check(fdsPerEntry); err != nil {
		return fmt.Errorf("keep %q: %w", key, err)
	}
	if _, err := c.do(r, fd, page); err != nil {
		return fmt.Errorf("keep %q: %w", key, err)
	}
	return nil
}

// Drop makes the keeper close what key holds. A key that holds nothing is no error.
func (c *Client) Drop(key string) error {
	if _, err := c.do(request{Op: opDrop, Key: key}); err != nil {
		return fmt.Errorf("release %q: %w", key, err)
	}
	return nil
}

// Take fetches duplicates of what is kept under keys that begin with prefix. The keeper keeps its
// own, so that an agent that dies right after loses nothing.
func (c *Client) Take(prefix string) (some []Kept, err error) {
	all, err := c.do(request{Op: opTake, Key: prefix, Look: true})
	if err != nil {
		return nil, fmt.Errorf("fetch kept listeners: %w", err)
	}
	for _, p := range all {
		if strings.HasPrefix(p.Key, prefix) {
			some = append(some, p)
		} else { // a keeper of an earlier build sends everything
			closeAll([]int{p.FD, p.Page})
		}
	}
	return some, nil
}

// TakeAll is Take of everything.
func (c *Client) TakeAll() ([]Kept, error) { return c.Take("") }

// Watch returns when the keeper ends; nil then. It returns an error if ctx ends before, or no
// keeper answers.
func (c *Client) Watch(ctx context.Context) error {
	conn, err := c.dial()
	if err != nil {
		return fmt.Errorf("watch fd keeper: %w", err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	err = send(conn, request{Op: opWatch})
	if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err != nil { // also of a connection that was closed because ctx ended
		return errors.Join(ctx.Err(), fmt.Errorf("watch fd keeper: %w", err))
	}
	msg, fds, err := receive(conn)
	closeAll(fds)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil && len(msg) > 0 {
		return fmt.Errorf("watch fd keeper: it answers %.200q: it is of an older version", msg)
	}
	return nil
}

// ErrNotServed says that the keeper is of a version that never has calls continue.
var ErrNotServed = errors.New("the fd keeper is of an older version")

// Serve says that the caller answers the calls of what is kept from here on, until it closes hold
// or ends. Then the keeper has those continue that CallPage.SetAway names, and answers questions.
func (c *Client) Serve() (hold io.Closer, done Settled, err error) {
	conn, err := c.dial()
	if err != nil {
		return nil, done, fmt.Errorf("serve kept listeners: %w", err)
	}
	defer func() {
		if err != nil {
			conn.Close()
		}
	}()
	var rep reply
	err = send(conn, request{Op: opServe})
	if err == nil {
		var msg []byte
		var fds []int
		msg, fds, err = receive(conn)
		closeAll(fds)
		if err == nil {
			err = json.Unmarshal(msg, &rep)
		}
	}
	switch {
	case err != nil:
		return nil, done, fmt.Errorf("serve kept listeners: %w", err)
	case rep.Error != "":
		return nil, done, fmt.Errorf("%w: %s", ErrNotServed, rep.Error)
	}
	return conn, rep.Settled, nil
}

// Stop ends the keeper. Programs whose listener no agent serves then get ENOSYS from trapped calls.
func (c *Client) Stop() error {
	if _, err := c.do(request{Op: opStop}); err != nil {
		return fmt.Errorf("stop fd keeper: %w", err)
	}
	return nil
}

// do sends one request and collects the replies.
func (c *Client) do(r request, fds ...int) (all []Kept, err error) {
	conn, err := c.dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return exchange(conn, r, fds...)
}

// exchange is do by a connection.
func exchange(conn *net.UnixConn, r request, fds ...int) (all []Kept, err error) {
	defer func() {
		if err != nil {
			for _, p := range all {
				closeAll([]int{p.FD, p.Page})
			}
			all = nil
		}
	}()
	if err := send(conn, r, fds...); err != nil {
		return nil, err
	}
	for end := time.Now().Add(takeTimeout); ; {
		// Each message has its time: there may be thousands.
		until := time.Now().Add(exchangeTimeout)
		if until.After(end) {
			until = end
		}
		if err := conn.SetDeadline(until); err != nil {
			return all, err
		}
		msg, got, err := receive(conn)
		if err != nil {
			return all, err
		}
		var rep reply
		if err := json.Unmarshal(msg, &rep); err != nil {
			closeAll(got)
			return all, fmt.Errorf("reply: %w", err)
		}
		if rep.Error != "" {
			closeAll(got)
			return all, errors.New(rep.Error)
		}
		if rep.Last {
			closeAll(got)
			return all, nil
		}
		if len(got) != fdsPerEntry {
			closeAll(got)
			return all, fmt.Errorf("reply: %d descriptors, want %d", len(got), fdsPerEntry)
		}
		all = append(all, Kept{Key: rep.Key, Meta: rep.Meta, FD: got[0], Page: got[1]})
	}
}

func (c *Client) dial() (*net.UnixConn, error) {
	conn, err := net.DialTimeout("unixpacket", c.path, exchangeTimeout)
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(exchangeTimeout)); err != nil {
		conn.Close()
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// Ensure makes sure that a keeper serves socketPath: if none answers, it starts "exe park --socket
// socketPath" in a session of its own, with no ties to the caller's terminal or output, and waits
// until it answers. lives, which may be nil, reports whether there is a keeper all the same, whose
// socket was removed: that one gets time to make it anew. A service supervisor that kills whole
// control groups (systemd without KillMode=process) would end the keeper with the agent: run it as
// a service of its own there.
func Ensure(exe, socketPath string, lives func() bool) error {
	return ensure(exec.Command(exe, "park", "--socket", socketPath), socketPath, lives)
}

func ensure(cmd *exec.Cmd, socketPath string, lives func() bool) error {
	client := NewClient(socketPath)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(exchangeTimeout)
	for client.answers() != nil {
		if lives == nil || !lives() || time.Now().After(deadline) {
			return startKeeper(cmd, client)
		}
		<-tick.C
	}
	return nil
}

// startKeeper starts a keeper and waits until it answers.
func startKeeper(cmd *exec.Cmd, client *Client) error {
	socketPath := client.path
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start fd keeper %s: %w", cmd.Path, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // or it stays a zombie if it ends before the caller
	deadline := time.Now().Add(exchangeTimeout)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := client.answers()
		if err == nil {
			return nil
		}
		select {
		case werr := <-ended:
			// Another agent may have started one at the same moment; then ours gave way.
			if client.answers() == nil {
				return nil
			}
			return fmt.Errorf("fd keeper %s ended at start (%v); run \"%s park --socket %s\" to see why", cmd.Path, werr, cmd.Path, socketPath)
		case now := <-tick.C:
			if now.After(deadline) {
				return fmt.Errorf("fd keeper at %s does not answer within %v: %w", socketPath, exchangeTimeout, err)
			}
		}
	}
}

// answers reports whether a keeper accepts connections.
func (c *Client) answers() error {
	if _, err := os.Stat(c.path); err != nil {
		return err
	}
	conn, err := c.dial()
	if err != nil {
		return err
	}
	return conn.Close()
}

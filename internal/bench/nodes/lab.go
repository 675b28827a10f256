package nodes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"heddle.dev/heddle/internal/bench/session"
	"heddle.dev/heddle/internal/lab"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netns"
)

// size is that of the lab. Its pool has room for the subnets of all made-up nodes.
var size = lab.Size{Nodes: 2, Containers: 1, AgentArgs: []string{"--pool=10.0.0.0/8"}}

// madeUp is where all made-up nodes are.
const madeUp = "198.19.0.0/16"

// startTimeout bounds the start of an agent into a large network.
const startTimeout = 2 * time.Minute

// restartAgent ends n2's agent and has the lab start another. The lab would wait until that knows
// all direct paths; here it is enough that it answers.
func restartAgent(ctx context.Context, place session.Lab) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	l, err := place.Open()
	if err != nil {
		return 0, err
	}
	agents, err := place.Agents()
	if err != nil {
		return 0, err
	}
	client := agents[1]
	defer client.Close()
	before, err := client.Status(ctx)
	if err != nil {
		return 0, err
	}
	if err := syscall.Kill(before.PID, syscall.SIGTERM); err != nil {
		return 0, fmt.Errorf("end agent %d: %w", before.PID, err)
	}
	for syscall.Kill(before.PID, 0) == nil {
		if ctx.Err() != nil {
			return 0, fmt.Errorf("agent %d does not end: %w", before.PID, ctx.Err())
		}
		time.Sleep(5 * time.Millisecond)
	}
	began := time.Now()
	upCtx, stop := context.WithCancel(ctx)
	up := make(chan error, 1)
	go func() { up <- l.Up(upCtx, size, io.Discard) }()
	defer func() { stop(); <-up }()
	for {
		now, err := client.Status(ctx)
		if err == nil && now.PID != before.PID {
			return time.Since(began), nil
		}
		select {
		case err := <-up:
			up <- err
			if err != nil {
				return 0, err
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("the new agent does not answer: %w", errors.Join(err, ctx.Err()))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// answerProbes has the host outside a lab accept connects to every direct port of all made-up
// nodes, until stop.
func answerProbes(place session.Lab) (stop func() error, err error) {
	outside := netns.Path(place.Name + "-outside")
	route := func(verb string) error {
		cmd := exec.Command("ip", "route", verb, "local", madeUp, "dev", "lo")
		if err := netns.Start(outside, cmd); err != nil {
			return err
		}
		return cmd.Wait()
	}
	if err := route("replace"); err != nil {
		return nil, fmt.Errorf("make the addresses of made-up nodes local: %w", err)
	}
	var listeners []net.Listener
	stop = func() error {
		var errs []error
		for _, l := range listeners {
			errs = append(errs, l.Close())
		}
		return errors.Join(append(errs, route("del"))...)
	}
	err = netns.Do(outside, func() error {
		for port := int(model.DefaultDirectPorts.First); port <= int(model.DefaultDirectPorts.Last); port++ {
			l, err := net.Listen("tcp4", ":"+strconv.Itoa(port))
			if err != nil {
				return err
			}
			listeners = append(listeners, l)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, stop())
	}
	for _, l := range listeners {
		go func() {
			for {
				conn, err := l.Accept()
				if errors.Is(err, net.ErrClosed) {
					return
				}
				if err == nil {
					_ = conn.Close() // a probe resets it
				}
			}
		}()
	}
	return stop, nil
}

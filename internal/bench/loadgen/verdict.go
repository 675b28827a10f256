package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Verdict is what watch prints when connects come to another end than before.
type Verdict struct {
	Allowed bool `json:"allowed"`
}

// watch connects again and again, and prints a Verdict at the first connect and whenever connects
// begin to be refused or to succeed, until its standard input or its lifetime ends. What it tells
// is late by a pause and a connect at most.
func watch(ctx context.Context, s settings, streams Streams) error {
	if _, err := netip.ParseAddrPort(s.to); err != nil {
		return fmt.Errorf("--to %q: want ADDRESS:PORT", s.to)
	}
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	over := ended(streams.In)
	out := json.NewEncoder(streams.Out)
	var last *Verdict
	tick := time.NewTicker(s.pause)
	defer tick.Stop()
	for {
		allowed, err := tryConnect(s.to)
		if err != nil {
			return fmt.Errorf("watch %s: %w", s.to, err)
		}
		if v := (Verdict{allowed}); last == nil || *last != v {
			if err := out.Encode(v); err != nil {
				return fmt.Errorf("print verdict: %w", err)
			}
			last = &v
		}
		select {
		case <-over:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// connectTimeout bounds a connect of watch: one whose SYN met a rule that had just come into force
// hears nothing.
const connectTimeout = time.Second

// tryConnect reports whether a connect succeeds or is refused; the error is for any other end. One
// that timed out was neither allowed nor refused: the rule came into force during the handshake.
func tryConnect(to string) (allowed bool, err error) {
	for {
		c, err := net.DialTimeout("tcp", to, connectTimeout)
		switch {
		case err == nil:
			return true, errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close())
		case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.ECONNRESET):
			// Refused; or ended, because the rule came into force during the handshake.
			return false, nil
		case !os.IsTimeout(err):
			return false, err
		}
	}
}

package loadgen

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"time"
)

// Reached is what await prints.
type Reached struct {
	// At is when the server's first byte arrived, in nanoseconds since 1970.
	At int64 `json:"at"`
	// Tries are the connects that it took.
	Tries int `json:"tries"`
}

// How long await waits for one connect, and between two: the pause of a client that is in a hurry.
const (
	awaitConnect = 2 * time.Second
	awaitPause   = time.Millisecond
)

// await says that it is ready, and then connects again and again until the server answers.
func await(ctx context.Context, s settings, streams Streams) error {
	if _, err := fmt.Fprintln(streams.Out, Ready); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, s.lifetime)
	defer cancel()
	gone := ended(streams.In)
	for tries := 1; ; tries++ {
		err := answers(ctx, s.to)
		if err == nil {
			return json.NewEncoder(streams.Out).Encode(Reached{At: time.Now().UnixNano(), Tries: tries})
		}
		select {
		case <-time.After(awaitPause):
		case <-gone:
			return fmt.Errorf("%s not reached after %d connects: %w", s.to, tries, err)
		case <-ctx.Done():
			return fmt.Errorf("%s not reached after %d connects: %w", s.to, tries, err)
		}
	}
}

// answers makes one connection to the echo server at to, and sends a byte there and back.
func answers(ctx context.Context, to string) error {
	d := net.Dialer{Timeout: awaitConnect}
	c, err := d.DialContext(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // what it was for is known by then
	if err := c.SetDeadline(time.Now().Add(awaitConnect)); err != nil {
		return err
	}
	b := []byte{1}
	if _, err := c.Write(b); err != nil {
		return err
	}
	_, err = c.Read(b)
	return err
}

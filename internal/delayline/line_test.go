package delayline

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/testutil"
)

// A rate spaces packets out and its queue drops what does not fit; a delay is added; losses are as
// many as were asked for.
func TestShape(t *testing.T) {
	now := time.Unix(1, 0)
	s := shaper{Shape: Shape{Rate: 8000, Queue: 2500, Delay: 50 * time.Millisecond}} // a byte a millisecond
	for i, want := range []time.Duration{1050 * time.Millisecond, 2050 * time.Millisecond} {
		if out, ok := s.take(1000, now); !ok || out.Sub(now) != want {
			t.Errorf("packet %d: %v, %v; want %v", i, out.Sub(now), ok, want)
		}
	}
	if _, ok := s.take(1000, now); ok {
		t.Error("a packet passed that the queue has no place for")
	}
	if out, ok := s.take(1000, now.Add(2*time.Second)); !ok || out.Sub(now) != 3050*time.Millisecond {
		t.Errorf("after the queue is empty: %v, %v", out.Sub(now), ok)
	}
	lossy := shaper{Shape: Shape{Loss: 0.1}, random: rand.New(rand.NewPCG(1, 1))}
	lost := 0
	for range 10_000 {
		if _, ok := lossy.take(1, now); !ok {
			lost++
		}
	}
	if lost < 800 || lost > 1200 {
		t.Errorf("lost %d of 10000, want about 1000", lost)
	}
}

// A connection over a line has its round trip and its rate.
func TestLine(t *testing.T) {
	testutil.NeedRoot(t, "makes network namespaces and TUN devices")
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip(err)
	}
	var ends [2]End
	for i := range ends {
		name := fmt.Sprintf("heddle-line%d-%d", os.Getpid(), i)
		testutil.NoError(t, netns.Create(name))
		t.Cleanup(func() { testutil.NoError(t, netns.Delete(name)) })
		ends[i] = End{netns.Path(name), "line", netip.AddrFrom4([4]byte{198, 18, 0, byte(1 + i)})}
	}
	const delay, rate, volume = 20 * time.Millisecond, 16e6, 1 << 20
	l, err := Open(ends[0], ends[1], Shape{Rate: rate, Queue: 1 << 20, Delay: delay}, Shape{Delay: delay}, 1)
	testutil.NoError(t, err)
	t.Cleanup(func() { testutil.NoError(t, l.Close()) })
	var listener net.Listener
	testutil.NoError(t, netns.Do(ends[1].Netns, func() (err error) {
		listener, err = net.Listen("tcp4", "198.18.0.2:0")
		return err
	}))
	t.Cleanup(func() { listener.Close() })
	var conn net.Conn
	began := time.Now()
	testutil.NoError(t, netns.Do(ends[0].Netns, func() (err error) {
		conn, err = net.Dial("tcp4", listener.Addr().String())
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	if took := time.Since(began); took < 2*delay {
		t.Errorf("connected after %v, want %v or more", took, 2*delay)
	}
	peer, err := listener.Accept()
	testutil.NoError(t, err)
	t.Cleanup(func() { peer.Close() })
	began = time.Now()
	go func() { _, _ = conn.Write(make([]byte, volume)) }()
	_, err = io.ReadFull(peer, make([]byte, volume))
	testutil.NoError(t, err)
	if took, least := time.Since(began).Seconds(), volume*8/rate; took < least {
		t.Errorf("%d bytes after %.2f s, want %.2f or more", volume, took, least)
	}
	if there, back := l.Counts(); there.Passed == 0 || back.Passed == 0 {
		t.Errorf("packets there %+v, back %+v", there, back)
	}
}

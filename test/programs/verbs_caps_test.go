package programs

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/testutil"
)

// sending is what a container has sent by its queue pairs, and between when and when it was asked
// for.
type sending struct {
	asked, told time.Time
	bytes       map[uint32]uint64
}

func (l verbsLab) sent(container string) sending {
	l.Helper()
	s := sending{asked: time.Now(), bytes: map[uint32]uint64{}}
	node, _, _ := strings.Cut(container, "/")
	state, err := l.rdma(node)
	testutil.NoError(l, err)
	s.told = time.Now()
	for _, qp := range state.QueuePairs {
		if qp.Endpoint == container {
			s.bytes[qp.Number] = qp.BytesSent
		}
	}
	return s
}

// since is what was sent after another look, by all queue pairs together, and Jain's index of what
// each sent: 1 if all sent as much.
func (s sending) since(before sending) (all, jain float64) {
	var squares float64
	for number, bytes := range s.bytes {
		n := float64(bytes - before.bytes[number])
		all, squares = all+n, squares+n*n
	}
	return all, all * all / max(1, squares) / float64(max(1, len(s.bytes)))
}

// writes has a container write to n1/c1's memory by so many queue pairs until stop is called, and
// comes back when all have sent something.
func (l verbsLab) writes(client string, qps, bytes int) (stop func()) {
	l.Helper()
	ctx, cancel := context.WithCancel(l.Context())
	words := []string{"ib_write_bw", "-x", "0", "-s", strconv.Itoa(bytes), "-t", "16", "-q", strconv.Itoa(qps), "-D", "3600"}
	var said [2]strings.Builder
	server, writer := l.exec(ctx, "n1/c1", words), l.exec(ctx, client, append(words, l.addr("n1/c1")))
	server.Stdout, server.Stderr, writer.Stdout, writer.Stderr = &said[0], &said[0], &said[1], &said[1]
	testutil.NoError(l, server.Start())
	l.awaitListener(pingpongPort)
	testutil.NoError(l, writer.Start())
	stop = func() {
		cancel()
		_, _ = writer.Wait(), server.Wait() // they are ended in the middle
	}
	testutil.Eventually(l, fmt.Sprintf("%d queue pairs of %s that send", qps, client), func() (bool, string) {
		now := l.sent(client)
		for _, n := range now.bytes {
			if n == 0 {
				return false, fmt.Sprint(now.bytes)
			}
		}
		return len(now.bytes) == qps, fmt.Sprint(now.bytes)
	})
	return stop
}

// TestVerbsCaps: what a container sends by RDMA is held to its cap within 5 %, on one node and
// between nodes: more than that never passes, and in some three seconds it is as much, whatever
// else the machine does in others.
func TestVerbsCaps(t *testing.T) {
	l := newVerbsLab(t)
	for _, client := range []string{"n1/c2", "n2/c1"} {
		for _, mbit := range []int{100, 400} {
			t.Run(fmt.Sprintf("%s %d", client, mbit), func(t *testing.T) {
				l := l
				l.T = t
				l.holds(client, mbit)
			})
		}
	}
}

func (l verbsLab) holds(client string, mbit int) {
	l.Helper()
	if out, err := l.heddle(l.Context(), "limit", "set", client, "--egress", fmt.Sprintf("%dmbit", mbit)).CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
	defer l.writes(client, 1, 8<<10)()

	const window = 3 * time.Second
	rate := float64(mbit) * 1e6 / 8
	before := l.sent(client)
	testutil.Eventually(l, "three seconds at the cap", func() (bool, string) {
		now := l.sent(client)
		if now.asked.Sub(before.told) < window {
			return false, "less than three seconds"
		}
		bytes, _ := now.since(before)
		// An answer is of some moment while it was under way: so much at most, and at least.
		most, least := now.told.Sub(before.asked).Seconds()*rate, now.asked.Sub(before.told).Seconds()*rate
		if bytes > 1.05*most {
			l.Errorf("%.0f bytes were sent where the cap gives %.0f", bytes, most)
			return true, ""
		}
		if before = now; bytes >= .95*least {
			l.Logf("%.3f of the cap", bytes/most)
			return true, ""
		}
		return false, fmt.Sprintf("%.0f bytes were sent where the cap gives %.0f", bytes, least)
	})
}

// TestVerbsFairness: 64 queue pairs of a program, which want as much as there is, get as much as
// each other between nodes: by their bytes in the same time, in which each sends hundreds of
// messages.
func TestVerbsFairness(t *testing.T) {
	const qps, message = 64, 8 << 10
	l := newVerbsLab(t)
	defer l.writes("n2/c1", qps, message)()

	before := l.sent("n2/c1")
	testutil.Eventually(t, "shares of which Jain's index is 0.97", func() (bool, string) {
		now := l.sent("n2/c1")
		all, jain := now.since(before)
		if all < qps*message*500 {
			return false, fmt.Sprintf("%.0f bytes", all)
		}
		if before = now; jain >= .97 && len(now.bytes) == qps {
			t.Logf("%.4f of %.0f bytes", jain, all)
			return true, ""
		}
		return false, fmt.Sprintf("Jain's index of %d queue pairs is %.3f", len(now.bytes), jain)
	})
}

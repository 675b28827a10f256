package intercept

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/fdkeep"
)

// mute is a keeper that does not give what it keeps as often as left says.
type mute struct {
	*fdkeep.Client
	left atomic.Int32
	deaf bool // it does not hear either that the agent answers calls
}

func (m *mute) Serve() (io.Closer, fdkeep.Settled, error) {
	if m.deaf && m.left.Load() > 0 {
		return nil, fdkeep.Settled{}, errors.New("no answer within 5s")
	}
	return m.Client.Serve()
}

func (m *mute) Take(prefix string) ([]fdkeep.Kept, error) {
	if prefix == "" && m.left.Add(-1) >= 0 {
		return nil, errors.New("no answer within 5s")
	}
	return m.Client.Take(prefix)
}

// resumer gives the configuration of an agent whose keeper is mute for so many tries, and what it
// says of that last.
func resumer(path, hp string, tries int32) (c agentConfig, m *mute, fault *atomic.Value) {
	m = &mute{Client: fdkeep.NewClient(hp)}
	m.left.Store(tries)
	c = testConfig(path, hp, &testMaker{})
	c.Keeper, fault = m, new(atomic.Value)
	c.Resuming = func(err error) {
		if err == nil {
			fault.Store("")
		} else {
			fault.Store(err.Error())
		}
	}
	return c, m, fault
}

// A keeper that does not answer the agent that starts is asked again. What comes meanwhile is served
// once.
func TestResumeIsTriedAgain(t *testing.T) {
	for _, end := range []func(*testing.T, string, string, func()){closes, isKilled} {
		c, hp, path := awayFrom(t, end)
		cfg, _, fault := resumer(path, hp, 3)
		s, _ := serve(t, cfg)
		if o := trapped(t, path, testName).tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Errorf("new container: %+v", o)
		}
		eventually(t, "both are served", func() bool { return s.Stats().Listeners == 2 })
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Errorf("container from before: %+v", o)
		}
		eventually(t, "the fault ends", func() bool { return fault.Load() == "" })
		if st := s.Stats(); st.Failed["resume"] != 1 || st.Listeners != 2 {
			t.Errorf("%d listeners, counters %v", st.Listeners, st.Failed)
		}
	}
}

// While a keeper still does not answer, socket() of containers from before goes on as without an
// agent, and new containers are the agent's.
func TestKeeperLetsCallsContinue(t *testing.T) {
	c, hp, path := awayFrom(t, closes)
	cfg, m, fault := resumer(path, hp, 1<<30)
	cfg.away.Store(true)
	s, _ := serve(t, cfg)
	fresh := trapped(t, path, testName)
	eventually(t, "the agent has asked", func() bool { return fault.Load() != nil })
	if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != 0 {
		t.Errorf("container from before: %+v, want a socket that no agent made", o)
	}
	if fault.Load() != "no answer within 5s" {
		t.Errorf("fault %q", fault.Load())
	}
	for _, c := range []*child{fresh, trapped(t, path, testName)} {
		for range 20 {
			if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
				t.Fatalf("new container: %+v", o)
			}
		}
	}
	m.left.Store(0)
	eventually(t, "all are served", func() bool { return s.Stats().Listeners == 3 })
	for _, c := range []*child{c, fresh} {
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Errorf("in the end: %+v", o)
		}
	}
	if n := s.Stats().Failed["no_agent"]; n != 1 {
		t.Errorf("%d sockets without an agent, want 1", n)
	}
	// The end of this agent is as any other's.
	s.Close()
	if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != 0 {
		t.Errorf("after the agent: %+v", o)
	}
}

// A keeper that has not heard of the agent settles calls as before, but none of new containers.
func TestKeeperIsDeaf(t *testing.T) {
	c, hp, path := awayFrom(t, closes)
	cfg, m, _ := resumer(path, hp, 1<<30)
	m.deaf = true
	cfg.away.Store(true)
	s, _ := serve(t, cfg)
	fresh := trapped(t, path, testName)
	for range 20 {
		if o := fresh.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
			t.Fatalf("new container: %+v", o)
		}
	}
	m.left.Store(0)
	eventually(t, "both are served", func() bool { return s.Stats().Listeners == 2 })
	for range 20 {
		for _, c := range []*child{c, fresh} {
			if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != int(testEndpoint) {
				t.Fatalf("in the end: %+v", o)
			}
		}
	}
	s.Close()
	for _, c := range []*child{c, fresh} {
		if o := c.tcp(unix.AF_INET); o.Errno != 0 || o.Priority != 0 {
			t.Errorf("after the agent: %+v", o)
		}
	}
}

// An agent that ends while its keeper is mute does not wait for it.
func TestEndWhileKeeperIsMute(t *testing.T) {
	_, hp, path := awayFrom(t, closes)
	cfg, _, fault := resumer(path, hp, 1<<30)
	s, err := listen(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	eventually(t, "a fault", func() bool { return fault.Load() != nil })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

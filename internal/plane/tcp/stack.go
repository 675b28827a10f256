package tcp

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane"
	"heddle.dev/heddle/internal/plane/tcp/congestion"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/stack"
)

// The kernel's own TCP as a stack: settings go to the programs, which give them to sockets.

// SetCongestion registers the congestion controls of the network's own that are used, has the
// kernel verify the others, and says what became of each.
func (p *Plane) SetCongestion(all []*stack.Object, used map[string]bool) []api.CongestionControl {
	out := make([]api.CongestionControl, 0, len(all))
	for _, o := range all {
		c := api.CongestionControl{Name: o.Name, SHA256: o.SHA256, Bytes: len(o.Object), State: api.CongestionUnused}
		var s congestion.State
		if used[o.Name] {
			s = p.stacks.Register(o)
		} else {
			s = p.stacks.Verify(o)
		}
		switch {
		case s.Err != nil:
			c.State, c.Error = api.CongestionFailed, s.Err.Error()
		case s.Registered && used[o.Name]:
			c.State = api.CongestionRegistered
		}
		out = append(out, c)
	}
	return out
}

// KeepCongestion unregisters those that are not in keep. Connections that have one go on with it.
func (p *Plane) KeepCongestion(keep map[string]bool) error { return p.stacks.Keep(keep) }

// CheckCongestion has the kernel verify an object, and gives the name of the congestion control in
// it.
func (p *Plane) CheckCongestion(object []byte) (string, error) {
	name, err := congestion.Check(object)
	if err == nil && slices.Contains([]string{"reno", "cubic", "bbr"}, name) {
		err = fmt.Errorf("%s is the name of a congestion control of Linux's: give yours another name", name)
	}
	return name, err
}

// ServeStack implements plane.Stacks: the kernel's TCP can have every setting of a profile but what
// this node lacks.
func (p *Plane) ServeStack(kind stack.Kind, s stack.Settings) error {
	if !kind.IsKernels() {
		return plane.ErrOtherStack
	}
	if s.Congestion != "" {
		if err := hasCongestion(s.Congestion); err != nil {
			return err
		}
	}
	for _, b := range []struct {
		name  stack.Setting
		bytes uint32
		limit string
	}{
		{stack.ReceiveBuffer, s.ReceiveBuffer, "rmem_max"},
		{stack.SendBuffer, s.SendBuffer, "wmem_max"},
	} {
		if b.bytes == 0 {
			continue
		}
		if most, err := coreLimit(b.limit); err == nil && uint64(b.bytes) > most {
			return fmt.Errorf("%s %d: this node's net.core.%s is %d: raise it, or ask for less", b.name, b.bytes, b.limit, most)
		}
	}
	return nil
}

// hasCongestion reports whether sockets of this node can have a congestion control. The kernel
// loads the module of one that it knows.
func hasCongestion(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return fmt.Errorf("socket: %w", err)
	}
	defer unix.Close(fd)
	err = unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_CONGESTION, name)
	if err == nil {
		return nil
	}
	all, _ := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control") // for the message alone
	return fmt.Errorf("congestion %s: this node's kernel has none of that name, but %s; `heddle stack load` brings one: %w",
		name, strings.Join(strings.Fields(string(all)), ", "), err)
}

// coreLimit reads net.core.NAME. A network namespace of old kernels does not show it.
func coreLimit(name string) (uint64, error) {
	text, err := os.ReadFile("/proc/sys/net/core/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

// SetStack implements plane.Stacks. An endpoint whose TCP another plane runs has none of the
// kernel's settings: what the kernel still does for it is not the profile's.
func (p *Plane) SetStack(e model.Endpoint, c stack.Choice) error {
	var s datapath.Stack
	switch {
	case c.Refused():
		s.Refused = true
	case c.Profile != nil && c.Stack.IsKernels():
		s = kernelStack(c)
	}
	// The container's own stack first: what it was given is known by what is in force.
	was, err := p.datapath.Stack(e.ID)
	if err != nil {
		return err
	}
	p.own.follow(e, was, s)
	changed, err := p.datapath.SetStack(e.ID, s)
	if changed {
		p.changedStacks.Store(true)
	}
	return err
}

// FollowStacks brings live connections to what SetStack said since it was called last. It is no
// error that they have to wait for a socket's lock: no container's start may.
func (p *Plane) FollowStacks() error {
	if !p.changedStacks.Swap(false) {
		return nil
	}
	began := time.Now()
	n, err := p.datapath.FollowStacks()
	if err != nil {
		p.changedStacks.Store(true)
		return unlessStuck(err) // then it is asked again when the pass has come back
	}
	p.log.Debug("live sockets follow changed stack profiles", "sockets", n, "took", time.Since(began))
	return nil
}

// kernelStack gives what the programs need of a choice.
func kernelStack(c stack.Choice) datapath.Stack {
	s, may := c.Settings, func(name stack.Setting) bool { return slices.Contains(c.Profile.Changeable, name) }
	out := datapath.Stack{
		Congestion: s.Congestion, ReceiveBuffer: s.ReceiveBuffer, SendBuffer: s.SendBuffer, PacingRate: uint32(s.PacingRate / 8),
		UserTimeout: uint32(time.Duration(s.UserTimeout).Milliseconds()), NotsentLowat: s.NotsentLowat, MSS: s.MSS, Window: s.InitialWindow,
		DelayedACK: uint32(time.Duration(s.DelayedACK).Microseconds()), ECN: s.ECN,
		Changeable: datapath.StackFields{
			Congestion: may(stack.Congestion), ReceiveBuffer: may(stack.ReceiveBuffer), SendBuffer: may(stack.SendBuffer), Pacing: may(stack.PacingRate),
			Keepalive: may(stack.Keepalive), UserTimeout: may(stack.UserTimeout), NotsentLowat: may(stack.NotsentLowat), MSS: may(stack.MSS),
		},
	}
	if k := s.Keepalive; k != nil {
		out.KeepaliveIdle, out.KeepaliveInterval = uint32(time.Duration(k.Idle).Seconds()), uint32(time.Duration(k.Interval).Seconds())
		out.KeepaliveCount = k.Count
	}
	return out
}

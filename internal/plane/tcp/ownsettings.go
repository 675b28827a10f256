package tcp

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/plane/tcp/datapath"
	"heddle.dev/heddle/internal/stack"
)

// The containers' own stacks, which run the TCP of processes that are not intercepted: they have of
// a profile what a network namespace can be given from outside. Decision 0101.

// ownStacks is what became of that.
type ownStacks struct {
	mu   sync.Mutex
	told map[model.EndpointID]ownStack
}

// ownStack is what one container's stack was told last.
type ownStack struct {
	netns string
	want  map[string]string
	kept  netcfg.Kept
	err   error // why not all of it is there
}

// ownKeys are by what the own stack has a setting. The other settings belong to single sockets.
var ownKeys = map[stack.Setting][]string{
	stack.Congestion:    {netcfg.RouteCongestion},
	stack.InitialWindow: {netcfg.RouteWindow},
	stack.ReceiveBuffer: {"ipv4/tcp_rmem"},
	stack.SendBuffer:    {"ipv4/tcp_wmem"},
	stack.Keepalive:     {"ipv4/tcp_keepalive_time", "ipv4/tcp_keepalive_intvl", "ipv4/tcp_keepalive_probes"},
	stack.NotsentLowat:  {"ipv4/tcp_notsent_lowat"},
}

// ownSettings gives the values of the keys.
func ownSettings(s datapath.Stack) map[string]string {
	out := make(map[string]string)
	set := func(key string, value uint32) {
		if value != 0 {
			out[key] = strconv.FormatUint(uint64(value), 10)
		}
	}
	if s.Congestion != "" {
		out[netcfg.RouteCongestion] = s.Congestion
	}
	set(netcfg.RouteWindow, s.Window)
	if s.KeepaliveCount != 0 {
		set("ipv4/tcp_keepalive_time", s.KeepaliveIdle)
		set("ipv4/tcp_keepalive_intvl", s.KeepaliveInterval)
		set("ipv4/tcp_keepalive_probes", s.KeepaliveCount)
	}
	set("ipv4/tcp_notsent_lowat", s.NotsentLowat)
	buffer := func(key string, bytes uint32) {
		if bytes != 0 {
			// As SO_RCVBUF: doubled, and not tuned. The first is what is left under pressure.
			size := min(2*uint64(bytes), math.MaxInt32)
			out[key] = fmt.Sprintf("4096 %d %[1]d", size)
		}
	}
	buffer("ipv4/tcp_rmem", s.ReceiveBuffer)
	buffer("ipv4/tcp_wmem", s.SendBuffer)
	return out
}

// follow brings the own stack of e's container from what was in force to what is to be. That a
// container has not got it is no reason to be without the endpoint: it is told.
func (o *ownStacks) follow(e model.Endpoint, was, is datapath.Stack) {
	had, want := ownSettings(was), ownSettings(is)
	o.mu.Lock()
	defer o.mu.Unlock()
	before, known := o.told[e.ID]
	if len(had)+len(want) == 0 && len(before.want) == 0 {
		delete(o.told, e.ID)
		return
	}
	if known && before.err == nil && before.netns == e.NetnsPath && maps.Equal(before.want, want) {
		return
	}
	now := ownStack{netns: e.NetnsPath, want: want}
	now.kept, now.err = netcfg.FollowOwnStack(e.NetnsPath, e.ContainerDevice(), had, want)
	if errors.Is(now.err, netcfg.ErrNoContainer) && len(want) == 0 {
		now.err = nil
	}
	if o.told == nil {
		o.told = make(map[model.EndpointID]ownStack)
	}
	o.told[e.ID] = now
	if len(want) == 0 {
		delete(o.told, e.ID)
	}
}

// again has what an endpoint was told looked at once more: it has its device now.
func (o *ownStacks) again(e model.Endpoint, is datapath.Stack) {
	o.mu.Lock()
	delete(o.told, e.ID)
	o.mu.Unlock()
	o.follow(e, is, is)
}

// OwnStack says which settings of a profile a container's own stack has, and why not the others.
func (p *Plane) OwnStack(id model.EndpointID, s stack.Settings) *api.OwnStack {
	p.own.mu.Lock()
	told := p.own.told[id]
	p.own.mu.Unlock()
	out := &api.OwnStack{}
	var has []string
	for _, t := range s.Text() {
		if why := told.lacks(t.Name); why != "" {
			if out.Lacks == nil {
				out.Lacks = make(map[stack.Setting]string)
			}
			out.Lacks[t.Name] = why
		} else {
			has = append(has, string(t.Name)+"="+t.Value)
		}
	}
	out.Settings = strings.Join(has, ",")
	return out
}

// lacks says why the container has not got a setting; "": it has.
func (o ownStack) lacks(name stack.Setting) string {
	keys := ownKeys[name]
	switch {
	case keys == nil:
		return "only sockets of intercepted programs have it"
	case o.err != nil:
		return o.err.Error()
	}
	for _, key := range keys {
		if value, kept := o.kept[key]; kept {
			return fmt.Sprintf("the container has %s %s of its own", key, value)
		}
		if !slices.Contains(slices.Collect(maps.Keys(o.want)), key) {
			return "the container has no network yet"
		}
	}
	return ""
}

package verbs

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Multicast groups between nodes: what a router says of the groups of its endpoints goes into their
// records, and what records say of others' goes to each router. docs/architecture/verbs.md.

const (
	// groupsEvery is the least time between two changes of records: programs may join and leave as
	// often as they like.
	groupsEvery = time.Second
	// groupsAgain is after a change that the store did not take.
	groupsAgain = 5 * time.Second
	// changesAtOnce are changes of an endpoint's record that may follow each other as fast, and
	// changeAgain is when there is one more: the store keeps what a record was for an hour, and
	// every agent reads each change.
	changesAtOnce = 32
	changeAgain   = 30 * time.Second
)

// groups is what the plane knows of multicast groups. Plane.mu guards it.
type groups struct {
	// joined are those of this node's endpoints that records have yet to say.
	joined map[model.EndpointID][]netip.Addr
	// made are the changes of their records of late.
	made map[model.EndpointID]changes
	wake chan struct{}
	// members are the endpoints of all nodes that are in some, by their IPv4 addresses.
	members map[netip.Addr]member
}

// changes are those of a record: how many, as of when, without those whose time has passed.
type changes struct {
	count int
	at    time.Time
}

// another says whether there may be one more, and counts it.
func (c *changes) another(now time.Time) bool {
	passed := int(now.Sub(c.at) / changeAgain)
	if passed >= c.count {
		*c = changes{0, now}
	} else {
		*c = changes{c.count - passed, c.at.Add(time.Duration(passed) * changeAgain)}
	}
	if c.count >= changesAtOnce {
		return false
	}
	c.count++
	return true
}

// member is an endpoint in groups.
type member struct {
	addrs  [2]netip.Addr
	groups []netip.Addr
}

// hearGroups hears what groups an endpoint of a router is in.
func (p *Plane) hearGroups(l *link, m heard) {
	id, known := p.numbered(l, m.Endpoint)
	if !known {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groups.joined[id] = m.groups
	p.groups.changed()
}

// changed wakes keepGroups.
func (g *groups) changed() {
	select {
	case g.wake <- struct{}{}:
	default: // it is awake
	}
}

// take gives what records are to say now. What has changed too often is left for later.
func (g *groups) take(now time.Time) map[model.EndpointID][]netip.Addr {
	joined := make(map[model.EndpointID][]netip.Addr)
	for id, list := range g.joined {
		made := g.made[id]
		if made.another(now) {
			joined[id] = list
			delete(g.joined, id)
		}
		g.made[id] = made
	}
	if len(g.joined) > 0 {
		g.changed()
	}
	return joined
}

// keepGroups brings records to what routers say, until ctx ends.
func (p *Plane) keepGroups(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.groups.wake:
		}
		pause := groupsEvery
		if !p.recordGroups(ctx) {
			pause = groupsAgain
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// recordGroups does so once; false: the store did not take all, and is asked again.
func (p *Plane) recordGroups(ctx context.Context) bool {
	p.mu.Lock()
	joined := p.groups.take(time.Now())
	p.mu.Unlock()
	all := true
	for id, list := range joined {
		err := p.cfg.SetGroups(ctx, id, list)
		if err == nil {
			continue
		}
		all = false
		p.cfg.Log.Warn("multicast groups of an endpoint are not known to other nodes; will try again", "endpoint", id, "err", err)
		p.mu.Lock()
		if _, newer := p.groups.joined[id]; !newer {
			p.groups.joined[id] = list
		}
		p.groups.changed()
		p.mu.Unlock()
	}
	return all
}

// followGroups tells routers of endpoints that have joined groups or left them. The caller holds
// mu.
func (p *Plane) followGroups(changes []model.GroupChange) {
	before, now := make(map[netip.Addr]member), make(map[netip.Addr]member)
	for _, change := range changes {
		addMembers(before, change.Before)
		addMembers(now, change.After)
	}
	for addr, m := range before {
		if _, stays := now[addr]; !stays {
			delete(p.groups.members, addr)
			p.tellGroups(m.addrs, nil)
		}
	}
	for addr, m := range now {
		p.groups.members[addr] = m
		if !sameMember(before[addr], m) {
			p.tellGroups(m.addrs, m.groups)
		}
	}
}

func addMembers(all map[netip.Addr]member, endpoints model.Endpoints) {
	for e := range endpoints.All() {
		if len(e.Planes.Verbs.Groups) > 0 {
			all[e.Addr4()] = member{[2]netip.Addr{e.Addr4(), e.Addr6()}, e.Planes.Verbs.Groups}
		}
	}
}

func sameMember(a, b member) bool { return a.addrs == b.addrs && slices.Equal(a.groups, b.groups) }

// tellGroups tells each router of a member. One that has the endpoint itself knows better, and
// gives it nothing by what it is told. The caller holds mu.
func (p *Plane) tellGroups(addrs [2]netip.Addr, groups []netip.Addr) {
	for _, l := range p.routers() {
		p.send(l, groupsMessage(addrs, groups), nil)
	}
}

// tellAllGroups tells a router, between BEGIN and END, of all members. The caller holds mu.
func (p *Plane) tellAllGroups(l *link) {
	for _, m := range p.groups.members {
		p.send(l, groupsMessage(m.addrs, m.groups), nil)
	}
}

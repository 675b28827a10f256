package tcp

import (
	"sync"
	"time"

	"heddle.dev/heddle/internal/model"
)

// reported holds what was last said of each endpoint's traffic, so that no count falls: a
// connection that ends between the reading of the accounts and that of the sockets is in neither
// for once.
type reported struct {
	mu   sync.Mutex // guards last
	last map[generation]model.Traffic
}

// generation tells an endpoint from a later one with the same id.
type generation struct {
	id      model.EndpointID
	created time.Time
}

// Traffic reports what the sockets of each of endpoints, all of the node's, did.
func (p *Plane) Traffic(endpoints []model.Endpoint) (list []model.Traffic, err error) {
	// Accounts first: what ends meanwhile is missed once rather than counted twice.
	index := make(map[model.EndpointID]int)
	list = make([]model.Traffic, len(endpoints))
	for i, e := range endpoints {
		if list[i], err = p.datapath.Account(e.ID); err != nil {
			return nil, err
		}
		if list[i].Sockets, err = p.datapath.Sockets(e.ID); err != nil {
			return nil, err
		}
		if list[i].Ports, err = p.datapath.Ports(e.ID); err != nil {
			return nil, err
		}
		list[i].Name = e.Name
		list[i].Live = make(map[model.Path]uint64)
		index[e.ID] = i
	}
	live, err := p.datapath.Connections()
	if err != nil {
		return nil, err
	}
	for _, c := range live {
		if i, ok := index[c.Endpoint]; ok {
			list[i].AddLive(c)
		}
	}
	p.reported.raise(endpoints, list)
	return list, nil
}

// raise makes no count of list, which belongs to endpoints, less than what was reported before.
func (r *reported) raise(endpoints []model.Endpoint, list []model.Traffic) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := make(map[generation]model.Traffic, len(list))
	for i, e := range endpoints {
		key := generation{e.ID, e.Created}
		list[i].RaiseTo(r.last[key])
		now[key] = list[i]
	}
	r.last = now
}

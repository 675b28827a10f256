package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/store"
)

// membersEvery is how often an agent looks for nodes that are gone.
const membersEvery = 2 * time.Second

// seenAgain is how old the note that a node answers may become before it is renewed, if nodes are
// never forgotten.
const seenAgain = time.Hour

// membership is this agent as one of the network's: it holds the node's name, and notes and forgets
// nodes that are gone.
type membership struct {
	*host
	nameLease store.NameLease // of this node's name: this agent. Start sets it
}

// followMembers notes which nodes' agents are gone, and forgets nodes that stay offline and silent,
// until ctx ends.
func (ms *membership) followMembers(ctx context.Context) {
	ticker := time.NewTicker(membersEvery)
	defer ticker.Stop()
	noticed, said := make(offlineSince), ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		state, _ := ms.view.last()
		now := time.Now().UTC()
		noticed.look(state.Offline, now)
		err := ms.apply(ctx, reconcile(state, ms.nameLease, ms.planes.Heard, noticed, ms.cfg.ForgetAfter, now))
		if err == nil {
			said = ""
		} else if err.Error() != said {
			said = err.Error()
			ms.log.Warn("nodes that are gone are not noted; will try again", "err", err)
		}
	}
}

// reconcileActions are what an agent is to do about nodes that are gone.
type reconcileActions struct {
	note   []store.OfflineRecord
	forget []string
	quiet  time.Time // of forget: they must not have been heard of since
}

// offlineSince is since when this agent has known of each node what the store notes of it. Notes
// have the times of other nodes' clocks, or of this one's before it was set: by these alone a clock
// that is a day ahead would have every node forgotten that is away for a moment.
type offlineSince map[string]noticedNote

type noticedNote struct {
	store.OfflineRecord
	at time.Time
}

// look compares with what the store has now.
func (o offlineSince) look(notes map[string]store.OfflineRecord, now time.Time) {
	maps.DeleteFunc(o, func(name string, _ noticedNote) bool { _, is := notes[name]; return !is })
	for name, note := range notes {
		if o[name].OfflineRecord != note {
			o[name] = noticedNote{note, now}
		}
	}
}

// reconcile decides what the agent own is to do about nodes whose agents are gone. The first live
// node by name does it for all; only that a node answers is noted by whoever finds it, somewhat
// later. An agent that holds no name does nothing: it knows less than others. answered says when a
// node last answered a probe of this one.
func reconcile(state store.State, own store.NameLease, answered func(model.Node) time.Time, noticed offlineSince, forgetAfter time.Duration, now time.Time) (c reconcileActions) {
	if state.NameLeases[own.Node].Instance != own.Instance {
		return c
	}
	first := slices.IndexFunc(state.Nodes, func(n model.Node) bool { _, held := state.NameLeases[n.Name]; return held })
	inCharge := first >= 0 && state.Nodes[first].Name == own.Node
	renew := seenAgain
	if forgetAfter > 0 {
		renew = min(renew, forgetAfter/4)
		c.quiet = now.Add(-forgetAfter)
	}
	for _, n := range state.Nodes {
		if _, held := state.NameLeases[n.Name]; held {
			continue
		}
		noted, is := state.Offline[n.Name]
		seen := answered(n)
		late := noted.Last().Add(renew)
		if !inCharge {
			late = late.Add(renew)
		}
		switch {
		case !is:
			if inCharge {
				c.note = append(c.note, store.OfflineRecord{Node: n.Name, Since: now})
			}
		case seen.After(late):
			c.note = append(c.note, store.OfflineRecord{Node: n.Name, Since: noted.Since, Seen: seen})
		case inCharge && forgetAfter > 0 && n.Planes.TCP.AnswersProbes && noted.Last().Before(c.quiet) && noticed[n.Name].at.Before(c.quiet) && !seen.After(c.quiet):
			// Nodes of builds that answer no probes may be alive without anybody's knowing.
			c.forget = append(c.forget, n.Name)
		}
	}
	return c
}

func (ms *membership) apply(ctx context.Context, c reconcileActions) error {
	var errs []error
	for _, record := range c.note {
		errs = append(errs, ms.store.NoteOffline(ctx, record))
	}
	for _, name := range c.forget {
		err := ms.store.ForgetNode(ctx, name, c.quiet)
		var live *store.NodeLiveError
		var seen *store.NodeSeenError
		switch {
		case errors.As(err, &live), errors.As(err, &seen):
		case err != nil:
			errs = append(errs, err)
		default:
			ms.log.Warn("node forgotten: its agent and its direct ports have been silent", "node", name, "for", ms.cfg.ForgetAfter)
		}
	}
	return errors.Join(errs...)
}

// Nodes lists the nodes of the network as last seen.
func (ms *membership) Nodes(context.Context) ([]api.Node, error) {
	state, _ := ms.view.last()
	out := make([]api.Node, len(state.Nodes))
	for i, n := range state.Nodes {
		out[i] = api.Node{Node: n, Presence: api.Presence{State: api.NodeLive, Endpoints: state.Endpoints.Groups(n.Name).Len()}}
		if h, held := state.NameLeases[n.Name]; held {
			out[i].Since = h.Since
			continue
		}
		noted := state.Offline[n.Name]
		seen := noted.Seen
		if mine := ms.planes.Heard(n); mine.After(seen) && mine.After(noted.Since) {
			seen = mine.UTC()
		}
		out[i].State, out[i].Since, out[i].Seen = api.NodeDead, noted.Since, seen
		if n.Name == ms.self.Name || !seen.IsZero() {
			out[i].State = api.NodeAway
		}
	}
	return out, nil
}

// ForgetNode removes a node that is gone from the network.
func (ms *membership) ForgetNode(ctx context.Context, name string) error {
	if name == ms.self.Name {
		return &api.Error{Code: api.CodeConflict, Field: "name", Message: fmt.Sprintf("this agent is node %s's", name),
			Remedy: "stop it, and ask the agent of another node"}
	}
	state, _ := ms.view.last()
	if !knowsNode(state, name) {
		return &api.Error{Code: api.CodeNotFound, Message: fmt.Sprintf("no node %s in the network", name)}
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	err := ms.store.ForgetNode(ctx, name, time.Time{})
	var live *store.NodeLiveError
	if errors.As(err, &live) {
		return &api.Error{Code: api.CodeConflict, Field: "name", Message: err.Error()}
	}
	if err != nil {
		return storeError(err)
	}
	ms.log.Warn("node forgotten, as an operator asked", "node", name)
	return nil
}

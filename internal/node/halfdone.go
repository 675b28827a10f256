package node

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/endpoint"
	"heddle.dev/heddle/internal/model"
)

// What becomes of endpoints while the store does not answer.

// undoAnswers bounds what the store is asked when the agent tries again by itself: a store that is
// slow beyond storeProbe is told at last.
const undoAnswers = 3 * storeProbe

// halfDone is an endpoint that is not there, and that the store may have.
type halfDone struct {
	model.Endpoint
	deleted bool // it was there, and there is a note for the next agent (api.NoteDeletion)
}

// silent is when the store last did not answer storeIsThere, and with what error.
type silent struct {
	at  time.Time
	err error
}

// deletionAnswers bounds what the store is asked when an endpoint goes: many containers that end
// together are not to wait each for a store that did not answer the first, nor for one that could
// not be made.
func (es *endpoints) deletionAnswers() time.Duration {
	if len(es.halfDone) > 0 {
		return storeProbe
	}
	return storeAnswers
}

// storeIsThere is asked before an endpoint called name is made. If there are some that the store
// has yet to hear of, it tries to undo one, that name's first, and is an error if the store does
// not answer: each that is tried all the same would hold change for long, and an address until the
// store is back. Who was waiting, since asked, while another heard that, is not to wait once more.
// The caller holds change.
func (es *endpoints) storeIsThere(name string, asked time.Time) error {
	h, again := es.halfDone[name]
	for _, other := range es.halfDone {
		if !again {
			h = other
		}
		break
	}
	if h.ID == 0 {
		return nil
	}
	if asked.Before(es.silent.at) {
		return unlessAway(es.silent.err)
	}
	err := es.undo(h, storeProbe)
	if isAway(err) {
		es.silent = silent{time.Now(), err}
	} else if !again {
		return nil // something else is wrong with that one
	}
	return unlessAway(err)
}

// leaseAgain leases an address, want unless that is the zero Addr. If it cannot be had, and an
// endpoint has it that the store has yet to hear of, it tells the store and tries once more: nobody
// can list or delete that one, and the store may be back. The caller holds change.
func (es *endpoints) leaseAgain(want netip.Addr, lease func() (endpoint.Lease, error)) (endpoint.Lease, error) {
	got, err := lease()
	if !errors.Is(err, endpoint.ErrAddr) && !errors.Is(err, endpoint.ErrExhausted) {
		return got, err
	}
	for _, h := range es.halfDone {
		if want.IsValid() && !slices.Contains(h.Addrs, want) {
			continue
		}
		if undo := es.undo(h, storeProbe); undo != nil {
			return got, errors.Join(err, undo)
		}
		return lease()
	}
	return got, err
}

// untoldError says that all of an endpoint is undone but what the store has of it, which does not
// answer.
type untoldError struct{ error }

func (e *untoldError) Unwrap() error { return e.error }

// tellLater keeps a deleted endpoint for undoHalfDone and, if that does not come to it, for the
// next agent.
func (es *endpoints) tellLater(e model.Endpoint, untold error) error {
	if err := api.NoteDeletion(es.cfg.APISocket, e.Name); err != nil {
		return unlessAway(errors.Join(untold, err))
	}
	es.known.remove(e)
	es.faults.ClearEndpoint(e.Name)
	es.halfDone[e.Name] = halfDone{e, true}
	es.log.Warn("endpoint detached; the store will be told when it answers, and until then nobody gets its address", "endpoint", e.Name, "id", e.ID, "err", untold)
	return nil
}

// followHalfDone calls undoHalfDone every so often until ctx ends: a store that is back need not
// have a new state to tell of.
func (es *endpoints) followHalfDone(ctx context.Context) {
	ticker := time.NewTicker(lastRepair)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			es.undoHalfDone()
		}
	}
}

// undoHalfDone tries again to undo endpoints that could not be made, and to tell the store of those
// that are deleted. It waits for nobody: the next state of the store, or whoever asks for the
// endpoint, tries again, too.
func (es *endpoints) undoHalfDone() {
	if !es.change.TryLock() {
		return
	}
	defer es.change.Unlock()
	for _, h := range es.halfDone {
		err := es.undo(h, undoAnswers)
		if err != nil {
			es.log.Warn("endpoint that is not there is not undone as a whole; will try again", "endpoint", h.Name, "id", h.ID, "err", err)
		}
		if isAway(err) {
			return
		}
	}
}

// undo undoes what is left of h. answers bounds what the store is asked.
func (es *endpoints) undo(h halfDone, answers time.Duration) error {
	if h.deleted {
		return es.detach(h.Endpoint, answers)
	}
	return es.takeBack(h.Endpoint, answers)
}

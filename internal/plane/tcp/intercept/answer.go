package intercept

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
)

// Owns implements trap.Handler.
func (h *Handler) Owns(d *trap.Data) bool {
	_, ok := parse(d)
	return ok
}

// Answer gives the caller a socket, or a batch of them, of its endpoint. A caller that is not in
// its endpoint's network namespace gets one of its own.
func (h *Handler) Answer(c *trap.Call) error {
	req, _ := parse(c.Data())
	if filled, done := c.Redeliver(req.key()); done {
		h.countBatch(filled)
		return nil
	}
	p := h.poolsOf(c.Endpoint)
	if p == nil {
		return c.EndpointGone()
	}
	if h.cfg.AdmitCompares && c.Thread() != 0 {
		return h.answerCompared(c, req, p)
	}
	if other, err := c.InOtherNetns(); err != nil {
		return err
	} else if other {
		return c.PassToOwnNetns()
	}
	own, err := h.proc.Owner(c.Thread())
	if err != nil {
		return h.why.owner.Because(fmt.Errorf("owner of thread %d: %w", c.Thread(), err))
	}
	return h.give(c, req, p, socketOptions{own: own, nonblock: req.Nonblock, mptcp: req.MPTCP}, model.Caller{})
}

// answerCompared answers a call with a socket made for a caller like the last. Whether this one is
// like it, and in the endpoint's network namespace, is seen together with the count of the socket.
func (h *Handler) answerCompared(c *trap.Call, req request, p *pools) error {
	netns, ok := c.EndpointNetns()
	if !ok {
		return c.PassToOwnNetns()
	}
	// Inodes of namespaces have 32 bits.
	caller := model.Caller{Thread: c.Thread(), Netns: uint32(netns), AnyOwner: !model.ProtectUser.On()}
	own := p.of(req.Family).lastOwner()
	err := h.give(c, req, p, socketOptions{own: own, nonblock: req.Nonblock, mptcp: req.MPTCP}, caller)
	if err == nil || errors.Is(err, model.ErrSocketQuota) || errors.Is(err, model.ErrStackRefused) || c.CallerGone(err) {
		return err
	}
	// There was no socket to be compared with: one in another namespace has no need of it.
	if other, oerr := c.InOtherNetns(); oerr == nil && other {
		return c.PassToOwnNetns()
	}
	return err
}

// give answers a call with a socket. What is not needed by the caller happens after it has its
// answer.
func (h *Handler) give(c *trap.Call, req request, p *pools, want socketOptions, caller model.Caller) error {
	if req.batch > 0 {
		if done, err := h.giveBatch(c, req, p, want, caller); done {
			return err
		}
	}
	pool := p.of(req.Family)
	s, ready, prefill, err := h.prefiller.take(pool, want)
	if prefill == needSoon && c.Crowded() { // it will be needed sooner
		prefill = needNow
	}
	defer h.prefiller.request(pool, prefill, c.YieldToCaller)
	if err == nil {
		err = h.admit(c, pool, &s, &want, caller)
	}
	if err != nil {
		return h.notGiven(c, pool, s, err)
	}
	if err := c.Give(trap.Descriptor{FD: s.fd, Inode: s.inode, CloseOnExec: req.CloseOnExec, Key: req.key()}); err != nil {
		return err // and what Admit counted is gone with the socket
	}
	if ready {
		h.hits.Add(1)
	} else {
		h.misses.Add(1)
	}
	return nil
}

// notGiven says what becomes of a call whose socket was not made, or not admitted, and of the
// socket.
func (h *Handler) notGiven(c *trap.Call, pool *socketPool, s socket, err error) error {
	switch {
	case errors.Is(err, errMake):
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			return c.OutOfDescriptors(err)
		}
		return h.why.makeSocket.Because(err)
	case errors.Is(err, model.ErrOtherNetns):
		h.prefiller.giveBack(pool, s)
		return c.PassToOwnNetns()
	case errors.Is(err, model.ErrSocketQuota):
		h.prefiller.giveBack(pool, s)
		return h.why.quota.Because(err)
	case errors.Is(err, model.ErrStackRefused):
		h.prefiller.giveBack(pool, s)
		return h.why.stack.Because(err)
	}
	closeFD(s.fd)
	if errors.Is(err, errOwner) {
		return h.why.owner.Because(err)
	}
	return h.why.makeSocket.Because(err)
}

// admit makes the socket what the caller wants and counts it. If the caller is another than the one
// it was made for, it is given to this one, which is then also what want says.
func (h *Handler) admit(c *trap.Call, pool *socketPool, s *socket, want *socketOptions, caller model.Caller) error {
	if err := s.apply(h.cfg.Maker, pool.endpoint, *want); err != nil {
		return fmt.Errorf("%w: %w", errOwner, err)
	}
	caller.UID, caller.GID = want.own.UID, want.own.GID
	err := h.cfg.Maker.Admit(s.fd, caller)
	if !errors.Is(err, model.ErrOtherOwner) && !errors.Is(err, model.ErrNoCaller) {
		return err
	}
	own, err := h.proc.Owner(c.Thread())
	if err != nil {
		return fmt.Errorf("%w of thread %d: %w", errOwner, c.Thread(), err)
	}
	want.own = own
	pool.learn(*want)
	if err := s.apply(h.cfg.Maker, pool.endpoint, *want); err != nil {
		return fmt.Errorf("%w: %w", errOwner, err)
	}
	caller.UID, caller.GID = own.UID, own.GID
	return h.cfg.Maker.Admit(s.fd, caller)
}

var (
	errOwner = errors.New("owner")
	errMake  = errors.New("make socket")
)

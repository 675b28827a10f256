package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/wireguard"
)

// keysEvery is how often an agent looks whether its key is to be changed, and by which keys others
// send; triesEvery while it tries one.
const (
	keysEvery  = time.Second
	triesEvery = 200 * time.Millisecond
)

// asksAtOnce is of how many agents one asks at a time whether they accept its key. All of them have
// half of the time in which a key is tried.
const asksAtOnce = 128

// answersWithin is for how long after its last answer a node may have connections although its
// agent is away, and for how long an agent is waited for that does not answer.
const answersWithin = 10 * time.Minute

// waitsLong is how long after its publication it is a fault that others keep a key from being used.
const waitsLong = time.Minute

// encryption is what the node has of WireGuard. The zero value is of a node that does not encrypt:
// it leaves out those that do.
type encryption struct {
	// keys are nil on a node that does not encrypt. step has them, and what is beside them; all
	// others what mu guards.
	change    sync.Mutex
	keys      *wireguard.Keys
	kernel    model.PublicKey // of the key that the device has
	published time.Time       // when the store got the next key
	rotation  wireguard.Rotation
	silent    silence

	// applying is held by who gives the device its peers. It is taken before mu.
	applying sync.Mutex

	mu     sync.Mutex
	own    model.WireGuardNode // what the store is to have
	stored model.WireGuardNode // what it has, as far as is known
	since  time.Time           // when the key in use was made
	waits  []string
	peers  []wireguard.Peer
	unfit  map[string]model.PlainReason
}

// keepKeys is the goroutine of a node that encrypts: it changes the node's key when an operator or
// its age asks for it, and follows others that do, until ctx ends.
type keepKeys struct {
	*host
	peers *peers
}

// openKeys reads or makes the node's keys, before the store hears of the node.
func (h *host) openKeys() (err error) {
	if !h.cfg.Encrypts() {
		return nil
	}
	e := &h.encryption
	if e.keys, err = wireguard.OpenKeys(h.cfg.StateDir); err != nil {
		return err
	}
	e.published = time.Now() // at the latest: joining comes after
	return e.note(h.cfg)
}

// note brings what others are told to the keys there are.
func (e *encryption) note(cfg Config) error {
	made, err := e.keys.Made()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.since = made
	e.own = model.WireGuardNode{Endpoint: cfg.encryptedEndpoint(), Prefix: cfg.EncryptPrefix, Key: e.keys.Public(), Next: e.keys.Next()}
	return err
}

func (e *encryption) wanted() (own, stored model.WireGuardNode) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.own, e.stored
}

// ownRecord is the node as the store is to have it.
func (h *host) ownRecord() model.Node {
	n := h.self
	n.WireGuard, _ = h.encryption.wanted()
	return n
}

// setUpEncryption makes the device by which the node's underlay address is reached, or removes that
// of an earlier agent.
func (h *host) setUpEncryption() error {
	e := &h.encryption
	if !h.cfg.Encrypts() {
		return netcfg.RemoveWireGuard()
	}
	e.mu.Lock()
	e.stored = h.self.WireGuard
	e.mu.Unlock()
	e.kernel = e.keys.Public()
	err := netcfg.SetWireGuard(netcfg.WireGuard{
		Outer: h.cfg.Underlay, Port: h.cfg.EncryptPort, Inner: h.self.Underlay, Prefix: h.cfg.EncryptPrefix, PrivateKey: e.keys.Private(),
	})
	if err != nil {
		return fmt.Errorf("set up encryption: %w", err)
	}
	if e.keys.Next().IsZero() {
		return nil
	}
	// The agent before may have ended while the kernel had the next key for a try.
	e.rotation.Resume(time.Now())
	return wrap("set up encryption", netcfg.SetWireGuardKey(e.keys.Private()))
}

// setUpInner makes the device by which other nodes' inner addresses are reached on an IPv6
// underlay, or removes that of an earlier agent.
func (h *host) setUpInner() error {
	if !h.cfg.translates() {
		return netcfg.RemoveInner()
	}
	return wrap("set up inner addresses", netcfg.SetInner(netcfg.Inner{Outer: h.cfg.Underlay, Addr: h.self.Underlay, Prefix: h.cfg.InnerPrefix}))
}

// admit brings WireGuard's peers to a state of the network, and gives the state without the nodes
// that this one cannot reach as both encrypt, or do not: nothing is sent to them.
func (h *host) admit(state store.State) (store.State, error) {
	e := &h.encryption
	e.applying.Lock()
	defer e.applying.Unlock()
	peers, unfit := wireguard.Peers(h.ownRecord(), state.Nodes)
	e.mu.Lock()
	for name, why := range unfit {
		if e.unfit[name] != why {
			h.log.Warn("node left out: nothing is sent to it, and nothing of it taken", "node", name, "reason", why)
		}
	}
	e.peers, e.unfit = peers, unfit
	for _, n := range state.Nodes {
		if n.Name == h.self.Name {
			e.stored = n.WireGuard
		}
	}
	e.mu.Unlock()
	if len(unfit) > 0 {
		state.Nodes = wireguard.Fit(state.Nodes, unfit)
		state.Endpoints = slices.DeleteFunc(slices.Clone(state.Endpoints), func(of []model.Endpoint) bool { return unfit[of[0].Node] != "" })
	}
	if !h.cfg.Encrypts() {
		return state, nil
	}
	return state, wrap("apply encryption", e.setPeers(peers))
}

// setPeers brings the device to peers, each node's address at the key that it sends by. The caller
// holds applying.
func (e *encryption) setPeers(peers []wireguard.Peer) error {
	if wireguard.Changing(peers) {
		device, err := netcfg.WireGuardPeers()
		if err != nil {
			return err
		}
		peers = wireguard.InUse(peers, func(key model.PublicKey) time.Time { return device[key].Handshake }, time.Now())
	}
	want := make([]netcfg.WireGuardPeer, len(peers))
	for i, p := range peers {
		want[i] = netcfg.WireGuardPeer{Key: p.Key, Endpoint: p.Endpoint, Inner: p.Inner}
	}
	if err := netcfg.SetWireGuardPeers(want); err != nil {
		return err
	}
	e.mu.Lock()
	e.peers = peers
	e.mu.Unlock()
	return nil
}

// follow looks by which keys other nodes send, if one is about to take another: no store says so.
func (e *encryption) follow() error {
	e.applying.Lock()
	defer e.applying.Unlock()
	e.mu.Lock()
	peers := e.peers
	e.mu.Unlock()
	if !wireguard.Changing(peers) {
		return nil
	}
	return e.setPeers(peers)
}

// AcceptedKeys says what the kernel has of a node's keys: whoever changes one goes by that.
func (k keepKeys) AcceptedKeys(_ context.Context, node string) (keys api.AcceptedKeys, err error) {
	if !k.cfg.Encrypts() {
		return keys, errPlain
	}
	e := &k.encryption
	if err := e.follow(); err != nil {
		return keys, err
	}
	device, err := netcfg.WireGuardPeers()
	if err != nil {
		return keys, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.peers {
		if d, has := device[p.Key]; has && p.Node == node && d.Inner.IsValid() {
			keys.Sends = p.Key
		} else if has && p.Node == node {
			keys.Accepts = p.Key
		}
	}
	return keys, nil
}

// errPlain is what a node says that does not encrypt.
var errPlain = &api.Error{Code: api.CodeUnsupported, Message: "this node does not encrypt", Remedy: "start its agent with --encrypt wireguard"}

// run keeps the keys until ctx ends, or the device has to be made anew.
func (k keepKeys) run(ctx context.Context) error {
	if !k.cfg.Encrypts() {
		<-ctx.Done()
		return nil
	}
	said, wait := "", keysEvery
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		if err := k.keepDevice(netcfg.FindWireGuard(k.devices.UnderlayIfindex), netcfg.CheckWireGuard); err != nil {
			return err
		}
		trying, err := k.step(ctx)
		if wait = keysEvery; trying {
			wait = triesEvery
		}
		err = errors.Join(k.encryption.follow(), err)
		if err == nil {
			said = ""
		} else if err.Error() != said && ctx.Err() == nil {
			said = err.Error()
			k.log.Error("key of encryption not as it should be; will try again", "err", err)
		}
	}
}

// deviceLasts is how long an agent has run at least that ends for want of its device: whoever
// takes it away again and again is not to have the agent started again and again.
const deviceLasts = time.Minute

// keepDevice is an error if the device is gone, as there says, and can be made. Then the agent
// ends, for the next one to make it: with it the kernel has removed VXLAN's device, which is on it,
// and programs and rules are for the device that there was, by its index.
func (k keepKeys) keepDevice(there error, can func() error) error {
	if there == nil {
		k.faults.Clear(api.FaultEncryption, "")
		return nil
	}
	if k.faults.Set(api.FaultEncryption, "", there) {
		k.log.Error("nothing reaches other nodes, or comes from them", "err", there)
	}
	if !errors.Is(there, netcfg.ErrNoWireGuard) || time.Since(k.started) < deviceLasts || can() != nil {
		return nil
	}
	return fmt.Errorf("%w: this agent ends, and the next one makes it; connections within the node go on", there)
}

// step does what is next: first the kernel has the key that it is to have, then the store; then it
// is decided about the next one (wireguard.Rotation). The kernel comes first because peers follow
// the key by which a node shakes hands with them, whether the store says so or is away.
func (k keepKeys) step(ctx context.Context) (trying bool, err error) {
	e := &k.encryption
	e.change.Lock()
	defer e.change.Unlock()
	for {
		trying = e.rotation.Trying()
		if err := k.give(); err != nil {
			return trying, err
		}
		if !trying { // the store has the next key by then, and nothing is to wait for it
			if err := k.tell(ctx); err != nil {
				return trying, err
			}
		}
		due := k.cfg.EncryptKeyAge > 0 && time.Since(e.since) > k.cfg.EncryptKeyAge
		if e.keys.Next().IsZero() {
			if !due {
				return false, nil
			}
			if err := errors.Join(e.keys.MakeNext(), e.note(k.cfg)); err != nil {
				return false, err
			}
			continue
		}
		do, waits := e.rotation.Step(e.published, time.Now(), k.others(), func(nodes []string) map[string]wireguard.Said { return k.ask(ctx, nodes) })
		e.mu.Lock()
		e.waits = waits
		e.mu.Unlock()
		k.reportWaits(waits)
		switch do {
		case wireguard.Wait:
			return trying, nil
		case wireguard.Back:
			k.log.Warn("key of encryption not changed: not all nodes have followed; will try again", "nodes", waits)
		case wireguard.Take:
			if err := errors.Join(e.keys.Switch(), e.note(k.cfg)); err != nil {
				e.rotation.Resume(time.Now())
				return false, err
			}
			e.silent = nil
			k.log.Info("key of encryption changed", "public_key", e.keys.Public())
		}
	}
}

// reportWaits says whom the next key has waited for for long.
func (k keepKeys) reportWaits(waits []string) {
	if len(waits) == 0 || time.Since(k.encryption.published) < waitsLong {
		k.faults.Clear(api.FaultKey, "")
		return
	}
	const most = 8 // names
	named, more := waits, ""
	if len(waits) > most {
		named, more = waits[:most], fmt.Sprintf(" and %d more", len(waits)-most)
	}
	err := fmt.Errorf("the next key waits for %s%s: can the ports of their agents be reached (--peer-port, TCP)? Who does not answer is waited for for %s",
		strings.Join(named, ", "), more, answersWithin)
	if k.faults.Set(api.FaultKey, "", err) {
		k.log.Warn("key of encryption not changed yet", "err", err)
	}
}

// give gives the kernel the key in use, or the next one while that is tried.
func (k keepKeys) give() error {
	e := &k.encryption
	public, private := e.keys.Public(), e.keys.Private()
	if e.rotation.Trying() {
		public, private = e.keys.Next(), e.keys.NextPrivate()
	}
	if e.kernel == public {
		return nil
	}
	if err := netcfg.SetWireGuardKey(private); err != nil {
		return err
	}
	e.kernel = public
	return nil
}

// tell tells the store what it is to have.
func (k keepKeys) tell(ctx context.Context) error {
	e := &k.encryption
	own, stored := e.wanted()
	if own == stored {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, storeAnswers)
	defer cancel()
	if _, err := k.store.JoinNode(ctx, k.ownRecord()); err != nil {
		return fmt.Errorf("tell the store of the node's keys: %w", err)
	}
	e.mu.Lock()
	e.stored = own
	e.mu.Unlock()
	e.published = time.Now()
	return nil
}

// others gives what is known of the nodes that this one reaches. An agent that has just started has
// heard of none.
func (k keepKeys) others() (out []wireguard.Known) {
	state, _ := k.view.last()
	k.encryption.mu.Lock()
	unfit := k.encryption.unfit
	k.encryption.mu.Unlock()
	for _, n := range wireguard.Fit(state.Nodes, unfit) {
		if n.Name == k.self.Name {
			continue
		}
		_, held := state.NameLeases[n.Name]
		heard := k.planes.Heard(n)
		last := heard
		if last.Before(k.started) {
			last = k.started
		}
		out = append(out, wireguard.Known{Node: n.Name, Held: held, Answers: time.Since(last) < answersWithin, Heard: heard})
	}
	return out
}

// ask asks nodes' agents whether their kernels accept the next key.
func (k keepKeys) ask(ctx context.Context, nodes []string) map[string]wireguard.Said {
	next := k.encryption.keys.Next()
	ctx, cancel := context.WithTimeout(ctx, wireguard.TryFor/2)
	defer cancel()
	said := make([]wireguard.Said, len(nodes))
	var wg sync.WaitGroup
	places := make(chan struct{}, asksAtOnce)
	for i, name := range nodes {
		places <- struct{}{}
		wg.Go(func() {
			said[i] = k.askOne(ctx, name, next)
			<-places
		})
	}
	wg.Wait()
	out := make(map[string]wireguard.Said, len(nodes))
	for i, name := range nodes {
		out[name] = said[i]
	}
	if k.encryption.silent == nil {
		k.encryption.silent = make(silence)
	}
	k.encryption.silent.judge(out, time.Now())
	return out
}

// silence is since when agents have not answered, by node.
type silence map[string]time.Time

// judge takes agents that have not answered for answersWithin for such as answer nobody: their
// ports cannot be reached, and without them no key would ever be changed. An agent that holds its
// node's name all that time follows the store.
func (s silence) judge(said map[string]wireguard.Said, now time.Time) {
	for name, what := range said {
		since, was := s[name]
		switch {
		case what != wireguard.Silent:
			delete(s, name)
		case !was:
			s[name] = now
		case now.Sub(since) >= answersWithin:
			said[name] = wireguard.Never
		}
	}
}

func (k keepKeys) askOne(ctx context.Context, node string, next model.PublicKey) wireguard.Said {
	resp, err := k.peers.AskNode(ctx, node, "/v1/encryption/accepted?node="+k.self.Name)
	var refused *api.Error
	if errors.As(err, &refused) && refused.Code == api.CodeUnsupported {
		return wireguard.Never
	}
	if err != nil {
		return wireguard.Silent
	}
	defer func() { _ = resp.Body.Close() }() // it has been read
	return answered(resp, next)
}

// answered reads what an agent has answered.
func answered(resp *http.Response, next model.PublicKey) wireguard.Said {
	var keys api.AcceptedKeys
	switch {
	case resp.StatusCode == http.StatusNotFound: // an earlier build
		return wireguard.Never
	case resp.StatusCode != http.StatusOK || json.NewDecoder(io.LimitReader(resp.Body, api.MaxRequestBytes)).Decode(&keys) != nil:
		return wireguard.Silent
	case keys.Sends == next:
		return wireguard.Sends
	case keys.Accepts == next:
		return wireguard.Accepts
	}
	return wireguard.Without
}

// RotateKey makes the node's next key. It is used when the others have heard of it.
func (k keepKeys) RotateKey(ctx context.Context) (api.Encryption, error) {
	if !k.cfg.Encrypts() {
		return api.Encryption{}, errPlain
	}
	e := &k.encryption
	e.change.Lock()
	err := errors.Join(e.keys.MakeNext(), e.note(k.cfg))
	if err == nil && !e.rotation.Trying() {
		err = k.tell(ctx)
	}
	e.change.Unlock()
	if err != nil {
		return api.Encryption{}, err
	}
	return *k.encryptionStatus(time.Now()), nil
}

// encryptionStatus says how encryption is; nil: the node does not encrypt, and reaches all others.
// That the device cannot be read is a fault: whoever asks wants to know what is wrong.
func (h *host) encryptionStatus(now time.Time) *api.Encryption {
	e := &h.encryption
	var device map[model.PublicKey]netcfg.WireGuardState
	if h.cfg.Encrypts() {
		var err error
		if device, err = netcfg.WireGuardPeers(); err != nil && !h.faults.Has(api.FaultEncryption) {
			h.faults.Set(api.FaultEncryption, "", err)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if !h.cfg.Encrypts() && len(e.unfit) == 0 {
		return nil
	}
	out := &api.Encryption{}
	if h.cfg.Encrypts() {
		*out = api.Encryption{
			Enabled: true, Device: netdev.WireGuard, Endpoint: e.own.Endpoint, Inner: h.self.Underlay, Prefix: e.own.Prefix,
			Key: e.own.Key, KeySince: e.since, Next: e.own.Next, Waits: e.waits,
		}
	}
	out.Peers = encryptedPeers(e.peers, e.unfit, device, now)
	return out
}

// encryptedPeers puts what the agent and the device know of peers together.
func encryptedPeers(peers []wireguard.Peer, unfit map[string]model.PlainReason, device map[model.PublicKey]netcfg.WireGuardState, now time.Time) (out []api.EncryptedPeer) {
	next := make(map[string]model.PublicKey)
	for _, p := range peers {
		if !p.Inner.IsValid() {
			next[p.Node] = p.Key
		}
	}
	for _, p := range peers {
		if !p.Inner.IsValid() {
			continue
		}
		d := device[p.Key]
		at, state := p.Endpoint, api.PeerIdle
		if d.Endpoint.IsValid() {
			at = d.Endpoint // where it was heard from, if it is behind a router that translates
		}
		switch {
		case d.Handshake.IsZero():
			state = api.PeerNoHandshake
		case now.Sub(d.Handshake) < netcfg.WireGuardSession:
			state = api.PeerEncrypted
		}
		out = append(out, api.EncryptedPeer{Node: p.Node, State: state, Endpoint: at, Inner: p.Inner, Key: p.Key, Next: next[p.Node],
			Handshake: d.Handshake, Sent: d.Sent, Received: d.Received})
	}
	for name, why := range unfit {
		out = append(out, api.EncryptedPeer{Node: name, State: api.PeerLeftOut, Reason: why})
	}
	slices.SortFunc(out, func(a, b api.EncryptedPeer) int {
		if a.Node < b.Node {
			return -1
		}
		return 1
	})
	return out
}

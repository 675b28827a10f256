package tcp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/probe"
)

// probePort is where the agent takes probes, at probeAddr: bpf/tc/probe.h gives it the SYNs. Only
// the node's own processes reach a loopback alias, and this one is of no endpoint.
const probePort = 0x4864

var probeAddr = model.LoopbackAlias(0, netip.MustParseAddr("127.0.0.1"))

// probeAnswers is how long a probe waits: the SYN is sent once more after a second.
const probeAnswers = 1500 * time.Millisecond

// startProbes makes the prober, with the states that the routes of an earlier agent have.
func (p *Plane) startProbes() error {
	known, err := p.datapath.PeerStates()
	if err != nil {
		return err
	}
	p.prober = probe.New(probe.Config{
		Dial: p.dialProbes, Reach: p.reachByOverlay, Known: known, Log: p.log,
		Apply: func(to probe.Peer, s model.PeerState) error {
			if err := p.datapath.SetPeerState(to.Underlay, s); err != nil {
				return err
			}
			if s == model.PeerBlocked {
				p.giveUpBlocked()
			}
			return nil
		},
	})
	p.probed = probedNodes{prober: p.prober, self: p.cfg.Self.Name}
	return nil
}

// suspect is told of a node to which a connect met with trouble.
func (p *Plane) suspect(underlay netip.Addr) {
	if p.prober.Suspect(underlay) == model.PeerBlocked {
		p.giveUpBlocked() // it was decided before the path was known to be blocked
	}
}

// giveUpBlocked shortens the wait of connects that will not be answered. They are no worse off
// without.
func (p *Plane) giveUpBlocked() {
	if _, err := p.datapath.GiveUpBlocked(); unlessStuck(err) != nil {
		p.log.Warn("direct connects on a blocked path end at their own time only", "err", err)
	}
}

// runProbes probes peers, and listens for their probes, until ctx ends. What fails here costs speed
// only.
func (p *Plane) runProbes(ctx context.Context) {
	fd, err := p.listenForProbes()
	if err != nil {
		// The program answers in the listener's place.
		p.log.Warn("probes of other nodes do not pass this node's firewall: they cannot tell whether it blocks direct ports", "err", err)
	} else {
		defer func() { _ = unix.Close(fd) }()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		if err := p.datapath.FollowReprobes(ctx, p.suspect); err != nil {
			p.log.Error("direct paths are probed at their time only, not when a connect fails", "err", err)
		}
	})
	p.prober.Run(ctx)
}

// listenForProbes opens the listener that answers other nodes' probes. They never send data, so
// that, with TCP_DEFER_ACCEPT, no connection is ever made of one and there is nothing to accept.
func (p *Plane) listenForProbes() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("probe listener: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_DEFER_ACCEPT, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Port: probePort, Addr: probeAddr.As4()}),
		unix.Listen(fd, unix.SOMAXCONN),
	)
	if err != nil {
		return -1, fmt.Errorf("probe listener at %s:%d: %w", probeAddr, probePort, err)
	}
	return fd, p.datapath.TagProbe(fd, netip.Addr{}, netip.Addr{})
}

// probedNodes are the nodes that the prober was told of last. The goroutine that calls SetTopology
// owns it.
type probedNodes struct {
	prober *probe.Prober
	self   string
	nodes  []model.Node
	known  bool // the prober was told of them without an error
}

// follow tells the prober of what has changed, or of all nodes after an error.
func (f *probedNodes) follow(nodes []model.Node) (err error) {
	if !f.known {
		err = f.prober.Follow(probedPeers(f.self, nodes))
	} else if changes := model.ChangedNodes(f.nodes, nodes); len(changes) > 0 {
		before, now := model.Sides(changes)
		err = f.prober.Change(probedPeers(f.self, before), probedPeers(f.self, now))
	}
	f.nodes, f.known = nodes, err == nil
	return err
}

// probedPeers gives the nodes whose direct paths are probed.
func probedPeers(self string, nodes []model.Node) []probe.Peer {
	var out []probe.Peer
	for _, n := range nodes {
		if n.Name != self && n.Direct() && n.Planes.TCP.AnswersProbes && len(n.Prefixes) > 0 {
			out = append(out, probe.Peer{Name: n.Name, Underlay: n.Underlay, Gateway: model.Gateway(n.Prefixes[0]), Ports: n.Planes.TCP.DirectPorts})
		}
	}
	return out
}

// dialProbes implements probe.Config.Dial.
func (p *Plane) dialProbes(ctx context.Context, to probe.Peer, ports []uint16) ([]probe.Answer, error) {
	own := model.Gateway(p.cfg.Self.Prefixes[0])
	from := &unix.SockaddrInet4{Addr: p.cfg.Self.Underlay.As4()}
	fds := make([]unix.PollFd, 0, len(ports))
	defer func() {
		for _, f := range fds {
			if f.Fd >= 0 {
				_ = unix.Close(int(f.Fd))
			}
		}
	}()
	prepare := func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, model.Mark); err != nil { // as connections have it
			return fmt.Errorf("set SO_MARK: %w", err)
		}
		// If the node has lost its address, the kernel's choice must do, as for connections.
		if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
			return fmt.Errorf("set IP_BIND_ADDRESS_NO_PORT: %w", err)
		}
		if err := unix.Bind(fd, from); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("bind to %s: %w", p.cfg.Self.Underlay, err)
		}
		return p.datapath.TagProbe(fd, own, to.Gateway)
	}
	for _, port := range ports {
		fd, err := dial(to.Underlay, port, prepare)
		if err != nil {
			return nil, err
		}
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT})
	}
	await(ctx, fds)
	out := make([]probe.Answer, len(fds))
	for i, f := range fds {
		out[i] = answerOf(f)
	}
	return out, nil
}

// answerOf says what became of a connect whose poll showed f. A probe that the other node's program
// answered is reset right after.
func answerOf(f unix.PollFd) probe.Answer {
	if f.Revents == 0 {
		return probe.Silent
	}
	errno, err := unix.GetsockoptInt(int(f.Fd), unix.SOL_SOCKET, unix.SO_ERROR)
	switch {
	case err != nil:
		return probe.Silent
	case errno == 0, unix.Errno(errno) == unix.ECONNRESET, unix.Errno(errno) == unix.EPIPE:
		return probe.Answered
	case unix.Errno(errno) == unix.ECONNREFUSED:
		return probe.Refused
	}
	return probe.Silent // EHOSTUNREACH and others: an ICMP error came back
}

// reachByOverlay implements probe.Config.Reach: any answer of the node's own stack will do.
func (p *Plane) reachByOverlay(ctx context.Context, to probe.Peer) bool {
	return p.reachGateway(ctx, to.Gateway)
}

func (p *Plane) reachGateway(ctx context.Context, gateway netip.Addr) bool {
	fd, err := dial(gateway, probePort, nil)
	if err != nil || fd < 0 {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	await(ctx, fds)
	return answerOf(fds[0]) != probe.Silent
}

// dial begins a connect, after prepare if there is one. It is ended by a RST, so that no port stays
// taken. Without a route it gives -1, which poll passes over: that is as good as no answer.
func dial(to netip.Addr, port uint16, prepare func(fd int) error) (fd int, err error) {
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
		return -1, fmt.Errorf("set SO_LINGER: %w", err)
	}
	if prepare != nil {
		if err := prepare(fd); err != nil {
			return -1, err
		}
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: int(port), Addr: to.As4()})
	if errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH) {
		_ = unix.Close(fd)
		return -1, nil
	}
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return -1, fmt.Errorf("connect: %w", err)
	}
	return fd, nil
}

// await polls until all of fds have something to say, or the time for answers is over. Afterwards
// Revents are what the kernel says then: a process that was kept waiting does not take an answer
// that is there for none.
func await(ctx context.Context, fds []unix.PollFd) {
	const slice = 100 * time.Millisecond // how long the end of ctx may go unseen
	open := slices.DeleteFunc(slices.Clone(fds), func(f unix.PollFd) bool { return f.Fd < 0 })
	deadline := time.Now().Add(probeAnswers)
	for len(open) > 0 && ctx.Err() == nil && time.Now().Before(deadline) {
		if _, err := unix.Poll(open, int(slice.Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
		open = slices.DeleteFunc(open, func(f unix.PollFd) bool { return f.Revents != 0 })
	}
	for {
		if _, err := unix.Poll(fds, 0); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

package capture

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"net/netip"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"heddle.dev/heddle/internal/model"
)

const (
	// maxWaiting and maxWaitingBytes bound the packets that wait for the agent's answer, maxWait
	// how long each does.
	maxWaiting      = 4096
	maxWaitingBytes = 32 << 20
	maxWait         = time.Second
	// askInterval is the least time between two questions, askTimeout how long one may take.
	askInterval = 20 * time.Millisecond
	askTimeout  = 2 * time.Second
	// A packet that another device has seen within this time is the same packet on its way.
	sameWithin = 50 * time.Millisecond
	// maxSeen bounds the packets that are remembered for that.
	maxSeen = 1 << 14
	// frameBuffer is how many packets may wait between the reading and the writing part.
	frameBuffer = 256
)

// MaxSnapLen is the longest packet that is kept whole.
const MaxSnapLen = maxPacket

// Options say what to capture.
type Options struct {
	Endpoint model.Endpoint
	// Ask lists the endpoint's connections, listeners excepted.
	Ask func(context.Context) ([]model.Connection, error)
	// Begun, if not nil, is called when every packet from now on will be judged: live connections
	// are known.
	Begun func()
	// KeepOption leaves Heddle's option in the SYN of a direct connection, where programs of a
	// container never see it.
	KeepOption bool
	// Port and Peer keep only packets that have them at either end, as the container sees them,
	// unless zero.
	Port uint16
	Peer netip.Prefix
	// Count ends the capture after so many packets; 0 does not.
	Count uint64
	// SnapLen cuts packets that are longer, after their checksums are computed.
	SnapLen int
}

// Counts say what became of packets.
type Counts struct {
	Captured  uint64 // written
	Dropped   uint64 // by the kernel, because this process was behind
	Unmatched uint64 // of connections that the agent did not know: the node's own, or over before it was asked
	Malformed uint64 // not understood
}

// Run writes the endpoint's packets to out until ctx ends or there are enough. What it has written
// is complete then, and whenever it waits for packets.
func Run(ctx context.Context, src *Source, out io.Writer, o Options) (Counts, error) {
	s, err := newSession(out, o, src.addrs)
	if err != nil {
		return Counts{}, err
	}
	first, err := o.Ask(ctx)
	if err != nil {
		return Counts{}, fmt.Errorf("list connections: %w", err)
	}
	s.matcher.learn(first)
	if o.Begun != nil {
		o.Begun()
	}
	reading, stop := context.WithCancel(ctx)
	defer stop()
	frames := make(chan frame, frameBuffer)
	var readErr error
	go func() {
		defer close(frames)
		readErr = src.read(reading.Done(), func(f frame) { frames <- f })
	}()
	err = s.run(ctx, stop, frames)
	s.counts.Dropped, _ = src.Drops() // the count is all that an error costs
	return s.counts, errors.Join(err, readErr)
}

// session is one capture. All of it belongs to the goroutine of run.
type session struct {
	o       Options
	matcher *matcher
	buffer  *bufio.Writer
	writer  *pcapgo.Writer
	counts  Counts
	seen    *recent[uint64, sighting]
	seed    maphash.Seed

	waiting []held
	bytes   int         // of those that wait
	answers chan answer // of the question under way
	asking  bool
	asked   time.Time // when the last question was put
}

// held is a packet that waits, because its connection is not known or because one before it waits.
type held struct {
	frame
	packet
	asked bool // a question was put after it was seen
}

type answer struct {
	list []model.Connection
	err  error
}

// sighting is where and when a packet was seen first.
type sighting struct {
	ifindex int
	at      time.Time
}

func newSession(out io.Writer, o Options, node []netip.Addr) (*session, error) {
	if o.SnapLen <= 0 || o.SnapLen > MaxSnapLen {
		return nil, fmt.Errorf("snap length %d: want 1 to %d", o.SnapLen, MaxSnapLen)
	}
	s := &session{
		o: o, matcher: newMatcher(o.Endpoint, node), buffer: bufio.NewWriterSize(out, 1<<20),
		seen: newRecent[uint64, sighting](maxSeen), seed: maphash.MakeSeed(), answers: make(chan answer, 1),
	}
	s.writer = pcapgo.NewWriterNanos(s.buffer)
	if err := s.writer.WriteFileHeader(uint32(o.SnapLen), layers.LinkTypeRaw); err != nil {
		return nil, fmt.Errorf("write file header: %w", err)
	}
	return s, s.flush()
}

// run takes frames until their channel is closed; stop makes the reader close it.
func (s *session) run(ctx context.Context, stop func(), frames <-chan frame) error {
	var err error
	for {
		timer := s.ask(ctx)
		if len(frames) == 0 && err == nil {
			err = s.flush()
		}
		if err != nil || s.enough() {
			stop()
			for range frames {
			}
			return errors.Join(err, s.flush())
		}
		select {
		case f, ok := <-frames:
			if !ok {
				return s.finish(ctx)
			}
			err = s.take(f)
		case a := <-s.answers:
			err = s.answered(a)
		case <-timer:
			err = s.release(time.Now())
		}
	}
}

func (s *session) enough() bool { return s.o.Count > 0 && s.counts.Captured >= s.o.Count }

func (s *session) flush() error {
	if err := s.buffer.Flush(); err != nil {
		return fmt.Errorf("write packets: %w", err)
	}
	return nil
}

// take judges a packet, or lets it wait.
func (s *session) take(f frame) error {
	p, err := parse(f.raw)
	if err != nil {
		s.counts.Malformed++
		return nil
	}
	if p.opens() {
		s.matcher.forget(&p)
	}
	src, dst, v := s.matcher.match(&p)
	switch {
	case v == verdictForeign:
		return nil
	case v == verdictOurs && len(s.waiting) == 0:
		return s.write(f, &p, src, dst)
	}
	s.waiting = append(s.waiting, held{frame: f, packet: p})
	s.bytes += len(f.raw)
	n := 0
	for over := s.bytes; len(s.waiting)-n > maxWaiting || over > maxWaitingBytes; n++ {
		over -= len(s.waiting[n].frame.raw)
	}
	return s.resolve(n)
}

// ask puts a question if packets wait for one and none is under way. It gives the channel of a
// timer that tells when to look again; nil if nothing waits.
func (s *session) ask(ctx context.Context) <-chan time.Time {
	if len(s.waiting) == 0 {
		return nil
	}
	if wait := askInterval - time.Since(s.asked); s.asking || wait > 0 {
		return time.After(max(wait, askInterval))
	}
	s.asking, s.asked = true, time.Now()
	for i := range s.waiting {
		s.waiting[i].asked = true
	}
	go func() {
		// A question outlives the end of the capture: what waits then still needs the answer.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askTimeout)
		defer cancel()
		list, err := s.o.Ask(ctx)
		s.answers <- answer{list, err}
	}()
	return time.After(askInterval)
}

// answered takes in an answer and judges what waited for it. An agent that is away is asked again
// until the packets have waited long enough.
func (s *session) answered(a answer) error {
	s.asking = false
	if a.err != nil {
		for i := range s.waiting {
			s.waiting[i].asked = false
		}
		return s.release(time.Now())
	}
	s.matcher.learn(a.list)
	n := 0
	for n < len(s.waiting) && s.known(&s.waiting[n]) {
		n++
	}
	return s.resolve(n)
}

func (s *session) known(h *held) bool {
	if h.asked {
		return true
	}
	_, _, v := s.matcher.match(&h.packet)
	return v != verdictUnknown
}

// release gives up waiting for an answer for packets that have waited too long.
func (s *session) release(now time.Time) error {
	n := 0
	for n < len(s.waiting) && now.Sub(s.waiting[n].at) > maxWait {
		n++
	}
	return s.resolve(n)
}

// resolve judges the first n packets that wait by what is known now.
func (s *session) resolve(n int) error {
	for i := range s.waiting[:n] {
		h := &s.waiting[i]
		s.bytes -= len(h.frame.raw)
		src, dst, v := s.matcher.resolve(&h.packet)
		if v != verdictOurs {
			s.counts.Unmatched++
			continue
		}
		if err := s.write(h.frame, &h.packet, src, dst); err != nil {
			return err
		}
	}
	if n > 0 {
		rest := copy(s.waiting, s.waiting[n:])
		clear(s.waiting[rest:])
		s.waiting = s.waiting[:rest]
	}
	return nil
}

// finish judges what still waits when the frames have ended.
func (s *session) finish(ctx context.Context) error {
	var err error
	if s.asking {
		err = s.answered(<-s.answers)
	}
	if len(s.waiting) > 0 && err == nil {
		s.asked = time.Time{}
		s.ask(ctx)
		err = s.answered(<-s.answers)
	}
	return errors.Join(err, s.resolve(len(s.waiting)), s.flush())
}

// write writes the packet with the addresses that the container sees, unless a filter or the count
// is against it.
func (s *session) write(f frame, p *packet, src, dst netip.AddrPort) error {
	if s.enough() || s.filtered(src, dst) {
		return nil
	}
	out := p.rewrite(src, dst, s.o.KeepOption)
	if s.repeated(out, f) {
		return nil
	}
	s.counts.Captured++
	info := gopacket.CaptureInfo{Timestamp: f.at, Length: len(out), CaptureLength: min(len(out), s.o.SnapLen)}
	if err := s.writer.WritePacket(info, out[:info.CaptureLength]); err != nil {
		return fmt.Errorf("write packet: %w", err)
	}
	return nil
}

func (s *session) filtered(src, dst netip.AddrPort) bool {
	if s.o.Port != 0 && src.Port() != s.o.Port && dst.Port() != s.o.Port {
		return true
	}
	return s.o.Peer.IsValid() && !s.o.Peer.Contains(src.Addr()) && !s.o.Peer.Contains(dst.Addr())
}

// repeated reports whether another device has seen the packet already: one that is forwarded, or
// that a bond or a bridge passes on. The same device sees it again only if it was sent again.
func (s *session) repeated(out []byte, f frame) bool {
	const headers = 160 // and some payload
	var h maphash.Hash
	h.SetSeed(s.seed)
	head := out[:min(len(out), headers)]
	if out[0]>>4 == 6 { // all but the hop limit
		_, _ = h.Write(head[:7])
		_, _ = h.Write(head[8:])
	} else { // all but time to live and header checksum
		_, _ = h.Write(head[:8])
		_ = h.WriteByte(head[9])
		_, _ = h.Write(head[12:])
	}
	key := h.Sum64()
	first, ok := s.seen.get(key)
	if ok && first.ifindex != f.ifindex && f.at.Sub(first.at).Abs() <= sameWithin {
		return true
	}
	s.seen.put(key, sighting{f.ifindex, f.at})
	return false
}

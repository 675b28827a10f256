package capture

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"heddle.dev/heddle/internal/model"
)

var (
	began     = time.Unix(1_800_000_000, 123456789)
	container = model.Endpoint{ID: 5, Name: "n1/c1", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.2")}}
	nodeAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")}
)

// alias is the node's address for a loopback address of the container.
func alias(a string) netip.Addr { return model.LoopbackAlias(container.ID, netip.MustParseAddr(a)) }

// written is a packet of the file.
type written struct {
	at       time.Time
	src, dst netip.AddrPort
	payload  string
	length   int
}

// runFrames runs a session over frames that are all there from the beginning, and reads back what
// it wrote.
func runFrames(t *testing.T, o Options, frames ...frame) ([]written, Counts) {
	t.Helper()
	o.Endpoint = container
	if o.SnapLen == 0 {
		o.SnapLen = MaxSnapLen
	}
	if o.Ask == nil {
		o.Ask = func(context.Context) ([]model.Connection, error) { return nil, nil }
	}
	var file bytes.Buffer
	s, err := newSession(&file, o, nodeAddrs)
	if err != nil {
		t.Fatal(err)
	}
	queue := make(chan frame, len(frames))
	for _, f := range frames {
		queue <- f
	}
	close(queue)
	if err := s.run(t.Context(), func() {}, queue); err != nil {
		t.Fatal(err)
	}
	return readFile(t, &file), s.counts
}

func readFile(t *testing.T, file io.Reader) []written {
	t.Helper()
	r, err := pcapgo.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	if r.LinkType() != layers.LinkTypeRaw {
		t.Errorf("link type %s", r.LinkType())
	}
	var list []written
	for {
		raw, info, err := r.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		w := written{at: info.Timestamp, length: info.Length}
		if len(raw) == info.Length {
			p := mustParse(t, raw)
			decode(t, raw)
			w.src, w.dst = p.src, p.dst
			if header := p.tcp(); header != nil {
				w.payload = string(p.raw[p.l4+len(header):])
			}
		}
		list = append(list, w)
	}
}

// at makes the n-th frame, seen by device 2.
func (s segment) at(t *testing.T, n int) frame {
	return frame{raw: s.bytes(t), at: began.Add(time.Duration(n) * time.Millisecond), ifindex: 2}
}

func ends(list []written) string {
	var parts []string
	for _, w := range list {
		parts = append(parts, w.src.String()+">"+w.dst.String()+" "+w.payload)
	}
	return strings.Join(parts, "; ")
}

func data(src, dst, payload string) segment {
	return segment{src: addrPort(src), dst: addrPort(dst), flags: flagACK, payload: []byte(payload)}
}

func syn(src, dst string, options ...layers.TCPOption) segment {
	return segment{src: addrPort(src), dst: addrPort(dst), flags: flagSYN, options: options}
}

// TestDirect: a connection is known from its SYN on, by nobody's help.
func TestDirect(t *testing.T) {
	asked := func(context.Context) ([]model.Connection, error) {
		t.Error("the agent was asked")
		return nil, nil
	}
	out := synOption(container.Addrs[0], addrPort("10.244.2.2:80"))
	in := synOption(netip.MustParseAddr("10.244.2.2"), addrPort("10.244.1.2:80"))
	other := synOption(netip.MustParseAddr("10.244.1.3"), addrPort("10.244.2.2:80"))
	list, counts := runFrames(t, Options{Ask: asked},
		syn("192.0.2.1:40000", "192.0.2.2:17410", out).at(t, 0),
		data("192.0.2.2:17410", "192.0.2.1:40000", "answer").at(t, 1),
		syn("192.0.2.2:50000", "192.0.2.1:17411", in).at(t, 2),
		data("192.0.2.1:17411", "192.0.2.2:50000", "reply").at(t, 3),
		syn("192.0.2.1:40001", "192.0.2.2:17410", other).at(t, 4),
		data("192.0.2.1:40001", "192.0.2.2:17410", "not ours").at(t, 5),
		// The same ports again, for another container.
		syn("192.0.2.1:40000", "192.0.2.2:17410", other).at(t, 6),
		data("192.0.2.1:40000", "192.0.2.2:17410", "not ours").at(t, 7))
	want := "10.244.1.2:40000>10.244.2.2:80 ; 10.244.2.2:80>10.244.1.2:40000 answer; " +
		"10.244.2.2:50000>10.244.1.2:80 ; 10.244.1.2:80>10.244.2.2:50000 reply"
	if got := ends(list); got != want || counts != (Counts{Captured: 4}) {
		t.Errorf("got  %s\nwant %s\n%+v", got, want, counts)
	}
	if !list[1].at.Equal(began.Add(time.Millisecond)) {
		t.Errorf("time %s, want the frame's to the nanosecond", list[1].at)
	}
}

// TestDirect6: version 2 of the option names the IPv6 forms of its addresses.
func TestDirect6(t *testing.T) {
	both := container
	both.Addrs = append(both.Addrs[:1:1], netip.MustParseAddr("fd00:48::10.244.1.2"))
	o := synOption(netip.MustParseAddr("10.244.2.2"), addrPort("10.244.1.2:80"))
	o.OptionData[2] = optionVersion6<<4 | o.OptionData[2]&0xf
	p := mustParse(t, syn("192.0.2.2:50000", "192.0.2.1:17410", o).bytes(t))
	src, dst, v := newMatcher(both, nodeAddrs).match(&p)
	if v != verdictOurs || src != addrPort("[fd00:48::10.244.2.2]:50000") || dst != addrPort("[fd00:48::10.244.1.2]:80") {
		t.Errorf("%s to %s, verdict %d", src, dst, v)
	}
	decode(t, p.rewrite(src, dst, false))
	if _, _, v := newMatcher(container, nodeAddrs).match(&p); v != verdictUnknown {
		t.Errorf("without IPv6: verdict %d, want a question", v)
	}
}

// TestOverlayAddresses: packets that carry overlay addresses are taken as they are; those of others
// are not.
func TestOverlayAddresses(t *testing.T) {
	list, counts := runFrames(t, Options{},
		data("10.244.1.2:1000", "10.244.2.2:80", "out").at(t, 0),
		data("10.244.2.2:80", "10.244.1.2:1000", "in").at(t, 1),
		data("10.244.1.3:1000", "10.244.2.2:80", "not ours").at(t, 2),
		data("10.244.1.2:1", "10.244.1.2:2", "itself").at(t, 3))
	want := "10.244.1.2:1000>10.244.2.2:80 out; 10.244.2.2:80>10.244.1.2:1000 in; 10.244.1.2:1>10.244.1.2:2 itself"
	if got := ends(list); got != want || counts.Unmatched != 0 {
		t.Errorf("got  %s\nwant %s\n%+v", got, want, counts)
	}
}

// TestLoopback: aliases become what the agent says, and the usual addresses if it says nothing.
func TestLoopback(t *testing.T) {
	a4, a6 := alias("127.0.0.1"), alias("::1")
	four, six := a4.String(), a6.String()
	foreign := model.LoopbackAlias(container.ID+1, netip.MustParseAddr("127.0.0.1"))
	ask := func(context.Context) ([]model.Connection, error) {
		return []model.Connection{{Local: addrPort("127.0.0.7:1"), Remote: addrPort("127.0.0.8:2"),
			NodeLocal: addrPort(four + ":1"), NodeRemote: addrPort(four + ":2")}}, nil
	}
	list, counts := runFrames(t, Options{Ask: ask},
		data(four+":1", four+":2", "a").at(t, 0),
		data(four+":2", four+":1", "b").at(t, 1),
		data(four+":3", four+":4", "c").at(t, 2),
		data(six+":5", six+":6", "d").at(t, 3),
		data(six+":7", "10.244.1.2:8", "e").at(t, 4),
		data(alias("127.0.0.9").String()+":9", alias("127.5.6.7").String()+":10", "f").at(t, 5),
		data(foreign.String()+":1", foreign.String()+":2", "not ours").at(t, 6))
	want := "127.0.0.7:1>127.0.0.8:2 a; 127.0.0.8:2>127.0.0.7:1 b; 127.0.0.1:3>127.0.0.1:4 c; [::1]:5>[::1]:6 d; [::1]:7>[::1]:8 e; " +
		"127.0.0.9:9>127.0.0.1:10 f"
	if got := ends(list); got != want || counts.Unmatched != 1 {
		t.Errorf("got  %s\nwant %s\n%+v", got, want, counts)
	}
}

// TestAsk: packets of connections that are not known wait for the agent, in their order, and what
// it does not know is the node's.
func TestAsk(t *testing.T) {
	asked := 0
	ask := func(context.Context) ([]model.Connection, error) {
		asked++
		return []model.Connection{{Local: addrPort("10.244.1.2:40000"), Remote: addrPort("198.51.100.1:443"),
			NodeLocal: addrPort("192.0.2.1:40000"), NodeRemote: addrPort("198.51.100.1:443")}}, nil
	}
	list, counts := runFrames(t, Options{Ask: ask},
		syn("192.0.2.1:40000", "198.51.100.1:443").at(t, 0),
		data("10.244.1.2:1000", "10.244.2.2:80", "known, but later").at(t, 1),
		data("198.51.100.1:443", "192.0.2.1:40000", "hello").at(t, 2),
		data("192.0.2.1:22", "198.51.100.1:5000", "the node's").at(t, 3))
	want := "10.244.1.2:40000>198.51.100.1:443 ; 10.244.1.2:1000>10.244.2.2:80 known, but later; 198.51.100.1:443>10.244.1.2:40000 hello"
	if got := ends(list); got != want || counts != (Counts{Captured: 3, Unmatched: 1}) || asked == 0 {
		t.Errorf("got  %s\nwant %s\n%+v, asked %d times", got, want, counts, asked)
	}
}

// TestHandshakeProvesNothing: the agent cannot list a connection before it is established, and is
// asked again then.
func TestHandshakeProvesNothing(t *testing.T) {
	m := newMatcher(container, nodeAddrs)
	ask := func(s segment) verdict {
		p := mustParse(t, s.bytes(t))
		_, _, before := m.match(&p)
		m.resolve(&p)
		return before
	}
	in := syn("198.51.100.1:5000", "192.0.2.1:17410")
	answer := segment{src: in.dst, dst: in.src, flags: flagSYN | flagACK}
	ack := data("198.51.100.1:5000", "192.0.2.1:17410", "")
	for _, s := range []segment{in, answer, ack} {
		if v := ask(s); v != verdictUnknown {
			t.Errorf("flags %#x: verdict %d, want a question", s.flags, v)
		}
	}
	if v := ask(ack); v != verdictForeign {
		t.Errorf("asked about again: verdict %d", v)
	}
}

// TestAgentAway: an agent that does not answer costs what only it knows.
func TestAgentAway(t *testing.T) {
	a4 := alias("127.0.0.1")
	ask := func(context.Context) ([]model.Connection, error) { return nil, errors.New("away") }
	list, counts := runFrames(t, Options{Ask: ask},
		data("192.0.2.1:40000", "198.51.100.1:443", "whose?").at(t, 0),
		data("10.244.1.2:1000", "10.244.2.2:80", "known").at(t, 1),
		data(a4.String()+":1", a4.String()+":2", "own").at(t, 2))
	want := "10.244.1.2:1000>10.244.2.2:80 known; 127.0.0.1:1>127.0.0.1:2 own"
	if got := ends(list); got != want || counts != (Counts{Captured: 2, Unmatched: 1}) {
		t.Errorf("got  %s\nwant %s\n%+v", got, want, counts)
	}
}

// TestWaitingIsBounded: a node's busy connection must not fill the memory while the agent is
// silent.
func TestWaitingIsBounded(t *testing.T) {
	s, err := newSession(io.Discard, Options{Endpoint: container, SnapLen: MaxSnapLen}, nodeAddrs)
	if err != nil {
		t.Fatal(err)
	}
	s.asking = true // and no answer comes
	for n := range maxWaiting + 100 {
		src := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), uint16(n+1))
		if err := s.take(segment{src: src, dst: addrPort("192.0.2.1:22"), flags: flagACK}.at(t, 0)); err != nil {
			t.Fatal(err)
		}
	}
	if len(s.waiting) != maxWaiting || s.counts.Unmatched != 100 {
		t.Errorf("%d packets wait, %d given up", len(s.waiting), s.counts.Unmatched)
	}
	large := strings.Repeat("x", 60_000)
	for n := range 2 * maxWaitingBytes / len(large) {
		src := netip.AddrPortFrom(netip.MustParseAddr("198.51.100.2"), uint16(n+1))
		if err := s.take(segment{src: src, dst: addrPort("192.0.2.1:22"), flags: flagACK, payload: []byte(large)}.at(t, 0)); err != nil {
			t.Fatal(err)
		}
	}
	sum := 0
	for _, h := range s.waiting {
		sum += len(h.frame.raw)
	}
	if sum != s.bytes || sum > maxWaitingBytes || sum < maxWaitingBytes/2 {
		t.Errorf("%d bytes wait, counted as %d", sum, s.bytes)
	}
}

// TestRepeated: what two devices saw is one packet, what one device saw twice is two.
func TestRepeated(t *testing.T) {
	p := data("10.244.1.2:1000", "10.244.2.2:80", "once").at(t, 0)
	forwarded, again, late := p, p, p
	forwarded.raw = bytes.Clone(p.raw)
	forwarded.raw[8]-- // time to live; its checksum is not looked at
	forwarded.ifindex, late.ifindex = 3, 3
	late.at = late.at.Add(time.Second)
	if list, _ := runFrames(t, Options{}, p, forwarded); len(list) != 1 {
		t.Errorf("forwarded: %s", ends(list))
	}
	if list, _ := runFrames(t, Options{}, p, again, late); len(list) != 3 {
		t.Errorf("sent again: %s", ends(list))
	}
}

func TestFilters(t *testing.T) {
	frames := []frame{
		data("10.244.1.2:1000", "10.244.2.2:80", "a").at(t, 0),
		data("10.244.2.2:80", "10.244.1.2:1000", "b").at(t, 1),
		data("10.244.1.2:1001", "10.244.3.3:81", "c").at(t, 2),
		{raw: []byte("not IP"), at: began},
	}
	peer, err := netip.ParsePrefix("10.244.3.0/24")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		o    Options
		want string
	}{
		"port":  {Options{Port: 81}, "c"},
		"peer":  {Options{Peer: peer}, "c"},
		"count": {Options{Count: 1}, "a"},
		"none":  {Options{}, "abc"},
	} {
		list, counts := runFrames(t, c.o, frames...)
		var got string
		for _, w := range list {
			got += w.payload
		}
		if got != c.want || counts.Captured != uint64(len(c.want)) {
			t.Errorf("%s: got %q, want %q, %+v", name, got, c.want, counts)
		}
	}
	list, _ := runFrames(t, Options{SnapLen: 20}, frames[0])
	if len(list) != 1 || list[0].length != len(frames[0].raw) || list[0].src.IsValid() {
		t.Errorf("snap length 20: %+v", list)
	}
	for _, n := range []int{-1, MaxSnapLen + 1} {
		if _, err := newSession(io.Discard, Options{SnapLen: n}, nil); err == nil {
			t.Errorf("snap length %d was taken", n)
		}
	}
}

// TestWriteError: a reader that goes away ends the capture.
func TestWriteError(t *testing.T) {
	r, w := io.Pipe()
	go func() {
		_, _ = io.CopyN(io.Discard, r, 24) // the file's header
		_ = r.CloseWithError(errors.New("reader went away"))
	}()
	s, err := newSession(w, Options{Endpoint: container, SnapLen: MaxSnapLen}, nodeAddrs)
	if err != nil {
		t.Fatal(err)
	}
	frames := make(chan frame)
	stopped := make(chan struct{})
	go func() {
		defer close(frames)
		for {
			select {
			case frames <- data("10.244.1.2:1000", "10.244.2.2:80", "x").at(t, 0):
			case <-stopped:
				return
			}
		}
	}()
	if err := s.run(t.Context(), func() { close(stopped) }, frames); err == nil || !strings.Contains(err.Error(), "went away") {
		t.Errorf("got %v", err)
	}
}

func TestRecentForgets(t *testing.T) {
	r := newRecent[int, int](10)
	for n := range 100 {
		r.put(n, n)
		r.get(0)
	}
	if _, ok := r.get(0); !ok {
		t.Error("a key that is in use was forgotten")
	}
	if _, ok := r.get(50); ok || len(r.young)+len(r.older) > 10 {
		t.Errorf("%d keys are remembered", len(r.young)+len(r.older))
	}
}

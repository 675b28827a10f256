package verbs

import (
	"encoding/hex"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/layout"
	"heddle.dev/heddle/internal/plane/verbs/protocol"
	"heddle.dev/heddle/internal/testutil"
)

// onWire are all messages by name, as they have been ever since.
func onWire(t *testing.T) map[string][]byte {
	t.Helper()
	b, err := os.ReadFile("../../../rust/verbs-protocol/tests/agent-messages.txt")
	testutil.NoError(t, err)
	all := map[string][]byte{}
	for line := range strings.Lines(string(b)) {
		if name, text, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			all[name], err = hex.DecodeString(text)
			testutil.NoError(t, err)
		}
	}
	return all
}

// TestWire: what is on the wire is what it was: agents and routers of other builds are met.
func TestWire(t *testing.T) {
	const number = 0x0102030405060708
	from, to := netip.MustParseAddr("fd00::3"), netip.MustParseAddr("10.244.0.2")
	group1, group2 := netip.MustParseAddr("232.0.0.1"), netip.MustParseAddr("ff0e::2")
	e := model.Endpoint{Name: "n1/c1", Addrs: []netip.Addr{to, from}}
	// Agents leave the other limits to the router.
	said := protocol.Limits{
		Contexts: 1, QPs: 2, CQs: 3, MRs: 4, Pds: 5, Srqs: 6, Ahs: 7, Channels: 8, MemoryMib: 9, SendsPerSecond: 10, SpinUs: 11, EgressKbit: 12, IngressKbit: 13, Outside: 1,
	}
	endpoint, err := layout.Parse[protocol.Endpoint](endpointMessage(number, e, Config{}))
	testutil.NoError(t, err)
	endpoint.Limits = said
	asked := heard{Head: protocol.Head{Tag: 0x11, Endpoint: number}, to: to}
	want := onWire(t)
	for name, got := range map[string][]byte{
		"hello": helloMessage(), "begin": plain(protocol.TypeBegin, 0), "end": plain(protocol.TypeEnd, 0), "endpoint": layout.Append(nil, &endpoint),
		"remove": plain(protocol.TypeRemove, number), "connected": connectedMessage(asked.Head, unix.ECONNREFUSED), "accepted": acceptedMessage(number, from, to),
		"stats": statsMessage(0x11, protocol.KindQPs, 0x21), "drain": plain(protocol.TypeDrain, 0),
		"groups-elsewhere": groupsMessage([2]netip.Addr{to, from}, []netip.Addr{group1}), "answer": answerMessage(asked, unix.EACCES, 0),
		"ask-anew": plain(protocol.TypeAskAnew, 0), "card": cardMessage(number, model.VerbsCard{LID: 7, GIDs: []netip.Addr{to, from}}),
	} {
		if string(got) != string(want[name]) {
			t.Errorf("%s is %x, want %x", name, got, want[name])
		}
		delete(want, name)
	}
	for name, check := range map[string]func(heard) bool{
		"connect":  func(m heard) bool { return m.Tag == 0x11 && m.to == to },
		"ask":      func(m heard) bool { return m.Tag == 0x11 && m.to == to },
		"refused":  func(m heard) bool { return unix.Errno(m.number) == unix.ENOMEM },
		"groups":   func(m heard) bool { return slices.Equal(m.groups, []netip.Addr{group1, group2}) },
		"released": func(m heard) bool { return m.Type == protocol.TypeReleased },
		"statistics-endpoints": func(m heard) bool {
			r := record[protocol.EndpointRecord](m.statistics.records)
			return m.statistics.Cursor == 0x21 && r.Endpoint == number && r.Used[9] == 109 && r.Limits[0] == 200 && r.Traffic[byCard].Received == 311 && r.Errors == 400 && r.Reasons[63] == 563
		},
		"statistics-qps": func(m heard) bool {
			of, q := parseQP(m.statistics.records)
			return of == number && q.Number == 7 && q.PeerNumber == 8 && q.Local == to && q.Peer == from && q.PID == 9 && q.Type == "RC" && q.State == "RTS" &&
				q.LastError == "RETRY_EXC_ERR" && q.BytesReceived == 34 && q.Errors == 35
		},
		"statistics-ids": func(m heard) bool {
			of, id := parseID(m.statistics.records)
			return of == number && id.Local == netip.AddrPortFrom(to, 18515) && id.Peer == netip.AddrPortFrom(from, 18516) && id.State == "connected" && id.PeerQPN == 42
		},
	} {
		m, err := parse(want[name])
		if err != nil || !check(m) {
			t.Errorf("%s is read as %+v, %v", name, m, err)
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("nobody says or hears %v", slices.Collect(maps.Keys(want)))
	}
}

// TestEarlierRecord: a router of before has fewer reasons; the others are 0.
func TestEarlierRecord(t *testing.T) {
	full := onWire(t)["statistics-endpoints"]
	short := statisticsMessage(0, protocol.KindEndpoints, 0, full[32:32+leastRecord[protocol.KindEndpoints]])
	m, err := parse(short)
	testutil.NoError(t, err)
	if r := record[protocol.EndpointRecord](m.statistics.records); r.Reasons[31] != 531 || r.Reasons[32] != 0 || r.Errors != 400 {
		t.Errorf("%+v", r)
	}
	if _, err := parse(short[:len(short)-8]); err == nil {
		t.Error("a record that is cut is read")
	}
}

package model

import (
	"encoding/json"
	"reflect"
	"testing"
)

func TestTraffic(t *testing.T) {
	a := Traffic{Opened: 3, Closed: 2, BytesSent: 100}
	a.AddLive(Connection{State: "ESTABLISHED", Path: "direct", BytesSent: 10, BytesReceived: 20, Retransmits: 1})
	a.AddLive(Connection{State: "CLOSE_WAIT", Path: "local", BytesSent: 5})
	for _, state := range []string{"LISTEN", "SYN_SENT", "SYN_RECV", "CLOSE"} {
		a.AddLive(Connection{State: state, Path: "direct", BytesSent: 1000})
	}
	want := Traffic{Opened: 3, Closed: 2, BytesSent: 115, BytesReceived: 20, Retransmits: 1,
		Live: map[Path]uint64{"direct": 1, "local": 1}}
	if !reflect.DeepEqual(a, want) {
		t.Errorf("got %+v\nwant %+v", a, want)
	}
	sum := Traffic{Accepted: 1, Live: map[Path]uint64{"local": 2}}
	sum.Add(a)
	if sum.Accepted != 1 || sum.Opened != 3 || sum.BytesSent != 115 || sum.Live["local"] != 3 || sum.LiveTotal() != 4 {
		t.Errorf("sum %+v", sum)
	}
	if a.LiveTotal() != 2 {
		t.Errorf("adding changed what was added: %+v", a)
	}
	later := Traffic{Opened: 4, BytesSent: 90}
	later.RaiseTo(a)
	if later.Opened != 4 || later.BytesSent != 115 || later.Live != nil {
		t.Errorf("raised to %+v", later)
	}
}

// TestTrafficCounts checks that no count is left out where all are meant.
func TestTrafficCounts(t *testing.T) {
	var one Traffic
	n := 0
	for v := reflect.ValueOf(&one).Elem(); n < v.NumField(); n++ {
		if f := v.Field(n); f.Kind() == reflect.Uint64 {
			f.SetUint(1)
		}
	}
	var sum Traffic
	sum.Add(one)
	if !reflect.DeepEqual(sum, one) {
		t.Errorf("sum %+v leaves out some of %+v", sum, one)
	}
}

func TestTrafficJSON(t *testing.T) {
	in := Traffic{Name: "c1", Live: map[Path]uint64{"direct": 7}}
	raw, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out Traffic
	if err := json.Unmarshal(raw, &out); err != nil || !reflect.DeepEqual(in, out) {
		t.Errorf("%s came back as %+v, %v", raw, out, err)
	}
}

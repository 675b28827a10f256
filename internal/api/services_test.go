package api

import (
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func TestServices(t *testing.T) {
	agent := newFakeAgent()
	client := serve(t, agent)
	at := model.ServiceAddr{AddrPort: netip.MustParseAddrPort("10.96.0.1:443")}
	want := []model.Service{{Addr: at, Backends: []netip.AddrPort{netip.MustParseAddrPort("10.1.0.2:6443")}, Affinity: 60},
		{Addr: model.ServiceAddr{AddrPort: at.AddrPort, UDP: true}, Backends: []netip.AddrPort{}}}
	if err := client.EditServices(t.Context(), ServiceEdit{Put: want}); err != nil {
		t.Fatal(err)
	}
	if got, err := client.Services(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("services %+v, %v", got, err)
	}
	for field, e := range map[string]ServiceEdit{
		"":                 {},
		"put[0].addr":      {Put: []model.Service{{}}},
		"put[1]":           {Put: []model.Service{want[0], want[0]}},
		"delete[0]":        {Delete: []model.ServiceAddr{{}}},
		"delete[0]: 10.96": {Put: want, Delete: []model.ServiceAddr{want[0].Addr}},
	} {
		if err := client.EditServices(t.Context(), e); !errors.Is(err, ErrInvalid) || !strings.HasPrefix(err.Error(), field) {
			t.Errorf("%+v: %v, want field %q", e, err, field)
		}
	}
}

// FuzzServiceEdit: whatever bytes arrive, an *Error or an edit that is valid.
func FuzzServiceEdit(f *testing.F) {
	for _, s := range []string{``, `{}`, `{"put":[{"addr":"10.96.0.1:80","backends":["10.1.0.1:80"],"affinity_s":1}]}`, `{"delete":["[fd00::1]:80","10.96.0.1:53/udp",""]}`, `{"put":[{"addr":"[::ffff:1.2.3.4]:1"}]}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var e ServiceEdit
		err := decodeStrict(strings.NewReader(body), MaxServiceBytes, &e)
		if err == nil {
			err = e.Validate()
		}
		var said *Error
		if err != nil && (!errors.As(err, &said) || said.Message == "") {
			t.Fatalf("error %#v", err)
		}
		if err != nil {
			return
		}
		for _, s := range e.Put {
			if err := s.Validate(); err != nil || s.Addr.Addr().IsLoopback() {
				t.Errorf("%+v: %v", s, err)
			}
		}
	})
}

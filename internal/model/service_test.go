package model

import (
	"net/netip"
	"testing"
)

func ports(list ...string) []netip.AddrPort {
	var out []netip.AddrPort
	for _, s := range list {
		out = append(out, netip.MustParseAddrPort(s))
	}
	return out
}

func serviceAt(s string) ServiceAddr { return ServiceAddr{AddrPort: netip.MustParseAddrPort(s)} }

// TestServiceAddr: what is written is read again, and TCP is written as before there was UDP.
func TestServiceAddr(t *testing.T) {
	for text, want := range map[string]ServiceAddr{
		"10.96.0.10:53": serviceAt("10.96.0.10:53"), "10.96.0.10:53/udp": {serviceAt("10.96.0.10:53").AddrPort, true},
		"[fd00::1]:53/udp": {serviceAt("[fd00::1]:53").AddrPort, true}, "": {},
	} {
		var got ServiceAddr
		if err := got.UnmarshalText([]byte(text)); err != nil || got != want {
			t.Errorf("%q is %v, %v; want %v", text, got, err, want)
		}
		if text != "" && got.String() != text {
			t.Errorf("%q is written as %q", text, got)
		}
	}
	for _, text := range []string{"/udp", "10.96.0.10:53/tcp", "10.96.0.10:53/udp/udp", "10.96.0.10/udp"} {
		var got ServiceAddr
		if err := got.UnmarshalText([]byte(text)); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
	tcp, udp, next := serviceAt("10.96.0.10:53"), ServiceAddr{serviceAt("10.96.0.10:53").AddrPort, true}, serviceAt("10.96.0.10:54")
	if tcp.Compare(udp) >= 0 || udp.Compare(tcp) <= 0 || udp.Compare(next) >= 0 || udp.Compare(udp) != 0 {
		t.Error("the order is not TCP, UDP, next port")
	}
}

func TestServiceValidate(t *testing.T) {
	for name, c := range map[string]struct {
		s     Service
		field string
	}{
		"IPv4":                {Service{Addr: serviceAt("10.96.0.1:443"), Backends: ports("192.0.2.1:6443", "10.1.0.2:1"), Affinity: 86400}, ""},
		"no backends":         {Service{Addr: serviceAt("[fd00::1]:80")}, ""},
		"zero":                {Service{}, "addr"},
		"port 0":              {Service{Addr: serviceAt("10.96.0.1:0")}, "addr"},
		"loopback":            {Service{Addr: serviceAt("127.0.0.1:80")}, "addr"},
		"0.0.0.0":             {Service{Addr: serviceAt("0.0.0.0:80")}, "addr"},
		"reserved":            {Service{Addr: serviceAt("250.1.2.3:80")}, "addr"},
		"v4-mapped":           {Service{Addr: serviceAt("[::ffff:10.0.0.1]:80")}, "addr"},
		"zone":                {Service{Addr: serviceAt("[fe80::1%eth0]:80")}, "addr"},
		"backend of loopback": {Service{Addr: serviceAt("10.96.0.1:80"), Backends: ports("10.1.0.2:1", "127.0.0.1:1")}, "backends[1]"},
		"other family":        {Service{Addr: serviceAt("10.96.0.1:80"), Backends: ports("[fd00::1]:1")}, "backends[0]"},
		"twice":               {Service{Addr: serviceAt("10.96.0.1:80"), Backends: ports("10.1.0.2:1", "10.1.0.2:1")}, "backends[1]"},
		"affinity":            {Service{Addr: serviceAt("10.96.0.1:80"), Affinity: 86401}, "affinity_s"},
		"too many":            {Service{Addr: serviceAt("10.96.0.1:80"), Backends: make([]netip.AddrPort, MaxBackendsOfOne+1)}, "backends"},
	} {
		err, _ := c.s.Validate().(*ServiceError)
		switch {
		case c.field == "" && c.s.Validate() != nil, c.field != "" && (err == nil || err.Field != c.field):
			t.Errorf("%s: %v, want field %q", name, c.s.Validate(), c.field)
		}
	}
}

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

func TestServiceValidate(t *testing.T) {
	for name, c := range map[string]struct {
		s     Service
		field string
	}{
		"IPv4":                {Service{Addr: ports("10.96.0.1:443")[0], Backends: ports("192.0.2.1:6443", "10.1.0.2:1"), Affinity: 86400}, ""},
		"no backends":         {Service{Addr: ports("[fd00::1]:80")[0]}, ""},
		"zero":                {Service{}, "addr"},
		"port 0":              {Service{Addr: ports("10.96.0.1:0")[0]}, "addr"},
		"loopback":            {Service{Addr: ports("127.0.0.1:80")[0]}, "addr"},
		"0.0.0.0":             {Service{Addr: ports("0.0.0.0:80")[0]}, "addr"},
		"reserved":            {Service{Addr: ports("250.1.2.3:80")[0]}, "addr"},
		"v4-mapped":           {Service{Addr: ports("[::ffff:10.0.0.1]:80")[0]}, "addr"},
		"zone":                {Service{Addr: ports("[fe80::1%eth0]:80")[0]}, "addr"},
		"backend of loopback": {Service{Addr: ports("10.96.0.1:80")[0], Backends: ports("10.1.0.2:1", "127.0.0.1:1")}, "backends[1]"},
		"other family":        {Service{Addr: ports("10.96.0.1:80")[0], Backends: ports("[fd00::1]:1")}, "backends[0]"},
		"twice":               {Service{Addr: ports("10.96.0.1:80")[0], Backends: ports("10.1.0.2:1", "10.1.0.2:1")}, "backends[1]"},
		"affinity":            {Service{Addr: ports("10.96.0.1:80")[0], Affinity: 86401}, "affinity_s"},
		"too many":            {Service{Addr: ports("10.96.0.1:80")[0], Backends: make([]netip.AddrPort, MaxBackendsOfOne+1)}, "backends"},
	} {
		err, _ := c.s.Validate().(*ServiceError)
		switch {
		case c.field == "" && c.s.Validate() != nil, c.field != "" && (err == nil || err.Field != c.field):
			t.Errorf("%s: %v, want field %q", name, c.s.Validate(), c.field)
		}
	}
}

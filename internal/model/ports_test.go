package model

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParsePort(t *testing.T) {
	for text, want := range map[string]string{
		"8080:80":                "*:8080->80/tcp",
		"8053:53/udp":            "*:8053->53/udp",
		"192.0.2.1:8080:80/tcp":  "192.0.2.1:8080->80/tcp",
		"127.0.0.1:8080:80":      "127.0.0.1:8080->80/tcp",
		"[2001:db8::1]:8080:80":  "[2001:db8::1]:8080->80/tcp",
		":80":                    "*:0->80/tcp",
		"0.0.0.0::80":            "0.0.0.0:0->80/tcp",
		"8000-8010:80":           "*:8000->80/tcp",
		"80":                     "",
		"8080:0":                 "",
		"65536:80":               "",
		"8080:80/sctp":           "",
		"8080:80/tcp/udp":        "",
		"8010-8000:80":           "",
		"-8000:80":               "",
		"x:8080:80":              "",
		"224.0.0.1:8080:80":      "",
		"[fe80::1]:8080:80":      "",
		"[::1]:8080:80":          "",
		"127.0.0.2:8080:80":      "",
		"[::ffff:1.2.3.4]:80:80": "",
		"":                       "",
	} {
		got, err := ParsePort(text)
		if want == "" != (err != nil) || err == nil && got.String() != want {
			t.Errorf("%q: %s, %v, want %q", text, got, err, want)
		}
	}
}

func TestPublishedPortsOverlap(t *testing.T) {
	port := func(addr, protocol string, n uint16) PublishedPort {
		p := PublishedPort{HostPort: n, Port: 80, Protocol: protocol}
		if addr != "" {
			p.HostAddr = netip.MustParseAddr(addr)
		}
		return p
	}
	every := port("", PortTCP, 80)
	for _, c := range []struct {
		a, b PublishedPort
		want bool
	}{
		{every, every, true},
		{every, port("192.0.2.1", PortTCP, 80), true},
		{every, port("::", PortTCP, 80), true},
		{every, port("", PortUDP, 80), false},
		{every, port("", PortTCP, 81), false},
		{port("0.0.0.0", PortTCP, 80), port("::", PortTCP, 80), false},
		{port("0.0.0.0", PortTCP, 80), port("127.0.0.1", PortTCP, 80), true},
		{port("192.0.2.1", PortTCP, 80), port("192.0.2.2", PortTCP, 80), false},
	} {
		if c.a.Overlaps(c.b) != c.want || c.b.Overlaps(c.a) != c.want {
			t.Errorf("%s and %s: want %v", c.a, c.b, c.want)
		}
	}
	if err := ValidatePorts([]PublishedPort{every, port("", PortTCP, 81), port("127.0.0.1", PortTCP, 80)}); err == nil || !strings.Contains(err.Error(), "its port is that of *:80->80/tcp") {
		t.Errorf("two of one port: %v", err)
	}
	if err := ValidatePorts(make([]PublishedPort, MaxPublishedPorts+1)); err == nil {
		t.Error("too many are taken")
	}
	if ValidatePorts([]PublishedPort{{Port: 80, Protocol: PortTCP}}) == nil {
		t.Error("host port 0 is taken")
	}
}

func TestPortRequestMeets(t *testing.T) {
	have := PublishedPort{HostPort: 8001, Port: 80, Protocol: PortTCP}
	for text, want := range map[string]bool{":80": true, "8001:80": true, "8000-8001:80": true, "8000:80": false, "8002-8003:80": false,
		":81": false, ":80/udp": false, "0.0.0.0:8001:80": false} {
		r, err := ParsePort(text)
		if err != nil || r.Meets(have) != want {
			t.Errorf("%s meets %s: want %v, %v", have, text, want, err)
		}
	}
}

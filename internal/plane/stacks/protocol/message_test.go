package protocol

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"unsafe"
)

// TestLayouts: encoding/binary leaves no gaps, and so must the layouts that C has.
func TestLayouts(t *testing.T) {
	for name, sizes := range map[string][2]int{
		"plain":    {binary.Size(Plain{}), int(unsafe.Sizeof(Plain{}))},
		"hello":    {binary.Size(Hello{}), int(unsafe.Sizeof(Hello{}))},
		"tenant":   {binary.Size(Tenant{}), int(unsafe.Sizeof(Tenant{}))},
		"bind":     {binary.Size(Bind{}), int(unsafe.Sizeof(Bind{}))},
		"listen":   {binary.Size(Listen{}), int(unsafe.Sizeof(Listen{}))},
		"connect":  {binary.Size(Connect{}), int(unsafe.Sizeof(Connect{}))},
		"named":    {binary.Size(Named{}), int(unsafe.Sizeof(Named{}))},
		"set":      {binary.Size(Set{}), int(unsafe.Sizeof(Set{}))},
		"close":    {binary.Size(Close{}), int(unsafe.Sizeof(Close{}))},
		"accepted": {binary.Size(Accepted{}), int(unsafe.Sizeof(Accepted{}))},
		"info":     {binary.Size(Info{}), int(unsafe.Sizeof(Info{}))},
		"stats":    {binary.Size(Stats{}), int(unsafe.Sizeof(Stats{}))},
	} {
		if sizes[0] != sizes[1] || sizes[0] > MessageMax {
			t.Errorf("%s: %d bytes encoded, %d in C, at most %d", name, sizes[0], sizes[1], MessageMax)
		}
	}
}

func TestMessagesComeBack(t *testing.T) {
	to := netip.MustParseAddrPort("10.99.2.1:80")
	sent := Connect{Head: Head{Type: TypeConnect, Tag: 7, Tenant: 3, ID: 9}, Remote: AddressOf(to), Skip: 1}
	b := Append(nil, &sent)
	got, err := Parse[Connect](b)
	if err != nil || got != sent || got.Remote.AddrPort() != to {
		t.Errorf("%+v, %v; sent %+v", got, err, sent)
	}
	if head, err := ParseHead(b); err != nil || head != sent.Head {
		t.Errorf("%+v, %v; sent %+v", head, err, sent.Head)
	}
	if _, err := Parse[Connect](b[1:]); !errors.Is(err, ErrMalformed) {
		t.Errorf("a message that is too short: %v", err)
	}
	if _, err := ParseHead(b[:31]); !errors.Is(err, ErrMalformed) {
		t.Errorf("a head that is too short: %v", err)
	}
}

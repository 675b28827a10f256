package datapath

import (
	"bytes"
	"debug/elf"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/names"
)

// enum gives the names and values of an enum of the BPF object.
func enum(t *testing.T, name string) map[uint64]string {
	t.Helper()
	spec, err := loadHeddle()
	if err != nil {
		t.Fatal(err)
	}
	var e *btf.Enum
	if err := spec.Types.TypeByName(name, &e); err != nil {
		t.Fatal(err)
	}
	out := make(map[uint64]string)
	for _, v := range e.Values {
		out[v.Value] = v.Name
	}
	return out
}

// TestReasonsMatch ties names.Reasons, from which metric labels and `heddle status` are made, to the
// numbers the programs count under.
func TestReasonsMatch(t *testing.T) {
	counted := enum(t, "heddle_reason")
	if n := len(counted) - 1; n != len(names.Reasons) { // REASON_MAX is none
		t.Fatalf("%d reasons in bpf/include/abi/reason.h, %d in names.Reasons", n, len(names.Reasons))
	}
	for i, r := range names.Reasons {
		if want := "REASON_" + strings.ToUpper(r.Name); counted[uint64(i)] != want {
			t.Errorf("reason %d: %s in bpf/include/abi/reason.h, %s in names.Reasons", i, counted[uint64(i)], want)
		}
	}
}

// TestProtectionsMatch ties model.Protections to enum heddle_protection.
func TestProtectionsMatch(t *testing.T) {
	names := enum(t, "heddle_protection")
	if n := len(names) - 1; n != len(model.Protections) { // PROTECT_MAX is none
		t.Fatalf("%d protections in bpf/include/abi/protection.h, %d in model.Protections", n, len(model.Protections))
	}
	for i, p := range model.Protections {
		if int(p.Protection) != i {
			t.Errorf("%s: number %d at index %d", p.Name, p.Protection, i)
		}
		if want := "PROTECT_" + strings.ToUpper(p.Name); names[uint64(i)] != want {
			t.Errorf("protection %d: %s in bpf/include/abi/protection.h, %s in model.Protections", i, names[uint64(i)], want)
		}
	}
	if len(model.Protections) > 64 {
		t.Error("config_without has 64 bits")
	}
}

// TestPathsMatch ties names.Paths to enum heddle_path.
func TestPathsMatch(t *testing.T) {
	taken := enum(t, "heddle_path")
	for i, name := range taken {
		if want := "PATH_" + strings.ToUpper(string(names.PathOf(uint8(i)))); name != want {
			t.Errorf("path %d: %s in bpf/include/abi/path.h, want %s", i, name, want)
		}
	}
	if last := names.PathOf(uint8(len(taken))); !strings.HasPrefix(string(last), "path(") {
		t.Errorf("names.Paths has %s that bpf/include/abi/path.h lacks", last)
	}
}

// TestLoopbackAliasMatches ties model.LoopbackAlias to bpf/include/address.h.
func TestLoopbackAliasMatches(t *testing.T) {
	for loopback, want := range map[string]string{
		"127.0.0.1": "127.164.104.1", "127.0.0.255": "127.164.104.255", "127.0.1.0": "127.164.105.2",
		"127.255.255.255": "127.164.105.7", "::1": "127.164.105.255",
	} {
		if got := model.LoopbackAlias(0x1234, netip.MustParseAddr(loopback)); got != netip.MustParseAddr(want) {
			t.Errorf("%s of endpoint 0x1234: %s, want %s", loopback, got, want)
		}
	}
	src, err := os.ReadFile("../../../../bpf/include/address.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, def := range []string{"ALIAS_BASE 0x7f800000", "ALIAS_ID_MASK 0x3fff", "ALIAS_SLOTS 512", "ALIAS_SLOT_SHARED 256", "ALIAS_SLOT_LAST 509", "ALIAS_SLOT_IPV6 511"} {
		if !strings.Contains(strings.Join(strings.Fields(string(src)), " "), "#define "+def) {
			t.Errorf("bpf/include/address.h does not define %s", def)
		}
	}
}

// TestMirrorMatches ties model.MirrorPrefix and model.CrossingPrefix to bpf/include/mirror.h.
func TestMirrorMatches(t *testing.T) {
	for id, want := range map[model.EndpointID]string{1: "250.0.4.0/22", 0x1234: "250.72.208.0/22", model.MaxEndpointID: "250.255.252.0/22"} {
		if got := model.MirrorPrefix(id); got != netip.MustParsePrefix(want) || !model.MirrorRange.Overlaps(got) {
			t.Errorf("endpoint %d: %s, want %s in %s", id, got, want, model.MirrorRange)
		}
	}
	if got, want := model.CrossingPrefix(0x1234), netip.MustParsePrefix("250.72.209.0/25"); got != want {
		t.Errorf("crossing addresses %s, want %s", got, want)
	}
	src, err := os.ReadFile("../../../../bpf/include/mirror.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, def := range []string{"MIRROR_BASE 0xfa000000", "MIRROR_SLOTS 1024", "MIRROR_CROSSING 256", "MIRROR_CROSSINGS 128"} {
		if !strings.Contains(strings.Join(strings.Fields(string(src)), " "), "#define "+def) {
			t.Errorf("bpf/include/mirror.h does not define %s", def)
		}
	}
}

// TestAddresses checks that addresses survive the maps' form.
func TestAddresses(t *testing.T) {
	for _, s := range []string{"10.244.1.2", "::1", "2001:db8::17"} {
		a := netip.MustParseAddr(s)
		if got := toAddr(fromAddr(a)); got != a {
			t.Errorf("%s came back as %s", a, got)
		}
	}
}

// TestNoConstantStructs guards against a defect of clang 14's BPF backend: where a constant struct
// is copied, it may drop a neighbouring store (it dropped tag->flags in connect6). Such constants
// land in sections of their own.
func TestNoConstantStructs(t *testing.T) {
	object, err := elf.NewFile(bytes.NewReader(_HeddleBytes))
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range object.Sections {
		if strings.HasPrefix(s.Name, ".rodata.cst") {
			t.Errorf("the object has section %s: build structs field by field (bpf/include/address.h)", s.Name)
		}
	}
}

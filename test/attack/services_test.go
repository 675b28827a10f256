package attack

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

func init() {
	attacks = append(attacks,
		attack{"send beyond the overlay by a service's address that nothing translates", model.ProtectServices, "n1", sendByService})
}

// sendByService sends a datagram to a host outside, which policy forbids, at an address that the
// node takes for a service's of a container: policy is asked about that one only.
func sendByService(t *testing.T) (reached string) {
	outside, at, port := lab.StartOutside(t), lab.OutsideTarget(t), lab.FreePort()
	outside.Must(receiver, port)
	lab.ApplyDocument(t, map[string]any{"apiVersion": "heddle.dev/v1", "kind": "Policy", "name": "services",
		"subject": map[string]any{"prefixes": []string{lab.Address(t, "overlay", "n1/c1") + "/32"}},
		"egress":  map[string]any{"default": "deny", "deny": "drop"}})
	node := api.Dial(lab.APISocket("n1"))
	t.Cleanup(node.Close)
	service := model.ServiceAddr{AddrPort: netip.AddrPortFrom(netip.MustParseAddr(at), uint16(port)), UDP: true}
	backend := netip.AddrPortFrom(netip.MustParseAddr(lab.Address(t, "overlay", "n2/c1")), uint16(port))
	testutil.NoError(t, node.EditServices(t.Context(), api.ServiceEdit{Put: []model.Service{{Addr: service, Backends: []netip.AddrPort{backend}}}}))
	defer func() {
		if err := node.EditServices(context.Background(), api.ServiceEdit{Delete: []model.ServiceAddr{service}}); err != nil {
			t.Error(err)
		}
	}()
	before := lab.Counters(t, "n1")["drop_service"]
	client := lab.StartPeer(t, "overlay", "n1/c1")
	client.Must(`socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hostile", (%q, %d))`, at, port)
	testutil.Eventually(t, "the datagram to be dropped, or the host outside to get it", func() (bool, string) {
		got, dropped := outside.Do("got"), lab.Counters(t, "n1")["drop_service"]
		if strings.Contains(got, "hostile") {
			reached = "the host outside got " + got
		}
		return reached != "" || dropped > before, fmt.Sprint(got, dropped)
	})
	return reached
}

package netdev

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

func TestNamesOfEndpoints(t *testing.T) {
	if HostMAC(1).String() == ContainerMAC(1).String() || HostMAC(1).String() == HostMAC(256).String() {
		t.Error("hardware addresses of endpoints are not different")
	}
	if got := EndpointName(model.MaxEndpointID); got != "hd3fff" || len(got) >= unix.IFNAMSIZ {
		t.Errorf("EndpointName = %s", got)
	}
}

func TestEndpointOf(t *testing.T) {
	link := func(name string, mac net.HardwareAddr) netlink.Link {
		return &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, HardwareAddr: mac}}
	}
	for _, id := range []model.EndpointID{1, 0x2a, model.MaxEndpointID} {
		if got, ours := EndpointOf(link(EndpointName(id), HostMAC(id))); !ours || got != id {
			t.Errorf("EndpointOf(%d) = %d, %v", id, got, ours)
		}
	}
	divert, err := net.ParseMAC(DivertMAC)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []netlink.Link{
		link("hd1", HostMAC(2)), link("hd01", HostMAC(1)), link("hd2A", HostMAC(0x2a)), link("hd0", HostMAC(0)), link("hd", HostMAC(0)),
		link("hdx", HostMAC(1)), link("eth0", HostMAC(1)), link("hd1", nil), link(Divert, divert),
		&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "hd1", HardwareAddr: HostMAC(1)}},
	} {
		if id, ours := EndpointOf(l); ours {
			t.Errorf("%s %s taken for endpoint %d", l.Type(), l.Attrs().Name, id)
		}
	}
}

package api

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/model"
)

func TestSetPorts(t *testing.T) {
	agent := newFakeAgent()
	client := serve(t, agent)
	agent.endpoints["n1/c1"] = model.Endpoint{ID: 7, Name: "n1/c1"}
	port := model.PortRequest{PublishedPort: model.PublishedPort{HostAddr: netip.MustParseAddr("192.0.2.1"), HostPort: 8080, Port: 80, Protocol: model.PortUDP}, HostPortEnd: 8090}
	e, err := client.SetPorts(t.Context(), "n1/c1", []model.PortRequest{port})
	if err != nil || len(e.Ports) != 1 || e.Ports[0] != port.PublishedPort {
		t.Errorf("%+v, %v", e.Ports, err)
	}
	if _, err := client.SetPorts(t.Context(), "n1/c2", nil); !errors.Is(err, ErrNotFound) {
		t.Errorf("an endpoint that is not there: %v", err)
	}
	port.Protocol = "sctp"
	many := make([]model.PortRequest, model.MaxPublishedPorts+1)
	for _, bad := range [][]model.PortRequest{{port}, {{}}, many} {
		_, err := client.SetPorts(t.Context(), "n1/c1", bad)
		var said *Error
		if !errors.As(err, &said) || said.Code != CodeInvalid || said.Field != "ports" || said.Remedy == "" {
			t.Errorf("%d ports: %v", len(bad), err)
		}
	}
	var said *Error
	_, err = decodeEndpointRequest(strings.NewReader(`{"name":"a","netns_path":"/a","ports":[{"port":80,"protocol":"sctp"}]}`))
	if !errors.As(err, &said) || said.Field != "ports" {
		t.Errorf("POST: %v", err)
	}
}

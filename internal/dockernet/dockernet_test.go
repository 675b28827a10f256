package dockernet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
)

// fakeNode has the prefix 10.1.2.0/24 and notes what is asked of it.
type fakeNode struct {
	reserved []netip.Addr
	awaited  []api.EndpointRequest
	deleted  []string
	ports    map[string][]model.PortRequest
	err      error // of everything that can fail
}

func (n *fakeNode) DockerPool() (netip.Prefix, netip.Addr) {
	return netip.MustParsePrefix("10.1.2.0/24"), netip.MustParseAddr("10.1.2.1")
}

func (n *fakeNode) ReserveAddr(want netip.Addr) (netip.Addr, error) {
	if !want.IsValid() {
		want = netip.MustParseAddr("10.1.2.9")
	}
	n.reserved = append(n.reserved, want)
	return want, n.err
}

func (n *fakeNode) ReleaseAddr(addr netip.Addr) {
	n.reserved = slices.DeleteFunc(n.reserved, func(a netip.Addr) bool { return a == addr })
}

func (n *fakeNode) AwaitContainer(_ context.Context, req api.EndpointRequest) (string, error) {
	n.awaited = append(n.awaited, req)
	return "hc7", n.err
}

func (n *fakeNode) DeleteEndpoint(_ context.Context, name string) error {
	n.deleted = append(n.deleted, name)
	return n.err
}

func (n *fakeNode) SetPorts(_ context.Context, name string, ports []model.PortRequest) (model.Endpoint, error) {
	if n.ports == nil {
		n.ports = map[string][]model.PortRequest{}
	}
	n.ports[name] = ports
	return model.Endpoint{}, n.err
}

func serve(n *fakeNode) http.Handler {
	return NewHandler(n, slog.New(slog.NewTextHandler(io.Discard, nil)))
}

// call sends one request as Docker does and gives the answer.
func call(t testing.TB, h http.Handler, method, body string) string {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/"+method, strings.NewReader(body)))
	if w.Code != http.StatusOK || w.Header().Get("Content-Type") != mediaType {
		t.Errorf("%s: status %d, %s", method, w.Code, w.Header().Get("Content-Type"))
	}
	return strings.TrimSpace(w.Body.String())
}

var (
	netID = strings.Repeat("ab", 32)
	epID  = "0123456789abcdef" + strings.Repeat("0", 48)
	ids   = `"NetworkID":"` + netID + `","EndpointID":"` + epID + `"`
)

// TestContainer is the life of a container on a network, with the requests of Docker 20.10.
func TestContainer(t *testing.T) {
	n := &fakeNode{}
	h := serve(n)
	var published []model.PortRequest
	for _, step := range []struct{ method, body, want string }{
		{"Plugin.Activate", ``, `{"Implements":["NetworkDriver","IpamDriver"]}`},
		{"NetworkDriver.GetCapabilities", ``, `{"ConnectivityScope":"global","Scope":"local"}`},
		{"IpamDriver.GetCapabilities", ``, `{"RequiresMACAddress":false,"RequiresRequestReplay":false}`},
		{"IpamDriver.GetDefaultAddressSpaces", ``, `{"GlobalDefaultAddressSpace":"heddle","LocalDefaultAddressSpace":"heddle"}`},
		{"IpamDriver.RequestPool", `{"AddressSpace":"heddle","Pool":"","SubPool":"","Options":{},"V6":false}`,
			`{"Data":{"com.docker.network.gateway":"10.1.2.1/24"},"Pool":"0.0.0.0/0","PoolID":"0.0.0.0/0"}`},
		{"IpamDriver.RequestPool", `{"AddressSpace":"heddle","Pool":"10.1.2.0/24","SubPool":"","Options":{},"V6":false}`,
			`{"Data":{"com.docker.network.gateway":"10.1.2.1/24"},"Pool":"10.1.2.0/24","PoolID":"10.1.2.0/24"}`},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"` + netID + `","Options":{"com.docker.network.enable_ipv6":false,"com.docker.network.generic":{}},` +
			`"IPv4Data":[{"AddressSpace":"heddle","Pool":"10.1.2.0/24","Gateway":"10.1.2.1/24","AuxAddresses":null}],"IPv6Data":[]}`, `{}`},
		{"IpamDriver.RequestAddress", `{"PoolID":"10.1.2.0/24","Address":"","Options":{}}`, `{"Address":"10.1.2.9/32"}`},
		{"NetworkDriver.CreateEndpoint", `{` + ids + `,"Interface":{"Address":"10.1.2.9/32","AddressIPv6":"","MacAddress":""},` +
			`"Options":{"com.docker.network.endpoint.exposedports":[],"io.heddle.label.app":"web"}}`, `{"Interface":{}}`},
		{"NetworkDriver.Join", `{` + ids + `,"SandboxKey":"/var/run/docker/netns/0123","Options":{}}`,
			`{"InterfaceName":{"SrcName":"hc7","DstPrefix":"eth"},"Gateway":"10.1.2.1","StaticRoutes":[{"Destination":"10.1.2.1/32","RouteType":1,"NextHop":""}],"DisableGatewayService":true}`},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[]}}`, `{}`},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.endpoint.exposedports":[{"Proto":6,"Port":80}],"com.docker.network.portmap":[` +
			`{"Proto":6,"IP":"","Port":80,"HostIP":"","HostPort":8080,"HostPortEnd":8080},{"Proto":17,"IP":"","Port":53,"HostIP":"127.0.0.1","HostPort":8053,"HostPortEnd":8063},` +
			`{"Proto":6,"IP":"","Port":81,"HostIP":"::","HostPort":0,"HostPortEnd":0}]}}`, `{}`},
		{"NetworkDriver.EndpointOperInfo", `{` + ids + `}`, `{"Value":{}}`},
		{"NetworkDriver.RevokeExternalConnectivity", `{` + ids + `}`, `{}`},
		{"NetworkDriver.Leave", `{` + ids + `}`, `{}`},
		{"NetworkDriver.DeleteEndpoint", `{` + ids + `}`, `{}`},
		{"IpamDriver.ReleaseAddress", `{"PoolID":"10.1.2.0/24","Address":"10.1.2.9"}`, `{}`},
		{"NetworkDriver.DeleteNetwork", `{"NetworkID":"` + netID + `"}`, `{}`},
		{"IpamDriver.ReleasePool", `{"PoolID":"10.1.2.0/24"}`, `{}`},
	} {
		if got := call(t, h, step.method, step.body); got != step.want {
			t.Errorf("%s: %s\nwant %s", step.method, got, step.want)
		}
		if ports := n.ports["docker/0123456789ab"]; len(ports) > 0 {
			published = ports
		}
	}
	var texts []string
	for _, p := range published {
		texts = append(texts, fmt.Sprintf("%s-%d", p, p.HostPortEnd))
	}
	want := []string{"*:8080->80/tcp-0", "127.0.0.1:8053->53/udp-8063", "[::]:0->81/tcp-0"}
	if !slices.Equal(texts, want) || len(n.ports) != 1 || len(n.ports["docker/0123456789ab"]) != 0 {
		t.Errorf("published %v, want %v; in the end %v", texts, want, n.ports)
	}
	if len(n.awaited) != 1 || len(n.reserved) != 0 || !slices.Equal(n.deleted, []string{"docker/0123456789ab"}) {
		t.Fatalf("awaited %+v, reserved %v, deleted %v", n.awaited, n.reserved, n.deleted)
	}
	e := n.awaited[0]
	if e.Name != "docker/0123456789ab" || e.NetnsPath != "/var/run/docker/netns/0123" || !e.Intercepted || e.Addr.String() != "10.1.2.9" ||
		len(e.Labels) != 1 || e.Labels["app"] != "web" {
		t.Errorf("endpoint %+v", e)
	}
	if !Owns(e.Name) || Owns("n1/c1") {
		t.Error("Owns does not tell Docker's endpoints from others")
	}
}

func TestRefusals(t *testing.T) {
	endpoint := func(iface, options string) string {
		return `{` + ids + `,"Interface":` + iface + `,"Options":` + options + `}`
	}
	for _, c := range []struct{ method, body, want string }{
		{"NetworkDriver.Fly", `{}`, "no such method"},
		{"NetworkDriver.CreateNetwork", ``, "want a JSON object"},
		{"NetworkDriver.CreateNetwork", `[]`, "want a JSON object"},
		{"NetworkDriver.CreateNetwork", `{} {}`, "after the JSON object"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"../x"}`, "hexadecimal"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"` + netID + `","IPv4Data":[{"Pool":"172.18.0.0/16"}]}`, "--ipam-driver"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"` + netID + `"}`, "0 IPv4 subnets"},
		{"NetworkDriver.CreateNetwork", `{"NetworkID":"` + netID + `","IPv4Data":[{"Pool":"10.1.2.0/24"}],"IPv6Data":[{"Pool":"fd00::/64"}]}`, "--ipv6"},
		{"NetworkDriver.CreateEndpoint", endpoint(`null`, `{}`), "--ipam-driver"},
		{"NetworkDriver.CreateEndpoint", endpoint(`{"Address":"x"}`, `{}`), "IPv4 address"},
		{"NetworkDriver.CreateEndpoint", endpoint(`{"Address":"fd00::1/64"}`, `{}`), "IPv4 address"},
		{"NetworkDriver.CreateEndpoint", endpoint(`{"Address":"10.1.2.9/32","MacAddress":"02:00:00:00:00:01"}`, `{}`), "--mac-address"},
		{"NetworkDriver.CreateEndpoint", endpoint(`{"Address":"10.1.2.9/32"}`, `{"io.heddle.label.a":1}`), "want text"},
		{"NetworkDriver.Join", `{` + ids + `,"SandboxKey":"/run/docker/netns/1"}`, "was not created"},
		{"NetworkDriver.Join", `{` + ids + `,"SandboxKey":"../x"}`, "absolute path"},
		{"NetworkDriver.DeleteEndpoint", `{"NetworkID":"` + netID + `","EndpointID":"0123"}`, "hexadecimal"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Port":80}]}}`, "want tcp or udp"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":132,"Port":80}]}}`, "want tcp or udp"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":6}]}}`, "port: want 1..65535"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostIP":"x"}]}}`, "no IP address"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostIP":"224.0.0.1"}]}}`, "not reached at"},
		{"NetworkDriver.ProgramExternalConnectivity", `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":65536}]}}`, "malformed"},
		{"NetworkDriver.RevokeExternalConnectivity", `{"NetworkID":"` + netID + `","EndpointID":"x"}`, "hexadecimal"},
		{"IpamDriver.RequestPool", `{"V6":true}`, "--ipv6"},
		{"IpamDriver.RequestPool", `{"Pool":"172.18.0.0/16"}`, "10.1.2.0/24"},
		{"IpamDriver.RequestPool", `{"Pool":"10.1.2.0/24","SubPool":"10.1.2.128/25"}`, "--ip-range"},
		{"IpamDriver.RequestAddress", `{"Address":"10.1.2.7","Options":{"RequestAddressType":"com.docker.network.gateway"}}`, "--gateway"},
		{"IpamDriver.RequestAddress", `{"Address":"fd00::1"}`, "IPv4 address"},
		{"IpamDriver.RequestAddress", `{"Address":"10.1.2.7","Options":[]}`, "malformed"},
		{"IpamDriver.ReleaseAddress", `{"Address":7}`, "malformed"},
		{"IpamDriver.ReleaseAddress", `{"Address":"` + strings.Repeat("x", maxRequestBytes) + `"}`, "exceeds"},
	} {
		n := &fakeNode{}
		var answer struct{ Err string }
		if err := json.Unmarshal([]byte(call(t, serve(n), c.method, c.body)), &answer); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(answer.Err, c.want) || !strings.HasPrefix(answer.Err, "heddle: ") {
			t.Errorf("%s %.80s: error %q, want one with %q", c.method, c.body, answer.Err, c.want)
		}
		if len(n.awaited)+len(n.deleted)+len(n.reserved)+len(n.ports) > 0 {
			t.Errorf("%s %.80s: the node was asked for something", c.method, c.body)
		}
	}
}

func TestFailures(t *testing.T) {
	n := &fakeNode{err: errors.New("no free address")}
	h := serve(n)
	for method, body := range map[string]string{
		"IpamDriver.RequestAddress":    `{}`,
		"NetworkDriver.Join":           `{` + ids + `,"SandboxKey":"/n"}`,
		"NetworkDriver.DeleteEndpoint": `{` + ids + `}`,

		"NetworkDriver.ProgramExternalConnectivity": `{` + ids + `,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80}]}}`,
		"NetworkDriver.RevokeExternalConnectivity":  `{` + ids + `}`,
	} {
		call(t, h, "NetworkDriver.CreateEndpoint", `{`+ids+`,"Interface":{"Address":"10.1.2.9/32"}}`)
		if got := call(t, h, method, body); got != `{"Err":"heddle: no free address"}` {
			t.Errorf("%s: %s", method, got)
		}
	}
	n.err = api.ErrNotFound
	for _, method := range []string{"NetworkDriver.DeleteEndpoint", "NetworkDriver.RevokeExternalConnectivity"} {
		if got := call(t, h, method, `{`+ids+`}`); got != `{}` {
			t.Errorf("%s of what is gone: %s", method, got)
		}
	}
}

// TestPendingIsBounded: what was created and never joined does not fill the agent's memory.
func TestPendingIsBounded(t *testing.T) {
	h := serve(&fakeNode{})
	var last string
	for i := range maxPending + 1 {
		id := strings.Repeat("0", 52) + string([]byte{hex(i >> 8), hex(i >> 4), hex(i)})
		id = id + strings.Repeat("0", idBytes-len(id)-1) + string(hex(i>>12))
		last = call(t, h, "NetworkDriver.CreateEndpoint", `{"NetworkID":"`+netID+`","EndpointID":"`+id+`","Interface":{"Address":"10.1.2.9/32"}}`)
	}
	if !strings.Contains(last, "wait to be joined") {
		t.Errorf("the last of %d: %s", maxPending+1, last)
	}
}

func hex(n int) byte { return "0123456789abcdef"[n&15] }

// FuzzRequests: whatever is sent, the answer is a JSON object, and the node is asked for nothing
// that the request's checks let through by mistake.
func FuzzRequests(f *testing.F) {
	f.Add("NetworkDriver.CreateEndpoint", `{`+ids+`,"Interface":{"Address":"10.1.2.9/32"},"Options":{"io.heddle.label.a":"b"}}`)
	f.Add("NetworkDriver.Join", `{`+ids+`,"SandboxKey":"/var/run/docker/netns/1"}`)
	f.Add("NetworkDriver.DeleteEndpoint", `{`+ids+`}`)
	f.Add("NetworkDriver.ProgramExternalConnectivity", `{`+ids+`,"Options":{"com.docker.network.portmap":[{"Proto":6,"Port":80,"HostPort":8080,"HostPortEnd":8081,"HostIP":"::1"}]}}`)
	f.Add("IpamDriver.RequestPool", `{"Pool":"10.1.2.0/24"}`)
	f.Add("IpamDriver.RequestAddress", `{"Address":"10.1.2.9","Options":{"RequestAddressType":"x"}}`)
	f.Add("IpamDriver.ReleaseAddress", `{"Address":"10.1.2.9"}`)
	methods := []string{"NetworkDriver.CreateNetwork", "NetworkDriver.CreateEndpoint", "NetworkDriver.Join", "NetworkDriver.DeleteEndpoint",
		"NetworkDriver.ProgramExternalConnectivity", "IpamDriver.RequestPool", "IpamDriver.RequestAddress", "IpamDriver.ReleaseAddress"}
	f.Fuzz(func(t *testing.T, method, body string) {
		if !slices.Contains(methods, method) {
			return
		}
		n := &fakeNode{}
		h := serve(n)
		call(t, h, "NetworkDriver.CreateEndpoint", `{`+ids+`,"Interface":{"Address":"10.1.2.9/32"}}`) // to be joined
		var answer map[string]any
		if err := json.Unmarshal([]byte(call(t, h, method, body)), &answer); err != nil {
			t.Fatalf("%s %q: %v", method, body, err)
		}
		for _, e := range n.awaited {
			if err := e.Validate(); err != nil {
				t.Errorf("%s %q: endpoint %+v: %v", method, body, e, err)
			}
		}
		for name, ports := range n.ports {
			if err := (api.PortsRequest{Ports: ports}).Validate(); err != nil || !Owns(name) {
				t.Errorf("%s %q: publishes %v of %q: %v", method, body, ports, name, err)
			}
		}
		for _, name := range n.deleted {
			if err := api.ValidateEndpointName("name", name); err != nil || !Owns(name) {
				t.Errorf("%s %q: deletes %q", method, body, name)
			}
		}
	})
}

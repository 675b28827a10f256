package cni

import (
	"context"
	"errors"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
)

func TestAgentErrorsHaveCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		code uint
	}{
		{api.ErrNoAgent, types.ErrTryAgainLater},
		{api.ErrAgentEnded, types.ErrTryAgainLater},
		{&api.Error{Code: api.CodeUnavailable}, types.ErrTryAgainLater},
		{&api.Error{Code: api.CodeExhausted}, codeExhausted},
		{&api.Error{Code: api.CodeConflict, Field: "addr"}, codeConflict},
		{&api.Error{Code: api.CodeInvalid, Field: "netns_path"}, types.ErrInvalidNetNS},
		{&api.Error{Code: api.CodeInvalid, Field: "name"}, types.ErrInvalidEnvironmentVariables},
		{&api.Error{Code: api.CodeInvalid, Field: "addr"}, types.ErrInvalidNetworkConfig},
		{&api.Error{Code: api.CodeInternal}, codeFailed},
		{errors.New("broken pipe"), types.ErrIOFailure},
	} {
		if e := agentError("add", "/s", c.err); e.Code != c.code || e.Msg == "" {
			t.Errorf("%v: %d %s, want code %d", c.err, e.Code, e.Msg, c.code)
		}
		if c.code == codeFailed || c.code == types.ErrIOFailure {
			c.code = types.ErrTryAgainLater
		}
		if e := repeatable("delete", "/s", c.err); e.Code != c.code {
			t.Errorf("DEL, %v: %d %s, want code %d", c.err, e.Code, e.Msg, c.code)
		}
	}
}

// Without an agent, in a directory where there never was one.
func TestWithoutAgent(t *testing.T) {
	stdin := conf(`,"socket":"` + filepath.Join(t.TempDir(), "none", "api.sock") + `","cni.dev/valid-attachments":[]`)
	args := &skel.CmdArgs{ContainerID: "a", IfName: "eth0", Netns: "/proc/self/ns/net", StdinData: stdin}
	for name, c := range map[string]struct {
		operation func(*skel.CmdArgs) error
		code      uint
	}{"add": {add, 11}, "gc": {gc, 11}, "status": {status, 51}, "check": {check, types.ErrInvalidNetworkConfig}} {
		var said *types.Error
		if err := c.operation(args); !errors.As(err, &said) || said.Code != c.code {
			t.Errorf("%s: %v, want code %d", name, err, c.code)
		}
	}
	if err := del(args); err != nil {
		t.Errorf("del: %v", err)
	}
	args.ContainerID = "..//"
	if err := del(args); err != nil {
		t.Errorf("del of what cannot be: %v", err)
	}
}

func TestResult(t *testing.T) {
	e := model.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd00::2")}}
	d := api.EndpointDevice{Name: "eth0", MAC: "02:48:43:00:00:01", NodeName: "hd1", NodeMAC: "02:48:45:00:00:01", MTU: 1450,
		Gateways: []netip.Addr{netip.MustParseAddr("fd00::1"), netip.MustParseAddr("10.1.0.1")}}
	r := result(config{}, e, d, "/run/netns/x")
	if len(r.IPs) != 2 || r.IPs[0].String() == "" || r.IPs[0].Gateway.String() != "10.1.0.1" || r.IPs[1].Gateway.String() != "fd00::1" ||
		r.IPs[1].Address.String() != "fd00::2/128" || *r.IPs[1].Interface != 1 || r.Interfaces[1].Sandbox != "/run/netns/x" {
		t.Errorf("%v %v", r.IPs, r.Interfaces)
	}
	want := []string{"10.1.0.1/32", "0.0.0.0/0", "fd00::1/128", "::/0"}
	for i, route := range r.Routes {
		if route.Dst.String() != want[i] || (route.GW != nil) != (i%2 == 1) {
			t.Errorf("route %v, want to %s", route, want[i])
		}
	}
	for _, v := range versions.SupportedVersions() {
		if _, err := r.GetAsVersion(v); err != nil {
			t.Errorf("version %s: %v", v, err)
		}
	}
}

// Of Kubernetes, an endpoint is asked for with its pod's labels, and not at all without them.
func TestKubernetesLabels(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "kube.sock")
	args := &skel.CmdArgs{ContainerID: "a", IfName: "eth0", Netns: "/proc/self/ns/net", Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-1;K8S_POD_UID=u1"}
	c := config{Kubernetes: socket}
	var said *types.Error
	if _, err := podLabels(t.Context(), c, args); !errors.As(err, &said) || said.Code != types.ErrTryAgainLater {
		t.Errorf("nobody answers: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"app": "web", podlabels.UID: "u1"}
	s := &http.Server{Handler: podlabels.Handler(func(_ context.Context, q podlabels.Question) (map[string]string, error) {
		if q != (podlabels.Question{Namespace: "shop", Name: "web-1", UID: "u1"}) {
			return nil, podlabels.ErrUnknown
		}
		return want, nil
	})}
	go func() { _ = s.Serve(l) }()
	defer func() { _ = s.Close() }()
	if got, err := podLabels(t.Context(), c, args); err != nil || !maps.Equal(got, want) {
		t.Errorf("labels %v, %v", got, err)
	}
	for _, other := range []string{"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-2", "K8S_POD_NAME=web-1", ""} {
		args.Args = other
		if got, err := podLabels(t.Context(), c, args); err == nil {
			t.Errorf("%q: labels %v", other, got)
		}
	}
	// The whole of ADD stops there: without the pod's labels the agent is not asked.
	args.StdinData = conf(`,"kubernetes":"` + socket + `","socket":"/nowhere/api.sock"`)
	if err := add(args); err == nil || !strings.Contains(err.Error(), "CNI_ARGS") {
		t.Errorf("add: %v", err)
	}
	for _, wrong := range []string{`,"kubernetes":"kube.sock"`, `,"kubernetes":"/k","labels":{"a":"b"}`} {
		if _, err := parseConfig(conf(wrong)); err == nil {
			t.Errorf("%s is taken", wrong)
		}
	}
}

package cni

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"heddle.dev/heddle/internal/api"
)

func conf(more string) []byte {
	return []byte(`{"cniVersion":"1.1.0","name":"net","type":"heddle-cni"` + more + `}`)
}

func TestParseConfig(t *testing.T) {
	c, err := parseConfig(conf(`,"dns":{"nameservers":["10.0.0.9"]},"intercepted":false,"labels":{"a":"b","c":"d"},"cni.dev/later":1,
		"args":{"cni":{"labels":[{"key":"c","value":"e"}],"ips":["10.1.0.9/24"]}},"runtimeConfig":{"ips":["10.1.0.7/24","fd00::7"]},"ipam":{}`))
	if err != nil || c.intercepted() || c.DNS.Nameservers[0] != "10.0.0.9" || c.Socket != "/run/heddle/api.sock" {
		t.Fatalf("%+v %v", c, err)
	}
	pod, err := parseArgs("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;IP=10.1.0.8")
	if err != nil {
		t.Fatal(err)
	}
	labels := c.labels(pod)
	if len(labels) != 4 || labels["a"] != "b" || labels["c"] != "e" || labels["io.heddle.namespace"] != "shop" || labels["io.heddle.pod"] != "web-0" {
		t.Errorf("labels %v", labels)
	}
	if a, err := c.wantedAddr(pod); err != nil || a.String() != "10.1.0.7" {
		t.Errorf("address %v %v", a, err)
	}
	if c, err = parseConfig(conf("")); err != nil || !c.intercepted() {
		t.Errorf("defaults: %+v %v", c, err)
	}
	if a, err := c.wantedAddr(pod); err != nil || a.String() != "10.1.0.8" {
		t.Errorf("address of CNI_ARGS %v %v", a, err)
	}
}

func TestConfigErrorsNameTheField(t *testing.T) {
	for more, want := range map[string]struct {
		code uint
		text string
	}{
		`,"sokcet":"/x"`: {types.ErrUnsupportedField, `sokcet: "/x"`},
		`,"runtimeConfig":{"mac":"02:00:00:00:00:01"}`:   {types.ErrUnsupportedField, "runtimeConfig.mac"},
		`,"ipam":{"type":"host-local"}`:                  {types.ErrUnsupportedField, "ipam: host-local"},
		`,"socket":"x"`:                                  {types.ErrInvalidNetworkConfig, "socket"},
		`,"socket":7`:                                    {types.ErrInvalidNetworkConfig, "socket"},
		`,"intercepted":"yes"`:                           {types.ErrInvalidNetworkConfig, "intercepted"},
		`,"labels":["a"]`:                                {types.ErrInvalidNetworkConfig, "labels"},
		`,"runtimeConfig":{"ips":"10.0.0.1"}`:            {types.ErrInvalidNetworkConfig, "runtimeConfig.ips"},
		`,"runtimeConfig":{"portMappings":7}`:            {types.ErrInvalidNetworkConfig, "runtimeConfig.portMappings"},
		`,"prevResult":{"cniVersion":"1.1.0","ips":"x"}`: {types.ErrInvalidNetworkConfig, "prevResult"},
	} {
		_, err := parseConfig(conf(more))
		var said *types.Error
		if !errors.As(err, &said) || said.Code != want.code || !strings.Contains(said.Msg, want.text) {
			t.Errorf("%s: %v, want code %d and %q", more, err, want.code, want.text)
		}
	}
	if _, err := parseConfig([]byte(`{`)); err == nil {
		t.Error("no JSON was accepted")
	}
	if _, err := parseArgs("a=b;c"); err == nil {
		t.Error("malformed CNI_ARGS were accepted")
	}
}

func TestPortMappings(t *testing.T) {
	for mapping, want := range map[string]string{
		`{"hostPort":8080,"containerPort":80,"protocol":"tcp"}`:                         "*:8080->80/tcp",
		`{"hostPort":8053,"containerPort":53,"protocol":"UDP","hostIP":"192.0.2.1"}`:    "192.0.2.1:8053->53/udp",
		`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"0.0.0.0"}`:      "0.0.0.0:8080->80/tcp",
		`{"hostPort":0,"containerPort":80,"protocol":"tcp"}`:                            "", // not published
		`{"hostPort":8080,"containerPort":80,"protocol":"sctp"}`:                        "unsupported field runtimeConfig.portMappings: sctp",
		`{"hostPort":8080,"protocol":"tcp"}`:                                            "port: want 1..65535",
		`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"192.0.2.1/24"}`: "is no IP address",
		`{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"::1"}`:          "not reached at ::1",
	} {
		c, err := parseConfig(conf(`,"capabilities":{"portMappings":true},"runtimeConfig":{"portMappings":[` + mapping + `]}`))
		if err != nil {
			t.Fatal(err)
		}
		ports, err := c.ports()
		got := ""
		if err != nil {
			got = err.Error()
		} else if len(ports) == 1 {
			got = ports[0].String()
		}
		if !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", mapping, got, want)
		}
	}
}

func TestBandwidth(t *testing.T) {
	for asked, want := range map[string]string{
		// As containerd has annotations of 10M and 1M.
		`{"ingressRate":10000000,"ingressBurst":4294967295,"egressRate":1000000,"egressBurst":4294967295}`: "in 10mbit out 1mbit",
		`{"egressRate":1000000}`:             "in none out 1mbit",
		`{"ingressBurst":4294967295}`:        "in none out none",
		`{"ingressRate":1000000000000001}`:   "in none out none", // beyond what can be had
		`{"ingressRate":1000}`:               "runtimeConfig.bandwidth.ingressRate: 1000 bits a second: want",
		`{"egressRate":99999}`:               "runtimeConfig.bandwidth.egressRate: 99999",
		`{"egressRate":-1}`:                  "runtimeConfig.bandwidth.egressRate",
		`{"unshapedSubnets":["10.0.0.0/8"]}`: "unsupported field runtimeConfig.bandwidth.unshapedSubnets",
	} {
		c, err := parseConfig(conf(`,"capabilities":{"bandwidth":true},"runtimeConfig":{"bandwidth":` + asked + `}`))
		var got string
		if err == nil {
			var req api.EndpointRequest
			if req, err = request(c, &skel.CmdArgs{ContainerID: "a", IfName: "eth0", Netns: "/run/netns/a"}); err == nil {
				got = fmt.Sprintf("in %v out %v", req.Limits.Ingress, req.Limits.Egress)
			}
		}
		if err != nil {
			got = err.Error()
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", asked, got, want)
		}
	}
}

// What is in the way of ADD must not be in that of DEL.
func TestDeleteTakesWhatAddRefuses(t *testing.T) {
	if _, err := parseLenient(conf(`,"sokcet":"/x","ipam":{"type":"host-local"},"prevResult":{"ips":7}`)); err != nil {
		t.Error(err)
	}
}

func TestValidAttachments(t *testing.T) {
	keep, err := validAttachments(conf(`,"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`), "net")
	if err != nil || len(keep) != 1 || !keep["net/a/eth0"] {
		t.Errorf("%v %v", keep, err)
	}
	if keep, err = validAttachments(conf(`,"cni.dev/attachments":null`), "net"); err != nil || len(keep) != 0 {
		t.Errorf("an empty list: %v %v", keep, err)
	}
	for _, more := range []string{"", `,"cni.dev/valid-attachments":{}`} {
		if keep, err := validAttachments(conf(more), "net"); err == nil {
			t.Errorf("%q: %v: everything would be deleted", more, keep)
		}
	}
}

func FuzzConfig(f *testing.F) {
	f.Add(conf(`,"labels":{"a":"b"},"runtimeConfig":{"ips":["10.0.0.1/24"]},"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`), "K8S_POD_NAMESPACE=a;IP=x")
	f.Add(conf(`,"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/x"}],"ips":[{"interface":0,"address":"10.1.0.2/24"}]}`), "")
	f.Fuzz(func(t *testing.T, stdin []byte, args string) {
		c, err := parseConfig(stdin)
		if _, lenient := parseLenient(stdin); err == nil && lenient != nil {
			t.Errorf("DEL refuses what ADD takes: %v", lenient)
		}
		if keep, gcErr := validAttachments(stdin, c.Name); gcErr == nil && keep == nil {
			t.Error("GC would keep nothing without having been told so")
		}
		pod, argsErr := parseArgs(args)
		if err != nil || argsErr != nil {
			return
		}
		c.labels(pod)
		_, _ = c.wantedAddr(pod)
		if c.prev == nil {
			return
		}
		if addr, adopted, err := c.adoption("eth0"); err == nil && (!addr.Is4() || adopted.Validate() != nil) {
			t.Errorf("adopts %s of %v", addr, adopted)
		}
	})
}

func TestAdoption(t *testing.T) {
	result := func(ips string) string {
		return `,"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"cni0"},{"name":"eth0"},{"name":"eth0","sandbox":"/x"},{"name":"net1","sandbox":"/x"}],"ips":[` + ips + `]}`
	}
	const one, other, six = `{"interface":2,"address":"10.88.1.5/24"}`, `{"interface":3,"address":"10.9.0.2/24"}`, `{"interface":2,"address":"fd00::5/64"}`
	for more, want := range map[string]string{
		result(one + "," + other):                               "10.88.1.5 [10.88.1.0/24]",
		result(one) + `,"carried":["10.88.0.0/16"]`:             "10.88.1.5 [10.88.0.0/16]",
		result(`{"address":"10.88.1.5/32"}`):                    "10.88.1.5 []",
		result(one + "," + six):                                 "prevResult.ips: fd00::5/64",
		result(six):                                             "prevResult.ips: fd00::5/64",
		result(one + `,{"interface":2,"address":"10.1.0.1/8"}`): "prevResult.ips: 10.1.0.1/8",
		result(other):                                           "prevResult.ips: has no address of eth0",
		`,"prevResult":{"cniVersion":"1.1.0"}`:                  "prevResult.interfaces: none is eth0",
		result(one) + `,"carried":["x"]`:                        "carried[0]:",
		result(one) + `,"carried":["10.88.0.1/16"]`:             "carried: prefix 10.88.0.1/16",
	} {
		c, err := parseConfig(conf(more))
		if err != nil {
			t.Fatal(err)
		}
		addr, adopted, err := c.adoption("eth0")
		var got string
		if err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprint(addr, " ", adopted.Prefixes)
		}
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s: %s, want %s", more, got, want)
		}
	}
}

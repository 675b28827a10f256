package cni

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
	"heddle.dev/heddle/internal/policy"
)

// config is the plugin's configuration of one network.
type config struct {
	types.PluginConf

	// Socket is the path of the agent's API socket.
	Socket string `json:"socket"`
	// Intercepted says that the containers' TCP sockets are made in the node's namespace.
	Intercepted *bool `json:"intercepted"`
	// Adopted are the IPv4 prefixes of the network that the plugins before this one make, on all
	// nodes.
	Adopted []string `json:"carried"`
	// Labels are given to every endpoint of the network, for policy.
	Labels map[string]string `json:"labels"`
	// Kubernetes is the path of heddle-kube's socket: it gives pods' endpoints their labels, and
	// keeps them. Empty: none does.
	Kubernetes string `json:"kubernetes"`

	RuntimeConfig struct {
		IPs          []string      `json:"ips"`
		PortMappings []portMapping `json:"portMappings"`
		Bandwidth    bandwidth     `json:"bandwidth"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs    []string `json:"ips"`
			Labels []struct {
				Key   string `json:"key"`
				Value string `json:"value"`
			} `json:"labels"`
		} `json:"cni"`
	} `json:"args"`

	prev *current.Result // nil: the plugin is the first, or the only one, of its list
}

// portMapping is a port to be published, as runtimes give those of Podman's -p and of Kubernetes'
// hostPort to a plugin whose configuration has the capability portMappings.
type portMapping struct {
	HostPort      uint16 `json:"hostPort"`
	ContainerPort uint16 `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

// ports gives what is to be published.
func (c config) ports() (out []model.PortRequest, err error) {
	const field = "runtimeConfig.portMappings"
	for _, m := range c.RuntimeConfig.PortMappings {
		if m.HostPort == 0 {
			continue // as the plugin portmap has it: not published
		}
		p := model.PortRequest{PublishedPort: model.PublishedPort{HostPort: m.HostPort, Port: m.ContainerPort, Protocol: strings.ToLower(m.Protocol)}}
		if m.HostIP != "" {
			if p.HostAddr, err = netip.ParseAddr(m.HostIP); err != nil {
				return nil, invalid(field, fmt.Sprintf("hostIP %.60q is no IP address", m.HostIP), "")
			}
			p.HostAddr = p.HostAddr.Unmap()
		}
		if p.Protocol == "sctp" {
			return nil, unsupported(field, m.Protocol, "tcp and udp can be published")
		}
		if err := p.Validate(); err != nil {
			return nil, invalid(field, err.Error(), "")
		}
		out = append(out, p)
	}
	return out, nil
}

// bandwidth is what the container may receive and send, in bits a second, as runtimes give
// Kubernetes' annotations kubernetes.io/ingress-bandwidth and egress-bandwidth to a plugin whose
// configuration has the capability bandwidth. 0 is no cap. Runtimes of Kubernetes give the largest
// bursts there are, for nobody can ask for one; Heddle's caps have none.
type bandwidth struct {
	IngressRate  uint64 `json:"ingressRate"`
	IngressBurst uint64 `json:"ingressBurst"`
	EgressRate   uint64 `json:"egressRate"`
	EgressBurst  uint64 `json:"egressBurst"`
}

// limits gives the endpoint's. Nothing is as fast as model.MaxRate, so that a cap above is none.
func (c config) limits() (l model.Limits, err error) {
	for _, cap := range []struct {
		field string
		asked uint64
		to    *model.Rate
	}{{"ingressRate", c.RuntimeConfig.Bandwidth.IngressRate, &l.Ingress}, {"egressRate", c.RuntimeConfig.Bandwidth.EgressRate, &l.Egress}} {
		r := model.Rate(cap.asked)
		if r > model.MaxRate {
			continue
		}
		if err := r.Validate(); err != nil {
			return l, invalid("runtimeConfig.bandwidth."+cap.field, err.Error(), "give the pod's annotation a larger bandwidth, or leave it out")
		}
		*cap.to = r
	}
	return l, nil
}

// knownFields are those that a network configuration may have, the specification's first.
var knownFields = []string{
	"cniVersion", "name", "type", "capabilities", "args", "ipam", "dns", "runtimeConfig", "prevResult",
	"socket", "intercepted", "labels", "carried", "kubernetes",
}

// knownRuntimeFields are those of runtimeConfig; a runtime gives what the configuration's
// capabilities name.
var knownRuntimeFields = []string{"ips", "portMappings", "bandwidth"}

// knownBandwidthFields are those of runtimeConfig.bandwidth.
var knownBandwidthFields = []string{"ingressRate", "ingressBurst", "egressRate", "egressBurst"}

// parseConfig reads a configuration for ADD, CHECK and STATUS. Errors are CNI's and name the field.
func parseConfig(stdin []byte) (config, error) {
	c, err := parseLenient(stdin)
	if err != nil {
		return c, err
	}
	if err := refuseUnknown(stdin, "", knownFields); err != nil {
		return c, err
	}
	inner, under := stdin, ""
	for _, f := range []struct {
		name  string
		known []string
	}{{"runtimeConfig", knownRuntimeFields}, {"bandwidth", knownBandwidthFields}} {
		var fields map[string]json.RawMessage
		if json.Unmarshal(inner, &fields) != nil || len(fields[f.name]) == 0 {
			break
		}
		inner, under = fields[f.name], under+f.name+"."
		if err := refuseUnknown(inner, under, f.known); err != nil {
			return c, err
		}
	}
	if !c.IPAM.IsEmpty() {
		return c, unsupported("ipam", c.IPAM.Type, "Heddle gives out the node's own addresses; leave ipam out")
	}
	if !filepath.IsAbs(c.Socket) {
		return c, invalid("socket", fmt.Sprintf("%q is no absolute path", c.Socket), "give the path of the agent's --api-socket, or leave it out")
	}
	if c.Kubernetes != "" && !filepath.IsAbs(c.Kubernetes) {
		return c, invalid("kubernetes", fmt.Sprintf("%q is no absolute path", c.Kubernetes), "give the path of heddle-kube's --socket, or leave it out")
	}
	if c.Kubernetes != "" && len(c.Labels)+len(c.Args.CNI.Labels) > 0 {
		return c, invalid("labels", "stands beside kubernetes", "label the pods: heddle-kube makes the endpoints' labels those of the pods")
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return c, invalid("prevResult", err.Error(), "")
	}
	if c.PrevResult != nil {
		if c.prev, err = current.NewResultFromResult(c.PrevResult); err != nil {
			return c, invalid("prevResult", err.Error(), "")
		}
	}
	return c, nil
}

// parseLenient reads what DEL and GC need of a configuration. They must do their work whatever the
// rest is like.
func parseLenient(stdin []byte) (config, error) {
	var c config
	if err := json.Unmarshal(stdin, &c); err != nil {
		var field string
		if mismatch := new(json.UnmarshalTypeError); asType(err, &mismatch) {
			field = mismatch.Field
		}
		if field != "" {
			return c, invalid(field, err.Error(), "")
		}
		return c, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	if c.Socket == "" {
		c.Socket = api.DefaultSocket
	}
	return c, nil
}

// refuseUnknown reports the first field of a JSON object that is not known: a misspelt one would be
// ignored otherwise.
func refuseUnknown(object []byte, prefix string, known []string) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(object, &fields); err != nil {
		return invalid(strings.TrimSuffix(prefix, "."), err.Error(), "")
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, name) && !strings.HasPrefix(name, "cni.dev/") {
			value := string(bytes.TrimSpace(fields[name]))
			return unsupported(prefix+name, value, "fields are: "+strings.Join(known, ", "))
		}
	}
	return nil
}

// intercepted gives the field's value, true if it is not there.
func (c config) intercepted() bool { return c.Intercepted == nil || *c.Intercepted }

// podArgs are what Kubernetes' runtimes say of a pod in CNI_ARGS, and what operators may:
// "K=V;K2=V2".
type podArgs struct {
	namespace, pod, uid, ip string
}

// parseArgs reads CNI_ARGS. Keys that are not known are ignored: every plugin of a list gets the
// same.
func parseArgs(args string) (podArgs, error) {
	var p podArgs
	for pair := range strings.SplitSeq(args, ";") {
		if pair == "" {
			continue
		}
		k, v, ok := strings.Cut(pair, "=")
		if !ok {
			return p, types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS: %.60q is no KEY=VALUE", pair), "")
		}
		switch k {
		case "K8S_POD_NAMESPACE":
			p.namespace = v
		case "K8S_POD_NAME":
			p.pod = v
		case "K8S_POD_UID":
			p.uid = v
		case "IP":
			p.ip = v
		}
	}
	return p, nil
}

// labels gives an endpoint's labels: the network's, the attachment's, and those of its pod, later
// ones outranking earlier ones.
func (c config) labels(pod podArgs) map[string]string {
	labels := maps.Clone(c.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	for _, l := range c.Args.CNI.Labels {
		labels[l.Key] = l.Value
	}
	if pod.namespace != "" {
		labels[policy.NamespaceLabel] = pod.namespace
	}
	if pod.pod != "" {
		labels[podlabels.Pod] = pod.pod
	}
	return labels
}

// wantedAddr gives the address that the runtime asks for, the zero Addr for none. One address
// decides that of the other family, so the first of each source is taken.
func (c config) wantedAddr(pod podArgs) (netip.Addr, error) {
	for _, source := range []struct {
		field string
		ips   []string
	}{{"runtimeConfig.ips", c.RuntimeConfig.IPs}, {"args.cni.ips", c.Args.CNI.IPs}, {"CNI_ARGS: IP", strings.Fields(pod.ip)}} {
		if len(source.ips) == 0 {
			continue
		}
		text, _, _ := strings.Cut(source.ips[0], "/")
		a, err := netip.ParseAddr(text)
		if err != nil {
			return a, invalid(source.field, fmt.Sprintf("%.60q is no IP address", source.ips[0]), "")
		}
		return a, nil
	}
	return netip.Addr{}, nil
}

// validAttachments reads the attachments that GC is to leave alone: their endpoints' names.
func validAttachments(stdin []byte, network string) (map[string]bool, error) {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &raw); err != nil {
		return nil, types.NewError(types.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	const field, old = "cni.dev/valid-attachments", "cni.dev/attachments"
	list, there := raw[field]
	if !there {
		list, there = raw[old]
	}
	if !there {
		// Nothing said is not "nothing is valid": everything would go.
		return nil, invalid(field, "is missing", "give the list of attachments to keep")
	}
	var valid []types.GCAttachment
	if err := json.Unmarshal(list, &valid); err != nil {
		return nil, invalid(field, err.Error(), "")
	}
	keep := map[string]bool{}
	for _, a := range valid {
		keep[endpointName(network, a.ContainerID, a.IfName)] = true
	}
	return keep, nil
}

// endpointName gives the name of an attachment's endpoint. The three are CNI's key of an
// attachment.
func endpointName(network, containerID, ifname string) string {
	return network + "/" + containerID + "/" + ifname
}

// adoption gives what the plugins before this one have given the container: its IPv4 address on the
// device ifname, and the network it is of, by default the address's own subnet.
func (c config) adoption(ifname string) (netip.Addr, *model.Adopted, error) {
	device := slices.IndexFunc(c.prev.Interfaces, func(i *current.Interface) bool { return i.Sandbox != "" && i.Name == ifname })
	if device < 0 {
		return netip.Addr{}, nil, invalid("prevResult.interfaces", fmt.Sprintf("none is %s in the container", ifname), "")
	}
	var own netip.Prefix
	for _, ip := range c.prev.IPs {
		if ip.Interface != nil && *ip.Interface != device {
			continue
		}
		p, err := netip.ParsePrefix(ip.Address.String())
		if err != nil || !p.Addr().Is4() || own.IsValid() {
			return netip.Addr{}, nil, invalid("prevResult.ips", fmt.Sprintf("%s: an endpoint can have one address of another network, an IPv4 one", ip.Address.String()),
				"take IPv6 ranges out of the ipam of the plugin before heddle-cni")
		}
		own = p
	}
	if !own.IsValid() {
		return netip.Addr{}, nil, invalid("prevResult.ips", "has no address of "+ifname, "")
	}
	adopted := &model.Adopted{Prefixes: []netip.Prefix{}}
	for i, text := range c.Adopted {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return netip.Addr{}, nil, invalid(fmt.Sprintf("carried[%d]", i), fmt.Sprintf("%.60q is no ADDRESS/LENGTH", text), "")
		}
		adopted.Prefixes = append(adopted.Prefixes, p)
	}
	if len(c.Adopted) == 0 && own.Bits() < 32 {
		adopted.Prefixes = append(adopted.Prefixes, own.Masked())
	}
	if err := adopted.Validate(); err != nil {
		return netip.Addr{}, nil, invalid("carried", err.Error(), "")
	}
	return own.Addr(), adopted, nil
}

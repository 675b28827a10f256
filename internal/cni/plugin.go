// Package cni is Heddle's CNI plugin: a thin client of the node's agent. It is started by a
// container runtime for each operation, asks the agent over its API socket to make or remove the
// endpoint of a container's network namespace, and reports the result in CNI's form. It changes
// nothing itself.
package cni

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/podlabels"
)

// answers bounds one operation. Attachments are made one after the other, and runtimes start many
// pods at once; they themselves give up after two to four minutes.
const answers = podlabels.Making

// statusAnswers bounds STATUS, which runtimes ask for often.
const statusAnswers = 10 * time.Second

// versions are those of the specification that the plugin speaks.
var versions = version.PluginSupports("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")

// Main runs one operation as the environment and standard input have it, prints its result, and
// ends the process with exit code 1 if it fails.
func Main(about string) {
	skel.PluginMainFuncs(skel.CNIFuncs{Add: add, Del: del, Check: check, GC: gc, Status: status}, versions, about)
}

// add makes the endpoint of a network namespace, or, behind other plugins, of the device and the
// address they made. It may be repeated.
func add(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	req, err := request(c, args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), answers)
	defer cancel()
	if c.Kubernetes != "" {
		if req.Labels, err = podLabels(ctx, c, args); err != nil {
			return err
		}
	}
	client := api.Dial(c.Socket)
	defer client.Close()
	e, err := client.CreateEndpoint(ctx, req)
	if err != nil {
		return agentError("add", c.Socket, err)
	}
	if c.prev != nil {
		return types.PrintResult(c.prev, c.CNIVersion) // all of it is as the plugins before made it
	}
	d, err := client.EndpointDevice(ctx, e.Name)
	if err != nil {
		return agentError("add", c.Socket, err)
	}
	return types.PrintResult(result(c, e, d, args.Netns), c.CNIVersion)
}

// podLabels asks heddle-kube for the labels of the pod. Without an answer there is no endpoint: one
// without its pod's labels would be open to what policies forbid.
func podLabels(ctx context.Context, c config, args *skel.CmdArgs) (map[string]string, error) {
	pod, err := parseArgs(args.Args)
	if err != nil {
		return nil, err
	}
	if pod.namespace == "" || pod.pod == "" {
		return nil, types.NewError(types.ErrInvalidEnvironmentVariables, "CNI_ARGS: K8S_POD_NAMESPACE and K8S_POD_NAME are missing",
			"take kubernetes out of the network configuration, unless the runtime is one of Kubernetes")
	}
	labels, err := podlabels.Ask(ctx, c.Kubernetes, podlabels.Question{Namespace: pod.namespace, Name: pod.pod, UID: pod.uid})
	if err != nil {
		return nil, types.NewError(types.ErrTryAgainLater, "add: "+err.Error(), "see that heddle-kube runs on this node and reaches the API server")
	}
	return labels, nil
}

// request asks for the endpoint of an attachment.
func request(c config, args *skel.CmdArgs) (api.EndpointRequest, error) {
	pod, err := parseArgs(args.Args)
	if err != nil {
		return api.EndpointRequest{}, err
	}
	addr, err := c.wantedAddr(pod)
	if err != nil {
		return api.EndpointRequest{}, err
	}
	var adopted *model.Adopted
	if c.prev != nil {
		if addr, adopted, err = c.adoption(args.IfName); err != nil {
			return api.EndpointRequest{}, err
		}
	}
	ports, err := c.ports()
	if err != nil {
		return api.EndpointRequest{}, err
	}
	limits, err := c.limits()
	if err != nil {
		return api.EndpointRequest{}, err
	}
	path, err := filepath.Abs(args.Netns)
	if err != nil {
		return api.EndpointRequest{}, types.NewError(types.ErrInvalidNetNS, "CNI_NETNS: "+err.Error(), "")
	}
	return api.EndpointRequest{
		Name: endpointName(c.Name, args.ContainerID, args.IfName), NetnsPath: path, Intercepted: c.intercepted(),
		Addr: addr, Labels: c.labels(pod), Device: args.IfName,
		Adopted: adopted, CNI: &model.CNIAttachment{Network: c.Name, ContainerID: args.ContainerID}, Ports: ports, Limits: limits,
	}, nil
}

// result says what the agent made. The addresses are host addresses, so the gateway has a route of
// its own.
func result(c config, e model.Endpoint, d api.EndpointDevice, sandbox string) *current.Result {
	r := &current.Result{
		CNIVersion: current.ImplementedSpecVersion,
		Interfaces: []*current.Interface{
			{Name: d.NodeName, Mac: d.NodeMAC, Mtu: d.MTU},
			{Name: d.Name, Mac: d.MAC, Mtu: d.MTU, Sandbox: sandbox},
		},
		DNS: c.DNS,
	}
	for _, a := range e.Addrs {
		i := slices.IndexFunc(d.Gateways, func(gw netip.Addr) bool { return gw.Is4() == a.Is4() })
		if i < 0 {
			continue
		}
		gw := net.IP(d.Gateways[i].AsSlice())
		r.IPs = append(r.IPs, &current.IPConfig{Interface: current.Int(1), Address: hostNet(a), Gateway: gw})
		everywhere := net.IPNet{IP: make(net.IP, a.BitLen()/8), Mask: net.CIDRMask(0, a.BitLen())}
		r.Routes = append(r.Routes, &types.Route{Dst: hostNet(d.Gateways[i])}, &types.Route{Dst: everywhere, GW: gw})
	}
	return r
}

func hostNet(a netip.Addr) net.IPNet {
	return net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// del removes an attachment's endpoint. That it is not there is no error, nor is it that no agent
// runs: then the deletion is written down for the next agent.
func del(args *skel.CmdArgs) error {
	c, err := parseLenient(args.StdinData)
	if err != nil {
		return err
	}
	name := endpointName(c.Name, args.ContainerID, args.IfName)
	if model.ValidateEndpointName(name) != nil {
		return nil // ADD refuses it
	}
	ctx, cancel := context.WithTimeout(context.Background(), answers)
	defer cancel()
	client := api.Dial(c.Socket)
	defer client.Close()
	if err := client.DeleteEndpointLater(ctx, name); err != nil && !errors.Is(err, api.ErrNotFound) {
		return repeatable("delete", c.Socket, err)
	}
	return nil
}

// check compares what there is with what ADD made and reported.
func check(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	if c.prev == nil {
		return invalid("prevResult", "is missing", "give the result of ADD")
	}
	ctx, cancel := context.WithTimeout(context.Background(), answers)
	defer cancel()
	client := api.Dial(c.Socket)
	defer client.Close()
	name := endpointName(c.Name, args.ContainerID, args.IfName)
	list, err := client.Endpoints(ctx)
	if err != nil {
		return agentError("check", c.Socket, err)
	}
	i := slices.IndexFunc(list, func(e model.Endpoint) bool { return e.Name == name })
	if i < 0 {
		return changed(fmt.Sprintf("endpoint %s is gone", name))
	}
	for _, a := range list[i].Addrs {
		if list[i].Adopted != nil && a.Is6() {
			continue // it stands for the other inside Heddle; the container does not have it
		}
		if !slices.ContainsFunc(c.prev.IPs, func(ip *current.IPConfig) bool { return ip.Address.IP.Equal(net.IP(a.AsSlice())) }) {
			return changed(fmt.Sprintf("prevResult: lacks the endpoint's address %s", a))
		}
	}
	d, err := client.EndpointDevice(ctx, name)
	if err != nil {
		return agentError("check", c.Socket, err)
	}
	if len(d.Problems) > 0 {
		return changed(d.Problems[0])
	}
	return nil
}

func changed(what string) *types.Error {
	return types.NewError(codeChanged, "check: "+what, "restart the container")
}

// gc removes the endpoints of the network's attachments that are not valid any more.
func gc(args *skel.CmdArgs) error {
	c, err := parseLenient(args.StdinData)
	if err != nil {
		return err
	}
	keep, err := validAttachments(args.StdinData, c.Name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), answers)
	defer cancel()
	client := api.Dial(c.Socket)
	defer client.Close()
	list, err := client.Endpoints(ctx)
	if err != nil {
		return repeatable("garbage collection", c.Socket, err)
	}
	var errs []error
	for _, e := range list {
		if e.CNI == nil || e.CNI.Network != c.Name || keep[e.Name] {
			continue
		}
		if err := client.DeleteEndpoint(ctx, e.Name); err != nil && !errors.Is(err, api.ErrNotFound) {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return repeatable(fmt.Sprintf("garbage collection: %d endpoints remain", len(errs)), c.Socket, errs[0])
	}
	return nil
}

// status reports whether ADD could work now.
func status(args *skel.CmdArgs) error {
	c, err := parseConfig(args.StdinData)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), statusAnswers)
	defer cancel()
	client := api.Dial(c.Socket)
	defer client.Close()
	st, err := client.Status(ctx)
	if err != nil {
		// Connections go on, but programs that ask for sockets wait.
		e := agentError("status", c.Socket, err)
		return types.NewError(types.ErrLimitedConnectivity, e.Msg, e.Details)
	}
	if !st.Store.Healthy {
		return types.NewError(types.ErrPluginNotAvailable, "status: the agent does not reach its store: "+st.Store.Error,
			"see that etcd is up; containers that run are not affected")
	}
	return nil
}

package node

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg"
)

// What the agent knows of its endpoints' network namespaces. The inode of one names it among all that exist; once
// it has gone another may get the number.

// resolve finds the endpoint whose containers name it in their seccomp profile.
func (a *Agent) resolve(metadata string, _ specs.ContainerProcessState) (model.EndpointID, error) {
	e, ok := a.known.named(metadata)
	if !ok {
		return 0, fmt.Errorf("no endpoint %q on this node: create it before its containers start", metadata)
	}
	if !e.Planes.TCP.Intercepted {
		return 0, fmt.Errorf("endpoint %q is not intercepted: create it with intercepted=true", metadata)
	}
	return e.ID, nil
}

// endpointIn finds the intercepted endpoint of a network namespace.
func (a *Agent) endpointIn(inode uint64) (model.EndpointID, bool) {
	a.attachAwaited(inode)
	e, ok := a.known.inNetns(inode)
	if !ok || !e.Planes.TCP.Intercepted {
		return 0, false
	}
	// The endpoint may have outlived its container, and its namespace's number belong to another now.
	now, err := netcfg.NetnsInode(e.NetnsPath)
	return e.ID, err == nil && now == inode
}

// setNetns notes in which network namespace an endpoint is. Another endpoint that was in one of this number is in none any more: a
// namespace has one endpoint, so that the number has been given again.
func (a *Agent) setNetns(id model.EndpointID, inode uint64) error {
	other, had := a.known.setNetns(id, inode)
	if !had {
		return nil
	}
	return a.planes.LeaveNetns(other)
}

// checkNetns refuses a path at which there is no network namespace, and one of a namespace that has an endpoint: it
// could have one default route, and its sockets one address.
func (a *Agent) checkNetns(path string) error {
	inode, err := netcfg.NetnsInode(path)
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Field: "netns_path", Message: err.Error(),
			Remedy: "give the path of an existing network namespace, not the node's own"}
	}
	holder, taken := a.known.inNetns(inode)
	if !taken {
		return nil
	}
	if now, err := netcfg.NetnsInode(holder.NetnsPath); err != nil || now != inode {
		return nil // what had the number has gone
	}
	return &api.Error{Code: api.CodeConflict, Field: "netns_path",
		Message: fmt.Sprintf("network namespace %s has an endpoint already: %s", path, holder.Name),
		Remedy:  "a network namespace can have one endpoint; delete that one first: heddle endpoints delete " + holder.Name}
}

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
	e, ok := a.endpointByName(metadata)
	if !ok {
		return 0, fmt.Errorf("no endpoint %q on this node: create it before its containers start", metadata)
	}
	if !e.Intercepted {
		return 0, fmt.Errorf("endpoint %q is not intercepted: create it with intercepted=true", metadata)
	}
	return e.ID, nil
}

// endpointIn finds the intercepted endpoint of a network namespace.
func (a *Agent) endpointIn(inode uint64) (model.EndpointID, bool) {
	a.attachAwaited(inode)
	a.mu.RLock()
	e, ok := a.byID[a.byNetns[inode]]
	a.mu.RUnlock()
	if !ok || !e.Intercepted {
		return 0, false
	}
	// The endpoint may have outlived its container, and its namespace's number belong to another now.
	now, err := netcfg.NetnsInode(e.NetnsPath)
	return e.ID, err == nil && now == inode
}

// netnsOf gives the inode of an endpoint's network namespace.
func (a *Agent) netnsOf(id model.EndpointID) (inode uint64, ok bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	inode, ok = a.netns[id]
	return inode, ok
}

// setNetns notes in which network namespace an endpoint is. Another endpoint that was in one of this number is in none any more: a
// namespace has one endpoint, so that the number has been given again.
func (a *Agent) setNetns(id model.EndpointID, inode uint64) error {
	a.mu.Lock()
	a.dropNetns(id)
	other, had := a.byNetns[inode]
	if had {
		delete(a.netns, other)
	}
	a.netns[id], a.byNetns[inode] = inode, id
	a.mu.Unlock()
	if !had {
		return nil
	}
	return a.datapath.LeaveNetns(other)
}

// dropNetns is called with mu held.
func (a *Agent) dropNetns(id model.EndpointID) {
	if inode, ok := a.netns[id]; ok && a.byNetns[inode] == id {
		delete(a.byNetns, inode)
	}
	delete(a.netns, id)
}

// checkNetns refuses a path at which there is no network namespace, and one of a namespace that has an endpoint: it
// could have one default route, and its sockets one address.
func (a *Agent) checkNetns(path string) error {
	inode, err := netcfg.NetnsInode(path)
	if err != nil {
		return &api.Error{Code: api.CodeInvalid, Field: "netns_path", Message: err.Error(),
			Remedy: "give the path of an existing network namespace, not the node's own"}
	}
	a.mu.RLock()
	holder, taken := a.byID[a.byNetns[inode]]
	a.mu.RUnlock()
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

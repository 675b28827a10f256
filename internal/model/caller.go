package model

import "errors"

// Caller is what a thread must be to have a socket, for a kernel that can compare it.
type Caller struct {
	// Thread is its number in the initial PID namespace; 0 compares nothing.
	Thread uint32
	// Netns is the inode of the network namespace that it is in; 0 is any.
	Netns uint32
	// UID and GID are its effective ids as the initial user namespace numbers them, unless
	// AnyOwner.
	UID, GID uint32
	AnyOwner bool
}

// Why a caller does not get a socket.
var (
	// ErrSocketQuota says that its endpoint has as many sockets as it may.
	ErrSocketQuota = errors.New("endpoint has as many sockets as it may")
	// ErrStackRefused says that its endpoint has no TCP here: the node cannot serve the endpoint's
	// stack profile.
	ErrStackRefused = errors.New("endpoint has no TCP stack on this node")
	// ErrOtherNetns says that it is in another network namespace.
	ErrOtherNetns = errors.New("caller is in another network namespace")
	// ErrOtherOwner says that it has other effective ids.
	ErrOtherOwner = errors.New("caller has other user or group ids")
	// ErrNoCaller says that there is no such thread any more.
	ErrNoCaller = errors.New("caller has gone")
)

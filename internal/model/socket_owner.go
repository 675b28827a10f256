package model

// SocketOwner is a process that holds sockets of an endpoint although it is neither intercepted nor
// guarded.
type SocketOwner struct {
	PID      int        `json:"pid"` // in the agent's PID namespace
	Endpoint EndpointID `json:"endpoint_id"`
	Sockets  int        `json:"sockets"`
}

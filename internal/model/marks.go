package model

// Marks of packets and sockets in a node's namespace are Heddle's own: docs/protocols/pins.md. They
// spell "Hd".
const (
	Mark        = 0x48640001 // packets of node sockets that stay on the node
	OverlayMark = 0x48640002 // those that go by the overlay
	DropMark    = 0x48640003
	RejectMark  = 0x48640004
	// ServiceMark is of packets to services, without and with the lowest bit. What other rules of a
	// node may set beside it until it is looked at is ForeignMarks: kube-proxy's.
	ServiceMark  = 0x48640006
	ForeignMarks = 0xc000
	// Table is the routing table in which overlay addresses are local.
	Table = 0x4864
)

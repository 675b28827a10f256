package netstack

// archCalls are calls that other architectures do not have.
var archCalls []uint32

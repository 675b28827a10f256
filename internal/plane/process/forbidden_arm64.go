package process

// archForbidden are calls that other architectures do not have.
var archForbidden []uint32

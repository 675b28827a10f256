package netcfg

import "net/netip"

// VTEPMAC gives the hardware address that SetupNode gives the overlay device of the node with this
// address on the network that joins the nodes, so that the node can be registered before its
// devices exist.
func VTEPMAC(underlay netip.Addr) string { return vtepMAC(underlay).String() }

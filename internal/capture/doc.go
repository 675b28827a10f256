// Package capture writes the packets of one endpoint as its container would have seen them: with
// overlay addresses, whichever way they travelled, in the pcap format.
//
// Packets come from a packet socket on every device of the node (source.go). The addresses that a
// program sees for a connection come from the SYN's option where it has one, from the packet itself
// where it carries overlay addresses anyway, and from the agent's list of connections otherwise
// (matcher.go). A packet of a connection that is not known yet waits, and all that follow with it,
// until the agent has been asked (session.go). Nothing here is in the way of a packet: what is
// captured are copies, and an agent that does not answer costs names, not traffic.
package capture

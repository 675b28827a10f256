package datapath

import "fmt"

// RedirectPackets has packets between containers go past the node's stack where they need nothing
// of it, or all of them through it. Until it is called they go through it. tunnel says whether the
// programs put on and take off the headers of the overlay's device.
func (d *Datapath) RedirectPackets(redirect, tunnel bool) error {
	if err := d.objs.TunnelByProgram.Set(word(tunnel)); err != nil {
		return fmt.Errorf("set tunnel_by_program: %w", err)
	}
	if err := d.objs.PacketsRedirected.Set(word(redirect)); err != nil {
		return fmt.Errorf("set packets_redirected: %w", err)
	}
	return nil
}

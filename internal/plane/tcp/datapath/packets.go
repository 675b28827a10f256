package datapath

import "fmt"

// RedirectPackets has packets between containers go past the node's stack where they need nothing
// of it, or all of them through it. Until it is called they go through it.
func (d *Datapath) RedirectPackets(redirect bool) error {
	if err := d.objs.PacketsRedirected.Set(word(redirect)); err != nil {
		return fmt.Errorf("set packets_redirected: %w", err)
	}
	return nil
}

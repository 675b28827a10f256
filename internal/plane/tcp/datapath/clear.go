package datapath

import (
	"net/netip"

	"heddle.dev/heddle/internal/plane/tcp/names"
)

// CutClear ends the direct connections of this node's endpoints that stood before the node began to
// encrypt, and says how many: the programs at both ends see ECONNABORTED or a reset. On a node that
// does not encrypt there are none. It must run in the node's network namespace; errors are
// CutForbidden's.
func (d *Datapath) CutClear() (cut int, err error) {
	cut, err = d.endPass("cut_clear", d.objs.CutClear, d.objs.ClearUnlocked)
	return cut, wrapCut(err)
}

// Clear counts them, and gives the addresses in the clear of the nodes at their other ends with how
// many of them each has.
func (d *Datapath) Clear() (map[netip.Addr]int, error) {
	if !d.cfg.UnderlayRaw {
		return nil, nil
	}
	all, err := d.Connections()
	if err != nil {
		return nil, err
	}
	out := make(map[netip.Addr]int)
	for _, c := range all {
		if local := c.NodeLocal.Addr(); c.Path == names.PathDirect && !local.IsUnspecified() && local != d.cfg.Underlay {
			out[c.NodeRemote.Addr()]++
		}
	}
	return out, nil
}

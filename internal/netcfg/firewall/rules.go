package firewall

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Rules are Heddle's nftables table as the agent wants it, and what alone writes it: they keep what
// they are told, so that Mend can write all of it again. Their methods may be called from several
// goroutines.
type Rules struct {
	cfg              Config
	divert, underlay int // indexes of devices

	mu        sync.Mutex          // guards the rest, and the table in the kernel
	nodes     map[netip.Addr]bool // from which the overlay is accepted
	moved     []netip.Addr        // to this node
	adopted   []netip.Addr
	published []Published
	counts    map[string]uint64 // of the guards, as they were read last
	written   contents          // the zero contents: the kernel may have anything
	gone      string            // what a write met with that Mend has not said yet
}

// Set replaces Heddle's nftables table by what cfg needs, in one transaction: there is no moment
// without it, and connections under translation keep theirs; chains of an earlier version go with
// its table. divert is the index of netdev.Divert, underlay that of the underlay's device, nodes
// are those from which the overlay is accepted, and moved the addresses that have moved to this
// node, until SetMoved says otherwise.
//
// Every packet of the node passes the base chains, so there is one a hook and priority, and the
// first rules let go what nothing is to be done about: decision 0007 counts what that costs.
func Set(cfg Config, divert, underlay int, nodes, moved []netip.Addr) (*Rules, error) {
	t := &Rules{
		cfg: cfg, divert: divert, underlay: underlay, nodes: make(map[netip.Addr]bool), moved: slices.Clone(moved),
		published: slices.Clone(cfg.Published), counts: make(map[string]uint64),
	}
	slices.SortFunc(t.moved, netip.Addr.Compare)
	for _, a := range nodes {
		t.nodes[a] = true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t, t.rewrite()
}

// Mend writes the table again if the kernel does not have the one that was written last, and says
// what of it was gone: "" if nothing.
func (t *Rules) Mend() (gone string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.written.table == 0 && t.gone == "" {
		return "", t.rewrite() // a write that failed, and nobody else's doing
	}
	if err := t.compare(); err != nil || t.gone == "" {
		return "", err
	}
	gone = t.gone
	if t.written.table == 0 { // else a write has met with it, and mended it
		err = t.rewrite()
	}
	if err == nil {
		t.gone = ""
	}
	return gone, err
}

// compare notes what of the table is gone, if it was there as noted. The caller holds mu.
func (t *Rules) compare() error {
	if t.written.table == 0 {
		return nil
	}
	now, err := readContents()
	switch {
	case errors.Is(err, unix.ENOENT):
		t.gone = "the table"
	case err != nil:
		return err
	case now.table != t.written.table:
		t.gone = "the table, which has another in its place"
	case now.flags != t.written.flags:
		t.gone = "what the table is switched on by"
	case !slices.Equal(now.rules, t.written.rules):
		t.gone = "some of its rules, or there were others among them"
	default:
		return nil
	}
	t.written = contents{}
	return nil
}

// rewrite writes all of the table. The caller holds mu.
func (t *Rules) rewrite() error {
	t.written = contents{}
	if err := t.readCounts(); err != nil {
		return err
	}
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	r := ruleset{c, heddleTable(), t.cfg}
	c.AddTable(r.table) // so that there is one to delete
	c.DelTable(r.table)
	c.AddTable(r.table)
	if err := r.addGuards(slices.Collect(maps.Keys(t.nodes)), t.counts); err != nil {
		return err
	}
	r.addEarly(t.divert, t.underlay)
	r.addPlainOut(t.underlay)
	r.addTranslated()
	r.addServices()
	r.addDeliver()
	r.addOutside()
	if err := errors.Join(r.addMoved(t.moved), r.addAdopted(t.adopted), r.addPublished(t.published)); err != nil {
		return err
	}
	return t.flush(c)
}

// write has the kernel follow what was noted, by what change adds: or, if it does not have what was
// noted before, by all of it. The caller holds mu.
func (t *Rules) write(change func(r ruleset) error) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	if err := t.compare(); err != nil {
		t.written = contents{} // or nobody would write what was noted: the kernel has what it had
		return err
	}
	if t.written.table != 0 {
		if err = change(ruleset{c, heddleTable(), t.cfg}); err == nil {
			err = t.flush(c)
		}
		if err == nil {
			return nil
		}
	}
	if again := t.rewrite(); again != nil {
		return errors.Join(err, again)
	}
	return nil
}

// flush makes the changes of c, and notes what the kernel has then.
func (t *Rules) flush(c *nftables.Conn) error {
	if err := c.Flush(); err != nil {
		return fmt.Errorf("set nftables table %s: %w", Table, err)
	}
	now, err := readContents()
	t.written = now
	return err
}

// contents tells the table that the kernel has from another of its name, or one that has been
// changed: by the number that the kernel gave it, its flags, and the numbers of its rules.
type contents struct {
	table uint64
	flags uint32
	rules []uint64
}

// readContents asks the kernel: ENOENT if there is no table.
func readContents() (contents, error) {
	found, err := rtnl.Dump(func() ([]contents, error) {
		var now contents
		err := ask(unix.NFT_MSG_GETTABLE, 0, func(kind uint16, value []byte) {
			switch kind {
			case nftaTableHandle:
				now.table = binaryutil.BigEndian.Uint64(value)
			case unix.NFTA_TABLE_FLAGS:
				now.flags = binaryutil.BigEndian.Uint32(value)
			}
		})
		if err != nil {
			return nil, err
		}
		err = ask(unix.NFT_MSG_GETRULE, unix.NLM_F_DUMP, func(kind uint16, value []byte) {
			if kind == unix.NFTA_RULE_HANDLE {
				now.rules = append(now.rules, binaryutil.BigEndian.Uint64(value))
			}
		})
		return []contents{now}, err
	})
	if err != nil {
		return contents{}, fmt.Errorf("read nftables table %s: %w", Table, err)
	}
	return found[0], nil
}

// nftaTableHandle is NFTA_TABLE_HANDLE, which no library names.
const nftaTableHandle = 4

// ask asks the kernel about Heddle's table, and gives each attribute of its answers.
func ask(what, flags int, each func(kind uint16, value []byte)) error {
	var broken error
	err := rtnl.AskOf(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|what, flags, func(m syscall.NetlinkMessage) bool {
		attrs, err := nl.ParseRouteAttr(m.Data[min(nl.SizeofNfgenmsg, len(m.Data)):])
		broken = errors.Join(broken, err)
		for _, a := range attrs {
			each(a.Attr.Type, a.Value)
		}
		return flags != 0
	}, &nl.Nfgenmsg{NfgenFamily: unix.NFPROTO_INET}, nl.NewRtAttr(unix.NFTA_TABLE_NAME, nl.ZeroTerminated(Table))) // NFTA_RULE_TABLE is the same
	return errors.Join(err, broken)
}

func heddleTable() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
}

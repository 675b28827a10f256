package netcfg

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// Direction is the side of a device that a tc program is attached to, as the node's kernel sees it.
type Direction int

// Directions.
const (
	Ingress Direction = iota // packets the device hands to the node
	Egress                   // packets the node hands to the device
)

// String gives tc's word.
func (d Direction) String() string {
	if d == Egress {
		return "egress"
	}
	return "ingress"
}

func (d Direction) parent() uint32 {
	if d == Egress {
		return netlink.HANDLE_MIN_EGRESS
	}
	return netlink.HANDLE_MIN_INGRESS
}

// Every program of Heddle's has the same place in its direction, so attaching replaces.
const (
	filterHandle   = 1
	filterPriority = 1
	// filterOwner begins the names of Heddle's filters.
	filterOwner = "heddle:"
)

// Filter is a BPF program, of type sched_cls, and where it is attached in direct-action mode.
type Filter struct {
	Direction Direction
	Program   int    // descriptor
	Name      string // shown by `tc filter`, after "heddle:"
	class     uint32 // the program reads it as tc_classid
}

// String says what is attached.
func (f Filter) String() string { return fmt.Sprintf("attach %s to %s", f.Name, f.Direction) }

// AttachTC attaches filters to a device, each as handle 1 of priority 1 for all protocols. A
// program of Heddle's that is there is replaced in one step: every packet meets the old or the new
// one. A filter of somebody else's in that place is an error.
func AttachTC(ifindex int, filters ...Filter) error {
	if err := attachTC(ifindex, filters); err != nil {
		return fmt.Errorf("device %d: %w", ifindex, err)
	}
	return nil
}

func attachTC(ifindex int, filters []Filter) error {
	var b rtnl.Batch
	addClsact(&b, ifindex)
	err := b.Do()
	if errors.Is(err, unix.EEXIST) { // without the qdisc there was no filter
		err = mayAttach(ifindex, filters)
	}
	if err != nil {
		return err
	}
	for _, f := range filters {
		addFilter(&b, ifindex, f)
	}
	return b.Do()
}

// addClsact has b add the qdisc that holds filters of both directions.
func addClsact(b *rtnl.Batch, index int) {
	b.Add("add clsact qdisc", unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		&nl.TcMsg{Ifindex: int32(index), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("clsact")))
}

// addFilter has b attach f, in place of what of Heddle's is there.
func addFilter(b *rtnl.Batch, index int, f Filter) {
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	if f.class != 0 {
		options.AddRtAttr(nl.TCA_BPF_CLASSID, nl.Uint32Attr(f.class))
	}
	options.AddRtAttr(nl.TCA_BPF_FD, nl.Uint32Attr(uint32(f.Program)))
	options.AddRtAttr(nl.TCA_BPF_NAME, nl.ZeroTerminated(filterOwner+f.Name))
	options.AddRtAttr(nl.TCA_BPF_FLAGS, nl.Uint32Attr(nl.TCA_BPF_FLAG_ACT_DIRECT))
	b.Add(f.String(), unix.RTM_NEWTFILTER, unix.NLM_F_CREATE,
		&nl.TcMsg{Ifindex: int32(index), Handle: filterHandle, Parent: f.Direction.parent(), Info: netlink.MakeHandle(filterPriority, nl.Swap16(unix.ETH_P_ALL))},
		nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")), options)
}

// mayAttach fails if another's qdisc or filter is in the place of Heddle's.
func mayAttach(ifindex int, filters []Filter) error {
	clsact, err := hasClsact(ifindex)
	if err != nil {
		return err
	}
	if !clsact {
		name, _, _ := Device(ifindex) // "" if it has gone
		return ingressError(name)
	}
	for _, f := range filters {
		if _, err := ownFilter(ifindex, f.Direction); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	return nil
}

// ingressError says that another qdisc is in the place of Heddle's.
func ingressError(device string) error {
	return fmt.Errorf("device %s has an ingress qdisc, which excludes clsact; delete it (tc qdisc del dev %[1]s ingress)", device)
}

// DetachTC undoes AttachTC, and removes the device's clsact qdisc if no filter is left on it. That
// the device or the program is not there is no error.
func DetachTC(ifindex int, dir Direction) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByIndex(ifindex)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err == nil {
		_, err = detach(h, link, dir)
	}
	if err != nil {
		return fmt.Errorf("detach from %s of device %d: %w", dir, ifindex, err)
	}
	return nil
}

// detach is DetachTC; found says that the program was there.
func detach(h *netlink.Handle, link netlink.Link, dir Direction) (found bool, err error) {
	clsact, err := hasClsact(link.Attrs().Index)
	if err != nil || !clsact {
		return false, err
	}
	own, err := ownFilter(link.Attrs().Index, dir)
	if errors.Is(err, errForeignFilter) || err == nil && own == nil {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if err := h.FilterDel(newFilter(link.Attrs().Index, dir)); err != nil && !errors.Is(err, unix.ENOENT) {
		return true, err
	}
	for _, d := range []Direction{Ingress, Egress} {
		left, err := rtnl.Dump(func() ([]netlink.Filter, error) { return h.FilterList(link, d.parent()) })
		if err != nil || len(left) > 0 {
			return true, err
		}
	}
	if err := h.QdiscDel(newClsact(link.Attrs().Index)); err != nil && !errors.Is(err, unix.ENOENT) {
		return true, err
	}
	return true, nil
}

// errForeignFilter: the place of Heddle's filter is taken.
var errForeignFilter = errors.New("priority 1 is taken by a filter that is not Heddle's; move it to another priority (tc filter)")

// attached is a filter that a device has.
type attached struct {
	priority uint16
	handle   uint32
	name     string // "" but for BPF programs
	class    uint32 // that the program reads
}

// ownFilter gives Heddle's filter, nil if it is not there, and errForeignFilter if another is in
// its place.
func ownFilter(ifindex int, dir Direction) (own *attached, err error) {
	list, err := rtnl.Dump(func() (list []attached, err error) {
		err = rtnl.Ask(unix.RTM_GETTFILTER, unix.NLM_F_DUMP, func(m syscall.NetlinkMessage) bool {
			if f, ok := parseFilter(m.Data); ok {
				list = append(list, f)
			}
			return true
		}, &nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(ifindex), Parent: dir.parent()})
		return list, err
	})
	if err != nil {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	for _, f := range list {
		if f.priority != filterPriority {
			continue
		}
		if !strings.HasPrefix(f.name, filterOwner) {
			return nil, errForeignFilter
		}
		if f.handle == filterHandle {
			own = &f
		}
	}
	return own, nil
}

// parseFilter reads one of a list. The kernel also tells of each priority, without options: that is
// no filter.
func parseFilter(raw []byte) (f attached, ok bool) {
	if len(raw) < nl.SizeofTcMsg {
		return f, false
	}
	msg := nl.DeserializeTcMsg(raw)
	f.handle = msg.Handle
	f.priority, _ = netlink.MajorMinor(msg.Info)
	attrs, err := nl.ParseRouteAttr(raw[nl.SizeofTcMsg:])
	if err != nil {
		return f, false
	}
	bpf := false
	for _, a := range attrs {
		switch a.Attr.Type {
		case nl.TCA_KIND:
			bpf = nl.BytesToString(a.Value) == "bpf"
		case nl.TCA_OPTIONS:
			ok = true
			options, err := nl.ParseRouteAttr(a.Value)
			for _, o := range options {
				switch {
				case err != nil || !bpf: // another kind's options have other meanings
				case o.Attr.Type == nl.TCA_BPF_NAME:
					f.name = nl.BytesToString(o.Value)
				case o.Attr.Type == nl.TCA_BPF_CLASSID:
					f.class = nl.NativeEndian().Uint32(o.Value)
				}
			}
		}
	}
	return f, ok
}

func newFilter(ifindex int, dir Direction) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: ifindex, Parent: dir.parent(), Handle: filterHandle, Priority: filterPriority, Protocol: unix.ETH_P_ALL,
		},
		Fd: -1,
	}
}

func newClsact(ifindex int) *netlink.GenericQdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}
}

func hasClsact(ifindex int) (there bool, err error) {
	// One device's is asked for by its place. A list is of all devices, whatever device it is asked
	// for.
	told := false
	err = rtnl.Ask(unix.RTM_GETQDISC, unix.NLM_F_ECHO|unix.NLM_F_ACK, func(m syscall.NetlinkMessage) bool {
		attrs, _ := nl.ParseRouteAttr(m.Data[min(nl.SizeofTcMsg, len(m.Data)):])
		for _, a := range attrs {
			if a.Attr.Type == nl.TCA_KIND {
				told, there = true, nl.BytesToString(a.Value) == "clsact"
			}
		}
		return false
	}, &nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(ifindex), Parent: netlink.HANDLE_CLSACT})
	if told || errors.Is(err, unix.ENOENT) {
		return there, nil
	}
	// The kernel has no answer but that it has understood, or EINVAL, where there was one that is
	// gone.
	list, err := rtnl.Dump(func() ([]netlink.Qdisc, error) {
		return rtnl.Each().QdiscList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: ifindex}})
	})
	if err != nil {
		return false, fmt.Errorf("list qdiscs: %w", err)
	}
	for _, q := range list {
		if q.Type() == "clsact" {
			return true, nil
		}
	}
	return false, nil
}

// ensureClsact adds the qdisc that holds filters of both directions unless it is there.
func ensureClsact(h *netlink.Handle, link netlink.Link) error {
	err := h.QdiscAdd(newClsact(link.Attrs().Index))
	if errors.Is(err, unix.EEXIST) {
		if there, err := hasClsact(link.Attrs().Index); err != nil || there {
			return err
		}
		return ingressError(link.Attrs().Name)
	}
	if err != nil {
		return fmt.Errorf("add clsact qdisc: %w", err)
	}
	return nil
}

// DetachElsewhere detaches the program called name from the ingress of all devices that are no
// endpoint's, but of those to keep: a node's underlay address may have been another device's once.
func DetachElsewhere(name string, keep ...int) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if _, endpoint := netdev.EndpointOf(l); endpoint || slices.Contains(keep, l.Attrs().Index) {
			continue
		}
		if clsact, err := hasClsact(l.Attrs().Index); err != nil || !clsact {
			if err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("qdiscs of %s: %w", l.Attrs().Name, err)
			}
			continue
		}
		own, err := ownFilter(l.Attrs().Index, Ingress)
		if err == nil && own != nil && own.name == filterOwner+name {
			_, err = detach(h, l, Ingress)
		}
		if err != nil && !errors.Is(err, errForeignFilter) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("detach %s from %s: %w", name, l.Attrs().Name, err)
		}
	}
	return nil
}

// detachAll detaches Heddle's programs from every device.
func detachAll(h *netlink.Handle, gone func(string, ...any)) error {
	links, err := rtnl.Dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	var errs []error
	for _, l := range links {
		for _, dir := range []Direction{Ingress, Egress} {
			found, err := detach(h, l, dir)
			if found {
				gone("BPF program from %s of %s", dir, l.Attrs().Name)
			}
			if err != nil && !errors.Is(err, unix.ENODEV) {
				errs = append(errs, fmt.Errorf("detach from %s of %s: %w", dir, l.Attrs().Name, err))
			}
		}
	}
	return errors.Join(errs...)
}

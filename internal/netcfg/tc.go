package netcfg

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
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
	var b batch
	b.clsact(ifindex)
	err := b.do()
	if errors.Is(err, unix.EEXIST) { // without the qdisc there was no filter
		err = mayAttach(ifindex, filters)
	}
	if err != nil {
		return err
	}
	for _, f := range filters {
		b.filter(ifindex, f)
	}
	return b.do()
}

// mayAttach fails if another's qdisc or filter is in the place of Heddle's.
func mayAttach(ifindex int, filters []Filter) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByIndex(ifindex)
	if err != nil {
		return err
	}
	if err := ensureClsact(h, link); err != nil {
		return err
	}
	for _, f := range filters {
		if _, err := ownFilter(h, link, f.Direction); err != nil {
			return fmt.Errorf("%s: %w", f, err)
		}
	}
	return nil
}

// DetachTC undoes AttachTC, and removes the device's clsact qdisc if no filter is left on it. That
// the device or the program is not there is no error.
func DetachTC(ifindex int, dir Direction) error {
	h, err := open()
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
	clsact, err := hasClsact(h, link)
	if err != nil || !clsact {
		return false, err
	}
	own, err := ownFilter(h, link, dir)
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
		left, err := dump(func() ([]netlink.Filter, error) { return h.FilterList(link, d.parent()) })
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

// ownFilter gives Heddle's filter, nil if it is not there, and errForeignFilter if another is in
// its place.
func ownFilter(h *netlink.Handle, link netlink.Link, dir Direction) (own *netlink.BpfFilter, err error) {
	list, err := dump(func() ([]netlink.Filter, error) { return h.FilterList(link, dir.parent()) })
	if err != nil {
		return nil, fmt.Errorf("list filters: %w", err)
	}
	for _, f := range list {
		if f.Attrs().Priority != filterPriority {
			continue
		}
		bpf, ok := f.(*netlink.BpfFilter)
		if !ok || !strings.HasPrefix(bpf.Name, filterOwner) {
			return nil, errForeignFilter
		}
		if bpf.Handle == filterHandle {
			own = bpf
		}
	}
	return own, nil
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

func hasClsact(h *netlink.Handle, link netlink.Link) (bool, error) {
	// One device's is asked for by its place. A list is of all devices, whatever device it is asked
	// for.
	req := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_ECHO|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(link.Attrs().Index), Parent: netlink.HANDLE_CLSACT})
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC) // none with an error
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	for _, m := range messages {
		attrs, perr := nl.ParseRouteAttr(m[nl.SizeofTcMsg:])
		for _, a := range attrs {
			if perr == nil && a.Attr.Type == nl.TCA_KIND {
				return nl.BytesToString(a.Value) == "clsact", nil
			}
		}
	}
	// The kernel has no answer but that it has understood, or EINVAL, where there was one that is
	// gone.
	list, err := dump(func() ([]netlink.Qdisc, error) { return h.QdiscList(link) })
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
		if there, err := hasClsact(h, link); err != nil || there {
			return err
		}
		return fmt.Errorf("device %s has an ingress qdisc, which excludes clsact; delete it (tc qdisc del dev %[1]s ingress)", link.Attrs().Name)
	}
	if err != nil {
		return fmt.Errorf("add clsact qdisc: %w", err)
	}
	return nil
}

// DetachElsewhere detaches the program called name from the ingress of all devices that are no
// endpoint's, but of those to keep: a node's underlay address may have been another device's once.
func DetachElsewhere(name string, keep ...int) error {
	h, err := open()
	if err != nil {
		return err
	}
	defer h.Close()
	links, err := dump(h.LinkList)
	if err != nil {
		return fmt.Errorf("list devices: %w", err)
	}
	for _, l := range links {
		if _, endpoint := endpointOf(l); endpoint || slices.Contains(keep, l.Attrs().Index) {
			continue
		}
		if clsact, err := hasClsact(h, l); err != nil || !clsact {
			if err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("qdiscs of %s: %w", l.Attrs().Name, err)
			}
			continue
		}
		own, err := ownFilter(h, l, Ingress)
		if err == nil && own != nil && own.Name == filterOwner+name {
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
	links, err := dump(h.LinkList)
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

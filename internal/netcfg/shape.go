package netcfg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/netcfg/netdev"
	"heddle.dev/heddle/internal/netcfg/rtnl"
)

// shapeMajor is the HTB qdisc's handle. skb->priority chooses the class, so it must not be one that
// somebody else uses on the node.
const shapeMajor = 0x4864

// ShapeBlock is how many classes a block has (datapath.LimitSlots): one for what is no connection,
// those of connections, and the one that all of these share. ShapeBlocks is how many blocks there
// are.
const (
	ShapeBlock  = 256
	ShapeBlocks = 128
)

// First minor numbers: of endpoints' classes by direction, plus the endpoint's id, and of the
// blocks.
const (
	minorEgress  = 0
	minorIngress = uint16(model.MaxEndpointID) + 1
	minorBlocks  = 2 * minorIngress
)

// ShapedDirection is one direction of an endpoint's traffic.
type ShapedDirection struct {
	// Rate caps all of it, ConnectionRate each TCP connection; 0: no cap.
	Rate, ConnectionRate model.Rate
	// Block, 0 to ShapeBlocks-1, is this direction's alone if ConnectionRate is set.
	Block int
}

// Shape is what one endpoint's traffic is held to.
type Shape struct {
	ID              model.EndpointID
	Egress, Ingress ShapedDirection
}

// shapeClass is a class of the HTB qdisc.
type shapeClass struct {
	minor, parent uint16     // parent 0: the qdisc itself
	rate, ceil    model.Rate // rate: what it may send whatever its parent says
	queue         int        // bytes that may wait; 0: it has classes below it
}

// EgressClasses gives the classes of a Shape that datapath.Cap wants: of everything or of what is
// no connection, and the first of the block of connections. 0: none.
func (s Shape) EgressClasses() (class, connections uint16) {
	return s.Egress.handles(minorEgress + uint16(s.ID))
}

// IngressClasses gives the same for the other direction.
func (s Shape) IngressClasses() (class, connections uint16) {
	return s.Ingress.handles(minorIngress + uint16(s.ID))
}

func (d ShapedDirection) handles(own uint16) (class, connections uint16) {
	switch {
	case d.ConnectionRate == 0 && d.Rate == 0:
		return 0, 0
	case d.ConnectionRate == 0:
		return own, 0
	case d.Rate == 0:
		return 0, d.block()
	}
	return d.block(), d.block()
}

func (d ShapedDirection) block() uint16 { return minorBlocks + uint16(d.Block)*ShapeBlock }

// ShapeBlockOf gives the block that begins with class first, as EgressClasses and IngressClasses
// give it.
func ShapeBlockOf(first uint16) (block int, ok bool) {
	if first < minorBlocks {
		return 0, false
	}
	return int(first-minorBlocks) / ShapeBlock, true
}

// classes lists what the direction needs, parents first; own is its class if it has no block.
func (d ShapedDirection) classes(own uint16) []shapeClass {
	class, first := d.handles(own)
	if first == 0 {
		if class == 0 {
			return nil
		}
		return []shapeClass{{minor: class, rate: d.Rate, ceil: d.Rate, queue: queueBytes(d.Rate)}}
	}
	// A class cannot change its parent, so connections have one whether all of them are capped
	// together or not.
	total := d.Rate
	if total == 0 {
		total = model.MaxRate
	}
	parent := first + ShapeBlock - 1
	ceil := min(d.ConnectionRate, total)
	// What each may send whatever the others do; the rest is borrowed, in equal shares.
	share := min(total/(4*ShapeBlock), ceil)
	out := []shapeClass{{minor: parent, rate: total, ceil: total},
		{minor: first, parent: parent, rate: share, ceil: total, queue: queueBytes(total)}}
	for i := uint16(1); i < ShapeBlock-1; i++ {
		out = append(out, shapeClass{minor: first + i, parent: parent, rate: share, ceil: ceil, queue: queueBytes(ceil)})
	}
	return out
}

// classes lists the classes of both directions, parents first.
func (s Shape) classes() []shapeClass {
	return append(s.Egress.classes(minorEgress+uint16(s.ID)), s.Ingress.classes(minorIngress+uint16(s.ID))...)
}

// queueBytes is how much may wait in a class: 50 ms of it, and room for some packets of the largest
// size there is. More makes slow classes worse: connections that find the queue long take what
// waits in it for lost.
func queueBytes(r model.Rate) int {
	const least, most = 384 << 10, 64 << 20
	return min(max(int(r/8/20), least), most)
}

// burstBytes is what a class may send at once after it was idle, or could not send because no
// processor was free: 10 ms of it.
func burstBytes(r model.Rate) int {
	const least = 16 << 10
	return max(int(r/8/100), least)
}

// Limiter is the pair of tc programs that choose packets' classes.
type Limiter struct {
	In, Out int // descriptors: for ingress and egress
}

// SetShapes brings the classes of these endpoints to shapes, in one step each, and makes the
// shaping device and the filters if they are not there. Classes that a shape had before and has no
// longer stay: call PruneShapes when the programs no longer use them. It gives the device's index.
func SetShapes(shapes []Shape, progs Limiter) (ifindex int, err error) {
	h, err := rtnl.Open()
	if err != nil {
		return 0, err
	}
	defer h.Close()
	dev, err := ensureShapeDevice(h)
	if err != nil {
		return 0, err
	}
	for _, s := range shapes {
		if s.ID == 0 || s.ID > model.MaxEndpointID || max(s.Egress.Block, s.Ingress.Block) >= ShapeBlocks {
			return 0, fmt.Errorf("shape of endpoint %d: want an id of 1..%d and blocks below %d", s.ID, model.MaxEndpointID, ShapeBlocks)
		}
		for _, c := range s.classes() {
			if err := setClass(h, dev, c); err != nil {
				return 0, fmt.Errorf("endpoint %d: set class %x:%x of %s: %w", s.ID, shapeMajor, c.minor, netdev.Shape, err)
			}
		}
	}
	return dev.Attrs().Index, attachLimiters(h, dev, progs)
}

// PruneShapes removes the classes that no shape of keep needs; without any shape, filters and
// device as well. An endpoint whose packets are only marked has a shape without rates.
func PruneShapes(keep []Shape) error {
	h, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer h.Close()
	dev, err := findShapeDevice(h)
	if err != nil || dev == nil {
		return err
	}
	if len(keep) == 0 {
		return errors.Join(detachLimiters(h, func(string, ...any) {}), rtnl.DeleteLink(h, dev))
	}
	needed := make(map[uint16]bool)
	for _, s := range keep {
		for _, c := range s.classes() {
			needed[c.minor] = true
		}
	}
	have, err := rtnl.Dump(func() ([]netlink.Class, error) { return h.ClassList(dev, 0) })
	if err != nil {
		return fmt.Errorf("list classes of %s: %w", netdev.Shape, err)
	}
	// Those below others go first.
	slices.SortStableFunc(have, func(a, b netlink.Class) int { return below(b) - below(a) })
	var errs []error
	for _, c := range have {
		if _, minor := netlink.MajorMinor(c.Attrs().Handle); !needed[minor] {
			if err := h.ClassDel(c); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("delete class %s of %s: %w", netlink.HandleStr(c.Attrs().Handle), netdev.Shape, err))
			}
		}
	}
	return errors.Join(errs...)
}

// ShapeUse gives what waited in the classes of each shape: egress and ingress. Without a shaping
// device nothing did.
func ShapeUse(shapes []Shape) (egress, ingress []model.QueueUse, err error) {
	h, err := rtnl.Open()
	if err != nil {
		return nil, nil, err
	}
	defer h.Close()
	dev, err := findShapeDevice(h)
	if err != nil {
		return nil, nil, err
	}
	byMinor := make(map[uint16]*netlink.ClassStatistics)
	if dev != nil {
		have, err := rtnl.Dump(func() ([]netlink.Class, error) { return h.ClassList(dev, 0) })
		if err != nil {
			return nil, nil, fmt.Errorf("list classes of %s: %w", netdev.Shape, err)
		}
		for _, c := range have {
			_, minor := netlink.MajorMinor(c.Attrs().Handle)
			byMinor[minor] = c.Attrs().Statistics
		}
	}
	for _, s := range shapes {
		egress = append(egress, useOf(s.Egress.classes(minorEgress+uint16(s.ID)), byMinor))
		ingress = append(ingress, useOf(s.Ingress.classes(minorIngress+uint16(s.ID)), byMinor))
	}
	return egress, ingress, nil
}

// useOf sums up those of classes that have a queue.
func useOf(classes []shapeClass, byMinor map[uint16]*netlink.ClassStatistics) (use model.QueueUse) {
	for _, c := range classes {
		s := byMinor[c.minor]
		if s == nil || c.queue == 0 {
			continue
		}
		if s.Basic != nil {
			use.Bytes += s.Basic.Bytes
			use.Packets += uint64(s.Basic.Packets)
		}
		if s.Queue != nil {
			use.Dropped += uint64(s.Queue.Drops)
			use.BacklogBytes += uint64(s.Queue.Backlog)
		}
	}
	return use
}

// below is 1 for a class that is below another.
func below(c netlink.Class) int {
	if p := c.Attrs().Parent; p != netlink.HANDLE_ROOT && p&0xffff != 0 {
		return 1
	}
	return 0
}

func findShapeDevice(h *netlink.Handle) (netlink.Link, error) {
	dev, err := rtnl.FindLink(netdev.Shape)
	if err != nil || dev == nil {
		return nil, err
	}
	if dev.Type() != "ifb" || dev.Attrs().HardwareAddr.String() != netdev.ShapeMAC {
		return nil, fmt.Errorf("device %s: is not Heddle's; remove or rename it", netdev.Shape)
	}
	return dev, nil
}

// ensureShapeDevice makes the device and its qdisc unless they are there.
func ensureShapeDevice(h *netlink.Handle) (netlink.Link, error) {
	dev, err := findShapeDevice(h)
	if err != nil {
		return nil, err
	}
	if dev == nil {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = netdev.Shape
		attrs.HardwareAddr, _ = net.ParseMAC(netdev.ShapeMAC)
		attrs.TxQLen = 1000 // packets of no class, of which there should be none
		if err := h.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}); err != nil {
			return nil, fmt.Errorf("make shaping device %s (kernel option IFB): %w", netdev.Shape, err)
		}
		if dev, err = h.LinkByName(netdev.Shape); err != nil {
			return nil, fmt.Errorf("device %s: %w", netdev.Shape, err)
		}
	}
	if err := netdev.QuietIPv6(netdev.Shape); err != nil {
		return nil, err
	}
	if err := rtnl.SetUp(h, dev); err != nil {
		return nil, err
	}
	qdiscs, err := rtnl.Dump(func() ([]netlink.Qdisc, error) { return h.QdiscList(dev) })
	if err != nil {
		return nil, fmt.Errorf("list qdiscs of %s: %w", netdev.Shape, err)
	}
	for _, q := range qdiscs {
		if q.Type() == "htb" && q.Attrs().Handle == netlink.MakeHandle(shapeMajor, 0) {
			return dev, nil
		}
	}
	if err := addHTB(dev.Attrs().Index); err != nil {
		return nil, fmt.Errorf("add HTB qdisc to %s (kernel option NET_SCH_HTB): %w", netdev.Shape, err)
	}
	return dev, nil
}

// addHTB adds the qdisc with a size table that takes the Ethernet header off, and without entries:
// so a packet that is still to be cut into segments counts once, not with the headers of each.
func addHTB(ifindex int) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(ifindex),
		Handle: netlink.MakeHandle(shapeMajor, 0), Parent: netlink.HANDLE_ROOT})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("htb")))
	const tcaStab, tcaStabBase = 8, 1
	const ethernetHeader = 14
	spec := make([]byte, 24) // struct tc_sizespec
	spec[0] = 3              // cell_log
	overhead := int32(-ethernetHeader)
	binary.NativeEndian.PutUint32(spec[4:], uint32(overhead))
	stab := nl.NewRtAttr(tcaStab|unix.NLA_F_NESTED, nil)
	stab.AddRtAttr(tcaStabBase, spec)
	req.AddData(stab)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	glob := nl.TcHtbGlob{Version: 3, Rate2Quantum: 10}
	options.AddRtAttr(nl.TCA_HTB_INIT, glob.Serialize())
	req.AddData(options)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// setClass makes a class, or changes the one that is there without touching what waits in it.
func setClass(h *netlink.Handle, dev netlink.Link, c shapeClass) error {
	const quantum = 60000 // what it borrows in one turn, bytes
	ifindex := dev.Attrs().Index
	class := netlink.NewHtbClass(netlink.ClassAttrs{LinkIndex: ifindex,
		Handle: netlink.MakeHandle(shapeMajor, c.minor), Parent: netlink.MakeHandle(shapeMajor, c.parent),
	}, netlink.HtbClassAttrs{Rate: uint64(c.rate), Ceil: uint64(c.ceil),
		Buffer: uint32(burstBytes(c.rate)), Cbuffer: uint32(burstBytes(c.ceil)), Quantum: quantum})
	// The kernel's ticks have 32 bits: a slow class cannot have saved up this much.
	class.Buffer, class.Cbuffer = min(class.Buffer, math.MaxInt32), min(class.Cbuffer, math.MaxInt32)
	if err := h.ClassReplace(class); err != nil {
		return err
	}
	if c.queue == 0 {
		return nil
	}
	return setQueue(ifindex, c)
}

// setQueue gives a class a queue that is bounded in bytes.
func setQueue(ifindex int, c shapeClass) error {
	req := nl.NewNetlinkRequest(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(ifindex), Parent: netlink.MakeHandle(shapeMajor, c.minor)})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bfifo")))
	req.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, nl.Uint32Attr(uint32(c.queue)))) // struct tc_fifo_qopt
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("set queue: %w", err)
	}
	return nil
}

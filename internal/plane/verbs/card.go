package verbs

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
)

// port is the one of a card that the router uses.
const port = "ports/1"

// ReadCard says where other nodes reach the machine's RDMA device of this name, nil if nowhere.
// The router takes one of these addresses.
func ReadCard(name string) (*model.VerbsCard, error) { return readCard("/sys/class/infiniband", name) }

func readCard(dir, name string) (*model.VerbsCard, error) {
	dir = filepath.Join(dir, name, port)
	var card model.VerbsCard
	for i := 0; ; i++ {
		text, err := os.ReadFile(filepath.Join(dir, "gids", strconv.Itoa(i)))
		if errors.Is(err, fs.ErrNotExist) {
			break
		}
		if err != nil { // some drivers say so of a place that is empty
			continue
		}
		gid, err := netip.ParseAddr(strings.TrimSpace(string(text)))
		if err != nil {
			return nil, fmt.Errorf("read the addresses of %s: %w", name, err)
		}
		if !gid.IsUnspecified() && !slices.Contains(card.GIDs, gid) {
			card.GIDs = append(card.GIDs, gid)
		}
	}
	if len(card.GIDs) == 0 {
		return nil, nil
	}
	// What is more than there is room for is what the router takes last.
	slices.SortStableFunc(card.GIDs, func(a, b netip.Addr) int { return rank(a) - rank(b) })
	card.GIDs = card.GIDs[:min(len(card.GIDs), model.MaxCardGIDs)]
	text, err := os.ReadFile(filepath.Join(dir, "lid"))
	if err != nil {
		return nil, fmt.Errorf("read the address of %s: %w", name, err)
	}
	lid, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 16)
	if err != nil {
		return nil, fmt.Errorf("read the address of %s: %w", name, err)
	}
	card.LID = uint16(lid)
	return &card, nil
}

func rank(gid netip.Addr) int {
	if gid.Is4In6() {
		return 0
	}
	return 1
}

// members are the nodes and endpoints of the network, as SetTopology has told last.
type members struct {
	nodes     []model.Node
	endpoints model.Endpoints
}

// SetTopology implements plane.Network.
func (p *Plane) SetTopology(_ []netip.Prefix, nodes []model.Node, endpoints model.Endpoints) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.followGroups(endpoints.ChangedSince(p.members.endpoints))
	before := p.members.nodes
	same := len(nodes) == len(before) && (len(nodes) == 0 || &nodes[0] == &before[0])
	if p.members = (members{nodes, endpoints}); !same {
		p.askAnew() // peers without Heddle may be known as nodes now
	}
	return nil
}

// Heard implements plane.Network.
func (p *Plane) Heard(model.Node) time.Time { return time.Time{} }

// cardOf gives the card of the node that an endpoint's address lives on; nil: none is known.
func (m members) cardOf(addr netip.Addr) *model.VerbsCard {
	addr = addr.Unmap()
	for _, group := range m.endpoints {
		for _, e := range group {
			if !slices.Contains(e.Addrs, addr) {
				continue
			}
			i := slices.IndexFunc(m.nodes, func(n model.Node) bool { return n.Name == e.Node })
			if i < 0 {
				return nil
			}
			return m.nodes[i].Planes.Verbs.Card
		}
	}
	return nil
}

// tellCard says where the card is at the other end of the connection that the router is told of
// next: it believes no other place. The caller holds mu.
func (p *Plane) tellCard(l *link, number uint64, other netip.Addr) {
	if p.cfg.Device == "" {
		return // its pairs go by TCP
	}
	if card := p.members.cardOf(other); card != nil {
		p.send(l, cardMessage(number, *card), nil)
	}
}

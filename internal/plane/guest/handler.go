package guest

import (
	"errors"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/trap"
)

// Handler answers questions of one kind, which a library asks by
//
//	socket(AF_INET, SOCK_STREAM, 0, magic, question, ^magic)
//
// of which the kernel takes the first three arguments: clib/guest/ask.c. Each is answered by a
// goroutine of its own: a socket's lock may be held by a send that waits for memory.
type Handler struct {
	// Magic is the kind's number, random, so that no program has it in its registers by chance.
	Magic uint64
	Why   []*trap.Reason // all of the plane's
	// Socket is why one in another network namespace than its endpoint's gets nothing, Busy one for
	// whom there is no place.
	Socket, Busy *trap.Reason
	// Begin refuses a question of an endpoint, or says how it is answered. An error of answer means
	// that it was not.
	Begin func(id model.EndpointID) (places Places, answer func(*trap.Deferred) error, err error)
}

var _ interface {
	trap.EndpointHandler
	trap.ListenerHandler
	trap.AskedHandler
} = (*Handler)(nil)

// Places are taken by questions of an endpoint that are being answered: they may wait for its
// program in the kernel.
type Places chan struct{}

// NewPlaces gives those of an endpoint.
func NewPlaces() Places { return make(Places, 16) }

var errBusy = errors.New("too many questions at a time")

// Owns implements trap.Handler.
func (h *Handler) Owns(d *trap.Data) bool {
	return d.Arch == trap.NativeArch && d.Nr == unix.SYS_SOCKET && d.Args[3] == h.Magic && d.Args[5] == ^h.Magic
}

// Question gives the question of a call.
func Question(d trap.Data) uint64 { return d.Args[4] }

// Bound implements trap.EndpointHandler: what there is of an endpoint begins with its Attach.
func (*Handler) Bound(*trap.Endpoint) {}

// Released implements trap.EndpointHandler.
func (*Handler) Released(*trap.Endpoint) {}

// Annotations implements trap.ListenerHandler: heddle-runtime preloads the library in containers
// with this one.
func (*Handler) Annotations() []string { return []string{model.AnnotationGuest} }

// Opened implements trap.ListenerHandler.
func (*Handler) Opened(*trap.Listener) {}

// Closed implements trap.ListenerHandler.
func (*Handler) Closed(*trap.Listener) {}

// Asked implements trap.AskedHandler.
func (h *Handler) Asked(l *trap.Listener) (kind uint64, ok bool) { return h.Magic, hasLibrary(l) }

func hasLibrary(l *trap.Listener) bool { return l.Annotation(model.AnnotationGuest) == "true" }

// Reasons implements trap.Handler.
func (h *Handler) Reasons() []*trap.Reason { return h.Why }

// Answer implements trap.Handler.
func (h *Handler) Answer(c *trap.Call) error {
	if !hasLibrary(c.Listener()) {
		return c.Next()
	}
	if other, err := c.InOtherNetns(); err != nil {
		return err
	} else if other {
		return h.Socket.Because(ErrNoConnection)
	}
	places, answer, err := h.Begin(c.Endpoint.ID)
	if err != nil {
		return err
	}
	select {
	case places <- struct{}{}:
	default:
		return h.Busy.Because(errBusy)
	}
	d := c.Defer()
	go func() {
		defer func() { <-places }()
		if err := answer(d); err != nil {
			d.Fail(err)
		}
	}()
	return nil
}

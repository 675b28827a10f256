package trap

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"heddle.dev/heddle/internal/model"
)

// TestUndeliveredIsItsHandlers: a descriptor that a caller was not told of is given again by the
// handler that gave it, and not forgotten when another one looks for its own.
func TestUndeliveredIsItsHandlers(t *testing.T) {
	var l Listener
	a, b := &handling{}, &handling{}
	l.addUndelivered(7, undelivered{by: a, inode: 1, number: 3, key: 9})
	if u, ok := l.takeUndelivered(7, b); ok {
		t.Errorf("another handler's %+v", u)
	}
	if u, ok := l.takeUndelivered(7, a); !ok || u.inode != 1 || u.number != 3 {
		t.Errorf("%+v, %v", u, ok)
	}
	if _, ok := l.takeUndelivered(7, a); ok {
		t.Error("given twice")
	}
}

// closing is a handler that notes its end, and asks for an annotation.
type closing struct {
	Handler
	name   string
	closed *[]string
}

func (c closing) Close()                { *c.closed = append(*c.closed, c.name) }
func (c closing) Annotations() []string { return []string{c.name} }
func (c closing) Opened(*Listener)      {}
func (c closing) Closed(*Listener)      {}

// TestServerClosesItsHandlers: a server has its handlers from Handle on, whether it comes to listen
// or not, and takes no more once it does.
func TestServerClosesItsHandlers(t *testing.T) {
	for name, path := range map[string]string{"never listened": "", "could not listen": strings.Repeat("x", maxSocketPathBytes+1), "listened": filepath.Join(t.TempDir(), "s")} {
		t.Run(name, func(t *testing.T) {
			var closed []string
			s := New()
			s.Handle(closing{name: "first", closed: &closed})
			s.Handle(closing{name: "second", closed: &closed})
			if path != "" {
				err := s.Listen(Config{SocketPath: path, Resolve: func(string, specs.ContainerProcessState) (model.EndpointID, error) { return 0, nil }})
				if (err == nil) != (name == "listened") {
					t.Fatal(err)
				}
			}
			if name == "listened" {
				func() {
					defer func() {
						if recover() == nil {
							t.Error("a handler after Listen was taken")
						}
					}()
					s.Handle(closing{})
				}()
			}
			s.Close()
			s.Close()
			if !slices.Equal(closed, []string{"second", "first"}) || !slices.Equal(s.annotations, []string{"first", "second"}) {
				t.Errorf("closed %q, annotations %q", closed, s.annotations)
			}
		})
	}
}

package trap

import "testing"

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

package fdkeep

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/patience"
)

// Limits of the protocol.
const (
	// MaxKeyBytes bounds a key.
	MaxKeyBytes = 512
	// MaxMetaBytes bounds the metadata of one listener.
	MaxMetaBytes = 16 << 10
	// MaxKept bounds the listeners a keeper keeps; each costs it two descriptors.
	MaxKept = 1 << 15

	maxMessageBytes = 64 << 10 // holds any message within the limits above, in base64
	fdsPerEntry     = 2        // the listener and its call page
)

// exchangeTimeout bounds one exchange of a client and a keeper; of a Take, each message.
var exchangeTimeout = patience.For(5 * time.Second)

// takeTimeout bounds a Take of everything: a keeper that sends each message just in time is as slow
// as one that sends none.
var takeTimeout = patience.For(time.Minute)

// The operations a request can ask for.
const (
	opPut  = "put"
	opDrop = "drop"
	opTake = "take"
	opStop = "stop"
	// opWatch is never answered: the connection ends with the keeper.
	opWatch = "watch"
	// opServe says that the client answers the listeners' calls until it hangs up.
	opServe = "serve"
)

// request is a client's message. Put carries the listener and its page by SCM_RIGHTS, in that
// order.
type request struct {
	Op   string `json:"op"`
	Key  string `json:"key,omitempty"` // of opTake: what keys begin with
	Meta []byte `json:"meta,omitempty"`
	// Look says of opTake that the client does not answer calls, or says so by opServe.
	Look bool `json:"look,omitempty"`
}

// Settled is what a keeper has done with calls while no agent ran, since it was started.
type Settled struct {
	Continued uint64 `json:"continued,omitempty"` // that the kernel went on with
	Questions uint64 `json:"questions,omitempty"` // that were answered with EAGAIN
}

// reply is a keeper's message. Take is answered by one reply an entry, each with its descriptors,
// and then one with Last set; everything else by a single reply with Last set.
type reply struct {
	Last  bool   `json:"last"`
	Error string `json:"error,omitempty"`
	Key   string `json:"key,omitempty"`
	Meta  []byte `json:"meta,omitempty"`
	// Settled answers opServe.
	Settled
}

// check reports what is wrong with a request that came with fds descriptors.
func (r request) check(fds int) error {
	want := 0
	switch r.Op {
	case opPut:
		want = fdsPerEntry
		fallthrough
	case opDrop:
		if r.Key == "" || len(r.Key) > MaxKeyBytes {
			return fmt.Errorf("key of %d bytes: want 1 to %d", len(r.Key), MaxKeyBytes)
		}
		if len(r.Meta) > MaxMetaBytes {
			return fmt.Errorf("metadata of %d bytes: want at most %d", len(r.Meta), MaxMetaBytes)
		}
	case opTake, opStop, opWatch, opServe:
	default:
		return fmt.Errorf("operation %q: unknown", r.Op)
	}
	if fds != want {
		return fmt.Errorf("operation %q: %d descriptors, want %d", r.Op, fds, want)
	}
	return nil
}

// parseRequest reads a request that came with fds descriptors.
func parseRequest(msg []byte, fds int) (request, error) {
	var r request
	if err := json.Unmarshal(msg, &r); err != nil {
		return r, fmt.Errorf("request: %w", err)
	}
	return r, r.check(fds)
}

// send writes one message with descriptors, which stay the caller's.
func send(c *net.UnixConn, v any, fds ...int) error {
	msg, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(msg, oob, nil)
	return err
}

// receive reads one message. The descriptors are the caller's; there are none after an error.
func receive(c *net.UnixConn) (msg []byte, fds []int, err error) {
	buf := make([]byte, maxMessageBytes)
	oob := make([]byte, unix.CmsgSpace(4*fdsPerEntry))
	n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			closeAll(fds)
			fds = nil
		}
	}()
	cmsgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return nil, nil, fmt.Errorf("control message: %w", err)
	}
	for i := range cmsgs {
		more, err := unix.ParseUnixRights(&cmsgs[i])
		if err != nil {
			return nil, fds, fmt.Errorf("descriptors: %w", err)
		}
		fds = append(fds, more...)
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return nil, fds, errors.New("message longer than the protocol allows")
	}
	return buf[:n], fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // always frees the number; nothing here can lose data
	}
}

// dup duplicates descriptors, all or none.
func dup(fds ...int) (dups []int, err error) {
	for _, fd := range fds {
		d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			closeAll(dups)
			return nil, os.NewSyscallError("dup", err)
		}
		dups = append(dups, d)
	}
	return dups, nil
}

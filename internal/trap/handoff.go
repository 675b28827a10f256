package trap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Limits of a hand-off message.
const (
	// maxHandoffBytes bounds the JSON text. Kubernetes annotations alone may take 256 KiB.
	maxHandoffBytes = 1 << 20
	// maxHandoffFDs bounds the descriptors of one message. The specification needs one.
	maxHandoffFDs = 16
	// maxMetadataBytes bounds the listener's metadata, which names an endpoint.
	maxMetadataBytes = 4096
)

// parseState reads a ContainerProcessState strictly: one JSON value, nothing after it, and every
// field we rely on. Fields it does not know are allowed, as the runtime specification asks of
// readers. fds is the number of descriptors that came along; the result is the index among them of
// the listener.
func parseState(msg []byte, fds int) (state specs.ContainerProcessState, index int, err error) {
	d := json.NewDecoder(bytes.NewReader(msg))
	if err := d.Decode(&state); err != nil {
		return state, 0, fmt.Errorf("container process state: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return state, 0, errors.New("container process state: text after the JSON value")
	}
	switch {
	case state.Version == "":
		return state, 0, errors.New("container process state: ociVersion is missing")
	case state.Pid <= 0:
		return state, 0, fmt.Errorf("container process state: pid %d: want a positive number", state.Pid)
	case state.State.ID == "":
		return state, 0, errors.New("container process state: state.id is missing")
	case len(state.Metadata) > maxMetadataBytes:
		return state, 0, fmt.Errorf("container process state: metadata of %d bytes: want at most %d; shorten listenerMetadata",
			len(state.Metadata), maxMetadataBytes)
	case len(state.Fds) != fds:
		return state, 0, fmt.Errorf("container process state: fds names %d descriptors, %d came", len(state.Fds), fds)
	}
	index = -1
	for i, name := range state.Fds {
		if name != specs.SeccompFdName {
			continue
		}
		if index >= 0 {
			return state, 0, fmt.Errorf("container process state: fds names %q twice", name)
		}
		index = i
	}
	if index < 0 {
		return state, 0, fmt.Errorf("container process state: fds lacks %q", specs.SeccompFdName)
	}
	return state, index, nil
}

// readHandoff reads one hand-off from a runtime. The listener's descriptor is the caller's to
// close; all others that came are closed. The caller sets the connection's deadline.
func readHandoff(c *net.UnixConn) (state specs.ContainerProcessState, fd int, err error) {
	msg, fds, err := readMessage(c)
	keep := -1
	defer func() {
		for i, f := range fds {
			if i != keep {
				closeFD(f)
			}
		}
	}()
	if err != nil {
		return state, -1, err
	}
	state, index, err := parseState(msg, len(fds))
	if err != nil {
		return state, -1, err
	}
	if !isNotifyFD(fds[index]) {
		return state, -1, fmt.Errorf("hand-off: %q is not a seccomp listener", specs.SeccompFdName)
	}
	keep = index
	return state, fds[index], nil
}

// errHungUp is what came of a connection that nothing was said on: heddle-runtime asks so whether
// somebody listens.
var errHungUp = errors.New("hand-off: nothing came")

// readMessage reads from a stream until it has a whole JSON value or the stream ends. Runtimes send
// one message and hang up, but neither is promised. The descriptors are the caller's, also after an
// error.
func readMessage(c *net.UnixConn) (msg []byte, fds []int, err error) {
	buf := make([]byte, 64<<10)
	oob := make([]byte, unix.CmsgSpace(4*maxHandoffFDs))
	for {
		n, oobn, flags, _, err := c.ReadMsgUnix(buf, oob)
		more, ferr := descriptors(oob[:oobn])
		fds = append(fds, more...)
		msg = append(msg, buf[:n]...)
		switch {
		case ferr != nil:
			return nil, fds, ferr
		case flags&unix.MSG_CTRUNC != 0 || len(fds) > maxHandoffFDs:
			return nil, fds, fmt.Errorf("hand-off: more than %d descriptors", maxHandoffFDs)
		case len(msg) > maxHandoffBytes:
			return nil, fds, fmt.Errorf("hand-off: longer than %d bytes", maxHandoffBytes)
		case errors.Is(err, io.EOF) || err == nil && n == 0 && oobn == 0:
			if len(msg) == 0 && len(fds) == 0 {
				return nil, nil, errHungUp
			}
			return msg, fds, nil
		case err != nil:
			return nil, fds, fmt.Errorf("hand-off: %w", err)
		}
		// Only a text that ends in a brace can be whole; do not parse the others again and again.
		if t := bytes.TrimRight(msg, " \t\r\n"); len(t) > 0 && t[len(t)-1] == '}' && json.Valid(t) {
			return msg, fds, nil
		}
	}
}

// descriptors takes the file descriptors out of control messages. Those it found are returned even
// with an error.
func descriptors(oob []byte) (fds []int, err error) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("hand-off: control message: %w", err)
	}
	for i := range msgs {
		if msgs[i].Header.Level != unix.SOL_SOCKET || msgs[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		more, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return fds, fmt.Errorf("hand-off: descriptors: %w", err)
		}
		fds = append(fds, more...)
	}
	return fds, nil
}

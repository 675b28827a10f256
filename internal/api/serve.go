package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrInUse is wrapped by Listen's error when another agent answers on the socket.
var ErrInUse = errors.New("another agent answers there")

// Limits of the server. The API is local and its requests small; the read limits only keep a stuck
// client from holding a connection for ever.
const (
	shutdownTimeout   = 5 * time.Second
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 30 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
	probeTimeout      = time.Second
	probeEvery        = 20 * time.Millisecond
	// maxSocketPath is sizeof(sockaddr_un.sun_path) without the terminating NUL.
	maxSocketPath = 107
)

// Serve listens on socketPath and serves handler until ctx ends; see Listen and ServeOn.
func Serve(ctx context.Context, socketPath string, handler http.Handler) error {
	ln, err := Listen(socketPath)
	if err != nil {
		return err
	}
	return ServeOn(ctx, ln, handler)
}

// Listen makes the API socket with mode 0600, and its folder if need be. The socket of an agent
// that ended without removing it is replaced; if an agent still answers there the error wraps
// ErrInUse. Closing the listener removes the socket.
func Listen(socketPath string) (ln net.Listener, err error) {
	if len(socketPath) > maxSocketPath || !filepath.IsAbs(socketPath) {
		return nil, fmt.Errorf("api socket %q: want an absolute path of at most %d bytes", socketPath, maxSocketPath)
	}
	dir := filepath.Dir(socketPath)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("api socket %s: %w", socketPath, err)
	}
	unlock, err := lockFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("api socket %s: %w", socketPath, err)
	}
	defer unlock()
	if err := removeStale(socketPath); err != nil {
		return nil, fmt.Errorf("api socket %s: %w", socketPath, err)
	}
	// bind() gives the file the mode that the socket has by then, so no other mode is ever seen.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var chmodErr error
		if err := c.Control(func(fd uintptr) { chmodErr = unix.Fchmod(int(fd), 0o600) }); err != nil {
			return err
		}
		return chmodErr
	}}
	ln, err = lc.Listen(context.Background(), "unix", socketPath)
	if err != nil {
		return nil, fmt.Errorf("api socket %s: %w", socketPath, err)
	}
	return ln, nil
}

// lockFolder keeps two agents that start at once from both taking the same socket for stale. The
// lock is on the folder itself, so that no lock file is left behind.
func lockFolder(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close() // read-only: nothing to lose
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return func() { _ = f.Close() }, nil
}

// awaitRefusal connects until that fails, and gives why. nil: it does not fail for some time. The
// threads of an agent that was killed end one after the other, and the last one closes the socket.
func awaitRefusal(socketPath string) error {
	ticker := time.NewTicker(probeEvery)
	defer ticker.Stop()
	for deadline := time.Now().Add(probeTimeout); ; <-ticker.C {
		c, err := net.DialTimeout("unix", socketPath, probeTimeout)
		if err != nil {
			return err
		}
		_ = c.Close() // it was opened only to see whether somebody answers
		if time.Now().After(deadline) {
			return nil
		}
	}
}

// removeStale removes socketPath if it is a socket on which nobody listens.
func removeStale(socketPath string) error {
	fi, err := os.Lstat(socketPath)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.Mode().Type() != fs.ModeSocket:
		return errors.New("there is a file that is no socket; remove it or choose another path")
	}
	err = awaitRefusal(socketPath)
	if err == nil {
		return fmt.Errorf("%w: stop it first, or choose another path", ErrInUse)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		// EAGAIN, for one, means a listener with a full queue.
		return fmt.Errorf("%w (or cannot be told not to): %w", ErrInUse, err)
	}
	return os.Remove(socketPath)
}

// ServeOn serves handler on ln until ctx ends, then lets running requests finish for some seconds
// and closes ln. It returns nil after an orderly end.
func ServeOn(ctx context.Context, ln net.Listener, handler http.Handler) error {
	srv := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve api on %s: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	if err := srv.Shutdown(grace); err != nil {
		// Requests that outlast the grace are cut off: their handlers see a cancelled context.
		_ = srv.Close()
	}
	<-served
	return nil
}

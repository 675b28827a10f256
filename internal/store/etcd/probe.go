package etcd

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// probeTime bounds one step of a probe.
const probeTime = 500 * time.Millisecond

// probe finds out what stands between this node and etcd, which gRPC hides behind "deadline
// exceeded".
func (s *Store) probe(ctx context.Context, err error) string {
	for _, e := range s.endpoints {
		addr, parseErr := hostPort(e)
		if parseErr != nil {
			return parseErr.Error()
		}
		dialer := net.Dialer{Timeout: probeTime}
		conn, dialErr := dialer.DialContext(ctx, "tcp", addr)
		if dialErr != nil {
			return dialErr.Error()
		}
		refused := s.probeTLS(conn, strings.HasPrefix(e, "https:"))
		if closeErr := conn.Close(); closeErr != nil && refused == "" && !errors.Is(closeErr, net.ErrClosed) {
			return closeErr.Error()
		}
		if refused != "" {
			return refused
		}
	}
	return "it accepts connections, but: " + err.Error()
}

// probeTLS says what is amiss with the handshake on conn, with its remedy; "" if nothing is.
// secure: the endpoint is an https one.
func (s *Store) probeTLS(conn net.Conn, secure bool) string {
	_ = conn.SetDeadline(time.Now().Add(probeTime)) // a connection that has none yet
	if !secure {
		// Whether it is a TLS server is all that is asked.
		c := tls.Client(conn, &tls.Config{InsecureSkipVerify: true})
		if err := c.Handshake(); err == nil || isAlert(err) {
			return "it speaks TLS: give https:// and --join-file, or --store-ca, --store-cert and --store-key"
		}
		return ""
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if s.options.tls != nil {
		cfg = s.options.tls.Clone()
	}
	cfg.NextProtos = []string{"h2"}
	if host, _, err := net.SplitHostPort(conn.RemoteAddr().String()); err == nil && cfg.ServerName == "" {
		cfg.ServerName = host
	}
	c := tls.Client(conn, cfg)
	err := c.Handshake()
	if err == nil {
		// With TLS 1.3 the server's opinion of our certificate comes after the handshake. A server
		// that is content says nothing, or begins HTTP/2.
		_, err = c.Read(make([]byte, 1))
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = nil
		}
	}
	return explainTLS(err)
}

// isAlert reports whether the other end has refused a handshake. crypto/tls has no type for that.
func isAlert(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "remote error"
}

// explainTLS gives the remedy for a handshake that failed.
func explainTLS(err error) string {
	var (
		unknown x509.UnknownAuthorityError
		invalid x509.CertificateInvalidError
		name    x509.HostnameError
		record  tls.RecordHeaderError
	)
	switch {
	case err == nil:
		return ""
	case errors.As(err, &unknown):
		return "its certificate is signed by an authority that is not trusted here: copy the network's join file anew (--join-file), or give its authority by --store-ca, and restart the agent"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "its certificate has expired, or the clock here is wrong (" + err.Error() + "): restart the first node's agent, or renew the certificate of your etcd"
	case errors.As(err, &name):
		return err.Error() + ": give --store an address that is in the certificate"
	case errors.As(err, &record), errors.Is(err, io.EOF):
		return "it does not speak TLS: give http:// if it is an etcd without it"
	case isAlert(err) && strings.Contains(err.Error(), "expired certificate"):
		return "it says that this node's certificate has expired, or its clock is wrong (" + err.Error() + "): set the clock of the store's node, put a new certificate where --store-cert and --store-key say, or copy the network's join file anew (--join-file) and restart the agent"
	case isAlert(err):
		return "it refuses this node's certificate (" + err.Error() + "): put a pair that it accepts where --store-cert and --store-key say, or copy the network's join file anew (--join-file) and restart the agent"
	}
	return err.Error()
}

// explainRefusal gives the remedy for an etcd with users, and for one that is full; "" if err is
// nothing of the kind.
func explainRefusal(err error) string {
	switch {
	case errors.Is(err, ErrFull):
		return "etcd is full, and takes no change: compact it, defragment every member, then disarm its alarm (etcdctl compact, defrag, alarm disarm)"
	case errors.Is(err, rpctypes.ErrUserEmpty), errors.Is(err, rpctypes.ErrAuthNotEnabled):
		return "check --store-user"
	case errors.Is(err, rpctypes.ErrAuthFailed):
		return "check --store-user and --store-password-file"
	case errors.Is(err, rpctypes.ErrPermissionDenied):
		return "give the user of --store-user the right to read and write keys below /heddle/"
	}
	return ""
}

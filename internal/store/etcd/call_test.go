package etcd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"heddle.dev/heddle/internal/store"
)

// unanswered are ways in which a request gets no answer: of a member that is killed, that has no
// majority, and some that nobody has thought of.
var unanswered = []error{
	status.Error(codes.Unavailable, "connection refused"),
	status.Error(codes.Internal, "server closed the stream without sending trailers"),
	status.Error(codes.Internal, "stream terminated by RST_STREAM with error code: INTERNAL_ERROR"),
	status.Error(codes.Unknown, "context deadline exceeded"), // a member without a majority ends it a moment before its client
	status.Error(codes.Unknown, "something else"),
	status.Error(codes.Canceled, "the transport is closing"),
	rpctypes.Error(rpctypes.ErrGRPCNoLeader),
	rpctypes.Error(rpctypes.ErrGRPCRequestTooManyRequests),
	io.ErrUnexpectedEOF,
	context.DeadlineExceeded,
}

// TestOnlyAnswersAreFinal: whatever keeps a request from being answered, it is made again, and when
// time is up the error says that it may be. What etcd, or this package, has decided is not asked
// again.
func TestOnlyAnswersAreFinal(t *testing.T) {
	s := &Store{options: optionsOf([]Option{WithTimeout(30 * time.Second)}), endpoints: []string{"https://127.0.0.1:1", "https://127.0.0.1:2"}, ctx: t.Context()}
	try := func(first error) (asked int, err error) {
		call, cancel := s.bound(t.Context())
		defer cancel()
		err = s.try(call, func(context.Context) error {
			if asked++; asked == 1 {
				return first
			}
			return nil
		})
		return asked, err
	}
	for _, trouble := range unanswered {
		if asked, err := try(trouble); err != nil || asked != 2 {
			t.Errorf("%v: asked %d times: %v", trouble, asked, err)
		}
		var unreachable *UnreachableError
		if err := s.explain(t.Context(), "read x", trouble); !errors.As(err, &unreachable) {
			t.Errorf("explained as %v, want a store that does not answer", err)
		}
		call, cancel := s.bound(t.Context())
		cancel()
		if err := s.try(call, func(context.Context) error { return trouble }); !errors.Is(err, trouble) {
			t.Errorf("when time is up: %v", err)
		}
	}
	for _, answer := range []error{rpctypes.Error(rpctypes.ErrGRPCCompacted), rpctypes.Error(rpctypes.ErrGRPCPermissionDenied),
		rpctypes.Error(rpctypes.ErrGRPCNoSpace),
		fmt.Errorf("wrapped: %w", rpctypes.Error(rpctypes.ErrGRPCRequestTooLarge)), &refusal{errConflict}} {
		if asked, err := try(answer); !errors.Is(err, answer) || asked != 1 {
			t.Errorf("%v: asked %d times: %v", answer, asked, err)
		}
		var unreachable *UnreachableError
		if err := s.explain(t.Context(), "read x", answer); errors.As(err, &unreachable) {
			t.Errorf("explained as %v, want what etcd said", err)
		}
	}
	if err := s.explain(t.Context(), "write x", rpctypes.Error(rpctypes.ErrGRPCNoSpace)); !strings.Contains(err.Error(), "alarm disarm") {
		t.Errorf("a full etcd is explained as %v", err)
	}
}

// TestAnswersLost loses the answers of transactions that etcd has carried out, each in another way,
// as when it is killed: every operation is as if it had been answered.
func TestAnswersLost(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	initNetwork(t, s, store.Network{})
	lost, next := 0, 0
	flaky, err := clientv3.New(clientv3.Config{Endpoints: s.client.Endpoints(), TLS: s.options.tls, Context: s.ctx, Logger: s.client.GetLogger(),
		DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any,
			conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoke(ctx, method, req, reply, conn, opts...)
			if next++; err == nil && next%3 == 0 { // once that of what an operation reads, once that of what it writes
				lost++
				return unanswered[lost%len(unanswered)]
			}
			return err
		})}})
	if err != nil {
		t.Fatal(err)
	}
	sound := s.client
	s.client = flaky
	t.Cleanup(func() { _ = flaky.Close(); s.client = sound })
	for range 2 * len(unanswered) {
		join(t, s, node(1))
		put(t, s, endpoint("n1", 1, "10.244.0.2"))
		if err := s.DeleteEndpoint(t.Context(), "n1", 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.LeaveNode(t.Context(), "n1"); err != nil {
		t.Fatal(err)
	}
	if lost < len(unanswered) {
		t.Errorf("%d answers lost", lost)
	}
	s.client = sound
	if resp, err := s.get(t.Context(), s.keys.Root(), clientv3.WithPrefix()); err != nil || len(resp.Kvs) != 1 {
		t.Errorf("left behind beside the network's key: %v, %v", resp.Kvs, err)
	}
}

// TestFirstCallMayTakeLonger: a server that begins to answer after the time of a call, as one does
// that has just started on a slow machine, is waited for, and the log says so; the calls after that
// have their usual time.
func TestFirstCallMayTakeLonger(t *testing.T) {
	t.Parallel()
	s := embedded(t, EmbeddedConfig{})
	at, err := hostPort(s.Endpoints()[0])
	if err != nil {
		t.Fatal(err)
	}
	const usual = 50 * time.Millisecond
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and says nothing until relay does
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	scheme, _, _ := strings.Cut(s.Endpoints()[0], ":")
	endpoint := []string{scheme + "://" + silent.Addr().String()}
	if _, err := Connect(t.Context(), endpoint, s.id, WithTimeout(usual), WithTLS(s.options.tls)); err == nil {
		t.Fatal("connected to what says nothing")
	}
	said := &tells{until: "has not answered yet", heard: make(chan struct{})}
	go func() {
		<-said.heard
		relayTo(silent, at)
	}()
	late, err := Connect(t.Context(), endpoint, s.id, WithTimeout(usual), withFirstCall(time.Minute), WithTLS(s.options.tls),
		WithLogger(slog.New(slog.NewTextHandler(said, nil))))
	if err != nil {
		t.Fatal(err)
	}
	defer closeStore(t, late)
	if late.options.timeout != usual {
		t.Errorf("the calls after the first may take %s, want %s", late.options.timeout, usual)
	}
}

// tells is a log that says when it has a text.
type tells struct {
	until string
	once  sync.Once
	heard chan struct{}
}

func (l *tells) Write(b []byte) (int, error) {
	if strings.Contains(string(b), l.until) {
		l.once.Do(func() { close(l.heard) })
	}
	return len(b), nil
}

// relayTo carries what connects to l to the server at an address, until l is closed.
func relayTo(l net.Listener, at string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			to, err := net.Dial("tcp", at)
			if err != nil {
				return
			}
			defer to.Close()
			go func() {
				_, _ = io.Copy(to, c)
				_ = to.Close()
			}()
			_, _ = io.Copy(c, to)
		}()
	}
}

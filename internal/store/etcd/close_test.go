package etcd

import (
	"context"
	"sync"
	"testing"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// TestCloseWithClientsThatComeBack closes embedded stores whose clients open each watch again as
// soon as it ends, as the agents of other nodes do. None may keep a store from ending; that is a
// matter of chance, so there are some.
func TestCloseWithClientsThatComeBack(t *testing.T) {
	t.Parallel()
	for range 3 {
		closeWhileClientsComeBack(t)
	}
}

func closeWhileClientsComeBack(t *testing.T) {
	t.Helper()
	a, cfg := secure(t)
	s := embedded(t, cfg, WithTLS(joinTLS(t, a)))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var open sync.WaitGroup
	for range 4 {
		c := connect(t, s, WithTLS(joinTLS(t, a)))
		watches := pb.NewWatchClient(c.client.ActiveConnection())
		for range 16 {
			open.Add(1)
			once := sync.OnceFunc(open.Done)
			wg.Go(func() {
				for ctx.Err() == nil {
					stream, err := watches.Watch(ctx)
					if err == nil {
						once()
						_, _ = stream.Recv() // until the server ends it
					}
				}
			})
		}
	}
	open.Wait()
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		cancel() // or it never ends
		t.Error("the store does not close")
		<-closed
	}
}

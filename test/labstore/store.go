// Package labstore is a client of the lab's store. It is apart from package lab because an etcd
// client is large.
package labstore

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/trust"
	"heddle.dev/heddle/test/lab"
)

// Open gives a client of the lab's store, with the rights of a node. The caller closes it.
func Open(t testing.TB) (*clientv3.Client, error) {
	config, err := storeConfig(t)
	if err != nil {
		return nil, err
	}
	dial := func(ctx context.Context, addr string) (conn net.Conn, err error) {
		nerr := netns.Do(netns.Path(lab.Name+"-n1"), func() error {
			var d net.Dialer
			conn, err = d.DialContext(ctx, "tcp", addr)
			return err
		})
		return conn, errors.Join(nerr, err)
	}
	config.DialOptions = []grpc.DialOption{grpc.WithContextDialer(dial)}
	return clientv3.New(config)
}

// storeConfig says how the lab's store is reached: n1's, or a cluster.
func storeConfig(t testing.TB) (clientv3.Config, error) {
	join, err := trust.ReadJoin(lab.NodeFile("n1", "join.pem"))
	if err == nil {
		return clientv3.Config{Endpoints: []string{join.Store}, TLS: join.TLS()}, nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return clientv3.Config{}, err
	}
	info := transport.TLSInfo{TrustedCAFile: File("ca-crt.pem"), CertFile: File("store.pem"), KeyFile: File("store.pem")}
	secure, err := info.ClientConfig()
	if err != nil {
		return clientv3.Config{}, err
	}
	var members []string
	for _, m := range Members {
		members = append(members, MemberURL(t, m))
	}
	return clientv3.Config{Endpoints: members, TLS: secure}, nil
}

// Members are the members of the store's cluster of a lab with --store-members 3.
var Members = []string{"s1", "s2", "s3"}

// File is one of the files by which agents reach the members.
func File(name string) string { return "/run/heddle/lab/" + lab.Name + "/store/" + name }

// MemberURL is where a member of the cluster answers.
func MemberURL(t testing.TB, member string) string {
	t.Helper()
	// IPv4 comes first; on an IPv6 underlay there is none.
	at, err := netip.ParsePrefix(strings.Fields(lab.Shell(t, lab.Name+"-"+member, "ip -o addr show scope global"))[3])
	if err != nil {
		t.Fatal(err)
	}
	return "https://" + netip.AddrPortFrom(at.Addr(), 2379).String()
}

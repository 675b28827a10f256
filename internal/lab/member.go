package lab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"heddle.dev/heddle/internal/netns"
	"heddle.dev/heddle/internal/trust"
)

// membersReady bounds how long store members may take to elect a leader.
const membersReady = 30 * time.Second

// Ports of a store member.
const (
	memberPort     = 2379
	memberPeerPort = 2380
)

// storeDir has the certificates of the store members.
func (l Lab) storeDir() string { return filepath.Join(l.Dir(), "store") }

func (l Lab) storeFiles() trust.ServerFiles { return trust.ServerFilesIn(l.storeDir()) }

func (s State) memberURL(member string, port uint16) string {
	return "https://" + netip.AddrPortFrom(s.fabricAddr(s.memberHost(member)), port).String()
}

// memberURLs gives where the store members serve clients.
func (s State) memberURLs() (urls []string) {
	for _, m := range s.members() {
		urls = append(urls, s.memberURL(m, memberPort))
	}
	return urls
}

// startMembers starts the store members that do not run, and waits until they have a leader.
func (u *up) startMembers(ctx context.Context) error {
	program, err := exec.LookPath("etcd")
	if err != nil {
		return fmt.Errorf("etcd is not installed (Debian: etcd-server): %w", err)
	}
	authority, err := trust.OpenAuthority(u.lab.storeDir())
	if err != nil {
		return err
	}
	if _, err := os.Stat(u.lab.storeFiles().CertAndKey); errors.Is(err, os.ErrNotExist) {
		var addrs []netip.Addr
		for _, m := range u.state.members() {
			addrs = append(addrs, u.state.fabricAddr(u.state.memberHost(m)))
		}
		if _, err := authority.Server(addrs...); err != nil {
			return err
		}
	}
	for _, m := range u.state.members() {
		if err := u.startMember(program, m); err != nil {
			return fmt.Errorf("%s: %w", m, err)
		}
	}
	for _, m := range u.state.members() {
		if err := u.awaitMember(ctx, m); err != nil {
			return fmt.Errorf("%s: %w", m, err)
		}
	}
	return nil
}

func (u *up) startMember(program, member string) error {
	dir, group := u.lab.nodeDir(member), filepath.Join(u.groups.v2, u.lab.cgroup(), member)
	if pids, err := processes(group); err != nil || len(pids) > 0 {
		return err // it runs
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	logFile, err := os.OpenFile(filepath.Join(dir, "etcd.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer logFile.Close()
	_, err = u.lab.startIn(member, group, logFile, append([]string{program}, u.lab.memberArgs(u.state, member)...))
	return err
}

// memberArgs is a store member's command line.
func (l Lab) memberArgs(s State, member string) []string {
	var cluster []string
	for _, m := range s.members() {
		cluster = append(cluster, m+"="+s.memberURL(m, memberPeerPort))
	}
	files := l.storeFiles()
	client, peer := s.memberURL(member, memberPort), s.memberURL(member, memberPeerPort)
	return []string{
		"--name", member, "--data-dir", filepath.Join(l.nodeDir(member), "data"), "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", strings.Join(cluster, ","), "--initial-cluster-token", l.name,
		"--client-cert-auth", "--trusted-ca-file", files.CA, "--cert-file", files.CertAndKey, "--key-file", files.CertAndKey,
		"--peer-client-cert-auth", "--peer-trusted-ca-file", files.CA, "--peer-cert-file", files.CertAndKey, "--peer-key-file", files.CertAndKey,
	}
}

// awaitMember waits until a store member says that it is healthy: it has a leader.
func (u *up) awaitMember(ctx context.Context, member string) error {
	files := u.lab.storeFiles()
	settings, err := trust.ClientFiles{CA: files.CA, Cert: files.CertAndKey, Key: files.CertAndKey}.TLS()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, membersReady)
	defer cancel()
	for {
		err := u.askMember(ctx, member, settings)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("no health after %s: %w%s", membersReady, err, tail(filepath.Join(u.lab.nodeDir(member), "etcd.log")))
		case <-time.After(killPoll):
		}
	}
}

func (u *up) askMember(ctx context.Context, member string, settings *tls.Config) error {
	// Connections are made in the member's namespace, whatever goroutine makes them.
	dial := func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = netns.Do(u.lab.netns(member), func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: settings, DialContext: dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.state.memberURL(member, memberPort)+"/health", nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	_ = resp.Body.Close() // the status says it
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("health: %s", resp.Status)
	}
	return nil
}

package programs

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
)

// cmPrograms are Debian's programs that connect by the image's own librdmacm: what the server runs,
// and the client but for the server's address.
var cmPrograms = [][2]string{
	{"rping -s -C 20", "rping -c -C 20 -a"},
	{"ucmatose -C 10", "ucmatose -C 10 -s"},
	{"udaddy", "udaddy -s"},
	{"rdma_server", "rdma_client -s"},
	{"rdma_xserver -c r", "rdma_xclient -c r -s"},
	{"ib_send_bw -R -F -n 200", "ib_send_bw -R -F -n 200"},
	{"ib_write_bw -R -F -n 200", "ib_write_bw -R -F -n 200"},
	{"rstream -S 65536 -C 100", "rstream -S 65536 -C 100 -s"},
}

// preload has a program use rsocket where it says TCP.
const preload = "env LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so.1 "

// preloaded are Debian's programs for TCP that librspreload carries: the list of
// docs/howto/rdma.md. Where rsocket refuses what they ask of socket() it has TCP do it, and says
// nothing: that the server is seen to listen by RDMA-CM shows that it does not.
func preloaded(t *testing.T) (programs [][2]string) {
	dir, err := filepath.Abs("testdata/rsocket")
	testutil.NoError(t, err)
	serve, fetch := "sh "+dir+"/serve.sh", "sh "+dir+"/fetch.sh "
	for _, p := range [][2]string{
		{"iperf -s -P 1", "iperf -n 8M -c"},
		{"NPtcp -u 4 -n 20", "NPtcp -u 4 -n 20 -h"},
		{serve, fetch + "wget"},
		{serve, fetch + "curl"},
	} {
		programs = append(programs, [2]string{preload + p[0], preload + p[1]})
	}
	return programs
}

// rsocketLimits is what limits.py finds of librdmacm and librspreload, and the page says of them: if
// it finds less, the page is to change, and programs are to be tried again.
const rsocketLimits = `a socket's descriptor: /dev/null
epoll: Operation not permitted
with SOCK_CLOEXEC: socket
accept4 is the C library's
a wait with a time, after one that is over: does not end
`

// refused matches what programs say of an event with an errno, which no later attempt changes.
var refused = regexp.MustCompile(`RDMA_CM_EVENT_UNREACHABLE, error:? -`)

// tooLate matches what a client of perftest says that has connected for what the two tell each
// other, and did not find the server listening for the other connection, as under load. That server
// takes the first connection of the next client for the second one, and both wait for ever.
// By datagrams nobody listens is a status, 1, and a listener that goes another, 2.
var tooLate = regexp.MustCompile(`RDMA_CM_EVENT_REJECTED|Unexpected CM event|RDMA_CM_EVENT_UNREACHABLE; error: [12]\b`)

// connect runs a server in n1/c1 and a client, which begins anew as long as nobody listens. Of
// perftest both do so. Under librspreload, where iperf ends well then, it begins when one listens.
func (l verbsLab) connect(client, serve, connect string) (served, said string, err error) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	defer cancel()
	addr, err := l.heddle(ctx, "lab", "ip", "n1/c1").Output()
	testutil.NoError(l, err)
	words := append(strings.Fields(connect), strings.TrimSpace(string(addr)))
	isPerftest := strings.HasPrefix(serve, "ib_")
	for {
		served, said, err = l.connectOnce(ctx, client, strings.Fields(serve), words, isPerftest || strings.HasPrefix(serve, preload))
		if err == nil || ctx.Err() != nil || !isPerftest || !tooLate.MatchString(said) {
			return served, said, err
		}
	}
}

func (l verbsLab) mustConnect(client string, p [2]string) {
	l.Helper()
	if served, said, err := l.connect(client, p[0], p[1]); err != nil {
		l.Errorf("%s between n1/c1 and %s: %v\n--- n1/c1\n%s\n--- %s\n%s", p[1], client, err, served, client, said)
	}
}

// connectOnce does so with one server; with one client, too, if that is to wait until the server
// listens.
func (l verbsLab) connectOnce(ctx context.Context, client string, serve, connect []string, waits bool) (served, said string, err error) {
	l.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if waits { // the last server may be about to end
		testutil.NoError(l, l.listens(ctx, false, nil))
	}
	server := l.exec(ctx, "n1/c1", serve)
	var out strings.Builder
	server.Stdout, server.Stderr = &out, &out
	testutil.NoError(l, server.Start())
	ended := make(chan error, 1)
	go func() { ended <- server.Wait() }()
	if waits {
		testutil.NoError(l, l.listens(ctx, true, ended))
	}
	for {
		answer, err := l.exec(ctx, client, connect).CombinedOutput()
		said = string(answer)
		select {
		case served := <-ended:
			return out.String(), said, errorsOf(err, served)
		default: // it may not have listened yet
		}
		if err == nil || ctx.Err() != nil || waits || refused.MatchString(said) {
			if err != nil {
				cancel()
			}
			return out.String(), said, errorsOf(err, <-ended)
		}
	}
}

// listens waits until a program of n1/c1 listens by RDMA-CM, or none, and at most until one has
// ended.
func (l verbsLab) listens(ctx context.Context, want bool, ended <-chan error) error {
	l.Helper()
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		state, err := l.rdma("n1")
		testutil.NoError(l, err)
		is := func(id api.CMID) bool { return strings.HasSuffix(id.Endpoint, "c1") && id.State == "listening" }
		if slices.ContainsFunc(state.CMIDs, is) == want {
			return nil
		}
		select {
		case err := <-ended:
			return fmt.Errorf("it ended before it listened: %w", err)
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

func errorsOf(first, second error) error {
	if first != nil {
		return first
	}
	return second
}

// multicast has mckey send from n2/c1 to a group until a member on its node and one on the other
// have got eight messages.
func (l verbsLab) multicast() {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), testutil.WaitTimeout)
	defer cancel()
	words := func(name string) []string {
		addr, err := l.heddle(ctx, "lab", "ip", name).Output()
		testutil.NoError(l, err)
		return []string{"mckey", "-m", "239.1.2.3", "-C", "8", "-b", strings.TrimSpace(string(addr))}
	}
	members := []string{"n1/c1", "n2/c2"}
	said := make([]strings.Builder, len(members))
	ended := make(chan error, len(members))
	for i, name := range members {
		member := l.exec(ctx, name, words(name))
		member.Stdout, member.Stderr = &said[i], &said[i]
		testutil.NoError(l, member.Start())
		go func() { ended <- member.Wait() }()
	}
	send := append(words("n2/c1"), "-s")
	// Nobody sees from outside who has joined, and what is sent before is lost.
	for left := len(members); left > 0; {
		if out, err := l.exec(ctx, "n2/c1", send).CombinedOutput(); err != nil {
			l.Fatalf("n2/c1: %v\n%s--- %v\n%s\n%s", err, out, members, &said[0], &said[1])
		}
		select {
		case err := <-ended:
			if left--; err != nil {
				l.Fatalf("%v: %v\n%s\n%s", members, err, &said[0], &said[1])
			}
		default:
		}
	}
}

// TestVerbsCM: Debian's own programs that use RDMA-CM and rsocket, as they are, on one node and
// between two, and not where policy forbids it.
func TestVerbsCM(t *testing.T) {
	l := newVerbsLab(t)
	for _, client := range []string{"n1/c2", "n2/c1"} {
		for _, p := range slices.Concat(cmPrograms, preloaded(t)) {
			l.mustConnect(client, p)
		}
	}
	limits, err := filepath.Abs("testdata/rsocket/limits.py")
	testutil.NoError(t, err)
	if out, err := l.exec(t.Context(), "n1/c1", strings.Fields(preload+python3+" "+limits)).CombinedOutput(); err != nil || string(out) != rsocketLimits {
		t.Errorf("limits of rsocket: %v\n%s", err, out)
	}
	l.multicast()
	file := filepath.Join(t.TempDir(), "policy.yaml")
	testutil.NoError(t, os.WriteFile(file, []byte(noVerbs), 0o600))
	if out, err := l.heddle(t.Context(), "policy", "apply", "--node", "n1", "-f", file).CombinedOutput(); err != nil {
		t.Fatalf("heddle policy apply: %v\n%s", err, out)
	}
	for _, client := range []string{"n1/c2", "n2/c1"} {
		served, said, err := l.connect(client, "rping -s -C 20", "rping -v -c -C 20 -a")
		if err == nil || strings.Contains(served+said, "ping data:") || !refused.MatchString(said) {
			t.Errorf("ids of %s connect that policy forbids: %v\n%s\n%s", client, err, served, said)
		}
	}
}

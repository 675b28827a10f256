package clib_test

import (
	"bytes"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// rdmaCM is the command of clib/verbs/protocol.h.
const rdmaCM = 24

// cmPrograms are Debian's programs that connect by the image's own librdmacm, from packages
// rdmacm-utils and perftest: what the server runs, and the client but for the server's address.
var cmPrograms = []struct{ name, server, client string }{
	{"rping", "rping -s -a 0.0.0.0 -C 20", "rping -c -C 20 -a"},
	{"ucmatose", "ucmatose -C 10", "ucmatose -C 10 -s"},
	{"ucmatose migrated", "ucmatose -m", "ucmatose -m -s"},
	{"udaddy", "udaddy", "udaddy -s"},
	{"rdma_client", "rdma_server", "rdma_client -s"},
	{"rdma_xclient", "rdma_xserver -c r", "rdma_xclient -c r -s"},
	{"ib_send_bw", "ib_send_bw -R -F -n 200", "ib_send_bw -R -F -n 200"},
	{"ib_write_bw", "ib_write_bw -R -F -n 200", "ib_write_bw -R -F -n 200"},
	{"ib_send_lat UD", "ib_send_lat -R -F -c UD -n 200", "ib_send_lat -R -F -c UD -n 200"},
	{"rstream", "rstream -S 65536 -C 50", "rstream -S 65536 -C 50 -s"},
	{"rstream nonblocking", "rstream -T n -S 4096 -C 50", "rstream -T n -S 4096 -C 50 -s"},
	{"riostream", "riostream -S 4096 -C 50", "riostream -S 4096 -C 50 -s"},
}

// tooLate matches what a client says that finds nobody who listens, by connections and by datagrams:
// those have a status in the place of a rejection.
var tooLate = regexp.MustCompile(`REJECTED|Unexpected CM event|RDMA_CM_EVENT_UNREACHABLE; error: [12]\b`)

// connectByCM runs a server, and a client once it listens. If the client gives up both begin anew:
// one of perftest connects for what the two tell each other, and then finds nobody who listens for
// the other connection if the server is slow, as under load. That server would take the first
// connection of the next client for the second one, and both would wait for ever.
func connectByCM(t *testing.T, router *agent, server, client *place, serve, connect []string) {
	t.Helper()
	for {
		var out bytes.Buffer
		s := server.command(serve...)
		s.Stdout, s.Stderr = &out, &out
		if err := s.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- s.Wait() }()
		for tick := time.NewTicker(5 * time.Millisecond); !router.listens(); {
			select {
			case err := <-ended:
				t.Fatalf("%v ended before it listened: %v\n%s", serve, err, &out)
			case <-tick.C:
			}
		}
		c, err := client.command(connect...).CombinedOutput()
		if err == nil {
			if err := <-ended; err != nil {
				t.Fatalf("%v: %v\n--- server\n%s--- client\n%s", serve, err, &out, c)
			}
			return
		}
		s.Process.Kill()
		<-ended
		if !tooLate.Match(c) {
			t.Fatalf("%v: %v\n--- server\n%s--- client\n%s", connect, err, &out, c)
		}
		t.Logf("%v: %v: both begin anew\n%s", connect, err, c)
	}
}

// TestDebianCM: unmodified programs connect by the image's librdmacm, between two endpoints of a
// node.
func TestDebianCM(t *testing.T) {
	router, dirs := startRDMA(t, [4]byte{10, 9, 0, 1}, [4]byte{10, 9, 0, 2})
	a, b := newPlace(t, dirs[0]), newPlace(t, dirs[1])
	join(t, a, b)
	for _, p := range cmPrograms {
		t.Run(p.name, func(t *testing.T) {
			connectByCM(t, router, a, b, strings.Fields(p.server), append(strings.Fields(p.client), "10.9.0.1"))
		})
	}
}

// TestMulticastCM: Debian's mckey joins a group by the image's librdmacm, in two endpoints that get
// what a third one sends.
func TestMulticastCM(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1}, [4]byte{10, 9, 0, 2}, [4]byte{10, 9, 0, 3})
	words := func(own string) []string { return []string{"mckey", "-m", "239.1.2.3", "-C", "8", "-b", own} }
	ended := make(chan error, 2)
	var said [2]bytes.Buffer
	for i, own := range []string{"10.9.0.1", "10.9.0.2"} {
		p := newPlace(t, dirs[i])
		receiver := p.command(words(own)...)
		receiver.Stdout, receiver.Stderr = &said[i], &said[i]
		if err := receiver.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { ended <- receiver.Wait() }()
	}
	p := newPlace(t, dirs[2])
	// Nobody sees from outside who has joined, and what is sent before is lost.
	for left := 2; left > 0; {
		if out, err := p.command(append(words("10.9.0.3"), "-s")...).CombinedOutput(); err != nil {
			t.Fatalf("sender: %v\n%s--- receivers\n%s%s", err, out, &said[0], &said[1])
		}
		select {
		case err := <-ended:
			if left--; err != nil {
				t.Fatalf("receiver: %v\n%s%s", err, &said[0], &said[1])
			}
		default:
		}
	}
}

// TestUnsupportedCM: the commands that the page of RDMA names answer EOPNOTSUPP, and no other does.
func TestUnsupportedCM(t *testing.T) {
	page := read(t, "../docs/howto/rdma.md")
	_, list, _ := strings.Cut(page, "<!-- unsupported by RDMA-CM -->")
	list, _, _ = strings.Cut(list, "<!-- end -->")
	var want []string
	for _, m := range regexp.MustCompile("`([A-Z_]+)`").FindAllStringSubmatch(list, -1) {
		want = append(want, m[1])
	}
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	control := connect(t, filepath.Join(dirs[0], "control"))
	ask := func(command uint32, fields ...uint32) unix.Errno {
		t.Helper()
		message := make([]byte, 8+4*len(fields), 512)
		order.PutUint32(message, command)
		for i, n := range fields {
			order.PutUint32(message[8+4*i:], n)
		}
		if command == rdmaCM {
			message = message[:cap(message)]
		}
		reply := make([]byte, 4096)
		_, err := unix.Write(control, message)
		if err == nil {
			_, err = unix.Read(control, reply)
		}
		if err != nil {
			t.Fatal(err)
		}
		return unix.Errno(order.Uint32(reply[8:]))
	}
	if errno := ask(hello, 1, 1); errno != 0 {
		t.Fatalf("hello: %v", errno)
	}
	var got []string
	// Of the kernel's header, in the order of their numbers.
	commands := regexp.MustCompile(`RDMA_USER_CM_CMD_(\w+)`).FindAllStringSubmatch(read(t, "/usr/include/rdma/rdma_user_cm.h"), -1)
	for number, m := range commands {
		// A command of 480 bytes that are 0, with room for its response.
		if errno := ask(rdmaCM, 512-16, 4096, uint32(number), 480); errno == unix.EOPNOTSUPP && m[1] != "CREATE_ID" {
			got = append(got, m[1])
		}
	}
	slices.Sort(got)
	if len(commands) != 23 || !slices.Equal(got, want) {
		t.Errorf("of %d commands %v answer EOPNOTSUPP, the page says %v", len(commands), got, want)
	}
}

// TestEndOfRouterCM: a program that waits for events of RDMA-CM hears that the router has ended.
func TestEndOfRouterCM(t *testing.T) {
	agent, dirs := startRDMA(t, [4]byte{10, 9, 0, 1}, [4]byte{10, 9, 0, 2})
	a, b := newPlace(t, dirs[0]), newPlace(t, dirs[1])
	join(t, a, b)
	server := a.command("rping", "-s", "-P")
	var out bytes.Buffer
	server.Stdout, server.Stderr = &out, &out
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := b.command("rping", "-c", "-C", "1", "-a", "10.9.0.1").CombinedOutput()
		if err == nil {
			break
		}
		if t.Context().Err() != nil || !strings.Contains(string(c), "REJECTED") {
			t.Fatalf("rping: %v\n%s", err, c)
		}
	}
	agent.kill()
	if err := server.Wait(); err == nil || !strings.Contains(out.String(), "Input/output error") {
		t.Errorf("the server ends with %v\n%s", err, &out)
	}
}

// TestEventChannels: what a program does with the descriptor of a channel.
func TestEventChannels(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	script, err := filepath.Abs("testdata/channel.py")
	if err != nil {
		t.Fatal(err)
	}
	newPlace(t, dirs[0]).run("/usr/bin/python3", script)
}

// TestForkCM: a child that is forked while another thread is in librdmacm opens a channel of its
// own.
func TestForkCM(t *testing.T) {
	_, dirs := startRDMA(t, [4]byte{10, 9, 0, 1})
	program := filepath.Join(t.TempDir(), "forks")
	out, err := exec.Command("cc", "-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-pthread", "-o", program, "testdata/cm_forks.c", "-lrdmacm").CombinedOutput()
	if err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	if out, err := newPlace(t, dirs[0]).command(program).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

package programs

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
)

// agentPID gives the process of n1's agent.
func (l verbsLab) agentPID() int {
	l.Helper()
	out, err := l.heddle(l.Context(), "status", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var status []struct{ PID int }
	testutil.NoError(l, json.Unmarshal(out, &status))
	return status[0].PID
}

// descriptors gives how many an agent has, and how many of them are memory without a file. Sockets
// that are neither bound nor connected are not counted, as many are made ahead as programs have
// lately asked for; nor those of processes: of a router that an agent has started it has one, of the
// one that it has from its predecessor none.
func descriptors(t testing.TB, pid int) (all, memory int) {
	t.Helper()
	used := make(map[string]bool)
	for table, inode := range map[string]int{"tcp": 9, "tcp6": 9, "unix": 6} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		testutil.NoError(t, err)
		for line := range strings.Lines(string(text)) {
			if f := strings.Fields(line); len(f) > inode {
				used["socket:["+f[inode]+"]"] = true
			}
		}
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	testutil.NoError(t, err)
	for _, e := range entries {
		to, _ := os.Readlink(filepath.Join(dir, e.Name())) // it may be closed meanwhile
		if used[to] || !strings.HasPrefix(to, "socket:") && to != "anon_inode:[pidfd]" {
			all++
		}
		if strings.HasPrefix(to, "/memfd:") {
			memory++
		}
	}
	return all, memory
}

// filesLeft gives the files by which processes find each other: sockets of n1, and shared memory.
func (l verbsLab) filesLeft() (files []string) {
	l.Helper()
	for _, root := range []string{"/run/heddle/lab/" + l.name + "/n1", "/dev/shm"} {
		testutil.NoError(l, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) { // it has gone meanwhile
				return nil
			}
			if err == nil && (d.Type() == fs.ModeSocket || root == "/dev/shm" && !d.IsDir()) {
				files = append(files, path)
			}
			return err
		}))
	}
	return files
}

// links gives connections of queue pairs that n1's endpoints have.
func (l verbsLab) links() (links []string) {
	l.Helper()
	out, err := l.heddle(l.Context(), "connections", "--node", "n1", "--output", "json").Output()
	testutil.NoError(l, err)
	var all []struct{ Endpoint, State, Local, Remote string }
	testutil.NoError(l, json.Unmarshal(out, &all))
	for _, c := range all {
		port := fmt.Sprintf(":%d", linkPort)
		if c.State != "LISTEN" && (strings.HasSuffix(c.Local, port) || strings.HasSuffix(c.Remote, port)) {
			links = append(links, fmt.Sprintf("%+v", c))
		}
	}
	return links
}

// linkPort is where routers listen for each other in endpoints' names.
const linkPort = 4791

// loads has n1/c1 written to between nodes and on one node, without end, and comes back when bytes
// go both ways.
func (l verbsLab) loads() (ends []program) {
	l.Helper()
	for i, client := range []string{"n1/c2", "n2/c1"} {
		port := livePort + i
		words := []string{"ib_write_bw", "-x", "0", "-D", "3600", "-p", fmt.Sprint(port)}
		ends = append(ends, l.start("n1/c1", words...))
		l.awaitListener(port)
		ends = append(ends, l.start(client, append(slices.Clip(words), l.addr("n1/c1"))...))
	}
	testutil.Eventually(l, "bytes to move in memory and by TCP", func() (bool, string) {
		state, err := l.rdma("n1")
		moves := func(path api.RDMAPath) bool {
			return slices.ContainsFunc(state.QueuePairs, func(q api.QueuePair) bool { return q.Path == path && q.BytesReceived > 1<<20 })
		}
		return err == nil && moves(api.RDMAMemory) && moves(api.RDMATCP), fmt.Sprintf("%+v, %v", state.QueuePairs, err)
	})
	return ends
}

// routerDies kills n1's router under load: programs of both nodes end with an error, another router
// serves those that begin then, and nothing of the one before is left.
func (l verbsLab) routerDies(before api.Router) {
	l.Helper()
	agent := l.agentPID()
	files := l.filesLeft()
	all, memory := descriptors(l, agent)
	ends := l.loads()
	if len(l.links()) == 0 {
		l.Error("queue pairs that communicate have no connection")
	}

	testutil.NoError(l, syscall.Kill(before.PID, syscall.SIGKILL))
	// Nothing hangs: a bound that is far below that of the programs.
	bound := time.After(testutil.WaitTimeout / 3)
	for _, end := range ends {
		ended := make(chan error, 1)
		go func() { ended <- end.Wait() }()
		select {
		case err := <-ended:
			if err == nil {
				l.Errorf("%v ended well without a router\n%s", end.Args, end.out)
			}
		case <-bound:
			l.Fatalf("%v hangs without its router", end.Args)
		}
	}
	testutil.Eventually(l, "another router", func() (bool, string) {
		now, err := l.router()
		return err == nil && now.State == api.RouterRuns && now.PID != before.PID && now.Ended == 1, fmt.Sprintf("%+v, %v", now, err)
	})
	testutil.Eventually(l, "the end of the connections of the router before", func() (bool, string) {
		left := l.links()
		return len(left) == 0, strings.Join(left, "\n")
	})
	for _, client := range []string{"n1/c2", "n2/c1"} {
		l.mustPair(client, pingpongPort, "ib_write_bw", "-x", "0", "-n", "200")
	}
	testutil.Eventually(l, "n1 to have what it had", func() (bool, string) {
		nowAll, nowMemory := descriptors(l, agent)
		more := slices.DeleteFunc(l.filesLeft(), func(f string) bool { return slices.Contains(files, f) })
		return nowAll <= all && nowMemory <= memory && len(more) == 0,
			fmt.Sprintf("%d descriptors, %d before; %d of memory, %d before; more files: %v", nowAll, all, nowMemory, memory, more)
	})
}

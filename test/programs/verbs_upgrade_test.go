package programs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// livePort is where the program listens that runs over the upgrade; others have the usual port.
const livePort = 18600

// otherBuild copies the programs under test, with a router that is another file.
func otherBuild(t *testing.T) (bin string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "bin")
	testutil.NoError(t, os.CopyFS(dir, os.DirFS(filepath.Dir(lab.Bin))))
	router, err := os.OpenFile(filepath.Join(dir, "heddle-rdma"), os.O_WRONLY|os.O_APPEND, 0)
	testutil.NoError(t, err)
	_, err = router.WriteString("another build")
	testutil.NoError(t, errors.Join(err, router.Close()))
	return filepath.Join(dir, filepath.Base(lab.Bin))
}

// replaceAgent ends n1's agent, and starts one of another build.
func (l verbsLab) replaceAgent(bin string) {
	l.Helper()
	testutil.NoError(l, lab.KillAgent(l.agentPID(), syscall.SIGTERM))
	ctx, cancel := context.WithTimeout(l.Context(), 4*testutil.WaitTimeout)
	defer cancel()
	args := append([]string{"lab", "up", "--lab", l.name, "--nodes", "2", "--containers", "2"}, l.arguments...)
	up := exec.CommandContext(ctx, bin, args...)
	if out, err := up.CombinedOutput(); err != nil {
		l.Fatalf("%v\n%s", err, out)
	}
}

// TestVerbsUpgrade: another build of the router takes the place of the one that runs, endpoint by
// endpoint, and programs that have devices open lose nothing; forth and back.
func TestVerbsUpgrade(t *testing.T) {
	l := newVerbsLab(t)
	for _, bin := range []string{otherBuild(t), lab.Bin} {
		before, err := l.router()
		if err != nil || before.State != api.RouterRuns || len(before.Old) > 0 {
			t.Fatalf("router %+v, %v", before, err)
		}
		words := []string{"ib_write_bw", "-x", "0", "-D", "20", "-p", fmt.Sprint(livePort)}
		server := l.start("n1/c1", words...)
		l.awaitListener(livePort)
		client := l.start("n2/c1", append(slices.Clip(words), l.addr("n1/c1"))...)
		testutil.Eventually(t, "bytes to move", func() (bool, string) {
			state, err := l.rdma("n1")
			return err == nil && slices.ContainsFunc(state.QueuePairs, func(q api.QueuePair) bool { return q.BytesReceived > 1<<20 }), fmt.Sprintf("%+v, %v", state, err)
		})
		l.replaceAgent(bin)
		testutil.Eventually(t, "two routers", func() (bool, string) {
			now, err := l.router()
			kept := slices.Equal(now.Old, []api.OldRouter{{PID: before.PID, Endpoints: 1}})
			return err == nil && now.State == api.RouterRuns && now.PID != before.PID && kept, fmt.Sprintf("%+v, %v", now, err)
		})
		if out, err := l.heddle(t.Context(), "rdma", "--node", "n1").Output(); err != nil || !strings.Contains(string(out), "of another build, has 1 of them") {
			t.Errorf("heddle rdma: %v\n%s", err, out)
		}
		// One has n1/c1, the other n1/c2.
		l.mustPair("n1/c2", pingpongPort, "ibv_rc_pingpong", "-g", "0")
		l.mustPair("n1/c2", pingpongPort, "ib_send_bw", "-x", "0", "-n", "200")
		for _, end := range []program{client, server} {
			if err := end.Wait(); err != nil || !strings.Contains(end.out.String(), "BW average") {
				t.Errorf("a program that ran over the upgrade: %v\n%s", err, end.out)
			}
		}
		testutil.Eventually(t, "the end of the router of the build before", func() (bool, string) {
			now, err := l.router()
			_, runs := os.Stat(fmt.Sprintf("/proc/%d", before.PID))
			return err == nil && len(now.Old) == 0 && now.Ended == 0 && os.IsNotExist(runs), fmt.Sprintf("%+v, %v", now, err)
		})
		l.mustPair("n1/c2", pingpongPort, "ibv_rc_pingpong", "-g", "0")
		l.mustPair("n2/c1", pingpongPort, "ibv_rc_pingpong", "-g", "0")
	}
}

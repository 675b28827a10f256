package programs

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestOpenMPI runs a job of two processes in two containers, with TCP between them and between what
// starts them. Open MPI binds sockets with AF_UNSPEC before they connect.
func TestOpenMPI(t *testing.T) {
	dir := mpiDir(t)
	for _, at := range placements {
		for _, mode := range [][2]string{{"overlay", "overlay"}, {"heddle", "heddle"}, {"heddle", "overlay"}, {"overlay", "heddle"}} {
			if mode[0] != mode[1] && !at.mixes {
				continue
			}
			t.Run(at.name+"/"+mode[0]+" to "+mode[1], func(t *testing.T) {
				runMPI(t, ends{server: at.server, client: at.client, clientMode: mode[0], serverMode: mode[1],
					addr: lab.Address(t, mode[1], at.server), dir: dir})
			})
		}
	}
}

// mpiDir has the program of a job, and what its processes are started by.
func mpiDir(t *testing.T) string {
	t.Helper()
	dir := lab.SharedDir(t)
	ring := filepath.Join(dir, "ring")
	if out, err := exec.Command("gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", ring, "testdata/mpi/ring.c", "-l:libmpi.so.40").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	for _, script := range []string{"launch.sh", "beside.sh"} {
		raw, err := os.ReadFile(filepath.Join("../../internal/bench/rdma/mpi", script))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, script), raw, 0o755)
		}
		testutil.NoError(t, err)
	}
	return dir
}

// runMPI runs the job: mpirun and one process at the client's end, one at the server's.
func runMPI(t *testing.T, e ends) {
	t.Helper()
	for _, pipe := range []string{"asked", "ended"} {
		path := filepath.Join(e.dir, pipe)
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		testutil.NoError(t, unix.Mkfifo(path, 0o666))
	}
	beside := lab.Start(t, e.serverMode, e.server, "env", "--chdir", e.dir, "TMPDIR="+e.dir, "./beside.sh")
	defer beside.Stop()
	r := lab.Run(t, e.clientMode, e.client, nil, "env", "--chdir", e.dir, "TMPDIR="+e.dir, "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
		"mpirun", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", filepath.Join(e.dir, "launch.sh"), "--mca", "btl", "tcp,self", "--mca", "oob", "tcp",
		"--mca", "btl_tcp_port_min_v4", "7000", // its default is 1024, which other tests bind, and which waits for a minute
		"-np", "2", "--host", lab.Address(t, e.clientMode, e.client)+","+e.addr, "./ring")
	if want := "ring of 2: 1048576 bytes\n"; r.Code != 0 || r.Stdout != want {
		t.Errorf("exit code %d, said %q, want %q\n%s\nbeside it:\n%s", r.Code, r.Stdout, want, r.Stderr, beside.Output())
	}
}

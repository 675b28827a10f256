package runtime

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/testutil"
)

// onNode calls f in a mount namespace that stands for the node's, and gives it another one, a
// container's.
func onNode(t *testing.T, f func(container *os.File)) {
	t.Helper()
	testutil.NeedRoot(t, "mounts")
	done := make(chan struct{})
	go func() {
		defer close(done)
		goruntime.LockOSThread() // for good: the thread ends with this
		if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_FS); err != nil {
			t.Error(err)
			return
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			t.Error(err)
			return
		}
		process := exec.Command("sleep", "infinity")
		process.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
		if err := process.Start(); err != nil {
			t.Error(err)
			return
		}
		defer func() { _, _ = process.Process.Kill(), process.Wait() }()
		network, mounts, err := openNamespaces(process.Process.Pid)
		if err != nil {
			t.Error(err)
			return
		}
		defer network.Close()
		defer mounts.Close()
		f(mounts)
	}()
	<-done
}

// mountsAt gives the lines of what the calling thread has mounted at a path.
func mountsAt(t *testing.T, path string) (lines []string) {
	t.Helper()
	raw, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Error(err)
	}
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 4 && fields[4] == path {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestMountIntoIsPrivate: the node's mounts are shared where systemd runs; a container that mounts
// over what it was given changes nothing of the node's.
func TestMountIntoIsPrivate(t *testing.T) {
	root, source := t.TempDir(), t.TempDir()
	place := filepath.Join(root, "place")
	testutil.NoError(t, os.Mkdir(place, 0o755))
	onNode(t, func(container *os.File) {
		must := func(what string, err error) {
			if err != nil {
				t.Errorf("%s: %v", what, err)
				goruntime.Goexit()
			}
		}
		must("mount the source", unix.Mount("tmpfs", source, "tmpfs", 0, ""))
		must("share it", unix.Mount("", source, "", unix.MS_SHARED, ""))
		node, err := os.Open("/proc/thread-self/ns/mnt")
		must("keep the namespace", err)
		defer node.Close()
		must("mountInto", mountInto(container, root, "/place", source))
		lines := mountsAt(t, place)
		if len(lines) != 1 || strings.Contains(lines[0], "shared:") || strings.Contains(lines[0], "master:") {
			t.Errorf("the container has %q", lines)
		}
		must("mount over it", unix.Mount("tmpfs", place, "tmpfs", 0, ""))
		must("go back", unix.Setns(int(node.Fd()), unix.CLONE_NEWNS))
		if lines := mountsAt(t, source); len(lines) != 1 {
			t.Errorf("the node has %q", lines)
		}
		must("link", os.Symlink(place, filepath.Join(root, "link")))
		if err := mountInto(container, root, "/link", source); !errors.Is(err, unix.ELOOP) {
			t.Errorf("an image's link is followed: %v", err)
		}
	})
}

// TestEndedBeforeItsVerbs: a container whose process ended before it had its verbs is not one
// without a network.
func TestEndedBeforeItsVerbs(t *testing.T) {
	process := exec.Command("true")
	testutil.NoError(t, process.Start())
	defer process.Wait()
	testutil.NoError(t, unix.Waitid(unix.P_PID, process.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil))
	state := strings.NewReader(fmt.Sprintf(`{"pid":%d}`, process.Process.Pid))
	if err := lateVerbs("/", filepath.Join(t.TempDir(), "s"), "", state); err == nil || !strings.Contains(err.Error(), "may have ended") {
		t.Errorf("%v", err)
	}
}

// TestStateOfWhoWishesVerbs: a container does not start without the verbs that it may wish for; of
// what no file is known the real runtime says itself that it is not there.
func TestStateOfWhoWishesVerbs(t *testing.T) {
	root := t.TempDir()
	runtime := filepath.Join(root, "runtime")
	testutil.NoError(t, os.WriteFile(runtime, []byte("#!/bin/sh\necho no memory >&2\nexit 1\n"), 0o755))
	for id, file := range map[string]string{"wishes": model.AnnotationVerbs, "does not": "{}"} {
		testutil.NoError(t, os.Mkdir(filepath.Join(root, id), 0o755))
		testutil.NoError(t, os.WriteFile(filepath.Join(root, id, "state.json"), []byte(file), 0o600))
	}
	for id, fails := range map[string]bool{"wishes": true, "does not": false, "unknown": false} {
		err := addVerbsNow(commandLine{root: root, id: id}, runtime)
		if (err != nil) != fails || fails && !strings.Contains(err.Error(), "no memory") {
			t.Errorf("%s: %v", id, err)
		}
	}
}

// TestOfARuntimeOfOtherFiles: a real runtime whose files are not known is asked which bundle the
// container has.
func TestOfARuntimeOfOtherFiles(t *testing.T) {
	t.Setenv(envWrapper, "1")
	dir := bundle(t, `{"annotations":{"io.heddle.verbs":"true"},"mounts":[{"destination":"/dev/heddle-verbs","type":"tmpfs","source":"`+verbsAtStart+`"}]}`)
	runtime := filepath.Join(dir, "runtime")
	script := "#!/bin/sh\n[ $3 = kill ] && touch $2/killed && exit\necho '" + `{"status":"created","pid":0,"bundle":"` + dir + `"}'` + "\n"
	testutil.NoError(t, os.WriteFile(runtime, []byte(script), 0o755))
	err := addVerbsNow(commandLine{root: dir, id: "c"}, runtime)
	if err == nil || !strings.Contains(err.Error(), "may have ended") { // by the process that mounts: there is no pid 0
		t.Errorf("%v", err)
	}
	_, err = os.Stat(filepath.Join(dir, "killed"))
	testutil.NoError(t, err)
}

// TestWishesVerbs: what real runtimes keep says which containers may wish for verbs.
func TestWishesVerbs(t *testing.T) {
	root := t.TempDir()
	for id, file := range map[string]string{"runc": "state.json", "crun": "config.json", "other": "options.json"} {
		testutil.NoError(t, os.Mkdir(filepath.Join(root, id), 0o755))
		testutil.NoError(t, os.WriteFile(filepath.Join(root, id, file), []byte(`{"`+model.AnnotationVerbs+`":"true"}`), 0o600))
	}
	testutil.NoError(t, os.WriteFile(filepath.Join(root, "crun", "state.json"), []byte("{}"), 0o600))
	for id, want := range map[string]bool{"runc": true, "crun": true, "other": false, "none": false} {
		if known, wished := wishesVerbs(root, id); known != want || wished != want {
			t.Errorf("%s: known %v, wished %v", id, known, wished)
		}
	}
}

// TestLateArgs: who may have verbs its bundle says, which is its engine's. A container that has its
// socket already gets no second one, and one that only holds a pod's namespaces none.
func TestLateArgs(t *testing.T) {
	t.Setenv(EnvSocket, "")
	const verbs, place = `"io.heddle.verbs":"true"`, `"destination":"/dev/heddle-verbs","type":"tmpfs","source":"` + verbsAtStart + `"`
	for _, c := range []struct {
		status, annotations, mount string
		want                       []string
	}{
		{"created", verbs, place, []string{verbsCommand, "/", DefaultSocket, ""}},
		{"created", verbs + `,"io.heddle.verbs-spin-us":"7","io.heddle.seccomp-socket":"/s"`, place, []string{verbsCommand, "/", "/s", "7"}},
		{"running", verbs, place, nil},
		{"created", `"io.heddle.verbs":"false"`, place, nil},
		{"created", "", place, nil},
		{"created", verbs + `,"io.kubernetes.cri.container-type":"sandbox"`, place, nil},
		{"created", verbs + `,"note":"` + verbsAtStart + `"`, `"destination":"/dev/heddle-verbs","type":"bind","source":"/run/heddle/verbs/7"`, nil},
		{"created", verbs, strings.Replace(place, verbsAtStart, verbsAtStart+"s", 1), nil},
		{"created", verbs, strings.Replace(place, "/dev/heddle-verbs", "/tmp", 1), nil},
	} {
		dir := bundle(t, `{"annotations":{`+c.annotations+`},"mounts":[{`+c.mount+`}]}`)
		got, err := lateArgs([]byte(`{"status":"` + c.status + `","bundle":"` + dir + `"}`))
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
	for _, state := range []string{"no state", `{"status":"created","bundle":"/nowhere"}`} {
		if _, err := lateArgs([]byte(state)); err == nil {
			t.Errorf("%s has arguments", state)
		}
	}
}

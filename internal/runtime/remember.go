package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// What a runtime can do is asked for by running it, which takes about as long as the rest of what
// the wrapper does. So the answer is kept beside the agent's seccomp socket, for the container that
// comes next.

// rememberedFile is the file's name.
const rememberedFile = "runtime.json"

// rememberedFor bounds how long an answer is taken for the runtime's. It depends on more than can
// be looked at: what is named as runtime may be a script that runs another.
const rememberedFor = 10 * time.Minute

// linkerCache changes whenever a library is installed, libseccomp among them.
const linkerCache = "/etc/ld.so.cache"

// remembered is the file's content.
type remembered struct {
	Runtime  string   `json:"runtime"` // all that tells it from another, and from itself before an upgrade
	Features features `json:"features"`
}

// knownFeatures is featuresOf, asked once in a while. dir is the directory of the seccomp socket.
func knownFeatures(dir, program string) features {
	name, id := filepath.Join(dir, rememberedFile), identity(program)
	if f, ok := recall(name, id, time.Now()); ok {
		return f
	}
	f, answered := featuresOf(program)
	if answered && id != "" {
		// Without it the next container costs a little more.
		_ = keep(name, remembered{id, f})
	}
	return f
}

// identity is the same for the same runtime with the same libraries and kernel; "" if it cannot be
// told.
func identity(program string) string {
	var kernel unix.Utsname
	if unix.Uname(&kernel) != nil {
		return ""
	}
	id := program + " " + unix.ByteSliceToString(kernel.Release[:])
	for _, path := range []string{program, linkerCache} {
		var st unix.Stat_t
		switch err := unix.Stat(path, &st); {
		case errors.Is(err, unix.ENOENT) && path == linkerCache: // a system without a cache, maybe without libraries
		case err != nil:
			return ""
		default:
			id += fmt.Sprintf(" %d:%d:%d:%d.%09d", st.Dev, st.Ino, st.Size, st.Ctim.Sec, st.Ctim.Nsec)
		}
	}
	return id
}

// recall reads the answer for the runtime of that identity, if it is there and new enough. What
// others than this process's user could have written does not count.
func recall(name, id string, now time.Time) (_ features, ok bool) {
	if !ownDir(filepath.Dir(name)) {
		return features{}, false
	}
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return features{}, false
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return features{}, false
	}
	if age := now.Sub(info.ModTime()); age < 0 || age > rememberedFor {
		return features{}, false
	}
	var r remembered
	if json.NewDecoder(f).Decode(&r) != nil || id == "" || r.Runtime != id {
		return features{}, false
	}
	return r.Features, true
}

// keep writes the answer down, in one step. An old one stays if that fails.
func keep(name string, r remembered) (err error) {
	if !ownDir(filepath.Dir(name)) {
		return fmt.Errorf("%s: no directory of this user alone", filepath.Dir(name))
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+rememberedFile+".*")
	if err != nil {
		return err
	}
	if err = errors.Join(json.NewEncoder(f).Encode(r), f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// ownDir reports whether dir is a directory that only this process's user can change.
func ownDir(dir string) bool {
	var st unix.Stat_t
	return unix.Lstat(dir, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR && int(st.Uid) == os.Geteuid() && st.Mode&0o022 == 0
}

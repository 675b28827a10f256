package process

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// Confined is how a program runs that is not Heddle's own: as a user that nobody else is, without
// privileges or a way to get some, without network, System V or POSIX queues of anybody's, without
// system calls that it does not need (forbidden), and within bounds.
type Confined struct {
	// User is the number of its user and of its only group.
	User uint32
	// Dir is the folder that its socket is in, which is made anew for each process.
	Dir string
	// By is a program that calls Become with what follows Confine on its command line.
	By string
}

// Confine is the command by which a program becomes a confined one.
const Confine = "confine"

// confinedSocket is the socket's name in Dir.
const confinedSocket = "agent.sock"

// dirFD is where a confined program has Dir open: the way there is not its to go.
const dirFD = 3

// ConfinedArguments are those that every confined program gets.
var ConfinedArguments = []string{"--agent", fmt.Sprintf("/proc/self/fd/%d/%s", dirFD, confinedSocket)}

// Socket is where the agent finds the program.
func (c *Confined) Socket() string { return filepath.Join(c.Dir, confinedSocket) }

// start starts the program.
func (p Program) start(cmd *exec.Cmd) error {
	c := p.Confined
	if c == nil {
		return cmd.Start()
	}
	dir, err := c.makeDir()
	if err != nil {
		return err
	}
	defer dir.Close()
	cmd.Path, cmd.Args = c.By, append([]string{c.By, Confine}, cmd.Args...)
	cmd.ExtraFiles, cmd.Env = []*os.File{dir}, []string{"PATH=/usr/bin:/bin"}
	cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWNET | unix.CLONE_NEWIPC
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: c.User, Gid: c.User, Groups: []uint32{}}
	return cmd.Start()
}

// makeDir makes Dir anew, and opens it.
func (c *Confined) makeDir() (*os.File, error) {
	// What is in there is the program's doing, links among it.
	if err := os.RemoveAll(c.Dir); err != nil {
		return nil, err
	}
	if err := os.Mkdir(c.Dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Chown(c.Dir, int(c.User), int(c.User)); err != nil {
		return nil, err
	}
	fd, err := unix.Open(c.Dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", c.Dir, err)
	}
	return os.NewFile(uintptr(fd), c.Dir), nil
}

// IsPeer fails unless the other end of a connection is the confined program: it may have put
// somebody else's socket into its folder.
func (c *Confined) IsPeer(conn *net.UnixConn) error {
	of, err := peer(conn)
	if err == nil && of.Uid != c.User {
		err = fmt.Errorf("%w: process %d of user %d listens there, and the program is user %d", ErrStranger, of.Pid, of.Uid, c.User)
	}
	return err
}

// IsProcess reports whether a process is the confined program's: numbers are given again.
func (c *Confined) IsProcess(pid int) bool {
	var st unix.Stat_t
	return unix.Stat(fmt.Sprintf("/proc/%d", pid), &st) == nil && st.Uid == c.User
}

// OnlyRoots fails unless nobody but root can have put the file there, or can change it: who can has
// the program be what it wants.
func OnlyRoots(path string) error {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file: copy the program there", path)
	}
	if st.Mode().Perm()&0o005 != 0o005 {
		return fmt.Errorf("%s cannot be executed by users without privileges, as it will be: chmod 755 %s", path, path)
	}
	for at, last := path, ""; at != last; at, last = filepath.Dir(at), at {
		st, err := os.Lstat(at)
		if err != nil {
			return err
		}
		owner := st.Sys().(*syscall.Stat_t).Uid
		if owner != 0 {
			return fmt.Errorf("%s belongs to user %d, who could put another program there: chown root %s", at, owner, at)
		}
		if st.IsDir() && st.Mode().Perm()&0o001 == 0 {
			return fmt.Errorf("%s is closed to users without privileges, as the program will be: chmod o+x %s", at, at)
		}
		// Of a folder such as /tmp nobody removes what is another's.
		shared := at != path && at != filepath.Dir(path) && st.Mode()&fs.ModeSticky != 0
		if st.Mode()&fs.ModeSymlink == 0 && st.Mode().Perm()&0o022 != 0 && !shared {
			return fmt.Errorf("%s may be written by others than root: chmod go-w %s", at, at)
		}
	}
	return nil
}

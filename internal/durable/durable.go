// Package durable writes files that a machine must have again after it lost its power: either as
// they were before, or whole.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// sync brings a file or a directory to the disk. Tests watch it.
var sync = (*os.File).Sync

// WriteFile replaces the file at path by one with content raw and mode perm, whatever the umask. A
// reader sees the old one or the new one. When WriteFile returns nil, so does a machine that lost
// its power. If it fails the old file is there, and path.new may be, which the next call replaces.
func WriteFile(path string, raw []byte, perm fs.FileMode) (err error) {
	next := path + ".new"
	// Made anew, so that it has this mode and no other process has it open.
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := writeNew(next, raw, perm); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// writeNew makes a file that is on the disk when it returns.
func writeNew(path string, raw []byte, perm fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return err
	}
	if _, err = f.Write(raw); err == nil {
		err = f.Chmod(perm)
	}
	if err == nil {
		err = sync(f)
	}
	return errors.Join(err, f.Close())
}

// MakeDir makes a directory and those above it, mode perm less the umask, unless they are there.
func MakeDir(path string, perm fs.FileMode) error {
	path = filepath.Clean(path)
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	above := filepath.Dir(path)
	if above != path {
		if err := MakeDir(above, perm); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, perm); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make directory: %w", err)
	}
	if info, err := os.Stat(path); err != nil {
		return fmt.Errorf("make directory: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("make directory %s: a file has that name", path)
	}
	if err := syncDir(above); err != nil {
		return fmt.Errorf("make directory %s: %w", path, err)
	}
	return nil
}

// syncDir brings a directory's entries to the disk.
func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(sync(d), d.Close())
}

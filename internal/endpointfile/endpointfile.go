// Package endpointfile keeps what a node's agent writes down of its endpoints beside its sockets,
// for itself, after the store has lost them, and for heddle-runtime: a file for each endpoint,
// named by the network namespace that it is in, so that a change and a question cost what they
// are, however many endpoints there are.
package endpointfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"heddle.dev/heddle/internal/model"
)

// Names beside the agent's sockets.
const (
	// Node is the file of what is not of one endpoint.
	Node = "node.json"
	// Dir is the directory of endpoints' files. The name of one is the inode number of its network
	// namespace.
	Dir = "endpoints"
	// waiting is the directory in Dir of those whose namespace is not known: their containers are
	// being made. The name of a file is the endpoint's id.
	waiting = "waiting"
	// suffix is that of a file that is being written.
	suffix = ".new"
)

// Files are those of one agent.
type Files struct {
	dir  string                      // Dir
	path map[model.EndpointID]string // of the files that there are, below dir
	of   map[string]model.EndpointID // the reverse
}

// In gives the files in the directory of an agent's sockets, of which none is known yet.
func In(sockets string) *Files {
	return &Files{dir: filepath.Join(sockets, Dir), path: make(map[model.EndpointID]string), of: make(map[string]model.EndpointID)}
}

// Put writes an endpoint's file; inode is that of its network namespace, 0 if it is not known.
func (f *Files) Put(id model.EndpointID, inode uint64, content []byte) error {
	path := strconv.FormatUint(inode, 10)
	if inode == 0 {
		path = filepath.Join(waiting, strconv.FormatUint(uint64(id), 10))
	}
	at := filepath.Join(f.dir, path)
	if have, err := os.ReadFile(at); err != nil || !bytes.Equal(have, content) {
		if err := f.write(at, content); err != nil {
			return err
		}
	}
	before, had := f.path[id]
	f.path[id], f.of[path] = path, id
	if had && before != path {
		return f.remove(id, before)
	}
	return nil
}

// write is Write, with the directories that are missing.
func (f *Files) write(at string, content []byte) error {
	err := Write(at, content)
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.MkdirAll(filepath.Join(f.dir, waiting), 0o700); err != nil {
		return fmt.Errorf("record of endpoints: %w", err)
	}
	return Write(at, content)
}

// Delete removes an endpoint's file.
func (f *Files) Delete(id model.EndpointID) error {
	path, had := f.path[id]
	if !had {
		return nil
	}
	delete(f.path, id)
	return f.remove(id, path)
}

// remove removes a file of an endpoint, unless it is another one's by now.
func (f *Files) remove(id model.EndpointID, path string) error {
	if f.of[path] != id {
		return nil
	}
	delete(f.of, path)
	if err := os.Remove(filepath.Join(f.dir, path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("record of endpoints: %w", err)
	}
	return nil
}

// Keep removes the files that were not put.
func (f *Files) Keep() error {
	paths, err := list(f.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range paths {
		if _, put := f.of[path]; !put {
			errs = append(errs, os.Remove(filepath.Join(f.dir, path)))
		}
	}
	return errors.Join(errs...)
}

// list gives the paths of all files below dir.
func list(dir string) (paths []string, err error) {
	for _, in := range []string{"", waiting} {
		entries, err := os.ReadDir(filepath.Join(dir, in))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("record of endpoints: %w", err)
		}
		for _, e := range entries {
			if !e.IsDir() {
				paths = append(paths, filepath.Join(in, e.Name()))
			}
		}
	}
	return paths, nil
}

// Write replaces a file in one step. It does not wait for a disk.
func Write(path string, content []byte) error {
	next := path + suffix
	if err := os.WriteFile(next, content, 0o600); err != nil {
		return fmt.Errorf("record of endpoints: %w", err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("record of endpoints: %w", err)
	}
	return nil
}

// All gives all endpoints that have files in the directory of an agent's sockets.
func All(sockets string) ([]model.Endpoint, error) {
	dir := filepath.Join(sockets, Dir)
	paths, err := list(dir)
	if err != nil {
		return nil, err
	}
	return read(dir, paths)
}

// Near gives those that have files which may be in the network namespace of that inode number: one,
// and those whose namespace was not known.
func Near(sockets string, inode uint64) ([]model.Endpoint, error) {
	dir := filepath.Join(sockets, Dir)
	entries, err := os.ReadDir(filepath.Join(dir, waiting))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("record of endpoints: %w", err)
	}
	paths := []string{strconv.FormatUint(inode, 10)}
	for _, e := range entries {
		paths = append(paths, filepath.Join(waiting, e.Name()))
	}
	return read(dir, paths)
}

// read reads files. One that is not there, is being written or is empty, as after a loss of power,
// is no endpoint's.
func read(dir string, paths []string) (out []model.Endpoint, err error) {
	for _, path := range paths {
		if filepath.Ext(path) == suffix {
			continue
		}
		raw, err := os.ReadFile(filepath.Join(dir, path))
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(raw) == 0 {
			continue
		}
		var e model.Endpoint
		if err == nil {
			err = json.Unmarshal(raw, &e)
		}
		if err != nil {
			return nil, fmt.Errorf("record of endpoints: %s: %w", filepath.Join(dir, path), err)
		}
		out = append(out, e)
	}
	return out, nil
}

package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
)

// FindProgram finds a path by which program can be run in the lab's containers, and gives the words
// that run loadgen.Main there. A container's root is made of the machine's root file system without
// what is mounted on it, so a program on another file system is copied to the root one first;
// remove takes the copy away again.
func FindProgram(ctx context.Context, place bench.Place, program string) (words []string, remove func() error, err error) {
	keep := func() error { return nil }
	words = []string{program, "bench", "loadgen"}
	first := checkProgram(ctx, place, words)
	if first == nil {
		return words, keep, nil
	}
	errs := []error{first}
	for _, parent := range []string{"/var/tmp", "/tmp", "/root"} {
		path, remove, err := copyProgram(program, parent)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		words := []string{path, "bench", "loadgen"}
		if err = checkProgram(ctx, place, words); err == nil {
			return words, remove, nil
		}
		errs = append(errs, err, remove())
	}
	return nil, nil, fmt.Errorf("run %s inside the lab's containers: %w\nput the program on the machine's root file system, "+
		"where containers see it", program, errors.Join(errs...))
}

// checkProgram runs the program in every container that takes part.
func checkProgram(ctx context.Context, place bench.Place, words []string) error {
	for _, container := range []string{"n1/c1", "n1/c2", "n2/c1"} {
		if _, err := proc.Output(place.Exec(ctx, bench.Overlay, container, bench.Command(words, "check")...)); err != nil {
			return fmt.Errorf("%s in %s: %w", words[0], container, err)
		}
	}
	return nil
}

// copyProgram copies program into a new directory under parent.
func copyProgram(program, parent string) (path string, remove func() error, err error) {
	directory, err := os.MkdirTemp(parent, "heddle-bench-")
	if err != nil {
		return "", nil, fmt.Errorf("copy program: %w", err)
	}
	remove = func() error { return os.RemoveAll(directory) }
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("copy program: %w", err), remove())
		}
	}()
	from, err := os.Open(program)
	if err != nil {
		return "", nil, err
	}
	defer func() { err = errors.Join(err, from.Close()) }()
	// Containers may run as any user.
	if err = os.Chmod(directory, 0o755); err != nil {
		return "", nil, err
	}
	path = filepath.Join(directory, "heddle")
	to, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o755)
	if err != nil {
		return "", nil, err
	}
	_, err = io.Copy(to, from)
	return path, remove, errors.Join(err, to.Close())
}

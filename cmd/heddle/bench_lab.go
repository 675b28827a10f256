package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"heddle.dev/heddle/internal/bench"
)

// What the benches have around them: a lab that is up while they measure, and files for what they found.

// inLab runs measure in a lab that is up, and takes down what it brought up. SIGINT and SIGTERM end measure.
func (s benchSettings) inLab(ctx context.Context, progress *os.File, measure func(context.Context, bench.Lab) error) (err error) {
	ctx, cancel := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer cancel()
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	place := bench.Lab{Heddle: program, Name: s.lab, SocketPool: s.socketPool}
	down, err := s.bringUp(ctx, place, progress)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, down()) }()
	err = measure(ctx, place)
	if ctx.Err() != nil {
		return errors.New("interrupted; nothing was written")
	}
	return err
}

// inLabWithPeer is inLab for what runs this program in the lab's containers: peer are the words that start it there. It
// warns of a machine that is busy.
func (s benchSettings) inLabWithPeer(ctx context.Context, progress *os.File, measure func(_ context.Context, _ bench.Lab, peer []string) error) error {
	return s.inLab(ctx, progress, func(ctx context.Context, place bench.Lab) (err error) {
		peer, remove, err := bench.FindProgram(ctx, place, place.Heddle)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, remove()) }()
		busy, err := bench.Background(ctx)
		if err != nil {
			return err
		}
		if busy > bench.QuietMachine {
			_, _ = fmt.Fprintf(progress, "other programs keep %.1f of %d processors busy: the figures will be noisy\n",
				busy, runtime.NumCPU())
		}
		return measure(ctx, place, peer)
	})
}

// checkFiles says before minutes of measuring, not after, that the results could not be written.
func (s benchSettings) checkFiles() error {
	for _, file := range []string{s.jsonFile, s.plotFile} {
		if info, err := os.Stat(filepath.Dir(file)); err != nil || !info.IsDir() {
			return fmt.Errorf("write %s: %s is no directory; make it first", file, filepath.Dir(file))
		}
	}
	return nil
}

// downTimeout bounds taking the lab down, which happens even when the bench was interrupted.
const downTimeout = 2 * time.Minute

// bringUp makes sure that the lab is up; down undoes what it did, and nothing if the lab was up before.
func (s benchSettings) bringUp(ctx context.Context, place bench.Lab, log *os.File) (down func() error, err error) {
	down = func() error { return nil }
	missing := place.Ready(ctx)
	if missing == nil {
		return down, nil
	}
	if !s.up {
		return nil, fmt.Errorf("lab is not up: %w\nbring it up with `heddle lab up`, or use --up", missing)
	}
	down = func() error {
		// The bench's context may be over; the lab must go all the same.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		return place.Down(ctx)
	}
	if err := place.Up(ctx, log); err != nil {
		return nil, errors.Join(err, down())
	}
	return down, nil
}

// writeFiles writes result as JSON, and what draw draws, to the files that were asked for. draw may be nil.
func (s benchSettings) writeFiles(result any, draw func(io.Writer) error) error {
	if s.jsonFile != "" {
		err := writeFile(s.jsonFile, func(w io.Writer) error {
			enc := json.NewEncoder(w)
			enc.SetIndent("", "  ")
			return enc.Encode(result)
		})
		if err != nil {
			return err
		}
	}
	if s.plotFile == "" || draw == nil {
		return nil
	}
	return writeFile(s.plotFile, draw)
}

// writeFile writes a whole file or none: a reader never sees half of one.
func writeFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".heddle-bench-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
		}
	}()
	if err = write(f); err != nil {
		return errors.Join(err, f.Close())
	}
	if err = errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

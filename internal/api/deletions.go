package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"time"
)

// deletionsDir is the name of a directory beside the API socket. A file in it says that the
// endpoint whose percent-encoded name it has was to be deleted while no agent ran, or is deleted
// but for what a store has of it that did not answer; its time is that of the deletion.
const deletionsDir = "deleted"

func deletions(socketPath string) string {
	return filepath.Join(filepath.Dir(socketPath), deletionsDir)
}

func noteOf(socketPath, name string) string {
	return filepath.Join(deletions(socketPath), url.PathEscape(name))
}

// NoteDeletion has the next agent that listens on socketPath delete an endpoint.
func NoteDeletion(socketPath, name string) error {
	err := os.MkdirAll(deletions(socketPath), 0o700)
	if err == nil {
		err = os.WriteFile(noteOf(socketPath, name), nil, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write down deletion: %w", err)
	}
	return nil
}

// DropDeletion takes back what NoteDeletion did: the endpoint is deleted.
func DropDeletion(socketPath, name string) error {
	if err := os.Remove(noteOf(socketPath, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("deletion that was made: %w", err)
	}
	return nil
}

// DeleteEndpointLater is DeleteEndpoint for those who cannot wait for an agent: if none runs, or it
// ends while it is at it, the next one deletes the endpoint when it starts, and the call succeeds.
// ErrNotFound as there.
func (c *Client) DeleteEndpointLater(ctx context.Context, name string) error {
	err := c.DeleteEndpoint(ctx, name)
	if !noAnswer(err) {
		return err
	}
	if _, err := os.Stat(filepath.Dir(c.socketPath)); errors.Is(err, fs.ErrNotExist) {
		return nil // no agent has run since the machine started, so there are no endpoints
	}
	if err := NoteDeletion(c.socketPath, name); err != nil {
		return err
	}
	// An agent that has begun to listen since may have read the directory already, and is to be
	// told. One that begins after this call has failed reads it later.
	if err := c.DeleteEndpoint(ctx, name); noAnswer(err) {
		return nil
	} else if err != nil && !errors.Is(err, ErrNotFound) {
		return err
	}
	return DropDeletion(c.socketPath, name)
}

// noAnswer reports whether an error says that no agent runs any more: none answers, or it ended
// first.
func noAnswer(err error) bool { return errors.Is(err, ErrNoAgent) || errors.Is(err, ErrAgentEnded) }

// Deletions gives the endpoints that were to be deleted while no agent ran, and when. The agent
// that listens on socketPath asks for them, and calls done when it has deleted them.
func Deletions(socketPath string) (byName map[string]time.Time, done func() error, err error) {
	dir := deletions(socketPath)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("deletions: %w", err)
	}
	byName = map[string]time.Time{}
	var files []string
	for _, f := range entries {
		info, err := f.Info()
		if err != nil {
			continue // made while this agent listened, and gone again
		}
		files = append(files, filepath.Join(dir, f.Name()))
		if name, err := url.PathUnescape(f.Name()); err == nil {
			byName[name] = info.ModTime()
		}
	}
	return byName, func() error {
		var errs []error
		for _, f := range files {
			if err := os.Remove(f); !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}, nil
}

package node

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"heddle.dev/heddle/internal/durable"
	"heddle.dev/heddle/internal/store"
)

// releaseAnswers bounds the wait for a store that is told that this agent ends.
const releaseAnswers = time.Second

// instanceFile is where a node keeps what tells it from another that calls itself the same.
const instanceFile = "instance"

// instance reads this node's instance, or makes one: 32 hexadecimal digits.
func instance(stateDir string) (string, error) {
	path := filepath.Join(stateDir, instanceFile)
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		var b [16]byte
		_, _ = rand.Read(b[:]) // it never fails
		made := hex.EncodeToString(b[:])
		if err := durable.WriteFile(path, []byte(made+"\n"), 0o600); err != nil {
			return "", fmt.Errorf("write instance: %w", err)
		}
		return made, nil
	}
	if err != nil {
		return "", fmt.Errorf("read instance: %w", err)
	}
	got := strings.TrimSuffix(string(raw), "\n")
	if b, err := hex.DecodeString(got); err != nil || len(b) != 16 || got != strings.ToLower(got) {
		return "", fmt.Errorf("instance %s: want 32 hexadecimal digits: remove the file to get new ones", path)
	}
	return got, nil
}

// holdName takes this node's name, before anything is written under it.
func (ms *membership) holdName(ctx context.Context) error {
	own, err := instance(ms.cfg.StateDir)
	if err != nil {
		return err
	}
	ms.nameLease = store.NameLease{Node: ms.cfg.Name, Instance: own, Underlay: ms.cfg.Underlay, Since: time.Now().UTC()}
	return ms.store.HoldName(ctx, ms.nameLease, ms.cfg.TakeOver)
}

// releaseName says that the agent ends. A store that is away finds out by itself.
func (ms *membership) releaseName() {
	ctx, cancel := context.WithTimeout(context.Background(), releaseAnswers)
	defer cancel()
	if err := ms.store.ReleaseName(ctx, ms.nameLease); err != nil {
		ms.log.Info("node name stays held until its lease ends", "node", ms.nameLease.Node, "err", err)
	}
}

// checkName reports that another agent has taken this node's name. Two agents must not speak for
// one node: they would give out the same addresses.
func checkName(state store.State, own store.NameLease) error {
	h, held := state.NameLeases[own.Node]
	if !held || h.Instance == own.Instance {
		return nil
	}
	return fmt.Errorf("node name %s was taken over by the agent at %s: this agent ends, connections of its containers go on; "+
		"start it under another name, or again with --take-over", own.Node, h.Underlay)
}

// offline gives the names of other nodes whose agents hold no name: they do not run, or do not
// reach the store.
func offline(state store.State, own string) (names []string) {
	for _, n := range state.Nodes {
		if _, held := state.NameLeases[n.Name]; !held && n.Name != own {
			names = append(names, n.Name)
		}
	}
	slices.Sort(names)
	return names
}

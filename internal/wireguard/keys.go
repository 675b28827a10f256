// Package wireguard keeps the keys of a node that encrypts what it sends to others, and decides
// which keys of theirs it accepts and when it may take another. It does no network I/O.
package wireguard

import (
	"crypto/ecdh"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"heddle.dev/heddle/internal/durable"
	"heddle.dev/heddle/internal/model"
)

// The files of a state directory: the private key, and the one that is about to take its place.
const (
	keyFile  = "wireguard.key"
	nextFile = "wireguard.next"
)

// StateFiles are what Keys makes in a state directory.
var StateFiles = []string{keyFile, nextFile}

// Keys are a node's. They never leave it: only the public ones are told. Not for several goroutines
// at once.
type Keys struct {
	dir       string
	key, next [32]byte // next: zero if there is none
}

// OpenKeys reads the keys of a state directory, or makes the first one.
func OpenKeys(dir string) (*Keys, error) {
	k := &Keys{dir: dir}
	var err error
	if k.key, err = readKey(filepath.Join(dir, keyFile)); errors.Is(err, os.ErrNotExist) {
		k.key, err = makeKey(filepath.Join(dir, keyFile))
	}
	if err != nil {
		return nil, err
	}
	k.next, err = readKey(filepath.Join(dir, nextFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	if k.next == k.key {
		return k, k.Switch() // an agent was killed in it
	}
	return k, nil
}

// Private gives the key that is in use.
func (k *Keys) Private() [32]byte { return k.key }

// Public gives its public key.
func (k *Keys) Public() model.PublicKey { return public(k.key) }

// Next gives the public key of the one that is about to be used; zero: there is none.
func (k *Keys) Next() model.PublicKey {
	if k.next == [32]byte{} {
		return model.PublicKey{}
	}
	return public(k.next)
}

// NextPrivate gives that one.
func (k *Keys) NextPrivate() [32]byte { return k.next }

// Made is when the key in use was made.
func (k *Keys) Made() (time.Time, error) {
	info, err := os.Stat(filepath.Join(k.dir, keyFile))
	if err != nil {
		return time.Time{}, fmt.Errorf("age of the key: %w", err)
	}
	return info.ModTime(), nil
}

// MakeNext makes the key that is about to be used, unless there is one.
func (k *Keys) MakeNext() (err error) {
	if k.next == [32]byte{} {
		k.next, err = makeKey(filepath.Join(k.dir, nextFile))
	}
	return err
}

// Switch puts the next key in the place of the one in use, for good.
func (k *Keys) Switch() error {
	if k.next == [32]byte{} {
		return errors.New("switch keys: there is no next one")
	}
	if err := writeKey(filepath.Join(k.dir, keyFile), k.next); err != nil {
		return err
	}
	k.key, k.next = k.next, [32]byte{}
	// A kill before this leaves the same key twice, which OpenKeys sees.
	if err := os.Remove(filepath.Join(k.dir, nextFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the next key: %w", err)
	}
	return nil
}

func public(private [32]byte) model.PublicKey {
	key, err := ecdh.X25519().NewPrivateKey(private[:])
	if err != nil {
		panic(err) // 32 bytes are a key
	}
	return model.PublicKey(key.PublicKey().Bytes())
}

func makeKey(path string) (key [32]byte, err error) {
	_, _ = rand.Read(key[:]) // it never fails
	key[0] &= 248            // as the kernel has it
	key[31] = key[31]&127 | 64
	return key, writeKey(path, key)
}

func writeKey(path string, key [32]byte) error {
	if err := durable.WriteFile(path, []byte(base64.StdEncoding.EncodeToString(key[:])+"\n"), 0o600); err != nil {
		return fmt.Errorf("write key: %w", err)
	}
	return nil
}

// readKey reads a key as wg(8) writes it.
func readKey(path string) (key [32]byte, err error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return key, fmt.Errorf("read key: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return key, fmt.Errorf("read key: %w", err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return key, fmt.Errorf("key %s: others than its owner may read or write it (mode %04o): chmod 600 it, or remove it to have another made", path, mode)
	}
	text := strings.TrimSuffix(string(raw), "\n")
	got, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(got) != len(key) || strings.Contains(text, "\n") { // which the decoder skips
		return key, fmt.Errorf("key %s: want 32 bytes in base64, as `wg genkey` prints: remove the file to have another made", path)
	}
	key = [32]byte(got)
	if key == [32]byte{} {
		return key, fmt.Errorf("key %s: it is zero: remove the file to have another made", path)
	}
	return key, nil
}

package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/node"
)

// Values of --encrypt, and what goes with it. 51820, WireGuard's usual port, is often taken.
const (
	encryptNone          = "none"
	encryptWireGuard     = "wireguard"
	defaultEncryptPort   = 51872
	defaultEncryptPrefix = "100.72.0.0/16"
	defaultInnerPrefix   = "100.73.0.0/16" // another, so that a network can be switched to encryption
)

func (f *flags) registerEncryption(p *pflag.FlagSet) {
	p.StringVar(&f.encrypt, "encrypt", encryptNone,
		"encrypt what nodes send each other: '"+encryptWireGuard+"' or '"+encryptNone+"', the same on all nodes of the network (docs/howto/encrypt.md)")
	p.Uint16Var(&f.cfg.EncryptPort, "encrypt-port", defaultEncryptPort, "UDP port on the underlay address that takes what is encrypted")
	p.StringVar(&f.encryptPrefix, "encrypt-prefix", defaultEncryptPrefix,
		"IPv4 prefix of the addresses by which nodes reach each other encrypted, the same on all nodes; in use nowhere else")
	p.StringVar((*string)(&f.cfg.EncryptOpen), "encrypt-open", string(model.ClearEnd), "direct connections that stand when the node begins to encrypt, and would go on in the clear: 'end' them, or 'keep' them and count them in the status")
	p.DurationVar(&f.cfg.EncryptKeyAge, "encrypt-key-age", 0, "take another key after this long; 0: when heddle encryption rotate asks for it")
}

// setEncryption makes a prefix of inner addresses of --encrypt, if it asks for encryption.
func (f *flags) setEncryption(cfg *node.Config) error {
	switch f.encrypt {
	case encryptNone:
		return nil
	case encryptWireGuard:
	default:
		return fmt.Errorf("--encrypt %q: want %s or %s", f.encrypt, encryptWireGuard, encryptNone)
	}
	if f.rdmaDevice != "" {
		return errors.New("--encrypt, --rdma-device: what the card sends would not be encrypted; leave out one of them")
	}
	got, err := parsePrefixes("--encrypt-prefix", []string{f.encryptPrefix})
	if err == nil {
		cfg.EncryptPrefix = got[0]
	}
	return err
}

package node

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"heddle.dev/heddle/internal/store"
	"heddle.dev/heddle/internal/store/etcd"
	"heddle.dev/heddle/internal/trust"
)

// trustDir is where the first node keeps the network's authority, in the state directory.
const trustDir = "trust"

// chooseStore fills in which store is meant when no flag says so.
func (c *Config) chooseStore() error {
	if c.Store != "" {
		return nil
	}
	j, err := trust.ReadJoin(c.JoinFile)
	if err != nil {
		return err
	}
	c.Store = j.Store
	return nil
}

// openStore starts the embedded store, or connects to the one there is.
func (h *host) openStore(ctx context.Context) (store.Store, error) {
	if h.cfg.Store == EmbeddedStore {
		return h.openEmbedded(ctx)
	}
	opts, err := h.cfg.storeOptions()
	if err != nil {
		return nil, err
	}
	if strings.Contains(h.cfg.Store, "http://") {
		h.log.Warn("the store is reached without TLS: whoever can reach or read that network owns this one; give https:// and certificates", "store", h.cfg.Store)
	}
	return etcd.Connect(ctx, h.cfg.storeEndpoints(), h.cfg.Network.ID, append(opts, etcd.WithLogger(h.log))...)
}

// storeOptions says how to speak to a store that is not embedded.
func (c Config) storeOptions() ([]etcd.Option, error) {
	var settings *tls.Config
	if c.JoinFile != "" {
		j, err := trust.ReadJoin(c.JoinFile)
		if err != nil {
			return nil, err
		}
		settings = j.TLS()
	} else {
		var err error
		if settings, err = c.StoreFiles.TLS(); err != nil {
			return nil, err
		}
	}
	if settings != nil && strings.Contains(c.Store, "http://") {
		return nil, fmt.Errorf("--store %s: certificates are for https://; give that, or leave them out", c.Store)
	}
	opts := []etcd.Option{etcd.WithTLS(settings)}
	if c.StoreUser != "" {
		word, err := trust.ReadPassword(c.StorePasswordFile)
		if err != nil {
			return nil, err
		}
		opts = append(opts, etcd.WithUser(c.StoreUser, word))
	}
	return opts, nil
}

// movedStore says where the nodes that have joined with the file at path look for the store, if
// that is not at url.
func movedStore(path, url string) (before string, moved bool) {
	j, err := trust.ReadJoin(path)
	return j.Store, err == nil && j.Store != url
}

// openEmbedded runs etcd in this process, for the nodes that have the join file.
func (h *host) openEmbedded(ctx context.Context) (store.Store, error) {
	authority, err := trust.OpenAuthority(filepath.Join(h.cfg.StateDir, trustDir))
	if err != nil {
		return nil, err
	}
	files, err := authority.Server(h.cfg.Underlay, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	if err != nil {
		return nil, err
	}
	path := filepath.Join(h.cfg.StateDir, trust.JoinFile)
	if before, moved := movedStore(path, h.cfg.embeddedURL()); moved {
		h.log.Warn("the store is where it was not before: nodes that have joined do not find it until they have the new join file, or this node its old --underlay and --store-port",
			"before", before, "store", h.cfg.embeddedURL(), "join_file", path)
	}
	join, err := authority.Join(path, h.cfg.embeddedURL())
	if err != nil {
		return nil, err
	}
	dir := h.cfg.StoreDir
	if dir == "" {
		dir = filepath.Join(h.cfg.StateDir, "etcd")
	}
	s, err := etcd.Embedded(ctx, etcd.EmbeddedConfig{
		NetworkID: h.cfg.Network.ID, Dir: dir, UnsafeNoFsync: h.cfg.StoreNoSync, ClientURL: h.cfg.embeddedURL(),
		TLS: etcd.ServerTLS{CertAndKey: files.CertAndKey, CA: files.CA},
	}, etcd.WithLogger(h.log), etcd.WithTLS(join.TLS()))
	if err != nil {
		return nil, err
	}
	h.log.Info("store runs; further nodes join with the join file", "store", h.cfg.embeddedURL(), "join_file", path)
	return s, nil
}

//go:build attack

package datapath

import (
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// setWithout tells the programs which protections they do without.
func setWithout(spec *ebpf.CollectionSpec) error {
	if err := spec.Variables["config_without"].Set(model.Without()); err != nil {
		return fmt.Errorf("set config_without: %w", err)
	}
	return nil
}

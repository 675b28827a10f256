//go:build attack

package datapath

import (
	"fmt"
	"os"
	"os/signal"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
)

// setWithout tells the programs which protections they do without. That may change while they run:
// the verifier sees both branches.
func setWithout(spec *ebpf.CollectionSpec) error {
	section := spec.Maps[".rodata.without"]
	section.Flags &^= unix.BPF_F_RDONLY_PROG
	section.Name = ".data.without" // the library freezes .rodata
	if err := spec.Variables["config_without"].Set(model.Without()); err != nil {
		return fmt.Errorf("set config_without: %w", err)
	}
	return nil
}

// followWithout takes the list of protections in the file of EnvWithoutFile at each SIGUSR1, and
// says so in a file beside it, whose name ends with ".done". What is judged once, when the agent
// starts or makes a socket, stays as it was.
func followWithout(d *Datapath) {
	path := os.Getenv(model.EnvWithoutFile)
	if path == "" {
		return
	}
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, unix.SIGUSR1)
	go func() {
		for range asked {
			said, err := d.takeWithout(path)
			if err != nil {
				said = "protections stay as they are: " + err.Error()
			}
			if err := os.WriteFile(path+".new", []byte(said), 0o600); err == nil {
				_ = os.Rename(path+".new", path+".done") // who waits for it says that it does not come
			}
		}
	}()
}

// takeWithout gives what the file says.
func (d *Datapath) takeWithout(path string) (list string, err error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read protections: %w", err)
	}
	list = string(raw)
	set, err := model.ParseProtections(list)
	if err != nil {
		return "", err
	}
	if err := d.objs.ConfigWithout.Set(set); err != nil {
		return "", fmt.Errorf("set config_without: %w", err)
	}
	model.SetWithout(set)
	return list, nil
}

package density

import (
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
)

func TestDensityOptions(t *testing.T) {
	good := Options{Containers: []int{1, 10}, Connections: []int{0, 100}, Rates: []float64{1000}, Scopes: bench.Scopes, Rounds: 1, Duration: time.Second}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Options){
		"--containers [10 1]":       func(o *Options) { o.Containers = []int{10, 1} },
		"--containers [0]":          func(o *Options) { o.Containers = []int{0} },
		"--containers [20000]":      func(o *Options) { o.Containers = []int{20000} },
		"--containers []":           func(o *Options) { o.Containers = nil },
		"--connections [1]":         func(o *Options) { o.Connections = []int{1} },
		"--connections [0 9 8]":     func(o *Options) { o.Connections = []int{0, 9, 8} },
		"--connections [0 1000000]": func(o *Options) { o.Connections = []int{0, 1000000} },
		"--rates 0":                 func(o *Options) { o.Rates = []float64{0} },
		"--scopes":                  func(o *Options) { o.Scopes = nil },
		"--duration":                func(o *Options) { o.Duration = time.Millisecond },
	} {
		o := good
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("want %q, got %v", want, err)
		}
	}
}

func TestDensityParsers(t *testing.T) {
	const text = "MemTotal:   9 kB\nSlab:       5 kB\nSUnreclaim: 4 kB\nPercpu:     1 kB\n"
	if got, err := machine.ParseMeminfo([]byte(text), "Slab", "Percpu"); err != nil || got != 6*1024 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "Slab: 5 kB\n", "Slab: x kB\nPercpu: 1 kB\n"} {
		if _, err := machine.ParseMeminfo([]byte(bad), "Slab", "Percpu"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	const caches = "slabinfo - version: 2.1\n# name <active_objs>\n" +
		"sock_inode_cache    8781   9177    832   19    4 : tunables    0    0    0 : slabdata    483    480      0\n"
	if got, err := machine.ParseSlabinfo([]byte(caches), "sock_inode_cache"); err != nil || got != float64(4*480*os.Getpagesize()) {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", strings.Replace(caches, " 480 ", " x ", 1), "sock_inode_cache 1 2 3\n"} {
		if _, err := machine.ParseSlabinfo([]byte(bad), "sock_inode_cache"); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if got, err := machine.ParseSwitches([]byte("Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t3\n")); err != nil || got != 17 {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := machine.ParseSwitches([]byte("Name:\tx\n")); err == nil {
		t.Error("a status without switches is taken")
	}
	if got := machine.UnifiedGroup([]byte("8:pids:/\n0::/heddle-x/n2\n")); got != "/heddle-x/n2" {
		t.Errorf("group %q", got)
	}
	if got := turned([]int{1, 2, 3}, 4); !reflect.DeepEqual(got, []int{2, 3, 1}) {
		t.Errorf("turned: %v", got)
	}
}

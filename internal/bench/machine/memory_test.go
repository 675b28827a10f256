package machine

import (
	"testing"
)

func TestParseEndpointFields(t *testing.T) {
	const text = "MemTotal:       1 kB\nSlab:     900 kB\nSUnreclaim:     100 kB\nKernelStack:      20 kB\nPercpu:   3 kB\nHugePages_Total:       0\n"
	if got, err := ParseMeminfo([]byte(text), EndpointFields...); err != nil || got != 123*1024 {
		t.Errorf("%v, %v", got, err)
	}
	for _, bad := range []string{"", "SUnreclaim: 1 kB\nPercpu: 1 kB\n", "SUnreclaim: x kB\nPercpu: 1 kB\nKernelStack: 1 kB\n"} {
		if _, err := ParseMeminfo([]byte(bad), EndpointFields...); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

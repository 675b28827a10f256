package doctor

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

func ipv6() finding {
	f := finding{name: "ipv6", detail: "AF_INET6 sockets can be made"}
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		f.err = fmt.Errorf("socket(AF_INET6): %w", err)
		return f
	}
	f.err = unix.Close(fd)
	return f
}

// ipv6Enabled looks at what stops IPv6 on every device, and on the one that delivers to the node
// itself. What a single other device says does not matter, since Heddle brings its own.
func (h host) ipv6Enabled() finding {
	f := finding{name: "ipv6_enabled", detail: "net.ipv6.conf.all.disable_ipv6 = 0"}
	for _, device := range []string{"all", "lo"} {
		v, err := h.value("proc/sys/net/ipv6/conf/" + device + "/disable_ipv6")
		switch {
		case err != nil:
			f.err = err
		case v == "":
			f.err = errors.New("this kernel has no IPv6, or was booted with ipv6.disable=1")
		case v != "0":
			f.err = fmt.Errorf("net.ipv6.conf.%s.disable_ipv6 = %s", device, v)
		}
		if f.err != nil {
			break
		}
	}
	return f
}

// ipv6Forwarding is no fault where the agent can let single devices forward.
func (h host) ipv6Forwarding() finding {
	f := finding{name: "ipv6_forwarding"}
	single, err := h.value("proc/sys/net/ipv6/conf/all/force_forwarding")
	if err != nil {
		f.err = err
		return f
	}
	all, err := h.value("proc/sys/net/ipv6/conf/all/forwarding")
	f.detail = "net.ipv6.conf.all.forwarding = " + all
	switch {
	case err != nil:
		f.err = err
	case all == "":
		f.err = errors.New("this kernel has no IPv6, or was booted with ipv6.disable=1")
	case all != "0":
	case single == "":
		f.err = errors.New(f.detail + ", and this kernel cannot forward for single devices")
	default:
		f.detail += "; the agent sets force_forwarding of the devices it needs"
	}
	return f
}

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/model"
	"heddle.dev/heddle/internal/plane/tcp/lockwait"
)

// stuckSockets is of how many sockets of an endpoint at once the end may wait for a lock. Each is a
// thread.
const stuckSockets = 4

// Stuck lists the passes that wait for the lock of a socket and were given up.
func (d *Datapath) Stuck() []lockwait.Stuck { return d.locks.Stuck() }

// Locked gives the overlay addresses of the endpoints of sockets whose lock a system call has at
// each of some looks.
func (d *Datapath) Locked() ([]netip.Addr, error) {
	const looks = 10
	seen := make(map[uint64]int) // by cookie
	addrs := make(map[netip.Addr]bool)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for range looks {
		raw, err := d.iterateUnlocked(d.objs.LockedSockets)
		if err == nil {
			err = eachRecord(raw, func(r *heddleSocketRecord) {
				if seen[r.Cookie]++; seen[r.Cookie] < looks {
					return
				}
				if a, known := d.AddressOf(model.EndpointID(r.EndpointId)); known { // one that is gone has none
					addrs[a] = true
				}
			})
		}
		if err != nil {
			return nil, fmt.Errorf("list locked sockets: %w", err)
		}
		<-tick.C
	}
	return slices.SortedFunc(maps.Keys(addrs), netip.Addr.Compare), nil
}

// endPass runs a pass that ends sockets and says how many. If it is stuck at one, those that
// unlocked lists are ended one by one: the error is lockwait.ErrStuck all the same, since a socket
// that changes just then may be missed, and the one with the lock stays. On kernels without
// bpf_sock_destroy all are ended so.
func (d *Datapath) endPass(name string, pass, unlocked *ebpf.Program) (ended int, err error) {
	results, err := d.iterate(name, pass)
	ended, failed := countEnded(results)
	if errors.Is(err, lockwait.ErrStuck) {
		n, errUnlocked := d.endUnlocked(unlocked)
		return ended + n, errors.Join(err, errUnlocked)
	}
	if err != nil {
		return ended, err
	}
	if failed > 0 { // before Linux 6.5 a program cannot
		n, err := d.endUnlocked(unlocked)
		return ended + n, err
	}
	return ended, nil
}

// countEnded reads what a pass wrote: a byte for each socket, 1 if it was ended.
func countEnded(results []byte) (ended, failed int) {
	for _, b := range results {
		ended += int(b)
	}
	return ended, len(results) - ended
}

// endUnlocked ends the sockets that a program lists, each by SOCK_DESTROY, which waits for the lock
// of that one alone: those of an endpoint one after the other, those of several side by side.
func (d *Datapath) endUnlocked(program *ebpf.Program) (ended int, err error) {
	tried := make(map[uint64]bool)
	for {
		raw, err := d.iterateUnlocked(program)
		if err != nil {
			return ended, err
		}
		byEndpoint := make(map[uint32][]heddleSocketRecord)
		if err := eachRecord(raw, func(r *heddleSocketRecord) {
			if !tried[r.Cookie] {
				tried[r.Cookie] = true
				byEndpoint[r.EndpointId] = append(byEndpoint[r.EndpointId], *r)
			}
		}); err != nil {
			return ended, err
		}
		if len(byEndpoint) == 0 { // a list that was read in parts may lack some
			return ended, nil
		}
		n, err := d.endEach(byEndpoint)
		ended += n
		if err != nil {
			return ended, err
		}
	}
}

func (d *Datapath) endEach(byEndpoint map[uint32][]heddleSocketRecord) (ended int, err error) {
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex // guards ended and errs
		errs []error
	)
	for id, sockets := range byEndpoint {
		wg.Go(func() {
			n, err := d.endOf(id, sockets)
			mu.Lock()
			defer mu.Unlock()
			ended, errs = ended+n, append(errs, err)
		})
	}
	wg.Wait()
	return ended, errors.Join(errs...)
}

// endOf ends sockets of one endpoint, those without a lock first.
func (d *Datapath) endOf(id uint32, sockets []heddleSocketRecord) (ended int, err error) {
	slices.SortStableFunc(sockets, func(a, b heddleSocketRecord) int { return int(a.Locked) - int(b.Locked) })
	place := 0
	for _, s := range sockets {
		switch err := d.destroy(fmt.Sprintf("end of a socket of endpoint %d, place %d", id, place), &s); {
		case errors.Is(err, lockwait.ErrStuck):
			if place++; place == stuckSockets {
				return ended, nil // the others are tried with the next pass
			}
		case err == nil:
			ended++
		case !errors.Is(err, unix.ENOENT): // it has ended
			return ended, fmt.Errorf("end a socket of endpoint %d: %w", id, err)
		}
	}
	return ended, nil
}

// destroy has the kernel end one socket.
func (d *Datapath) destroy(name string, s *heddleSocketRecord) error {
	answer, err := d.locks.Do(name, openSockDiag, destroyRequest(s))
	if err != nil {
		return err
	}
	return destroyed(answer)
}

func openSockDiag() (*os.File, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	return os.NewFile(uintptr(fd), "sock_diag"), nil
}

// destroyed reads the answer to a destroyRequest: nil if the socket was ended.
func destroyed(answer []byte) error {
	if len(answer) < unix.SizeofNlMsghdr+4 || binary.NativeEndian.Uint16(answer[4:]) != unix.NLMSG_ERROR {
		return fmt.Errorf("SOCK_DESTROY: an answer of %d bytes is no acknowledgement", len(answer))
	}
	if errno := -int32(binary.NativeEndian.Uint32(answer[unix.SizeofNlMsghdr:])); errno != 0 {
		return fmt.Errorf("SOCK_DESTROY: %w", unix.Errno(errno))
	}
	return nil
}

// destroyRequest is struct inet_diag_req_v2 (linux/inet_diag.h) behind its netlink header.
func destroyRequest(s *heddleSocketRecord) []byte {
	const sockDestroy, length = 21, unix.SizeofNlMsghdr + 56
	b := make([]byte, 0, length)
	b = binary.NativeEndian.AppendUint32(b, length)
	b = binary.NativeEndian.AppendUint16(b, sockDestroy)
	b = binary.NativeEndian.AppendUint16(b, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	b = append(b, make([]byte, 8)...) // sequence, port
	local, remote := toAddr(s.Local), toAddr(s.Remote)
	family := byte(unix.AF_INET6)
	if local.Is4() {
		family = unix.AF_INET
	}
	b = append(b, family, unix.IPPROTO_TCP, 0, 0)
	b = binary.NativeEndian.AppendUint32(b, 0) // of all states
	b = binary.NativeEndian.AppendUint16(b, s.LocalPort)
	b = binary.NativeEndian.AppendUint16(b, s.RemotePort)
	for _, a := range [][]byte{local.AsSlice(), remote.AsSlice()} {
		b = append(append(b, a...), make([]byte, 16-len(a))...)
	}
	b = binary.NativeEndian.AppendUint32(b, s.Ifindex)
	return binary.NativeEndian.AppendUint64(b, s.Cookie) // two words, the lower one first
}

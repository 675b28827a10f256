package datapath

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"heddle.dev/heddle/internal/model"
)

// Stack is what the sockets of one endpoint have of the kernel's TCP by a stack profile. The zero
// value of a field leaves it as the node has it.
type Stack struct {
	// Refused: the endpoint's programs get no TCP sockets.
	Refused    bool
	Congestion string // at most 15 bytes
	// ReceiveBuffer and SendBuffer are bytes as SO_RCVBUF and SO_SNDBUF take them, PacingRate bytes
	// a second, KeepaliveIdle and KeepaliveInterval seconds, UserTimeout milliseconds, MSS bytes,
	// Window segments, DelayedACK microseconds.
	ReceiveBuffer, SendBuffer                        uint32
	PacingRate                                       uint32
	KeepaliveIdle, KeepaliveInterval, KeepaliveCount uint32
	UserTimeout, NotsentLowat, MSS, Window           uint32
	DelayedACK                                       uint32
	ECN                                              bool
	// Changeable has what programs may change: fields that are not zero.
	Changeable StackFields
}

// StackFields says of settings whether they are meant.
type StackFields struct {
	Congestion, ReceiveBuffer, SendBuffer, Pacing, Keepalive, UserTimeout, NotsentLowat, MSS bool
}

// SetStack has the sockets of endpoint id that connect, listen or are accepted from now on have s.
// changed says whether they had another one before: then FollowStacks brings live ones there.
func (d *Datapath) SetStack(id model.EndpointID, s Stack) (changed bool, err error) {
	v := toStack(s)
	var old heddleStackSettings
	if err := ignoreAbsent(d.objs.StackByEndpoint.Lookup(uint32(id), &old)); err != nil {
		return false, fmt.Errorf("read stack of endpoint %d: %w", id, err)
	}
	if old == v {
		return false, nil
	}
	if v.Set == 0 {
		err = ignoreAbsent(d.objs.StackByEndpoint.Delete(uint32(id)))
	} else {
		err = d.objs.StackByEndpoint.Put(uint32(id), &v)
	}
	if err != nil {
		return false, fmt.Errorf("stack of endpoint %d: %w", id, err)
	}
	return true, d.stacksInForce()
}

// Stack gives what SetStack said of an endpoint last, also by an earlier agent, without what
// programs may change.
func (d *Datapath) Stack(id model.EndpointID) (Stack, error) {
	var v heddleStackSettings
	if err := ignoreAbsent(d.objs.StackByEndpoint.Lookup(uint32(id), &v)); err != nil {
		return Stack{}, fmt.Errorf("read stack of endpoint %d: %w", id, err)
	}
	has := func(bit heddleStackSetting) bool { return v.Set&uint32(bit) != 0 }
	s := Stack{
		Refused: has(heddleStackSettingSTACK_REFUSED), ECN: has(heddleStackSettingSTACK_ECN),
		ReceiveBuffer: v.ReceiveBuffer, SendBuffer: v.SendBuffer, PacingRate: v.PacingRate, KeepaliveIdle: v.KeepaliveIdle,
		KeepaliveInterval: v.KeepaliveInterval, KeepaliveCount: v.KeepaliveCount, UserTimeout: v.UserTimeout,
		NotsentLowat: v.NotsentLowat, MSS: v.Mss, Window: v.Window, DelayedACK: v.DelayedAck,
	}
	for _, c := range v.Congestion {
		if c == 0 {
			break
		}
		s.Congestion += string(rune(c))
	}
	return s, nil
}

// FollowStacks brings the live sockets of all endpoints to what SetStack said last, in what the
// kernel can change of them, and gives their number.
func (d *Datapath) FollowStacks() (followed int, err error) {
	written, err := d.iterate("follow_profile", d.objs.FollowProfile)
	if err != nil {
		return len(written), fmt.Errorf("change live connections: %w", err)
	}
	return len(written), nil
}

// stacksInForce tells the programs whether an endpoint has a profile. They are not told that the
// last one is gone: of sockets that it was applied to it has to be taken back.
func (d *Datapath) stacksInForce() error {
	var id uint32
	err := d.objs.StackByEndpoint.NextKey(nil, &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	if err == nil {
		err = d.objs.StacksInForce.Set(uint32(1))
	}
	if err != nil {
		return fmt.Errorf("set stacks_in_force: %w", err)
	}
	return nil
}

func toStack(s Stack) heddleStackSettings {
	v := heddleStackSettings{
		PacingRate: s.PacingRate, ReceiveBuffer: s.ReceiveBuffer, SendBuffer: s.SendBuffer,
		KeepaliveIdle: s.KeepaliveIdle, KeepaliveInterval: s.KeepaliveInterval, KeepaliveCount: s.KeepaliveCount,
		UserTimeout: s.UserTimeout, NotsentLowat: s.NotsentLowat, Mss: s.MSS, Window: s.Window, DelayedAck: s.DelayedACK,
	}
	v.Congestion = congestionName(s.Congestion)
	may := s.Changeable
	for _, setting := range []struct {
		bit     heddleStackSetting
		set     bool
		changed bool
	}{
		{heddleStackSettingSTACK_CONGESTION, s.Congestion != "", may.Congestion},
		{heddleStackSettingSTACK_RECEIVE_BUFFER, s.ReceiveBuffer != 0, may.ReceiveBuffer},
		{heddleStackSettingSTACK_SEND_BUFFER, s.SendBuffer != 0, may.SendBuffer},
		{heddleStackSettingSTACK_PACING, s.PacingRate != 0, may.Pacing},
		{heddleStackSettingSTACK_KEEPALIVE, s.KeepaliveCount != 0, may.Keepalive},
		{heddleStackSettingSTACK_USER_TIMEOUT, s.UserTimeout != 0, may.UserTimeout},
		{heddleStackSettingSTACK_NOTSENT_LOWAT, s.NotsentLowat != 0, may.NotsentLowat},
		{heddleStackSettingSTACK_MSS, s.MSS != 0, may.MSS},
		{heddleStackSettingSTACK_WINDOW, s.Window != 0, false},
		{heddleStackSettingSTACK_ECN, s.ECN, false},
		{heddleStackSettingSTACK_DELAYED_ACK, s.DelayedACK != 0, false},
		{heddleStackSettingSTACK_REFUSED, s.Refused, false},
	} {
		if setting.set {
			v.Set |= uint32(setting.bit)
			if !setting.changed {
				v.Held |= uint32(setting.bit)
			}
		}
	}
	return v
}

// congestionName gives a name as the programs have it.
func congestionName(name string) (out [len(heddleStackSettings{}.Congestion)]int8) {
	for i := range min(len(name), len(out)-1) {
		out[i] = int8(name[i])
	}
	return out
}

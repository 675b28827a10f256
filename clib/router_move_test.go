package clib_test

import (
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of libibverbs.
const (
	stateRTR = 2
	stateRTS = 3
	stateErr = 6
	kindUD   = 4

	opWrite       = 0
	opWriteImm    = 1
	opSend        = 2
	opSendImm     = 3
	opRead        = 4
	opCompareSwap = 5
	opFetchAdd    = 6

	statusProtection = 4
	statusFlushed    = 5
	statusRemote     = 10

	flagSignaled  = 2
	flagSolicited = 4
	flagInline    = 8
)

// entry is a scatter/gather entry.
type entry struct {
	address uint64
	length  uint32
	key     uint32
}

func entries(raw []byte, count int) []entry {
	var out []entry
	for i := range count {
		e := raw[16*i:]
		out = append(out, entry{order.Uint64(e), order.Uint32(e[8:]), order.Uint32(e[12:])})
	}
	return out
}

// copyMemory reads or writes the region that key names, at the address of its iova.
func (r *router) copyMemory(c *tenant, key uint32, address uint64, data []byte, write bool) bool {
	m, ok := r.mrs[key]
	if len(data) == 0 {
		return true
	}
	if !ok || m.context != c || address < m.iova || address+uint64(len(data)) > m.iova+m.length {
		return false
	}
	local := []unix.Iovec{{Base: &data[0], Len: uint64(len(data))}}
	remote := []unix.RemoteIovec{{Base: uintptr(m.address + address - m.iova), Len: len(data)}}
	n, err := 0, error(nil)
	if write {
		n, err = unix.ProcessVMWritev(c.pid, local, remote, 0)
	} else {
		n, err = unix.ProcessVMReadv(c.pid, local, remote, 0)
	}
	return err == nil && n == len(data)
}

func (r *router) gather(c *tenant, list []entry) ([]byte, bool) {
	var out []byte
	for _, e := range list {
		part := make([]byte, e.length)
		if !r.copyMemory(c, e.key, e.address, part, false) {
			return nil, false
		}
		out = append(out, part...)
	}
	return out, true
}

func (r *router) scatter(c *tenant, list []entry, data []byte) bool {
	for _, e := range list {
		n := min(int(e.length), len(data))
		if !r.copyMemory(c, e.key, e.address, data[:n], true) {
			return false
		}
		data = data[n:]
	}
	return len(data) == 0
}

// completion fills one in.
type completion struct {
	wrID                                                uint64
	status, opcode, length, imm, number, source, wcFlag uint32
	solicited                                           bool
}

func (q *cq) complete(c completion) {
	slot := make([]byte, slotSize)
	order.PutUint64(slot, c.wrID)
	for i, n := range []uint32{c.status, c.opcode, c.length, c.imm, c.number, c.source, c.wcFlag} {
		order.PutUint32(slot[8+4*i:], n)
	}
	order.PutUint64(slot[48:], 12345)
	q.ring.push(slot)
	armed := word(q.memory, 0)
	if was := atomic.LoadUint32(armed); (was == 1 || was == 2 && (c.solicited || c.status != 0)) && q.channel >= 0 &&
		atomic.CompareAndSwapUint32(armed, was, 0) {
		event := make([]byte, 16)
		order.PutUint64(event, q.user)
		order.PutUint32(event[8:], q.number)
		unix.Write(q.channel, event)
	}
}

// moveAll serves one request of each queue pair and says whether there was any.
func (r *router) moveAll() bool {
	moved := false
	for _, p := range r.qps {
		moved = r.move(p) || moved
	}
	return moved
}

func (r *router) move(p *qp) bool {
	if p.state == stateErr {
		if q := p.send.pop(10); q != nil {
			p.sendCQ.complete(completion{wrID: order.Uint64(q), status: statusFlushed, number: p.number})
			return true
		}
		if q := p.receive.pop(8); q != nil {
			p.receiveCQ.complete(completion{wrID: order.Uint64(q), status: statusFlushed, opcode: 128, number: p.number})
			return true
		}
		return false
	}
	if p.state != stateRTS || atomic.LoadUint32(word(p.send.memory, 128)) == p.send.own {
		return false
	}
	first := p.send.slot(0)
	op, remote := first[8], p.remote
	if p.kind == kindUD {
		remote = order.Uint32(first[24:])
	}
	to := r.qps[remote]
	receives := op == opSend || op == opSendImm || op == opWriteImm
	if to == nil || to.state < stateRTR || to.state == stateErr || receives && atomic.LoadUint32(word(to.receive.memory, 128)) == to.receive.own {
		return false // later
	}
	q := p.send.pop(10)
	var into []byte
	if receives {
		into = to.receive.pop(8)
	}
	status, opcode, length := r.execute(p, to, q, into)
	if status != 0 || p.signalAll || q[9]&flagSignaled != 0 {
		p.sendCQ.complete(completion{wrID: order.Uint64(q), status: status, opcode: opcode, length: length, number: p.number})
	}
	if status != 0 {
		p.state = stateErr
	}
	return true
}

// execute does what a send request says; `into` is the receive request that it uses.
func (r *router) execute(p, to *qp, q, into []byte) (status, opcode, length uint32) {
	op, flags, count := uint32(q[8]), q[9], int(q[11])
	address, rkey := order.Uint64(q[16:]), order.Uint32(q[24:])
	payload := q[48:]
	var data []byte
	local := []entry(nil)
	if flags&flagInline != 0 {
		data = payload[:order.Uint32(q[28:])]
	} else {
		local = entries(payload, count)
	}
	if op <= opSendImm && flags&flagInline == 0 {
		var ok bool
		if data, ok = r.gather(p.context, local); !ok {
			return statusProtection, 0, 0
		}
	}
	done := completion{length: uint32(len(data)), number: to.number, source: p.number, solicited: flags&flagSolicited != 0, opcode: 128}
	if op == opSendImm || op == opWriteImm {
		done.imm, done.wcFlag = order.Uint32(q[12:]), 2
	}
	switch op {
	case opSend, opSendImm:
		if p.kind == kindUD {
			data = append(make([]byte, 40), data...)
			done.length, done.wcFlag = uint32(len(data)), done.wcFlag|1
		}
		if !r.scatter(to.context, entries(into[16:], int(into[9])), data) {
			return statusRemote, 0, 0
		}
	case opWrite, opWriteImm:
		if !r.copyMemory(to.context, rkey, address, data, true) {
			return statusRemote, 0, 0
		}
		opcode, done.opcode = 1, 129
	case opRead:
		for _, e := range local {
			data = append(data, make([]byte, e.length)...)
		}
		if !r.copyMemory(to.context, rkey, address, data, false) || !r.scatter(p.context, local, data) {
			return statusRemote, 0, 0
		}
		return 0, 2, uint32(len(data))
	case opCompareSwap, opFetchAdd:
		return r.atomically(p, to, q, local)
	}
	if into != nil {
		done.wrID = order.Uint64(into)
		to.receiveCQ.complete(done)
	}
	return 0, opcode, uint32(len(data))
}

func (r *router) atomically(p, to *qp, q []byte, local []entry) (status, opcode, length uint32) {
	address, rkey, operand, swap := order.Uint64(q[16:]), order.Uint32(q[24:]), order.Uint64(q[32:]), order.Uint64(q[40:])
	old := make([]byte, 8)
	if !r.copyMemory(to.context, rkey, address, old, false) || !r.scatter(p.context, local, old) {
		return statusRemote, 0, 0
	}
	value := order.Uint64(old)
	switch {
	case q[8] == opFetchAdd:
		value += operand
	case value == operand:
		value = swap
	}
	r.copyMemory(to.context, rkey, address, unsafe.Slice((*byte)(unsafe.Pointer(&value)), 8), true)
	return 0, map[byte]uint32{opCompareSwap: 3, opFetchAdd: 4}[q[8]], 8
}

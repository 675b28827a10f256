package clib_test

import (
	"golang.org/x/sys/unix"
)

// errno is a reply that refuses.
func refuse(request []byte, errno unix.Errno) []byte {
	out := make([]byte, replySize)
	copy(out, request[:headSize])
	order.PutUint32(out[8:], uint32(errno))
	return out
}

// replyOf is a reply that begins with these numbers after its head.
func replyOf(request []byte, size int, numbers ...uint32) []byte {
	out := make([]byte, size)
	copy(out, request[:headSize])
	for i, n := range numbers {
		order.PutUint32(out[replySize+4*i:], n)
	}
	return out
}

func powerOfTwo(n uint32) uint32 {
	p := uint32(1)
	for p < n {
		p *= 2
	}
	return p
}

func ringSize(capacity uint32) int { return slotsAt + int(capacity)*slotSize }

// reply makes the reply to a request and does what it asks for. The router's lock is held.
func (r *router) reply(c *tenant, q []byte) (reply []byte, fds []int) {
	command := order.Uint32(q)
	r.seen[command]++
	at := func(offset int) uint32 { return order.Uint32(q[offset:]) }
	number := r.next
	r.next++
	switch command {
	case hello:
		return r.hello(c, q)
	case allocPD, createAH:
		return replyOf(q, 24, number), nil
	case createChannel:
		kept, passed := c.pair()
		r.channels[number] = kept
		return replyOf(q, 24, number), []int{passed}
	case createCQ:
		return r.createCQ(q, number)
	case createSRQ:
		capacity := powerOfTwo(at(20))
		fd, memory := sealed(ringSize(capacity))
		r.srqs[number] = newRing(memory, capacity)
		return replyOf(q, 40, number, capacity, uint32(len(memory)), 0, at(20), 3), []int{fd}
	case querySRQ:
		return replyOf(q, 32, r.srqs[at(8)].capacity, 3, 0), nil
	case createQP:
		return r.createQP(c, q, number)
	case modifyQP:
		p := r.qps[at(8)]
		p.modify(q)
		return replyOf(q, 24, p.state), nil
	case queryQP:
		p := r.qps[at(8)]
		reply = replyOf(q, 140)
		copy(reply[replySize:], p.attr)
		order.PutUint32(reply[replySize:], p.state)
		return reply, nil
	case destroyQP:
		delete(r.qps, at(8))
	case destroyCQ:
		delete(r.cqs, at(8))
	case regMR:
		if order.Uint64(q[16:]) == 0 {
			return refuse(q, unix.EINVAL), nil
		}
		r.mrs[number] = mr{context: c, address: order.Uint64(q[8:]), length: order.Uint64(q[16:]), iova: order.Uint64(q[24:])}
		return replyOf(q, 32, number, number, number), nil
	case deregMR:
		delete(r.mrs, at(8))
	default:
		if command > lastCommand {
			return refuse(q, unix.EOPNOTSUPP), nil
		}
	}
	return replyOf(q, replySize), nil
}

func (r *router) hello(c *tenant, q []byte) ([]byte, []int) {
	fd, memory := sealed(4096)
	c.memory = memory
	var passed int
	c.async, passed = c.pair()
	reply := replyOf(q, 160, 1, 4096)
	order.PutUint64(reply[24:], 0x0100007f00ff0002)
	copy(reply[32:], "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x09\x00\x01")
	limits := []uint32{1, 1024, 8192, 8192, 32, 512, 1024, 65536, 8192, 1024, 1024, 256, 8192, 32, 16, 64, 0, 1 << 30, 5, 0}
	for i, n := range limits {
		order.PutUint32(reply[64+4*i:], n)
	}
	order.PutUint64(reply[144:], 1<<47)
	go r.run(c)
	return reply, []int{fd, c.kick, passed}
}

func (r *router) createCQ(q []byte, number uint32) ([]byte, []int) {
	capacity := powerOfTwo(order.Uint32(q[16:]))
	fd, memory := sealed(128 + ringSize(capacity))
	queue := &cq{memory: memory, ring: newRing(memory[128:], capacity), number: number, user: order.Uint64(q[8:]), channel: -1}
	if handle := order.Uint32(q[20:]); handle != 0 {
		queue.channel = r.channels[handle]
	}
	r.cqs[number] = queue
	return replyOf(q, 32, number, capacity, uint32(len(memory))), []int{fd}
}

func (r *router) createQP(c *tenant, q []byte, number uint32) ([]byte, []int) {
	at := func(offset int) uint32 { return order.Uint32(q[offset:]) }
	sends, receives := powerOfTwo(9*max(at(40), 1)), powerOfTwo(9*max(at(44), 1))
	offset := (ringSize(sends) + 127) &^ 127
	fd, memory := sealed(offset + ringSize(receives))
	p := &qp{context: c, number: number, kind: at(32), sendCQ: r.cqs[at(20)], receiveCQ: r.cqs[at(24)], signalAll: at(36) == 1,
		send: newRing(memory, sends), receive: newRing(memory[offset:], receives), attr: make([]byte, 124)}
	reply := replyOf(q, 64, number, sends, receives, uint32(offset), uint32(len(memory)), 0, max(at(40), 1), max(at(44), 1), max(at(48), 1), max(at(52), 1), 512)
	if srq := at(28); srq != 0 {
		p.receive = r.srqs[srq]
		order.PutUint32(reply[24:], 0)
		order.PutUint32(reply[28:], 0)
	}
	r.qps[number] = p
	return reply, []int{fd}
}

func (p *qp) modify(q []byte) {
	const state, destination = 1 << 0, 1 << 20
	mask := order.Uint32(q[12:])
	copy(p.attr, q[16:])
	if mask&state != 0 {
		p.state = order.Uint32(q[16:])
	}
	if mask&destination != 0 {
		p.remote = order.Uint32(q[16+28:])
	}
}

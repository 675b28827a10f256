// Stack-module is a stack module of one's own, as small as it can be: gVisor's TCP with its
// defaults, behind the protocol of docs/protocols/stack-module.md. docs/howto/own-stacks.md shows
// how a node gets it. What it leaves out, it answers: options are taken without effect, and who
// asks what it uses hears of sockets and bytes.
//
//	main.go        messages of the agent's
//	tenant.go      the TCP of one endpoint, and its device
//	connection.go  bytes between a program's pair and a connection
package main

import (
	"flag"
	"log"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"heddle.dev/heddle/internal/plane/stacks/protocol"
)

func main() {
	path := flag.String("agent", "", "the socket to listen at")
	flag.Parse()
	listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: *path, Net: "unixpacket"})
	if err != nil {
		log.Fatal(err)
	}
	m := &module{tenants: map[uint64]*tenant{}}
	for {
		agent, err := listener.AcceptUnix()
		if err != nil {
			log.Fatal(err)
		}
		m.serve(agent)
		_ = agent.Close() // the next one gets everything
	}
}

// module is what agents find, one after the other. Tenants stay in between.
type module struct {
	mu      sync.Mutex // guards all of it, tenants among it
	agent   *net.UnixConn
	live    bool // the agent has named its tenants
	tenants map[uint64]*tenant
}

// send tells the agent something, if there is one, and closes the descriptor that goes with it.
// m.mu is held.
func send[M protocol.Message](m *module, message *M, fd int) {
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
		defer unix.Close(fd)
	}
	if m.agent != nil {
		_, _, _ = m.agent.WriteMsgUnix(protocol.Append(nil, message), rights, nil) // serve sees its end
	}
}

// serve hears an agent until it ends, or breaks the rules.
func (m *module) serve(agent *net.UnixConn) {
	m.mu.Lock()
	m.agent, m.live = agent, false
	m.mu.Unlock()
	buf, rights := make([]byte, protocol.MessageMax), make([]byte, unix.CmsgSpace(4))
	for {
		n, r, _, _, err := agent.ReadMsgUnix(buf, rights)
		if err != nil || n == 0 {
			break
		}
		fd := descriptor(rights[:r])
		m.mu.Lock()
		err = m.hear(buf[:n], fd)
		m.mu.Unlock()
		if err != nil {
			log.Print(err)
			break
		}
	}
	m.mu.Lock()
	m.agent, m.live = nil, false
	m.mu.Unlock()
}

// descriptor gives the one that came with a message, or -1.
func descriptor(rights []byte) int {
	all, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(all) == 0 {
		return -1
	}
	fds, err := unix.ParseUnixRights(&all[0])
	if err != nil || len(fds) == 0 {
		return -1
	}
	return fds[0]
}

// hear serves one message. After an error the agent's connection ends.
func (m *module) hear(b []byte, fd int) error {
	head, err := protocol.ParseHead(b[:min(len(b), 32)])
	if err != nil {
		return err
	}
	answer := protocol.Head{Type: head.Type | protocol.Answer, Tag: head.Tag, Tenant: head.Tenant, ID: head.ID}
	t := m.tenants[head.Tenant]
	switch head.Type {
	case protocol.TypeHello:
		hello := protocol.Hello{Head: answer, Version: protocol.Version, Features: protocol.CanReno | protocol.CanIPv6}
		copy(hello.Name[:], "example")
		send(m, &hello, -1)
		return nil
	case protocol.TypeBegin:
		for _, t := range m.tenants {
			t.kept = false
		}
		return nil
	case protocol.TypeEnd:
		m.live = true
		for id, t := range m.tenants {
			if !t.kept {
				delete(m.tenants, id)
				t.end()
				continue
			}
			t.announceAll()
		}
		return nil
	case protocol.TypeTenant:
		err = m.tenant(t, b, fd)
	case protocol.TypeStats:
		stats := protocol.Stats{Head: answer}
		for _, one := range m.tenants {
			if head.Tenant == 0 || one == t {
				one.count(&stats)
			}
		}
		send(m, &stats, -1)
		return nil
	case protocol.TypeTaken, protocol.TypeTellSent:
		return nil
	default:
		if t != nil {
			return t.hear(head, answer, b, fd)
		}
		err = unix.ENODEV
		if fd >= 0 { // a CONNECT that cannot be brings its pair back
			answer.Error = int32(unix.ENODEV)
			send(m, &protocol.Plain{Head: answer}, fd)
			return nil
		}
	}
	answer.Error = errnoOf(err)
	send(m, &protocol.Plain{Head: answer}, -1)
	return nil
}

// tenant makes a tenant, or hears of its limits, which are not kept here.
func (m *module) tenant(t *tenant, b []byte, fd int) error {
	asked, err := protocol.Parse[protocol.Tenant](b)
	if err != nil {
		return unix.EINVAL
	}
	if t != nil && t.generation == asked.Generation {
		t.kept = true
		if fd >= 0 {
			_ = unix.Close(fd)
			return unix.EEXIST
		}
		return nil
	}
	if fd < 0 {
		return unix.ENODEV
	}
	if t != nil { // another container has its number
		t.end()
	}
	t, err = newTenant(m, &asked, os.NewFile(uintptr(fd), "device"))
	if err == nil {
		m.tenants[asked.Head.Tenant] = t
	}
	return err
}

package programs

import (
	"testing"

	"heddle.dev/heddle/test/lab"
)

// python3 is the distribution's, whatever else is in PATH.
const python3 = "/usr/bin/python3"

// servePython gives a scenario's serve for a Python program that prints "ready" when it listens.
// -u: a program that is ended would keep its output to itself.
func servePython(script string) func(t testing.TB, e ends) *lab.Program {
	return func(t testing.TB, e ends) *lab.Program {
		t.Helper()
		server := lab.Start(t, e.serverMode, e.server, lab.AsNobody(python3, "-u", e.dir+"/"+script)...)
		server.WaitFor("ready")
		return server
	}
}

// talkPython gives a scenario's talk: what client and server print is what they saw.
func talkPython(script string) func(t testing.TB, e ends, server *lab.Program, saw *observation) {
	return func(t testing.TB, e ends, server *lab.Program, saw *observation) {
		t.Helper()
		saw.add("client", maskPorts(lab.MustRun(t, e.clientMode, e.client, lab.AsNobody(python3, e.dir+"/"+script, e.addr)...)))
		server.Stop()
		saw.add("server", maskPorts(server.Output()))
	}
}

// TestPythonBlocking checks what blocking programs do with sockets: half-closed connections,
// resets, peeking, timeouts, sendfile, options, IPv4 on an IPv6 socket, a listener shared by forked
// processes.
func TestPythonBlocking(t *testing.T) {
	compareModes(t, scenario{serve: servePython("blocking_server.py"), talk: talkPython("blocking_client.py")},
		func(t testing.TB, dir string) { copyPrograms(t, dir, "blocking_server.py", "blocking_client.py") })
}

// TestPythonAsyncio checks asyncio's streams on a dual-stack listener with many clients at once.
func TestPythonAsyncio(t *testing.T) {
	compareModes(t, scenario{serve: servePython("asyncio_server.py"), talk: talkPython("asyncio_client.py")},
		func(t testing.TB, dir string) { copyPrograms(t, dir, "asyncio_server.py", "asyncio_client.py") })
}

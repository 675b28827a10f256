package test

import "testing"

// python3 is the distribution's, whatever else is in PATH.
const python3 = "/usr/bin/python3"

// servePython gives a scenario's serve for a Python program that prints "ready" when it listens. -u: a
// program that is ended would keep its output to itself.
func servePython(script string) func(t testing.TB, e ends) *program {
	return func(t testing.TB, e ends) *program {
		t.Helper()
		server := start(t, e.serverMode, e.server, asNobody(python3, "-u", e.dir+"/"+script)...)
		server.waitFor("ready")
		return server
	}
}

// talkPython gives a scenario's talk: what client and server print is what they saw.
func talkPython(script string) func(t testing.TB, e ends, server *program, saw *observation) {
	return func(t testing.TB, e ends, server *program, saw *observation) {
		t.Helper()
		saw.add("client", maskPorts(mustRun(t, e.clientMode, e.client, asNobody(python3, e.dir+"/"+script, e.addr)...)))
		server.stop()
		saw.add("server", maskPorts(server.output()))
	}
}

// TestPythonBlocking checks what blocking programs do with sockets: half-closed connections, resets,
// peeking, timeouts, sendfile, options, IPv4 on an IPv6 socket, a listener shared by forked processes.
func TestPythonBlocking(t *testing.T) {
	compareModes(t, scenario{serve: servePython("blocking_server.py"), talk: talkPython("blocking_client.py")},
		func(t testing.TB, dir string) { copyPrograms(t, dir, "blocking_server.py", "blocking_client.py") })
}

// TestPythonAsyncio checks asyncio's streams on a dual-stack listener with many clients at once.
func TestPythonAsyncio(t *testing.T) {
	compareModes(t, scenario{serve: servePython("asyncio_server.py"), talk: talkPython("asyncio_client.py")},
		func(t testing.TB, dir string) { copyPrograms(t, dir, "asyncio_server.py", "asyncio_client.py") })
}

package programs

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// httpPort is where the Go and the Java server listen.
const httpPort = "8080"

// TestGoHTTP checks a server and a client in Go that are linked statically, so that nothing can be
// preloaded into them.
func TestGoHTTP(t *testing.T) {
	serve := func(t testing.TB, e ends) *lab.Program {
		server := lab.Start(t, e.serverMode, e.server, lab.AsNobody(e.dir+"/go-http", "server", ":"+httpPort)...)
		server.WaitFor("listening on")
		return server
	}
	talk := func(t testing.TB, e ends, server *lab.Program, saw *observation) {
		saw.add("client", maskPorts(lab.MustRun(t, e.clientMode, e.client, lab.AsNobody(e.dir+"/go-http", "client", e.addr+":"+httpPort)...)))
		server.Stop()
		saw.add("server", server.Output())
	}
	compareModes(t, scenario{serve, talk}, buildGo)
}

func buildGo(t testing.TB, dir string) {
	t.Helper()
	path := filepath.Join(dir, "go-http")
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, "./testdata/go-http")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	program, err := elf.Open(path)
	testutil.NoError(t, err)
	defer program.Close()
	for _, p := range program.Progs {
		if p.Type == elf.PT_INTERP {
			t.Errorf("%s is linked dynamically", path)
		}
	}
}

// TestJavaHTTP checks the JDK's HttpServer and HttpClient.
func TestJavaHTTP(t *testing.T) {
	// Start quickly; what it does once it runs is the same. It would leave its statistics in /tmp.
	java := func(dir string, args ...string) []string {
		return lab.AsNobody(append([]string{"java", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-cp", dir + "/classes"}, args...)...)
	}
	serve := func(t testing.TB, e ends) *lab.Program {
		server := lab.Start(t, e.serverMode, e.server, java(e.dir, "Server", httpPort)...)
		server.WaitFor("listening on")
		return server
	}
	talk := func(t testing.TB, e ends, server *lab.Program, saw *observation) {
		saw.add("client", maskPorts(lab.MustRun(t, e.clientMode, e.client, java(e.dir, "Client", e.addr, httpPort)...)))
		server.Stop()
		saw.add("server", maskPorts(server.Output()))
	}
	compareModes(t, scenario{serve, talk}, buildJava)
}

func buildJava(t testing.TB, dir string) {
	t.Helper()
	out, err := exec.Command("javac", "-d", filepath.Join(dir, "classes"),
		"testdata/java/Server.java", "testdata/java/Client.java").CombinedOutput()
	if err != nil {
		t.Fatalf("javac: %v\n%s", err, out)
	}
}

package programs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/testutil"
	"heddle.dev/heddle/test/lab"
)

// TestNginx checks nginx with workers of another user, two listeners on one port, TLS and a backend
// over loopback, for curl and wrk.
func TestNginx(t *testing.T) {
	compareModes(t, scenario{serve: serveNginx, talk: talkNginx}, prepareNginx)
}

// largeFile is the size of the file that nginx sends by sendfile.
const largeFile = 20 << 20

func prepareNginx(t testing.TB, dir string) {
	t.Helper()
	copyPrograms(t, dir, "nginx.conf")
	testutil.NoError(t, os.Mkdir(filepath.Join(dir, "files"), 0o755))
	lab.WriteFile(t, filepath.Join(dir, "files/index.html"), []byte("<h1>Heddle</h1>\n"))
	lab.WriteFile(t, filepath.Join(dir, "files/large"), pattern(largeFile))
	lab.WriteFile(t, filepath.Join(dir, "upload"), pattern(2<<20))
	out, err := exec.Command("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
		"-subj", "/CN=nginx.test", "-keyout", filepath.Join(dir, "key.pem"), "-out", filepath.Join(dir, "cert.pem")).CombinedOutput()
	if err != nil {
		t.Fatalf("openssl: %v\n%s", err, out)
	}
}

func serveNginx(t testing.TB, e ends) *lab.Program {
	t.Helper()
	lab.WriteFile(t, filepath.Join(e.dir, "access.log"), nil)
	server := lab.Start(t, e.serverMode, e.server, "nginx", "-e", "stderr", "-p", e.dir+"/", "-c", "nginx.conf")
	waitServer(t, e, "80")
	return server
}

func talkNginx(t testing.TB, e ends, server *lab.Program, saw *observation) {
	t.Helper()
	plain, tls := "http://"+e.addr, "https://nginx.test"
	trust := []string{"--cacert", filepath.Join(e.dir, "cert.pem"), "--resolve", "nginx.test:443:" + e.addr}
	curl(t, e, saw, plain+"/seen")
	curl(t, e, saw, plain+"/files/index.html")
	curl(t, e, saw, plain+"/files/large")
	curl(t, e, saw, plain+"/files/none")
	curl(t, e, saw, "http://[::ffff:"+e.addr+"]/seen", "--globoff")
	curl(t, e, saw, plain+"/backend/upload", "--data-binary", "@"+filepath.Join(e.dir, "upload"))
	curl(t, e, saw, plain+"/files/index.html", "--next", "-sS", plain+"/seen") // one connection for two requests
	curl(t, e, saw, tls+"/seen", trust...)
	curl(t, e, saw, tls+"/files/large", trust...)
	wrk(t, e, saw, plain+"/small")
	server.Stop()
	log, err := os.ReadFile(filepath.Join(e.dir, "access.log"))
	testutil.NoError(t, err)
	// Two workers write it, so the order is not that of the requests.
	lines := strings.Split(strings.TrimSpace(string(log)), "\n")
	slices.Sort(lines)
	saw.add("access log", strings.Join(lines, "\n"))
	for line := range strings.Lines(server.Output()) {
		if !strings.Contains(line, "[notice]") {
			saw.add("error log", lab.Mask(line, nginxStamp))
		}
	}
}

// dateHeader differs from one request to the next.
var dateHeader = regexp.MustCompile(`(?m)^Date: .*$`)

// nginxStamp is the time, and the processes' and the connection's number.
var nginxStamp = regexp.MustCompile(`[\d/]+ [\d:]+|\d+#\d+:|\*\d+`)

// curl fetches a URL and writes down status, headers, addresses and what was fetched.
func curl(t testing.TB, e ends, saw *observation, url string, flags ...string) {
	t.Helper()
	body := filepath.Join(e.dir, "body")
	const format = `%{stderr}%{http_code} HTTP/%{http_version}, %{num_connects} connects, from %{local_ip} to %{remote_ip}:%{remote_port}, ` +
		`%{size_upload} up, %{size_download} down\n`
	argv := append([]string{"curl", "-sS", "--max-time", "20", "-D", "-", "-o", body, "-w", format, url}, flags...)
	r := lab.Run(t, e.clientMode, e.client, nil, argv...)
	if r.Code != 0 {
		t.Fatalf("%s (server %s, client %s): exit code %d\n%s%s", strings.Join(argv, " "), e.serverMode, e.clientMode, r.Code, r.Stdout, r.Stderr)
	}
	data, err := os.ReadFile(body)
	testutil.NoError(t, err)
	what := "curl " + url
	saw.add(what, r.Stderr)
	saw.add(what+" headers", lab.Mask(r.Stdout, dateHeader))
	saw.add(what+" body", fmt.Sprintf("%d bytes, SHA-256 %x", len(data), sha256.Sum256(data)))
	if len(data) < 1024 {
		saw.add(what+" body", string(data))
	}
}

// wrk makes load for a second. It must see no error; how much it did is not compared.
func wrk(t testing.TB, e ends, saw *observation, url string, flags ...string) {
	t.Helper()
	out := lab.MustRun(t, e.clientMode, e.client, append([]string{"wrk", "--threads", "2", "--connections", "8", "--duration", "1", url}, flags...)...)
	what := "wrk " + url + " " + strings.Join(flags, " ")
	for line := range strings.Lines(out) {
		if strings.Contains(line, "Socket errors") || strings.Contains(line, "Non-2xx") {
			saw.add(what, line)
		}
	}
	var requests int
	if m := regexp.MustCompile(`(\d+) requests in`).FindStringSubmatch(out); m != nil {
		_, _ = fmt.Sscan(m[1], &requests)
	}
	if requests == 0 {
		t.Errorf("%s: no request was answered\n%s", what, out)
	}
}

package programs

import (
	"regexp"
	"strings"
	"testing"

	"heddle.dev/heddle/test/lab"
)

// TestRedis checks redis-server, run by an unprivileged user, for redis-cli and redis-benchmark.
func TestRedis(t *testing.T) {
	compareModes(t, scenario{serve: serveRedis, talk: talkRedis}, nil)
}

func serveRedis(t testing.TB, e ends) *lab.Program {
	t.Helper()
	server := lab.Start(t, e.serverMode, e.server, lab.AsNobody("redis-server", "--port", "6379", "--bind", "* -::*",
		"--protected-mode", "no", "--save", "", "--dir", "/", "--timeout", "30")...)
	server.WaitFor("Ready to accept connections")
	return server
}

// redisCommands use values of many sizes, counters and what the server knows of its client.
const redisCommands = `SET greeting "hello from the other end"
GET greeting
SETRANGE large 1000000 end
STRLEN large
GETRANGE large 999990 -1
INCR visits
INCRBY visits 41
RPUSH list a b c
LRANGE list 0 -1
GET nothing
LPOP greeting
CLIENT LIST
`

// redisClient are the parts of CLIENT LIST that say who is connected to what.
var redisClient = regexp.MustCompile(`\b(addr|laddr|user|resp)=\S+`)

func talkRedis(t testing.TB, e ends, _ *lab.Program, saw *observation) {
	t.Helper()
	r := lab.Run(t, e.clientMode, e.client, strings.NewReader(redisCommands), "redis-cli", "-h", e.addr)
	for line := range strings.Lines(r.Stdout + r.Stderr) {
		if who := redisClient.FindAllString(line, -1); who != nil {
			line = maskPorts(strings.Join(who, " "))
		}
		saw.add("redis-cli", line)
	}
	for _, flags := range [][]string{{"-P", "1"}, {"-P", "16", "-d", "4096"}, {"-k", "0"}} {
		operations, requests := "set,get,lpush,mset", "2000"
		if flags[0] == "-k" { // a connection for each
			operations, requests = "set,get", "500"
		}
		argv := append([]string{"redis-benchmark", "-h", e.addr, "-c", "20", "-q", "-t", operations, "-n", requests}, flags...)
		saw.add(strings.Join(argv, " "), finalRates(lab.MustRun(t, e.clientMode, e.client, argv...)))
	}
	saw.add("redis-cli", lab.MustRun(t, e.clientMode, e.client, "redis-cli", "-h", e.addr, "STRLEN", "key:__rand_int__"))
}

// rate is what redis-benchmark measured.
var rate = regexp.MustCompile(`[\d.]+ requests per second, p50=[\d.]+ msec`)

// finalRates gives the result lines of redis-benchmark without their figures; what it overwrites on
// a terminal while it runs is left out.
func finalRates(out string) string {
	var b strings.Builder
	for line := range strings.Lines(out) {
		line = line[strings.LastIndexByte(strings.TrimRight(line, "\r\n"), '\r')+1:]
		b.WriteString(lab.Mask(line, rate))
	}
	return b.String()
}

// TestMemcached checks memcached, which leaves root's rights behind after it has made its
// listeners, for a client that speaks its text protocol.
func TestMemcached(t *testing.T) {
	compareModes(t, scenario{
		serve: func(t testing.TB, e ends) *lab.Program {
			server := lab.Start(t, e.serverMode, e.server, "memcached", "-u", "nobody", "-p", "11211", "-U", "0", "-t", "2")
			waitServer(t, e, "11211")
			return server
		},
		talk: func(t testing.TB, e ends, _ *lab.Program, saw *observation) {
			out := lab.MustRun(t, e.clientMode, e.client, lab.AsNobody(python3, e.dir+"/memcached_client.py", e.addr, "11211")...)
			saw.add("client", maskPorts(out))
		},
	}, func(t testing.TB, dir string) { copyPrograms(t, dir, "memcached_client.py") })
}

package paper

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/bench/histogram"
)

// What pgbench is told: a million accounts, and the paper's load.
const (
	pgScale   = 10 // of 100,000 accounts
	pgThreads = 4
	// kindTransaction is the kind of pgbench's operations.
	kindTransaction = "transaction"
	// clientTail is what a client that does not know of the measured phase runs longer than that.
	clientTail = time.Second
)

// postgresFolder finds the newest server of Debian's.
func postgresFolder() (string, error) {
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/pgbench")
	if err != nil || len(found) == 0 {
		return "", errors.Join(errors.New("no /usr/lib/postgresql/*/bin/pgbench"), err)
	}
	slices.SortFunc(found, func(a, b string) int { return postgresVersion(a) - postgresVersion(b) })
	return filepath.Dir(found[len(found)-1]), nil
}

// postgresVersion reads the version out of the path of a program; 0 if there is none.
func postgresVersion(path string) int {
	n, err := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(path))))
	if err != nil {
		return 0
	}
	return n
}

func postgresProgram(name string) string {
	folder, err := postgresFolder()
	if err != nil {
		return name // missingPrograms has said so
	}
	return filepath.Join(folder, name)
}

// asNobody starts a program of a server that refuses to be root.
func asNobody(words ...string) []string {
	return append([]string{"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"}, words...)
}

// postgresApp runs pgbench's TPC-B; more are its further arguments.
func postgresApp(name, title string, rate float64, clients int, more ...string) App {
	return App{
		Name: name, Title: title, Rate: rate, family: "postgres",
		programs: []tool{{name: "postgres and pgbench", deb: "postgresql", find: func() error { _, err := postgresFolder(); return err }}},
		prepare:  preparePostgres,
		warmUp:   2 * time.Second, start: time.Minute,
		// It accepts, and refuses, before that.
		ready: "ready to accept connections",
		server: func(l launch) []string {
			return asNobody("sh", "-c", `exec "$@" 2>&1`, "sh", postgresProgram("postgres"), "-D", filepath.Join(l.data, "pg"), "-p", port(l),
				"-c", "listen_addresses="+l.address.Addr().String(), "-c", "unix_socket_directories=", "-c", "max_connections=150")
		},
		client: func(l launch) []string {
			seconds := (l.warmUp + l.duration + clientTail + time.Second - 1) / time.Second
			words := []string{postgresProgram("pgbench"), "-h", l.address.Addr().String(), "-p", port(l), "-U", "postgres",
				"-c", strconv.Itoa(clients), "-j", strconv.Itoa(pgThreads), "-T", strconv.Itoa(int(seconds)),
				"--log", "--log-prefix=" + pgLog(l)}
			if l.rate > 0 {
				words = append(words, "-R", strconv.FormatFloat(l.rate, 'f', -1, 64))
			}
			return append(append(words, more...), "postgres")
		},
		read: readPgbench,
	}
}

func pgLog(l launch) string { return filepath.Join(l.dir, fmt.Sprintf("pgbench-%d", l.number)) }

// preparePostgres makes the database, in memory: a disk's whims would drown what the network does.
// All modes use the one.
func preparePostgres(ctx context.Context, p *run) error {
	const script = `set -e
mkdir -p -m 777 "$2"
cd "$2"
"$1/initdb" -D "$2/pg" -U postgres --auth=trust --no-sync --locale=C -E UTF8
echo "host all all 0.0.0.0/0 trust
host all all ::/0 trust" >>"$2/pg/pg_hba.conf"
"$1/pg_ctl" -D "$2/pg" -w -l "$2/pg.log" -o "-c listen_addresses='' -k $2" start
"$1/pgbench" -i -q -s "$3" -h "$2" -U postgres postgres
"$1/pg_ctl" -D "$2/pg" -w stop
`
	folder, err := postgresFolder()
	if err != nil {
		return err
	}
	return p.inServer(ctx, asNobody("sh", "-c", script, "sh", folder, p.data, strconv.Itoa(pgScale))...)
}

// readPgbench reads the log of transactions, of those that ended in the window. At a fixed rate
// pgbench counts a transaction's latency from when it was due.
func readPgbench(o output) (s sample, err error) {
	files, err := filepath.Glob(pgLog(o.launch) + ".*")
	if err != nil || len(files) == 0 {
		return s, fmt.Errorf("pgbench: no log: %w", errors.Join(err, os.ErrNotExist))
	}
	h := &histogram.Histogram{}
	for _, file := range files {
		if err := readPgLogFile(file, o, h); err != nil {
			return s, err
		}
	}
	if h.Count() == 0 {
		return s, errors.New("pgbench: no transactions")
	}
	s = latencySample(map[string]*histogram.Histogram{kindTransaction: h})
	s.metrics[MetricRate] = float64(h.Count()) / o.end.Sub(o.begin).Seconds()
	s.addUnkept(o.launch.rate)
	return s, nil
}

// addUnkept compares the rate with the one asked for.
func (s sample) addUnkept(rate float64) {
	if rate > 0 {
		s.metrics[MetricUnkept] = max(0, 1-s.metrics[MetricRate]/rate)
	}
}

func readPgLogFile(file string, o output, h *histogram.Histogram) (err error) {
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("pgbench: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(file)) }()
	return readPgLog(f, o.begin, o.end, h)
}

// readPgLog counts the lines of a log that are about transactions that ended between begin and end:
// "client number latency-us script seconds microseconds [lag]".
func readPgLog(r io.Reader, begin, end time.Time, h *histogram.Histogram) error {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 6 {
			return fmt.Errorf("pgbench: %q: want 6 fields", lines.Text())
		}
		if f[2] == "skipped" || f[2] == "failed" {
			continue
		}
		var n [3]int64
		for i, field := range []string{f[2], f[4], f[5]} {
			var err error
			if n[i], err = strconv.ParseInt(field, 10, 64); err != nil {
				return fmt.Errorf("pgbench: %q: %w", lines.Text(), err)
			}
		}
		if at := time.Unix(n[1], n[2]*1000); !at.Before(begin) && at.Before(end) {
			h.Add(time.Duration(n[0]) * time.Microsecond)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("pgbench: %w", err)
	}
	return nil
}

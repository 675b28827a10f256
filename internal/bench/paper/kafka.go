package paper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/proc"
)

// kafkaApp is a broker and kafka-producer-perf-test with the paper's records and batches. The
// paper's ten threads are one here: the tool has no more in a process, and ten of Java's machines
// would be the load.
func kafkaApp(rate float64) App {
	return App{
		Name: "kafka", Title: "Kafka, one producer, 100 B, batch.size=8192", Rate: rate, family: "kafka",
		skip: func(o Options) string {
			if _, err := exec.LookPath("java"); err != nil {
				return "no program java: Debian package default-jre-headless"
			}
			if jars, err := filepath.Glob(filepath.Join(o.Kafka, "*.jar")); err != nil || len(jars) == 0 {
				return fmt.Sprintf("no jars in %s: `make kafka` fetches them, --kafka says where they are", o.Kafka)
			}
			return ""
		},
		prepare: prepareKafka,
		warmUp:  5 * time.Second, start: time.Minute,
		server: kafkaServer,
		client: func(l launch) []string {
			records := l.rate * (l.warmUp + l.duration + clientTail).Seconds()
			return append(kafkaJava(l), "org.apache.kafka.tools.ProducerPerformance", "--topic", "bench", "--record-size", "100",
				"--num-records", strconv.FormatFloat(records, 'f', 0, 64), "--throughput", strconv.FormatFloat(l.rate, 'f', 0, 64),
				"--producer-props", "bootstrap.servers="+l.address.String(), "batch.size=8192")
		},
		read: readKafka,
	}
}

// kafkaJava gives the words that run a program of Kafka's, quietly.
func kafkaJava(l launch) []string {
	return []string{"java", "-Xmx512m", "-cp", filepath.Join(l.dir, "kafka", "*"),
		"-Dlog4j.configuration=file:" + filepath.Join(l.dir, "kafka", "log4j.properties")}
}

// kafkaServer is a broker that is its own controller, with new files in memory.
func kafkaServer(l launch) []string {
	properties := fmt.Sprintf(`process.roles=broker,controller
node.id=1
controller.quorum.voters=1@%[1]s:%[3]d
listeners=PLAINTEXT://%[1]s:%[2]d,CONTROLLER://%[1]s:%[3]d
advertised.listeners=PLAINTEXT://%[1]s:%[2]d
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=%[4]s/kafka/log
num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
`, l.address.Addr(), l.address.Port(), l.address.Port()+bench.PortCount, l.data)
	const script = `set -e
data=$1 properties=$2
shift 2
rm -rf "$data/kafka"
mkdir -p "$data/kafka"
printf '%s' "$properties" >"$data/kafka/server.properties"
"$@" kafka.tools.StorageTool format -t MkU3OEVBNTcwNTJENDM2Qg -c "$data/kafka/server.properties"
exec "$@" kafka.Kafka "$data/kafka/server.properties"
`
	return append([]string{"sh", "-c", script, "sh", l.data, properties}, kafkaJava(l)...)
}

const kafkaLog = `log4j.rootLogger=WARN, A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.target=System.err
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%p %m%n
`

// prepareKafka copies the jars to where containers see them.
func prepareKafka(_ context.Context, p *run) error {
	to := filepath.Join(p.dir, "kafka")
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	jars, err := filepath.Glob(filepath.Join(p.options.Kafka, "*.jar"))
	if err != nil {
		return err
	}
	for _, jar := range jars {
		if err := copyFile(jar, filepath.Join(to, filepath.Base(jar))); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(to, "log4j.properties"), []byte(kafkaLog), 0o644)
}

func copyFile(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, in.Close()) }()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// kafkaSummary is the last line of the producer. Its latencies are in milliseconds and of the whole
// run, its start included.
var kafkaSummary = regexp.MustCompile(`(?m)^\d+ records sent, ([\d.]+) records/sec \([^)]*\), ([\d.]+) ms avg latency, [\d.]+ ms max latency, ` +
	`(\d+) ms 50th, \d+ ms 95th, (\d+) ms 99th, (\d+) ms 99\.9th`)

func readKafka(o output) (s sample, err error) {
	m := kafkaSummary.FindSubmatch(o.stdout)
	if m == nil {
		return s, fmt.Errorf("kafka: no summary in %q", proc.LastBytes(string(o.stdout), proc.TailLimit/2))
	}
	s.metrics = make(map[string]float64)
	for i, metric := range []string{MetricRate, LatencyMetric("record", "mean"), LatencyMetric("record", "p50"), LatencyMetric("record", "p99"), LatencyMetric("record", "p999")} {
		v, err := strconv.ParseFloat(string(m[i+1]), 64)
		if err != nil {
			return s, fmt.Errorf("kafka: %q: %w", m[0], err)
		}
		if i > 0 {
			v *= 1000
		}
		s.metrics[metric] = v
	}
	s.addUnkept(o.launch.rate)
	return s, nil
}

package intercept

import (
	"testing"

	"golang.org/x/sys/unix"
)

// BenchmarkSocket times socket()+close() in a trapped program, against the same program without a
// filter. ns/op counts the commands' overhead too; p50-ns and p99-ns are measured in the program,
// call by call.
func BenchmarkSocket(b *testing.B) {
	run := func(b *testing.B, c *child, typ int) {
		c.do(command{Op: "time", Family: unix.AF_INET, Type: typ, N: 500}) // warm
		b.ResetTimer()
		o := c.do(command{Op: "time", Family: unix.AF_INET, Type: typ, N: b.N})
		b.StopTimer()
		if o.Errno != 0 {
			b.Fatal(unix.Errno(o.Errno))
		}
		b.ReportMetric(float64(o.P50.Nanoseconds()), "p50-ns")
		b.ReportMetric(float64(o.P99.Nanoseconds()), "p99-ns")
	}
	b.Run("plain", func(b *testing.B) { run(b, startChildPlain(b), unix.SOCK_STREAM) })
	for name, typ := range map[string]int{"blocking": unix.SOCK_STREAM, "nonblock": unix.SOCK_STREAM | unix.SOCK_NONBLOCK | unix.SOCK_CLOEXEC} {
		b.Run("ready/"+name, func(b *testing.B) {
			path := socketPath(b)
			serve(b, testConfig(path, "", &testMaker{}))
			run(b, trapped(b, path, testName), typ)
		})
	}
	b.Run("inline", func(b *testing.B) {
		path := socketPath(b)
		cfg := testConfig(path, "", &testMaker{})
		cfg.ReadyPerFamily = -1
		serve(b, cfg)
		run(b, trapped(b, path, testName), unix.SOCK_STREAM)
	})
}

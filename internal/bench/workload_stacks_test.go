package bench

import "testing"

func TestReadRedis(t *testing.T) {
	out := `{"busy_cpu_s": 0.4, "output": "\"test\",\"rps\",\"avg_latency_ms\"\n\"GET\",\"50000.00\",\"0.2\"\n"}`
	got, err := readRedis([]byte(out))
	if err != nil || got["requests_per_s"] != 50000 || got["cpu_us_per_request"] != 10 {
		t.Errorf("read %v, %v", got, err)
	}
	for _, bad := range []string{``, `{}`, `{"output": "\"GET\",\"many\"\n"}`} {
		if got, err := readRedis([]byte(bad)); err == nil {
			t.Errorf("%q gave %v", bad, got)
		}
	}
}

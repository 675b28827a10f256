package logform

import (
	"bytes"
	"encoding/json"
	"errors"
	"log"
	"log/slog"
	"strings"
	"testing"
)

// TestForms: what is said in whatever way has the form that is asked for, a line each.
func TestForms(t *testing.T) {
	before := slog.Default()
	defer slog.SetDefault(before)
	for _, form := range []string{Text, JSON} {
		var out bytes.Buffer
		l, err := New(&out, "warn", form)
		if err != nil {
			t.Fatal(err)
		}
		l.Info("not this")
		l.Warn("two\nlines", "err", errors.New(`a "quoted" one`))
		slog.Error("by the default")
		slog.NewLogLogger(l.Handler(), slog.LevelError).Print("by a library")
		lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
		if len(lines) != 3 {
			t.Fatalf("%s: %d lines:\n%s", form, len(lines), out.String())
		}
		for _, line := range lines {
			var fields map[string]any
			if form == JSON && (json.Unmarshal([]byte(line), &fields) != nil || fields["msg"] == nil || fields["level"] == nil || fields["time"] == nil) {
				t.Errorf("no message in JSON: %s", line)
			}
			if form == Text && (!strings.HasPrefix(line, "time=") || !strings.Contains(line, " level=") || !strings.Contains(line, " msg=")) {
				t.Errorf("no message in text: %s", line)
			}
		}
	}
	var out bytes.Buffer
	if _, err := New(&out, "info", JSON); err != nil {
		t.Fatal(err)
	}
	log.Print("by package log")
	if !strings.HasPrefix(out.String(), `{"time":`) || !strings.Contains(out.String(), "by package log") {
		t.Errorf("package log says %s", out.String())
	}
}

func TestBadForms(t *testing.T) {
	for _, c := range []struct{ level, form, flag string }{{"loud", Text, "--log-level"}, {"info", "xml", "--log-format"}, {"info", "", "--log-format"}} {
		if _, err := New(&bytes.Buffer{}, c.level, c.form); err == nil || !strings.HasPrefix(err.Error(), c.flag) || !strings.Contains(err.Error(), "want") {
			t.Errorf("%q, %q: %v", c.level, c.form, err)
		}
	}
}

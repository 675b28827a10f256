package document

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"heddle.dev/heddle/internal/stack"
)

const profiles = `apiVersion: heddle.dev/v1
kind: StackProfile
name: wan
priority: 10
selector: {labels: {tier: wan}}
stack: kernel
fallback: refuse
settings:
  congestion: bbr
  initial_window: 32
  receive_buffer: 131072
  send_buffer: 131072
  pacing_rate: 12mbit
  keepalive: {idle: 60s, interval: 10s, count: 5}
  user_timeout: 30s
  notsent_lowat: 16384
  ecn: true
  delayed_ack: 20ms
  mss: 1400
changeable: [congestion, mss]
---
apiVersion: heddle.dev/v1
kind: StackProfile
name: isolated
selector: {}
stack: netstack
settings: {processors: 0.5, memory: 67108864, connections: 1000}
`

func TestParseStacks(t *testing.T) {
	got, err := ParseStacks(File{"f", []byte(profiles)})
	if err != nil || len(got) != 2 {
		t.Fatalf("%v, %v", got, err)
	}
	s := got[0].Settings
	if got[0].Priority != 10 || got[0].Fallback != stack.Refuse || s.Congestion != "bbr" || s.PacingRate != 12_000_000 ||
		s.Keepalive.Idle != stack.Duration(time.Minute) || s.DelayedACK != stack.Duration(20*time.Millisecond) || !s.ECN || len(got[0].Changeable) != 2 {
		t.Errorf("%+v", got[0])
	}
	if s := got[1].Settings; s.Processors != 0.5 || s.Memory != 64<<20 || s.Connections != 1000 {
		t.Errorf("%+v", s)
	}
}

func TestParseStacksRefuses(t *testing.T) {
	const head = "apiVersion: heddle.dev/v1\nkind: StackProfile\nname: a\n"
	for name, c := range map[string]struct {
		text, path string
		line       int
		says       string
	}{
		"no selector":      {head + "stack: kernel\n", "selector", 0, "write selector: {}"},
		"unknown stack":    {head + "selector: {}\nstack: lwip\n", "stack", 5, "kernel, shared-memory, netstack, smoltcp, or module/NAME"},
		"unknown field":    {head + "selector: {}\nstack: kernel\nsettings:\n  cc: bbr\n", "settings", 7, `"cc" is not known`},
		"window":           {head + "selector: {}\nstack: kernel\nsettings:\n  initial_window: 5000\n", "settings.initial_window", 7, "want 1 to 1000"},
		"zero":             {head + "selector: {}\nstack: kernel\nsettings: {mss: 0}\n", "settings.mss", 6, "above 0"},
		"congestion":       {head + "selector: {}\nstack: kernel\nsettings: {congestion: 'a b'}\n", "settings.congestion", 6, "want 1 to 15"},
		"rate":             {head + "selector: {}\nstack: kernel\nsettings: {pacing_rate: fast}\n", "settings.pacing_rate", 6, "is no rate"},
		"keepalive":        {head + "selector: {}\nstack: kernel\nsettings:\n  keepalive: {idle: 1s, interval: 1s}\n", "settings.keepalive.count", 0, "is missing"},
		"keepalive parts":  {head + "selector: {}\nstack: kernel\nsettings:\n  keepalive: {idle: 1500ms, interval: 1s, count: 1}\n", "settings.keepalive.idle", 7, "whole seconds"},
		"kernel's memory":  {head + "selector: {}\nstack: kernel\nsettings: {memory: 1048576}\n", "settings.memory", 6, "a stack in user space"},
		"queues":           {head + "selector: {}\nstack: shared-memory\nsettings: {queues: true}\n", "settings.queues", 6, "neighbours share"},
		"module's":         {head + "selector: {}\nstack: smoltcp\nsettings: {congestion: bbr}\n", "settings.congestion", 6, "write one of"},
		"module's setting": {head + "selector: {}\nstack: netstack\nsettings: {user_timeout: 9s, delayed_ack: 40ms}\n", "settings.delayed_ack", 6, "netstack has no such setting"},
		"own module's":     {head + "selector: {}\nstack: module/x\nsettings: {mss: 1000}\n", "settings.mss", 6, "leave it out, or take stack: kernel"},
		"changeable":       {head + "selector: {}\nstack: kernel\nsettings: {ecn: true}\nchangeable: [ecn]\n", "changeable[0]", 7, "no setting that programs can change"},
		"changeable unset": {head + "selector: {}\nstack: kernel\nchangeable: [mss]\n", "changeable[0]", 6, "not in settings"},
		"fallback":         {head + "selector: {}\nstack: kernel\nfallback: host\n", "fallback", 6, "kernel or refuse"},
		"twice":            {head + "selector: {}\nstack: kernel\n---\n" + head + "selector: {}\nstack: kernel\n", "", 7, "described twice"},
		"a policy":         {native, "", 2, "heddle policy apply"},
		"nothing":          {"# x\n", "", 0, "write a StackProfile"},
	} {
		got, err := ParseStacks(File{"f", []byte(c.text)})
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got != nil || e.Path != c.path || e.Line != c.line || !strings.Contains(e.Error(), c.says) {
			t.Errorf("%s: path %q line %d: %v; want %q, %d, %q", name, e.Path, e.Line, err, c.path, c.line, c.says)
		}
	}
	if _, err := Parse(File{"f", []byte(profiles)}); err == nil || !strings.Contains(err.Error(), "heddle stack apply") {
		t.Errorf("as policies: %v", err)
	}
}

// FuzzParseStacks: whatever is accepted is valid, and can be written and read again as the same.
func FuzzParseStacks(f *testing.F) {
	f.Add(profiles)
	f.Add(`{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"heddle.dev/v1","kind":"StackProfile","name":"a","selector":{},"stack":"smoltcp"}]}`)
	f.Add("apiVersion: heddle.dev/v1\nkind: StackProfile\nname: a\nselector: {}\nstack: netstack\nsettings: {processors: 1e2, user_timeout: 1h}\n")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := ParseStacks(File{"f", []byte(text)})
		var e *Error
		if err != nil && (!errors.As(err, &e) || e.Reason == "") {
			t.Fatalf("%v", err)
		}
		for _, p := range list {
			if err := p.Validate(); err != nil {
				t.Fatalf("accepted: %v", err)
			}
			raw, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			again, err := ParseStacks(File{"again", []byte(`{"apiVersion":"heddle.dev/v1","kind":"StackProfile",` + string(raw[1:]))})
			if err != nil {
				t.Fatalf("%s: %v", raw, err)
			}
			if second, err := json.Marshal(again[0]); err != nil || string(second) != string(raw) {
				t.Fatalf("%v\n%s\n%s", err, raw, second)
			}
		}
	})
}

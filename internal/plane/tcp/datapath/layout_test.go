package datapath

import (
	"strings"
	"testing"
)

func TestLayout(t *testing.T) {
	text, err := Layout()
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseLayout(text)
	if err != nil || formatLayout(got) != text || len(got) < 10 {
		t.Errorf("%d maps, %v", len(got), err)
	}
	if err := CheckLayout(t.TempDir(), text); err != nil {
		t.Errorf("no pins: %v", err)
	}
	first, rest, _ := strings.Cut(text, "\n")
	for name, bad := range map[string]string{
		"nothing": "", "no version": rest, "twice": text + first + "\n", "no name": strings.Fields(first)[0] + "\t\n",
		"short": text + "ab\tmap\n", "no digits": text + "x" + first[1:] + "\n", "no tab": text + "map\n",
	} {
		if err := CheckLayout(t.TempDir(), bad); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func FuzzParseLayout(f *testing.F) {
	text, err := Layout()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add("00\tx\n")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := parseLayout(text)
		if err != nil {
			return
		}
		again, err := parseLayout(formatLayout(a))
		if err != nil || len(again) != len(a) {
			t.Errorf("%v: %d entries, were %d", err, len(again), len(a))
		}
	})
}

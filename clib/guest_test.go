package clib_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// lanes builds the program that has the lanes of the guest library at both ends of a connection,
// with checks of its memory and its arithmetic.
func lanes(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "lanes")
	args := []string{"-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-fno-builtin", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-I.", "-o", program,
		"testdata/lanes.c", "guest/connection.c", "guest/send.c", "guest/receive.c", "guest/queues.c", "guest/region.c"}
	if out, err := exec.Command("gcc", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program
}

// runLanes runs it and gives what it said.
func runLanes(t *testing.T, program string, args ...string) string {
	t.Helper()
	out, err := exec.Command(program, args...).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// TestLanes: bytes arrive in order and whole, whichever way each of them goes, and a descriptor can
// be polled for them; what a hostile peer writes ends the connection at worst.
func TestLanes(t *testing.T) {
	program := lanes(t)
	for _, args := range [][]string{
		{"memory"}, {"edges"}, {"closed"}, {"random", "1", "20000000"}, {"random", "2", "20000000"}, {"random", "3", "20000000"},
		{"hostile", "1"}, {"hostile", "2"}, {"hostile", "3"}, {"hostile", "4"}, {"hostile", "5"}, {"hostile", "6"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			if said := runLanes(t, program, args...); said != "ok" {
				t.Errorf("%s", said)
			}
		})
	}
}

// TestLanesCarry: both ways of its bench carry all bytes. How fast is for a quiet machine to say.
func TestLanesCarry(t *testing.T) {
	program := lanes(t)
	for _, way := range []string{"lanes", "tcp"} {
		if said := runLanes(t, program, "bench", "50000000", "65536", way); !regexp.MustCompile(`^[\d.]+ Gb/s, [\d.]+ processor s/GB$`).MatchString(said) {
			t.Errorf("%s: %q", way, said)
		}
	}
}

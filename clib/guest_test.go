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
	return compile(t, "lanes", "-fsanitize=address,undefined", "-fno-sanitize-recover",
		"guest/connection.c", "guest/send.c", "guest/receive.c", "guest/queues.c", "guest/region.c")
}

// compile builds a program of testdata with files of the library.
func compile(t *testing.T, name string, more ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), name)
	args := append([]string{"-O1", "-g", "-std=gnu11", "-Wall", "-Wextra", "-fno-builtin", "-U_FORTIFY_SOURCE", "-pthread", "-I.", "-o", program, "testdata/" + name + ".c"}, more...)
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
		{"memory"}, {"edges"}, {"peeks"}, {"torn-peeks"}, {"closed"}, {"random", "1", "20000000"}, {"random", "2", "20000000"}, {"random", "3", "20000000"},
		{"hostile", "1"}, {"hostile", "2"}, {"hostile", "3"}, {"hostile", "4"}, {"hostile", "5"}, {"hostile", "6"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			if said := runLanes(t, program, args...); said != "ok" {
				t.Errorf("%s", said)
			}
		})
	}
}

// TestTable: what the library knows of a descriptor is right, whatever its process does meanwhile.
func TestTable(t *testing.T) {
	program := compile(t, "table", "guest/calls.c", "guest/connection.c", "guest/files.c", "guest/processes.c", "guest/queues.c",
		"guest/receive.c", "guest/region.c", "guest/send.c", "guest/table.c")
	for _, what := range []string{"fork", "raw-fork", "tls", "vfork", "cancel", "jump", "closed", "later", "later-queues", "died", "orphaned", "orphaned-at-once", "foreign-life", "lost", "lost-goes-on"} {
		t.Run(what, func(t *testing.T) {
			if said := runLanes(t, program, what); said != "ok" {
				t.Errorf("%s", said)
			}
		})
	}
}

// TestUnwind: a program's thread that is cancelled in a call of a library's does all that it is to
// do.
func TestUnwind(t *testing.T) {
	program := compile(t, "unwind", "-fexceptions")
	for _, name := range []string{"guest", "machine"} {
		library := filepath.Join(t.TempDir(), name+".so")
		if out, err := exec.Command("./build.sh", name, library).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if said := runLanes(t, "env", "LD_PRELOAD="+library, program); said != "ok" {
			t.Errorf("%s: %s", name, said)
		}
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

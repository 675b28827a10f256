// Command hostile is the attack suite's hostile program in Go: static, and with raw system calls
// only, so that nothing stands between it and the kernel. Its first argument names what it tries,
// its output says what came of it, a line for each try: "WHAT: RESULT". A result is "ok", the name
// of an errno, or what was read. docs/howto/attack-suite.md.
package main

import (
	"fmt"
	"os"
	"runtime"
	"sort"
	"strconv"

	"golang.org/x/sys/unix"
)

var commands = map[string]func(args []string){
	"race-bind":    raceBind,
	"race-connect": raceConnect,
	"race-option":  raceOption,
	"race-fd":      raceDescriptor,
	"undo":         undo,
	"ring":         ringCommands,
	"ring-poll":    ringPoll,
	"queue":        readQueue,
	"lend":         lend,
	"steal":        steal,
	"ports":        holdPorts,
	"memory":       holdMemory,
	"batches":      askBatches,
}

func main() {
	if len(os.Args) < 2 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: hostile WHAT ARG...")
		os.Exit(2)
	}
	runtime.GOMAXPROCS(8) // threads that race need no processors of their own, but must not wait for each other
	commands[os.Args[1]](os.Args[2:])
	fmt.Println("done")
}

// say prints one result.
func say(what, result string) { fmt.Printf("%s: %s\n", what, result) }

// sayCounts prints how often each result came.
func sayCounts(counts map[string]int) {
	var results []string
	for r := range counts {
		results = append(results, r)
	}
	sort.Strings(results)
	for _, r := range results {
		say(r, strconv.Itoa(counts[r]))
	}
}

// waitForEnd returns when standard input ends: the test has looked at what the program holds.
func waitForEnd() {
	var b [1]byte
	for {
		if n, err := os.Stdin.Read(b[:]); n == 0 || err != nil {
			return
		}
	}
}

// check ends the program: what fails here is not what it tries.
func check(what string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
		os.Exit(1)
	}
}

// nameOf is the name of an errno, "ok" for none.
func nameOf(errno unix.Errno) string {
	if errno == 0 {
		return "ok"
	}
	return unix.ErrnoName(errno)
}

// number reads a number of the command line.
func number(arg string) int {
	n, err := strconv.Atoi(arg)
	check(arg, err)
	return n
}

// Command heddle-runtime is an OCI runtime that hands a container's TCP sockets to Heddle. It takes runc's
// command line, adds Heddle's seccomp listener to the configuration of containers that carry the
// annotation io.heddle.endpoint, and runs runc.
package main

import (
	"fmt"
	"os"

	"heddle.dev/heddle/internal/runtime"
)

func main() {
	// Exec returns only if something is wrong.
	fmt.Fprintf(os.Stderr, "heddle-runtime: %v\n", runtime.Exec(os.Args[1:]))
	os.Exit(1)
}

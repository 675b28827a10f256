// Command heddle-runtime is an OCI runtime that hands a container's TCP sockets to Heddle. It takes
// runc's command line, adds Heddle's seccomp listener to the configuration of containers that carry
// the annotation io.heddle.endpoint, and runs runc.
package main

import (
	"fmt"
	"os"

	"heddle.dev/heddle/internal/runtime"
)

func main() {
	if err := runtime.Exec(os.Args[1:]); err != nil {
		fmt.Fprintf(os.Stderr, "heddle-runtime: %v\n", err)
		os.Exit(1)
	}
}

// Command heddle-netstack is a stack module whose TCP is gVisor's netstack: the agent starts one on
// a node that has endpoints whose profile says so. docs/architecture/stack-modules.md.
package main

import (
	"fmt"
	"os"

	"heddle.dev/heddle/internal/netstack"
)

func main() {
	var err error
	switch {
	case len(os.Args) == 3 && os.Args[1] == "--agent":
		err = netstack.Run(os.Args[2])
	case len(os.Args) == 3 && os.Args[1] == "--tenant": // by itself; the name is for people
		err = netstack.RunTenant()
	default:
		fmt.Fprintln(os.Stderr, "usage: heddle-netstack --agent PATH")
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "heddle-netstack:", err)
		os.Exit(1)
	}
}

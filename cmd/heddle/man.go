//go:build man

package main

import (
	"log"
	"os"
	"time"

	"github.com/spf13/cobra/doc"
)

// Built with the tag "man", the program writes its manual pages into the directory that is its one
// argument, and ends: packaging/build-deb.sh. They say nothing of the machine they were made on.
func init() {
	cmd := newRootCmd()
	cmd.DisableAutoGenTag = true
	date := time.Unix(0, 0)
	header := &doc.GenManHeader{Section: "8", Source: "Heddle", Manual: "Heddle", Date: &date}
	if err := doc.GenManTree(cmd, header, os.Args[1]); err != nil {
		log.Fatal(err)
	}
	os.Exit(0)
}

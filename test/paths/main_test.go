package paths

import (
	"fmt"
	"os"
	"testing"

	"heddle.dev/heddle/test/lab"
)

func TestMain(m *testing.M) {
	if ran, err := runQUIC(os.Args); ran { // in a container
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(lab.Main(m, "paths"))
}

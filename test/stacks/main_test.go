package stacks

import (
	"os"
	"testing"

	"heddle.dev/heddle/test/lab"
)

func TestMain(m *testing.M) { os.Exit(lab.Main(m, "stacks")) }

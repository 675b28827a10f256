package engines

import (
	"os"
	"testing"

	"heddle.dev/heddle/test/lab"
)

func TestMain(m *testing.M) {
	os.Exit(lab.Main(m, "engines", func() error { return removeEngines(enginesRoot()) }))
}

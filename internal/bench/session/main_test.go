package session

import (
	"testing"

	"heddle.dev/heddle/internal/bench/benchtest"
)

func TestMain(m *testing.M) { benchtest.Main(m) }

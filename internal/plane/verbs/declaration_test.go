package verbs

import (
	"testing"

	"heddle.dev/heddle/internal/plane/planetest"
)

func TestReportsAreDeclared(t *testing.T) { planetest.CheckReports(t, Open(Config{})) }

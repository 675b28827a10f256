package tcp

import (
	"testing"

	"heddle.dev/heddle/internal/plane/planetest"
)

func TestDeclaration(t *testing.T) { planetest.CheckDeclaration(t, "tcp", Declaration) }

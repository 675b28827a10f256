package testutil

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
)

// LabName gives the name that tests of this checkout begin those of their labs with:
// HEDDLE_TEST_LAB, or one made of the checkout's path, because tests of two checkouts at a time
// would take each other's labs down.
func LabName() string { return cmp.Or(os.Getenv("HEDDLE_TEST_LAB"), nameOf(checkout())) }

// nameOf leaves a lab's name, of 20 characters at most, room for a theme.
func nameOf(path string) string { return fmt.Sprintf("t%.3x", sha256.Sum256([]byte(path))) }

// checkout gives the folder of go.mod, above that in which tests of a package run; "" if there is
// none.
func checkout() string {
	dir, err := os.Getwd()
	for ; err == nil && dir != "/" && dir != "."; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	return ""
}

// Package testutil has what tests of every package need: to wait for a condition, to end at an
// error, and to be skipped by name where they cannot run. Tests of whole nodes use package test/lab
// as well.
package testutil

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"heddle.dev/heddle/internal/patience"
)

// WaitTimeout bounds every wait: for a program to be ready, to answer or to end. It only ends what
// hangs: beside other builds and tests a program may take half a minute to begin.
var WaitTimeout = patience.For(3 * time.Minute)

// Seconds gives a bound, for as patient a machine, as the argument that timeout(1) takes.
func Seconds(d time.Duration) string { return strconv.Itoa(int(patience.For(d).Seconds())) }

// Eventually waits for a condition, for WaitTimeout; when it gives up it prints what the condition
// saw last. It can be used in cleanups.
func Eventually(t testing.TB, what string, condition func() (ok bool, saw string)) {
	t.Helper()
	within(t, WaitTimeout, what, condition)
}

func within(t testing.TB, limit time.Duration, what string, condition func() (ok bool, saw string)) {
	t.Helper()
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; ; time.Sleep(pause) {
		ok, saw := condition()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited %s for %s\n%s", limit, what, saw)
		}
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// EventuallyTrue is Eventually for a condition with nothing to say.
func EventuallyTrue(t testing.TB, what string, condition func() bool) {
	t.Helper()
	Eventually(t, what, func() (bool, string) { return condition(), "" })
}

// EventuallyNil is Eventually for something that ends without an error; the last error is printed.
func EventuallyNil(t testing.TB, what string, try func() error) {
	t.Helper()
	Eventually(t, what, func() (bool, string) {
		err := try()
		return err == nil, fmt.Sprint(err)
	})
}

// NoError ends the test if err is one: what was done has to work for the test to mean anything.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// NeedRoot skips a test or benchmark that the caller's user cannot run; what says what it does.
func NeedRoot(t testing.TB, what string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skipf("needs root: %s", what)
	}
}

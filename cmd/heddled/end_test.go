package main

import (
	"context"
	"strings"
	"testing"
	"time"
)

// TestBoundEnd: a process that hangs after its signal says where, and ends.
func TestBoundEnd(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	var said strings.Builder
	codes := make(chan int)
	callOff := boundEnd(ctx, time.Millisecond, &said, func(code int) { codes <- code })
	defer callOff()
	select {
	case code := <-codes:
		t.Fatalf("ended with %d without a signal", code)
	case <-time.After(20 * time.Millisecond):
	}
	stop()
	if code := <-codes; code != 1 || !strings.Contains(said.String(), "TestBoundEnd") {
		t.Errorf("ended with %d, saying %q; want 1 and this test's stack", code, said.String())
	}
}

// TestBoundEndCalledOff: one that ends in time is left alone.
func TestBoundEndCalledOff(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	exited := make(chan int, 1)
	callOff := boundEnd(ctx, time.Hour, &strings.Builder{}, func(code int) { exited <- code })
	stop()
	callOff()
	select {
	case code := <-exited:
		t.Errorf("ended with %d", code)
	default:
	}
}

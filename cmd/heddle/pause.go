package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// newPauseCmd makes the hidden command that is the first process of a lab container: it does
// nothing but reap the processes that others leave, which is the duty of the first process of a
// process namespace.
func newPauseCmd() *cobra.Command {
	return &cobra.Command{
		Use:    "pause",
		Short:  "Wait, and reap orphans (the first process of a lab container)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return pause(cmd.Context()) },
	}
}

// pause reaps children until ctx ends.
func pause(ctx context.Context) error {
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	defer signal.Stop(children)
	for {
		if err := reap(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-children: // one signal may stand for many children
		}
	}
}

// reap takes the exit status of every child that has ended.
func reap() error {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, syscall.ECHILD), err == nil && pid == 0:
			return nil
		case err != nil:
			return os.NewSyscallError("wait4", err)
		}
	}
}

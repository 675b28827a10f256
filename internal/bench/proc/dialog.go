package proc

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os/exec"
)

// Dialog is a process that is spoken to: it gets lines and answers with lines. One goroutine at a
// time uses it.
type Dialog struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
	said  *Tail // on standard error
}

// Talk starts cmd, by start if that is not nil, and waits for its first line, which must be first.
func Talk(cmd *exec.Cmd, start func() error, first string) (*Dialog, error) {
	d := &Dialog{cmd: cmd, said: &Tail{Limit: TailLimit}}
	cmd.Stderr = d.said
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	d.in, d.lines = in, bufio.NewScanner(out)
	if start == nil {
		start = cmd.Start
	}
	if err := start(); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	line, err := d.Hear()
	if err == nil && string(line) != first {
		err = fmt.Errorf("it says %q", line)
	}
	if err != nil {
		d.Kill()
		return nil, d.Explain(err)
	}
	return d, nil
}

// Hear gives the next line, until the one after it.
func (d *Dialog) Hear() ([]byte, error) {
	if !d.lines.Scan() {
		return nil, errors.Join(errors.New("it ended"), d.lines.Err())
	}
	return d.lines.Bytes(), nil
}

// Ask gives the answer to a line.
func (d *Dialog) Ask(line string) ([]byte, error) {
	if _, err := io.WriteString(d.in, line+"\n"); err != nil {
		return nil, err
	}
	return d.Hear()
}

// Explain adds to an error what the process complained of.
func (d *Dialog) Explain(err error) error { return WithOutput(err, d.said) }

// Close ends the process by the end of its input.
func (d *Dialog) Close() error {
	_ = d.in.Close() // it fails only if the process is gone
	if err := d.cmd.Wait(); err != nil {
		return d.Explain(err)
	}
	return nil
}

// Kill ends the process, whatever it does.
func (d *Dialog) Kill() {
	_ = d.in.Close() // it may be gone
	_ = d.cmd.Process.Kill()
	_ = d.cmd.Wait() // says that it was killed
}

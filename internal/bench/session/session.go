// Package session is what every benchmark has around it: flags, a lab that is up, this program in
// the lab's containers, files of results, and the documents that are made of them.
package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"

	"heddle.dev/heddle/internal/bench"
	"heddle.dev/heddle/internal/bench/machine"
	"heddle.dev/heddle/internal/bench/report"
)

// Benchmark is a command of `heddle bench` with results of type R: data, and functions of the
// session and of the result.
type Benchmark[R any] struct {
	Name        string // of the command; "" for `heddle bench` itself
	Short, Long string
	Lab         Needs
	// Flags declares what the command takes beside --lab and --json.
	Flags func(Flags)
	// Check reads the flags, before a lab is brought up.
	Check func(*Session) error
	// Run measures. The session's lab is up.
	Run func(context.Context, *Session) (R, error)
	// Print writes the tables for who waits.
	Print func(io.Writer, *Session, R) error
	// WriteJSON writes what --json asks for; nil stands for the result with indentation.
	WriteJSON func(io.Writer, R) error
	// Plot draws what --plot asks for; nil: there is no such flag.
	Plot func(io.Writer, *Session, R) error
	// Report writes the parts of the tables' document that are made of committed results, and
	// plots; nil: it has none.
	Report func(*report.Document) error
	// Summaries are the parts of the pages of results.
	Summaries []Summary
}

// Summary gives a part of a page of results, made of committed results alone.
type Summary struct {
	Page  string // a file in the folder of results; "": the first page, which is not in it
	Part  string
	Write func(*report.Document) (string, error)
}

// Command is a benchmark whatever its results are.
type Command struct {
	Name, Short, Long string
	Flags             func(Flags)
	Run               func(ctx context.Context, s Settings, out io.Writer, progress *os.File) error
	Report            func(*report.Document) error
	Summaries         []Summary
}

// Command makes the command.
func (b Benchmark[R]) Command() Command {
	flags := func(f Flags) {
		f.StringVar(&f.Settings.Lab, "lab", b.Lab.Name, "name of the lab (default: the default lab)")
		f.StringVar(&f.JSON, "json", "", "write the results to this file")
		if b.Plot != nil {
			f.StringVar(&f.Settings.Plot, "plot", "", "draw the results into this SVG file")
		}
		if !b.Lab.Up {
			f.BoolVar(&f.Settings.Up, "up", false, "bring the lab up if it is not, and down again afterwards")
		}
		if b.Flags != nil {
			b.Flags(f)
		}
	}
	return Command{Name: b.Name, Short: b.Short, Long: b.Long, Flags: flags, Run: b.run, Report: b.Report, Summaries: b.Summaries}
}

// Words are the command's in marks and messages: "bench cost".
func (c Command) Words() string {
	if c.Name == "" {
		return "bench"
	}
	return "bench " + c.Name
}

// WriteReport writes the command's parts of a document, and its plots.
func (c Command) WriteReport(folder, document string, out io.Writer) error {
	d, err := report.OpenDocument(document, folder, c.Words()+" report")
	if err != nil {
		return err
	}
	if err := c.Report(d); err != nil {
		return err
	}
	return d.Save(out)
}

// Summarize writes all commands' parts of the pages of results, of which first is the one that is
// not in folder. All marks and all files of results have to be there, or no page is written.
func Summarize(commands []Command, folder, first string) error {
	pages := make(map[string]*report.Document)
	for _, c := range commands {
		for _, part := range c.Summaries {
			file := first
			if part.Page != "" {
				file = filepath.Join(folder, part.Page)
			}
			if err := part.writeInto(pages, file, folder); err != nil {
				return fmt.Errorf("summarize %s: %w", part.Part, err)
			}
		}
	}
	for _, page := range pages {
		if err := page.Save(io.Discard); err != nil {
			return err
		}
	}
	return nil
}

// writeInto writes the part into file, which stands in pages from then on. It saves nothing.
func (part Summary) writeInto(pages map[string]*report.Document, file, folder string) (err error) {
	page := pages[file]
	if page == nil {
		if page, err = report.OpenDocument(file, folder, "bench summary"); err != nil {
			return err
		}
		pages[file] = page
	}
	text, err := part.Write(page)
	if err != nil {
		return err
	}
	return page.Section(part.Part, "\n"+text+"\n")
}

// Session is one run of a benchmark.
type Session struct {
	Settings
	Lab        Lab
	Program    []string // runs the load generator in the lab's containers, if the benchmark needs it
	Background float64  // processors that other programs kept busy before
	Progress   *os.File
}

// Say writes a line for who waits. It is a courtesy: the measurement goes on without it.
func (s *Session) Say(format string, args ...any) {
	_, _ = fmt.Fprintf(s.Progress, format+"\n", args...)
}

// ParseScopes reads --scopes.
func (s *Session) ParseScopes() ([]bench.Scope, error) { return bench.ParseScopes(s.Scopes) }

// run measures in a lab, and then writes everything that was asked for: files only once every
// measurement has succeeded. SIGINT and SIGTERM end it.
func (b Benchmark[R]) run(ctx context.Context, settings Settings, out io.Writer, progress *os.File) error {
	ctx, cancel := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer cancel()
	s := &Session{Settings: settings, Progress: progress}
	if b.Check != nil {
		if err := b.Check(s); err != nil {
			return err
		}
	}
	if err := s.checkFiles(); err != nil {
		return err
	}
	var result R
	err := s.inLab(ctx, b.Lab, func() (err error) {
		if s.Background, err = machine.Background(ctx); err != nil {
			return err
		}
		if s.Background > machine.QuietMachine {
			s.Say("other programs keep %.1f of %d processors busy: the figures will be noisy", s.Background, runtime.NumCPU())
		}
		result, err = b.Run(ctx, s)
		return err
	})
	if ctx.Err() != nil {
		return errors.Join(errors.New("interrupted; nothing was written"), err)
	}
	if err != nil {
		return err
	}
	return b.WriteResult(out, s, result)
}

// WriteResult prints a result and writes the files that were asked for.
func (b Benchmark[R]) WriteResult(out io.Writer, s *Session, result R) error {
	if err := b.Print(out, s, result); err != nil {
		return err
	}
	write := b.WriteJSON
	if write == nil {
		write = func(w io.Writer, r R) error { return report.WriteJSON(w, r) }
	}
	for _, f := range []struct {
		what, name string
		write      func(io.Writer) error
	}{
		{"Results", s.JSON, func(w io.Writer) error { return write(w, result) }},
		{"Plot", s.Plot, func(w io.Writer) error { return b.Plot(w, s, result) }},
	} {
		if f.name == "" {
			continue
		}
		if err := report.WriteFile(f.name, f.write); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(out, "\n%s: %s\n", f.what, f.name); err != nil {
			return err
		}
	}
	return nil
}

// checkFiles says before minutes of measuring, not after, that the results could not be written.
func (s *Session) checkFiles() error {
	for _, file := range []string{s.JSON, s.Plot} {
		if info, err := os.Stat(filepath.Dir(file)); err != nil || !info.IsDir() {
			return fmt.Errorf("write %s: %s is no directory; make it first", file, filepath.Dir(file))
		}
	}
	return nil
}

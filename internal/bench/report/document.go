package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// Document is a page of which a command writes parts, each between two marks, from the results in a
// folder. Nothing is written before Save: a page that is half new would be worse than none.
type Document struct {
	file    string
	folder  string
	command string // that stands in the marks
	text    []byte
	plots   map[string][]byte
}

// OpenDocument reads a page. folder has the results, and gets the plots; command is the one whose
// parts are written.
func OpenDocument(file, folder, command string) (*Document, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return &Document{file: file, folder: folder, command: command, text: text, plots: make(map[string][]byte)}, nil
}

// Read reads a file of results into result.
func (d *Document) Read(name string, result any) error {
	return ReadFile(filepath.Join(d.folder, name), result)
}

// ReadFile reads a file of results into result.
func ReadFile(file string, result any) error {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, result); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// Mark gives the line after which a command writes a part of a page; a part that is the command's
// only one has no name.
func Mark(command, part string) string {
	if part != "" {
		part = ": " + part
	}
	return fmt.Sprintf("<!-- `heddle %s` writes from here%s -->\n", command, part)
}

// Section puts text in the place of a part: what stands between its mark and the next line "<!--
// ... to here ... -->".
func (d *Document) Section(part, text string) error {
	mark := []byte(Mark(d.command, part))
	begin := bytes.Index(d.text, mark)
	if begin < 0 {
		return fmt.Errorf("%s has no line %q", d.file, bytes.TrimSpace(mark))
	}
	begin += len(mark)
	end := begin
	for line := range bytes.Lines(d.text[begin:]) {
		if bytes.HasPrefix(line, []byte("<!-- ")) {
			if !bytes.Contains(line, []byte("to here")) {
				break
			}
			d.text = slices.Concat(d.text[:begin], []byte(text), d.text[end:])
			return nil
		}
		end += len(line)
	}
	return fmt.Errorf("%s: no line \"<!-- to here ... -->\" after %q", d.file, bytes.TrimSpace(mark))
}

// Plot draws a file beside the results.
func (d *Document) Plot(name string, draw func(io.Writer) error) error {
	var b bytes.Buffer
	if err := draw(&b); err != nil {
		return err
	}
	d.plots[name] = b.Bytes()
	return nil
}

// Save writes plots and page, and names the plots on out.
func (d *Document) Save(out io.Writer) error {
	for name, picture := range d.plots {
		file := filepath.Join(d.folder, name)
		if err := WriteFile(file, func(w io.Writer) error { _, err := w.Write(picture); return err }); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, "Plot:", file); err != nil {
			return err
		}
	}
	return WriteFile(d.file, func(w io.Writer) error { _, err := w.Write(d.text); return err })
}

// WriteJSON writes a result with indentation.
func WriteJSON(w io.Writer, result any) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(result); err != nil {
		return fmt.Errorf("write results: %w", err)
	}
	return nil
}

// WriteFile writes a whole file or none: a reader never sees half of one.
func WriteFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), ".heddle-bench-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(f.Name()))
		}
	}()
	if err = write(f); err != nil {
		return errors.Join(err, f.Close())
	}
	if err = errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

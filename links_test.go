package heddle_test

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

var (
	codeSpan     = regexp.MustCompile("`[^`\n]*`")
	markdownLink = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	documentName = regexp.MustCompile(`\bdocs/[a-zA-Z0-9/_.-]*[a-zA-Z0-9]\.(md|json|svg)\b`)
	linkText     = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// document is a page of Markdown: its text without code, and the anchors of its headings.
type document struct {
	text    string
	anchors map[string]bool
}

// readDocument reads a page. Lines in fences and lines indented by four spaces are code, in which
// nothing is a link or a heading. (A list's second paragraph would be indented, too; the project's
// pages have none.)
func readDocument(name string) (document, error) {
	raw, err := os.ReadFile(name)
	if err != nil {
		return document{}, err
	}
	d := document{anchors: map[string]bool{}}
	var text strings.Builder
	fenced := false
	for line := range strings.Lines(string(raw)) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if fenced || strings.HasPrefix(line, "    ") {
			continue
		}
		if title := strings.TrimLeft(line, "#"); len(title) < len(line) && strings.HasPrefix(title, " ") {
			d.addAnchor(title)
		}
		text.WriteString(line)
	}
	d.text = codeSpan.ReplaceAllString(text.String(), "")
	return d, nil
}

// addAnchor adds a heading's anchor, as the sites that show Markdown make it: lower case, spaces as
// hyphens, no punctuation, and a number for one that is there already.
func (d document) addAnchor(title string) {
	title = linkText.ReplaceAllString(strings.TrimSpace(title), "$1")
	var b strings.Builder
	for _, r := range strings.ToLower(title) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			b.WriteRune(r)
		}
	}
	anchor := b.String()
	for i := 1; d.anchors[anchor]; i++ {
		anchor = fmt.Sprintf("%s-%d", b.String(), i)
	}
	d.anchors[anchor] = true
}

// broken gives what is wrong with the links of a page. read gives the pages that they lead to.
func (d document) broken(name string, read func(string) (document, error)) (faults []string) {
	for _, match := range markdownLink.FindAllStringSubmatch(d.text, -1) {
		target := match[1]
		if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
			continue
		}
		file, anchor, hasAnchor := strings.Cut(target, "#")
		full := name
		if file != "" {
			full = path.Join(path.Dir(name), file)
		}
		if _, err := os.Stat(full); err != nil {
			faults = append(faults, fmt.Sprintf("%s: %s leads nowhere", name, target))
			continue
		}
		if !hasAnchor {
			continue
		}
		if to, err := read(full); err != nil || !to.anchors[anchor] {
			faults = append(faults, fmt.Sprintf("%s: %s: no heading of that name (%v)", name, target, err))
		}
	}
	return faults
}

// walkFiles calls f with each file of the repository that is not built, with its path.
func walkFiles(t *testing.T, f func(name string)) {
	t.Helper()
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			built := slices.Contains([]string{"bin", "out", "target"}, d.Name())
			if p != "." && (strings.HasPrefix(d.Name(), ".") || built) {
				return fs.SkipDir
			}
			return nil
		}
		f(filepath.ToSlash(p))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestLinks follows every relative link of every page, to its file and its heading.
func TestLinks(t *testing.T) {
	pages := map[string]document{}
	read := func(name string) (document, error) {
		if d, ok := pages[name]; ok {
			return d, nil
		}
		d, err := readDocument(name)
		if err == nil {
			pages[name] = d
		}
		return d, err
	}
	n := 0
	walkFiles(t, func(name string) {
		if !strings.HasSuffix(name, ".md") {
			return
		}
		n++
		d, err := read(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, fault := range d.broken(name, read) {
			t.Error(fault)
		}
	})
	if n < 20 {
		t.Errorf("only %d pages were found", n)
	}
}

// TestNamedDocuments demands that the pages and results exist that sources, scripts and the
// Makefile name.
func TestNamedDocuments(t *testing.T) {
	n := 0
	sources := []string{".go", ".c", ".h", ".sh", ".rs", ".service", ".yaml", ".yml"}
	walkFiles(t, func(name string) {
		if !slices.Contains(sources, path.Ext(name)) && path.Base(name) != "Makefile" {
			return
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range documentName.FindAllIndex(raw, -1) {
			document := string(raw[at[0]:at[1]])
			n++
			// A page of a sort, or one below another folder, is no page of ours.
			if path.Base(document) == "NAME.md" || at[0] > 0 && raw[at[0]-1] == '/' {
				continue
			}
			if _, err := os.Stat(document); err != nil {
				t.Errorf("%s names %s, which does not exist", name, document)
			}
		}
	})
	if n == 0 {
		t.Error("no source names a page")
	}
}

// TestBrokenLinks says that TestLinks would find what is broken.
func TestBrokenLinks(t *testing.T) {
	dir := t.TempDir()
	name := filepath.ToSlash(filepath.Join(dir, "a.md"))
	text := "# A `b`, and [c](a.md)\n\n## Twice\n## Twice\n" +
		"[x](#a-b-and-c) [x](a.md#twice-1) [x](https://example.org/) `[x](code)`\n" +
		"    [x](indented)\n```\n[x](fenced)\n# fenced\n```\n"
	for broken, want := range map[string]int{
		"": 0, "[x](none.md)": 1, "[x](#fenced)": 1, "[x](a.md#twice-2) [x](#none)": 2,
	} {
		if err := os.WriteFile(name, []byte(text+broken+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		d, err := readDocument(name)
		if err != nil {
			t.Fatal(err)
		}
		if faults := d.broken(name, readDocument); len(faults) != want {
			t.Errorf("%q: %v (anchors %v)", broken, faults, d.anchors)
		}
	}
}

// TestSitePages demands that the site's navigation has every page of docs/; decisions are reached
// by their index.
func TestSitePages(t *testing.T) {
	raw, err := os.ReadFile("mkdocs.yml")
	if err != nil {
		t.Fatal(err)
	}
	walkFiles(t, func(name string) {
		page, ok := strings.CutPrefix(name, "docs/")
		if !ok || !strings.HasSuffix(page, ".md") || strings.HasPrefix(page, "decisions/0") {
			return
		}
		if !strings.Contains(string(raw), ": "+page+"\n") {
			t.Errorf("%s is not in the navigation of mkdocs.yml", name)
		}
	})
}

package pages

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// page is a page of docs/howto as its reader works through it.
type page struct {
	name   string
	blocks []block
	tried  string // its last paragraph
}

// block is something that the page has its reader type, or a comment that stands for what it says
// in prose.
type block struct {
	line    int
	section string // the heading that it is under
	does    string // run, unseen, file, output, skip; "" if the page does not say
	host    string // "a": by default the first
	where   string // file: its path
	why     string // skip: the reason
	text    string

	background bool   // it goes on while the next ones are typed
	fails      bool   // it is to fail
	shows      string // it prints this
	until      string // afterwards this command is to succeed, at last
}

var (
	heading = regexp.MustCompile(`^#+ +(.*)$`)
	fence   = regexp.MustCompile("^( *)```(.*)$")
)

// readPage reads docs/howto/NAME.md.
func readPage(name string) (page, error) {
	raw, err := os.ReadFile(filepath.Join("../../docs/howto", name+".md"))
	if err != nil {
		return page{}, err
	}
	return parsePage(name, string(raw))
}

// parsePage finds the blocks of a page: what is indented by four spaces or between fences, and
// comments that begin with "unseen". The comment before a block says what is done with it.
func parsePage(name, text string) (p page, err error) {
	p.name = name
	text = strings.TrimRight(text, "\n")
	lines, paragraphs := strings.Split(text, "\n"), strings.Split(text, "\n\n")
	p.tried = paragraphs[len(paragraphs)-1]
	section, marked := "", (*block)(nil)
	take := func(line int, text string) {
		b := block{}
		if marked != nil {
			b = *marked
		}
		b.line, b.section, b.text = line, section, text
		p.blocks, marked = append(p.blocks, b), nil
	}
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		switch {
		case strings.HasPrefix(line, "<!--"):
			first := i
			for !strings.Contains(lines[i], "-->") {
				if i++; i == len(lines) {
					return p, fmt.Errorf("%s.md:%d: the comment has no end", name, first+1)
				}
			}
			comment := strings.Join(lines[first:i+1], "\n")
			comment = strings.TrimSpace(strings.TrimSuffix(strings.TrimPrefix(comment, "<!--"), "-->"))
			head, body, _ := strings.Cut(comment, "\n")
			if marked, err = parseMark(head); err != nil {
				return p, fmt.Errorf("%s.md:%d: %w", name, first+1, err)
			}
			if marked != nil && marked.does == "unseen" {
				take(first+1, body)
			}
		case fence.MatchString(line):
			indent, first := fence.FindStringSubmatch(line)[1], i+1
			for i++; i < len(lines) && !fence.MatchString(lines[i]); i++ {
				lines[i] = strings.TrimPrefix(lines[i], indent)
			}
			take(first, strings.Join(lines[first:min(i, len(lines))], "\n"))
		case strings.HasPrefix(line, "    ") && (i == 0 || lines[i-1] == "" || strings.HasSuffix(lines[i-1], "-->")):
			first, last := i, i
			for ; i < len(lines) && (lines[i] == "" || strings.HasPrefix(lines[i], "    ")); i++ {
				if lines[i] != "" {
					last = i
				}
				lines[i] = strings.TrimPrefix(lines[i], "    ")
			}
			i = last
			take(first+1, strings.Join(lines[first:last+1], "\n"))
		case line == "":
		default:
			if m := heading.FindStringSubmatch(line); m != nil {
				section = m[1]
			}
			if marked != nil {
				return p, fmt.Errorf("%s.md:%d: the comment before it is about no block", name, i+1)
			}
		}
	}
	return p, nil
}

// parseMark reads the first line of a comment; nil if it is about something else.
func parseMark(head string) (*block, error) {
	does, rest, _ := strings.Cut(head, " ")
	b := &block{does: does}
	switch does {
	case "run", "unseen":
	case "file":
		b.host, b.where, _ = strings.Cut(rest, " ")
		if b.where == "" {
			return nil, fmt.Errorf("file: want HOST PATH, have %q", rest)
		}
		return b, nil
	case "output":
		return b, nil
	case "skip":
		if b.why = rest; rest == "" {
			return nil, fmt.Errorf("skip: why?")
		}
		return b, nil
	default:
		return nil, nil
	}
	rest, b.until, _ = strings.Cut(rest, "; until ")
	words := strings.Split(rest, "; ")
	b.host = words[0]
	for _, w := range words[1:] {
		key, value, _ := strings.Cut(w, " ")
		switch key {
		case "background":
			b.background = true
		case "fails":
			b.fails = true
		case "shows":
			b.shows = value
		default:
			return nil, fmt.Errorf("%s: %q is not known", does, w)
		}
	}
	return b, nil
}

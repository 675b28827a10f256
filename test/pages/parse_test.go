package pages

import (
	"fmt"
	"strings"
	"testing"
)

// TestParsePage: what a page has its reader type is found, with what the comments say of it.
func TestParsePage(t *testing.T) {
	text := strings.Join([]string{
		"# Title", "", "<!-- run a; shows hello; until true; false -->", "", "    echo hello", "", "    echo more", "", "Words.",
		"    no block: it goes on with the words", "", "## Part", "", "1. A list", "", "<!-- file b /etc/x -->", "   ```json", "   {}", "   ```",
		"", "<!-- unseen a/2", "first", "second", "-->", "", "<!-- a remark -->", "", "```", "unmarked", "```", "", "<!-- skip no time -->", "    typed later", "", "Last tried.",
	}, "\n")
	p, err := parsePage("x", text)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, b := range p.blocks {
		got = append(got, fmt.Sprintf("%d %s %s %q %q %s %s %s %s", b.line, b.section, b.does, b.host, b.text, b.where, b.shows, b.until, b.why))
	}
	want := []string{
		`5 Title run "a" "echo hello\n\necho more"  hello true; false `,
		`17 Part file "b" "{}" /etc/x   `,
		`21 Part unseen "a/2" "first\nsecond"    `,
		`28 Part  "" "unmarked"    `,
		`33 Part skip "" "typed later"    no time`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if p.tried != "Last tried." {
		t.Errorf("last paragraph %q", p.tried)
	}
	for _, bad := range []string{"<!-- run a; sideways -->\n\n    x", "<!-- skip -->\n\n    x", "<!-- run a", "<!-- run a -->\n\nwords", "<!-- file a -->\n\n    x"} {
		if _, err := parsePage("x", bad); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
}

package flow

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"heddle.dev/heddle/internal/model"
)

// Limits of a filter.
const (
	maxValues = 32      // of one key
	maxValue  = 640     // bytes of one: a label with its value
	MaxLast   = 1 << 20 // flows
)

// Filter chooses flows. Of several values of one key any one is enough, but for labels, which an
// end must have all; what different keys say must hold at once. The zero Filter chooses all.
type Filter struct {
	From, To []PeerMatch
	// Labels: one of the ends has all of them.
	Labels []LabelMatch
	// Ports are the destination's.
	Ports    []PortRange
	Events   []Event
	Verdicts []Verdict
	Paths    []model.Path
	// Reasons are globs.
	Reasons []string
	// Since is from when on; the zero Since: from ever.
	Since Since
	// Last keeps the latest so many; 0: all.
	Last int
}

// FieldError says what is wrong with a key of a filter, and what to do about it.
type FieldError struct {
	Field, Message, Remedy string
}

// Error gives "field: message (remedy)".
func (e *FieldError) Error() string {
	s := e.Field + ": " + e.Message
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Keys lists the keys of a filter, in the order in which String writes them.
var Keys = []string{"from", "to", "label", "port", "event", "verdict", "path", "reason", "since", "last"}

// ParseFilter reads a filter from the values of a query: each key may be there several times, but
// for since and last. The error is a *FieldError.
func ParseFilter(values url.Values) (f Filter, err error) {
	for key, list := range values {
		if !slices.Contains(Keys, key) {
			return Filter{}, &FieldError{Field: short(key), Message: "unknown filter", Remedy: "use " + strings.Join(Keys, ", ")}
		}
		if len(list) > maxValues {
			return Filter{}, &FieldError{Field: key, Message: fmt.Sprintf("%d values, at most %d are taken", len(list), maxValues), Remedy: "use a prefix, or * and ? in names"}
		}
		if len(list) > 1 && (key == "since" || key == "last") {
			return Filter{}, &FieldError{Field: key, Message: "given more than once", Remedy: "leave all but one out"}
		}
	}
	for _, key := range Keys {
		for _, value := range values[key] {
			if err := f.add(key, value); err != nil {
				return Filter{}, err
			}
		}
	}
	if err := f.contradiction(); err != nil {
		return Filter{}, err
	}
	return f, nil
}

// ParseQuery reads what String wrote.
func ParseQuery(query string) (Filter, error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return Filter{}, &FieldError{Field: "query", Message: "malformed: " + err.Error()}
	}
	return ParseFilter(values)
}

// add adds one value of a key.
func (f *Filter) add(key, value string) error {
	if value == "" {
		return &FieldError{Field: key, Message: "is empty", Remedy: "leave it out to have all"}
	}
	if len(value) > maxValue {
		return &FieldError{Field: key, Message: fmt.Sprintf("%d bytes, at most %d are taken", len(value), maxValue)}
	}
	switch key {
	case "from":
		return appendParsed(&f.From, key, value, parsePeer)
	case "to":
		return appendParsed(&f.To, key, value, parsePeer)
	case "label":
		return appendParsed(&f.Labels, key, value, parseLabel)
	case "port":
		return appendParsed(&f.Ports, key, value, parsePorts)
	case "event":
		return appendParsed(&f.Events, key, value, oneOf(Events))
	case "verdict":
		return appendParsed(&f.Verdicts, key, value, oneOf(Verdicts))
	case "path":
		return appendParsed(&f.Paths, key, value, parsePath)
	case "reason":
		return appendParsed(&f.Reasons, key, value, parseReason)
	case "since":
		return setParsed(&f.Since, key, value, parseSince)
	}
	return setParsed(&f.Last, key, value, parseLast)
}

func setParsed[T any](to *T, key, value string, parse func(key, value string) (T, error)) (err error) {
	*to, err = parse(key, value)
	return err
}

// appendParsed adds a value to a list, once.
func appendParsed[T comparable](list *[]T, key, value string, parse func(key, value string) (T, error)) error {
	v, err := parse(key, value)
	if err == nil && !slices.Contains(*list, v) {
		*list = append(*list, v)
	}
	return err
}

// oneOf gives a parser of words.
func oneOf[T ~string](words []T) func(key, value string) (T, error) {
	return func(key, value string) (T, error) {
		if slices.Contains(words, T(value)) {
			return T(value), nil
		}
		known := make([]string, len(words))
		for i, w := range words {
			known[i] = string(w)
		}
		return "", &FieldError{Field: key, Message: fmt.Sprintf("%s is none", short(value)), Remedy: "use " + strings.Join(known, ", ")}
	}
}

// contradiction finds what no flow can be.
func (f *Filter) contradiction() error {
	if len(f.Verdicts) > 0 && len(f.Events) > 0 &&
		!slices.ContainsFunc(f.Events, func(e Event) bool { return slices.Contains(f.Verdicts, e.Verdict()) }) {
		return &FieldError{Field: "event", Message: fmt.Sprintf("no flow is %s and %s", f.Events[0], f.Verdicts[0]), Remedy: "leave out event or verdict"}
	}
	denied := len(f.Verdicts) > 0 && !slices.ContainsFunc(f.Verdicts, func(v Verdict) bool { return v != Denied }) ||
		len(f.Events) > 0 && !slices.ContainsFunc(f.Events, func(e Event) bool { return e != Deny })
	if denied && len(f.Paths) > 0 {
		return &FieldError{Field: "path", Message: "connections that are denied have none", Remedy: "leave out path"}
	}
	return nil
}

// Values gives the filter as the values of a query.
func (f Filter) Values() url.Values {
	values := make(url.Values)
	addAll(values, "from", f.From, PeerMatch.String)
	addAll(values, "to", f.To, PeerMatch.String)
	addAll(values, "label", f.Labels, LabelMatch.String)
	addAll(values, "port", f.Ports, PortRange.String)
	addAll(values, "event", f.Events, func(e Event) string { return string(e) })
	addAll(values, "verdict", f.Verdicts, func(v Verdict) string { return string(v) })
	addAll(values, "path", f.Paths, func(p model.Path) string { return string(p) })
	addAll(values, "reason", f.Reasons, func(s string) string { return s })
	if f.Since != (Since{}) {
		values.Set("since", f.Since.String())
	}
	if f.Last != 0 {
		values.Set("last", strconv.Itoa(f.Last))
	}
	return values
}

func addAll[T any](values url.Values, key string, list []T, text func(T) string) {
	for _, v := range list {
		values.Add(key, text(v))
	}
}

// String gives the filter as a query, which ParseQuery reads.
func (f Filter) String() string { return f.Values().Encode() }

// Match reports whether the filter chooses a flow. Since and Last are for who has them all.
func (f *Filter) Match(w *Flow) bool {
	return anyOf(f.From, func(m PeerMatch) bool { return m.matches(w.From) }) &&
		anyOf(f.To, func(m PeerMatch) bool { return m.matches(w.To) }) &&
		f.matchLabels(w) &&
		anyOf(f.Ports, func(p PortRange) bool { return p.First <= w.To.Port && w.To.Port <= p.Last }) &&
		anyOf(f.Events, func(e Event) bool { return e == w.Event }) &&
		anyOf(f.Verdicts, func(v Verdict) bool { return v == w.Verdict }) &&
		anyOf(f.Paths, func(p model.Path) bool { return p == w.Path }) &&
		anyOf(f.Reasons, func(g string) bool { return glob(g, w.Reason) })
}

// NoReason gives the first reason that the filter asks for and that is none of those there are; ""
// if it asks for none such.
func (f *Filter) NoReason(there []string) string {
	i := slices.IndexFunc(f.Reasons, func(g string) bool {
		return !slices.ContainsFunc(there, func(name string) bool { return glob(g, name) })
	})
	if i < 0 {
		return ""
	}
	return f.Reasons[i]
}

func (f *Filter) matchLabels(w *Flow) bool {
	has := func(p Peer) bool {
		return !slices.ContainsFunc(f.Labels, func(l LabelMatch) bool { return !l.matches(p.Labels) })
	}
	return len(f.Labels) == 0 || has(w.From) || has(w.To)
}

// anyOf reports whether a list is empty or has one that matches.
func anyOf[T any](list []T, matches func(T) bool) bool {
	return len(list) == 0 || slices.ContainsFunc(list, matches)
}

// Since is a moment: so long before now, or a time. One of both is zero.
type Since struct {
	Ago time.Duration
	At  time.Time
}

// String gives "5m0s", or a time of RFC 3339.
func (s Since) String() string {
	if s.At.IsZero() {
		return s.Ago.String()
	}
	return s.At.Format(time.RFC3339Nano)
}

// Start gives the moment; the zero time for the zero Since. A moment that is yet to come is a
// *FieldError.
func (s Since) Start(now time.Time) (time.Time, error) {
	switch {
	case s == Since{}:
		return time.Time{}, nil
	case s.At.IsZero():
		return now.Add(-s.Ago), nil
	case s.At.After(now):
		return time.Time{}, &FieldError{Field: "since", Message: s.String() + " is yet to come", Remedy: "give a duration such as 5m, or a time before now"}
	}
	return s.At, nil
}

func parseSince(key, value string) (Since, error) {
	if d, err := time.ParseDuration(value); err == nil {
		if d <= 0 {
			return Since{}, &FieldError{Field: key, Message: short(value) + " is not before now", Remedy: "give how long ago, such as 5m"}
		}
		return Since{Ago: d}, nil
	}
	at, err := time.Parse(time.RFC3339Nano, value)
	if err != nil || at.IsZero() || at.Year() < 1970 || at.Year() > 9999 {
		return Since{}, &FieldError{Field: key, Message: short(value) + " is neither a duration nor a time", Remedy: "write 5m, or 2026-11-28T21:00:00Z"}
	}
	return Since{At: at.UTC()}, nil
}

func parseLast(key, value string) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > MaxLast {
		return 0, &FieldError{Field: key, Message: short(value) + " is no number of flows", Remedy: fmt.Sprintf("give one from 1 to %d", MaxLast)}
	}
	return n, nil
}

// short quotes what somebody sent.
func short(s string) string { return fmt.Sprintf("%.60q", cmp.Or(s, "")) }

// Package logform makes the logs of Heddle's programs: one form for all that a program says, also
// by way of libraries.
package logform

import (
	"fmt"
	"io"
	"log/slog"
)

// The forms.
const (
	Text = "text" // name=value
	JSON = "json"
)

// New makes a logger that writes a line for each message of a level, by its name, or above. It
// becomes slog's default, so that what libraries say by package log has the same form. Errors name
// the flag.
func New(w io.Writer, level, form string) (*slog.Logger, error) {
	var least slog.Level
	if err := least.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("--log-level %.40q: want debug, info, warn or error", level)
	}
	options := &slog.HandlerOptions{Level: least}
	var handler slog.Handler
	switch form {
	case Text:
		handler = slog.NewTextHandler(w, options)
	case JSON:
		handler = slog.NewJSONHandler(w, options)
	default:
		return nil, fmt.Errorf("--log-format %.40q: want %s or %s", form, Text, JSON)
	}
	log := slog.New(handler)
	slog.SetDefault(log)
	return log, nil
}

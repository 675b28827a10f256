package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"heddle.dev/heddle/internal/api"
	"heddle.dev/heddle/internal/store"
)

// TestLabelsFitTheStore: labels that the API lets pass are taken by the store, and those that it
// refuses are refused by name, with what to do.
func TestLabelsFitTheStore(t *testing.T) {
	many := func(n int, key, value string) map[string]string {
		labels := make(map[string]string, n)
		for i := range n {
			k := fmt.Sprint(i) + key
			for len(k) > api.MaxLabelKey { // cut at the end of a character
				_, size := utf8.DecodeLastRuneInString(k)
				k = k[:len(k)-size]
			}
			labels[k] = value
		}
		return labels
	}
	long := strings.Repeat
	for what, c := range map[string]struct {
		labels map[string]string
		fits   bool
	}{
		"none":                      {nil, true},
		"as many and long as taken": {many(api.MaxLabels, long("k", api.MaxLabelKey), long("v", api.MaxLabelValue)), true},
		"many bytes a character":    {many(api.MaxLabels, long("é", api.MaxLabelKey), long("世", api.MaxLabelValue/3)), true},
		"longer as JSON":            {many(20, long("<", api.MaxLabelKey), long("&", api.MaxLabelValue)), false},
		"a bit longer as JSON":      {many(10, long("<", api.MaxLabelKey), long("&", api.MaxLabelValue)), true},
		"one too many":              {many(api.MaxLabels+1, "k", "v"), false},
		"key too long":              {map[string]string{long("k", api.MaxLabelKey+1): "v"}, false},
		"no key":                    {map[string]string{"": "v"}, false},
		"value too long":            {map[string]string{"k": long("v", api.MaxLabelValue+1)}, false},
		"control character":         {map[string]string{"k": "a\nb"}, false},
		"not UTF-8":                 {map[string]string{"k\xff": "v"}, false},
		"replacement character":     {map[string]string{"k": "\uFFFD"}, false}, // what the decoder makes of bad bytes
	} {
		err := api.LabelRequest{Set: c.labels, Remove: []string{"other"}}.Validate()
		if (err == nil) != c.fits {
			t.Errorf("%s: the API says %v", what, err)
		}
		var refusal *api.Error
		if err != nil && (!errors.As(err, &refusal) || refusal.Code != api.CodeInvalid || refusal.Field != "labels" || refusal.Remedy == "") {
			t.Errorf("%s: %v names no field or no remedy", what, err)
		}
		e := endpointOf(1, "c1", "10.244.1.2")
		e.Node, e.NetnsPath, e.Labels = "n1", "/"+long("x", 4094), c.labels
		if _, err := store.EncodeEndpoint(e); err != nil && c.fits {
			t.Errorf("%s: the store refuses what the API takes: %v", what, err)
		}
	}
}

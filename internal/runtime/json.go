package runtime

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// object is a JSON object. config.json is edited as generic JSON so that fields this version of the
// specification does not know come out as they went in.
type object = map[string]any

// readString reads a field that must be there.
func readString(o object, path, field string) (string, error) {
	s, ok := o[field].(string)
	if !ok {
		return "", fmt.Errorf("%s.%s: want a string, have %s", path, field, describe(o[field]))
	}
	return s, nil
}

// readNumber reads an unsigned number; absent gives missing.
func readNumber(o object, path, field string, missing uint64) (uint64, error) {
	v := o[field]
	if v == nil {
		return missing, nil
	}
	n, ok := v.(json.Number)
	if ok {
		if u, err := strconv.ParseUint(n.String(), 10, 64); err == nil {
			return u, nil
		}
	}
	return 0, fmt.Errorf("%s.%s: want an unsigned number of 64 bits, have %s", path, field, describe(v))
}

// number gives a number as a configuration that was read has it.
func number(n uint64) json.Number { return json.Number(strconv.FormatUint(n, 10)) }

// readList reads a list; absent gives none.
func readList(o object, path, field string) ([]any, error) {
	v := o[field]
	if v == nil {
		return nil, nil
	}
	l, ok := v.([]any)
	if !ok {
		return nil, fmt.Errorf("%s.%s: want a list, have %s", path, field, describe(v))
	}
	return l, nil
}

// readStrings reads a list of strings.
func readStrings(o object, path, field string) ([]string, error) {
	l, err := readList(o, path, field)
	if err != nil {
		return nil, err
	}
	out := make([]string, len(l))
	for i, v := range l {
		s, ok := v.(string)
		if !ok {
			return nil, fmt.Errorf("%s.%s[%d]: want a string, have %s", path, field, i, describe(v))
		}
		out[i] = s
	}
	return out, nil
}

// readObject reads an object; absent gives nil.
func readObject(o object, path, field string) (object, error) {
	v := o[field]
	if v == nil {
		return nil, nil
	}
	child, ok := v.(object)
	if !ok {
		return nil, fmt.Errorf("%s: want an object, have %s", path, describe(v))
	}
	return child, nil
}

// describe names a JSON value in an error.
func describe(v any) string {
	switch v := v.(type) {
	case nil:
		return "nothing"
	case object:
		return "an object"
	case []any:
		return "a list"
	case string:
		return strconv.Quote(v)
	default:
		return fmt.Sprint(v)
	}
}

// toAny gives a list as JSON has it.
func toAny(in []string) []any {
	out := make([]any, len(in))
	for i, s := range in {
		out[i] = s
	}
	return out
}

package api

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
)

// Whatever bytes arrive: an *Error with a code of the request's, or a request that is valid and
// that a client could have sent.
func FuzzDecodeEndpointRequest(f *testing.F) {
	for _, s := range []string{
		``, `{}`, `null`, `[]`, `{"name":"n1/c1","netns_path":"/run/netns/x","intercepted":true}`,
		`{"name":"c","netns_path":"/n","addr":"10.0.0.1","labels":{"a":"b"}}`, `{"name":"c","netns_path":"/n"} {}`,
		`{"name":"c","name":"d","netns_path":"/n","addr":"fe80::1%25"}`, `{"NAME":"c","netns_path":"/\u0000"}`,
		"{\"name\":\"\xff\"}", `{"name":1e999}`, strings.Repeat("[", 20000),
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		req, err := decodeEndpointRequest(strings.NewReader(body))
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Code != CodeInvalid && e.Code != CodeTooLarge || e.Message == "" {
				t.Fatalf("error %#v", err)
			}
			if !reflect.DeepEqual(req, EndpointRequest{}) {
				t.Fatalf("a request beside an error: %+v", req)
			}
			return
		}
		if err := req.Validate(); err != nil {
			t.Fatalf("accepted %+v, which is invalid: %v", req, err)
		}
		sent, err := json.Marshal(req)
		if err != nil {
			t.Fatal(err)
		}
		again, err := decodeEndpointRequest(strings.NewReader(string(sent)))
		if len(req.Labels) == 0 {
			req.Labels = nil // an empty object and none are one
		}
		if err != nil || !reflect.DeepEqual(again, req) {
			t.Fatalf("%s decodes to %+v (%v), want %+v", sent, again, err, req)
		}
	})
}

func FuzzDecodeConnectionFilter(f *testing.F) {
	for _, s := range []string{"", "endpoint=n1%2Fc1&listeners=true", "endpoint=a;b", "listeners=2", "%zz", "a=b&a=c"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, query string) {
		filter, err := decodeConnectionFilter(query)
		if err != nil && !errors.Is(err, ErrInvalid) {
			t.Fatalf("error %#v", err)
		}
		if filter.Endpoint != "" && ValidateEndpointName("endpoint", filter.Endpoint) != nil {
			t.Fatalf("accepted endpoint %q", filter.Endpoint)
		}
	})
}

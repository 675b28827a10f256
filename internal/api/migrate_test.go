package api

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestMigrate(t *testing.T) {
	client := serve(t, newFakeAgent())
	if _, err := client.CreateEndpoint(t.Context(), EndpointRequest{Name: "n1/c1", NetnsPath: "/run/netns/x"}); err != nil {
		t.Fatal(err)
	}
	for to, field := range map[string]string{"": "to", "No": "to"} {
		var e *Error
		if _, err := client.Migrate(t.Context(), "n1/c1", MigrateRequest{To: to}); !errors.As(err, &e) || e.Field != field || e.Code != CodeInvalid {
			t.Errorf("to %q: %v", to, err)
		}
	}
	m, err := client.Migrate(t.Context(), "n1/c1", MigrateRequest{To: "n2"})
	if want := (Migration{Move: testMove("n1/c1", "n2"), Steps: []MigrationStep{{Name: StepStore, Took: 7}}}); err != nil || !reflect.DeepEqual(m, want) {
		t.Errorf("got %+v, %v; want %+v", m, err, want)
	}
	if _, err := client.Migrate(t.Context(), "n1/c1", MigrateRequest{To: "n2"}); !errors.Is(err, ErrNotFound) {
		t.Errorf("an endpoint that is not there: %v", err)
	}
	moves, err := client.Moves(t.Context())
	if want := []Move{testMove("n1/c1", "n2")}; err != nil || !reflect.DeepEqual(moves, want) {
		t.Errorf("got %+v, %v; want %+v", moves, err, want)
	}
}

// FuzzDecodeMigrateRequest: whatever bytes arrive, an *Error or a request that is valid.
func FuzzDecodeMigrateRequest(f *testing.F) {
	for _, s := range []string{``, `{}`, `{"to":"n2"}`, `{"to":"n2","to":"N"}`, `{"to":7}`, `{"to":"n2"} {}`, `{"to":"n2","x":1}`, strings.Repeat("[", 2000)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		req, err := decodeMigrateRequest(strings.NewReader(body))
		var e *Error
		if err != nil && (!errors.As(err, &e) || e.Message == "") {
			t.Fatalf("error %#v", err)
		}
		if err == nil && req.Validate() != nil {
			t.Fatalf("accepted %+v", req)
		}
	})
}

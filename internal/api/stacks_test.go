package api

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"heddle.dev/heddle/internal/stack"
)

func TestStacks(t *testing.T) {
	agent := newFakeAgent()
	client := serve(t, agent)
	st, err := client.Stacks(t.Context())
	if err != nil || len(st.Profiles) != 1 || st.Profiles[0].Settings.PacingRate != 12_000_000 || st.Endpoints[0].Settings != "congestion=bbr,pacing_rate=12mbit" {
		t.Errorf("%+v, %v", st, err)
	}
	edit := StackEdit{Profiles: st.Profiles, Delete: []string{"old"}, Objects: [][]byte{{1, 2}}, DeleteObjects: []string{"dctcp"}}
	if made, err := client.EditStacks(t.Context(), edit); err != nil || len(made) != 1 {
		t.Errorf("%+v, %v", made, err)
	}
	if !reflect.DeepEqual(agent.stackEdit, edit) {
		t.Errorf("the agent was asked for %+v, want %+v", agent.stackEdit, edit)
	}
}

func TestStackEditRefused(t *testing.T) {
	for name, c := range map[string]struct {
		edit  StackEdit
		field string
	}{
		"nothing":  {StackEdit{}, ""},
		"null":     {StackEdit{Profiles: []*stack.Profile{nil}}, "profiles[0]"},
		"profile":  {StackEdit{Profiles: []*stack.Profile{{Name: "a", Stack: "lwip"}}}, "profiles[0].stack"},
		"module":   {StackEdit{Profiles: []*stack.Profile{{Name: "a", Stack: stack.Netstack, Settings: stack.Settings{MSS: 1000}}}}, "profiles[0].settings.mss"},
		"delete":   {StackEdit{Delete: []string{"a", "A"}}, "delete[1].name"},
		"no bytes": {StackEdit{Objects: [][]byte{{}}}, "objects[0]"},
		"too many": {StackEdit{Objects: [][]byte{make([]byte, stack.MaxObject+1)}}, "objects[0]"},
		"unload":   {StackEdit{DeleteObjects: []string{"a/b"}}, "delete_objects[0].congestion"},
	} {
		var e *Error
		if err := c.edit.Validate(); !errors.As(err, &e) || e.Code != CodeInvalid || e.Field != c.field {
			t.Errorf("%s: %v, want field %q", name, err, c.field)
		}
	}
}

// FuzzDecodeStackEdit: whatever is accepted is valid, and means the same when it is sent again.
func FuzzDecodeStackEdit(f *testing.F) {
	f.Add(`{"profiles":[{"name":"a","selector":{"labels":{"X":"y"}},"stack":"kernel","settings":{"congestion":"bbr","pacing_rate":"1mbit","user_timeout":"30s"}}]}`)
	f.Add(`{"delete":["a"],"objects":["AQI="],"delete_objects":["dctcp"]}`)
	f.Fuzz(func(t *testing.T, body string) {
		var edit, again StackEdit
		if decodeStrict(strings.NewReader(body), MaxStackBytes, &edit) != nil || edit.Validate() != nil {
			return
		}
		raw, err := json.Marshal(edit)
		if err != nil {
			t.Fatal(err)
		}
		if err := decodeStrict(strings.NewReader(string(raw)), MaxStackBytes, &again); err != nil || again.Validate() != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if second, err := json.Marshal(again); err != nil || string(second) != string(raw) {
			t.Fatalf("%s became %s, %v", raw, second, err)
		}
	})
}
